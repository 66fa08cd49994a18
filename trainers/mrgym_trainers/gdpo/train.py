"""GDPOTrainer: the training loop, top to bottom."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrgym.components import PRESENT_PREFIX, REWARD_PREFIX
from mrgym.env import MultiRewardEnv
from mrgym.errors import ConfigError
from mrgym.evaluate import evaluate
from mrgym.rollout import Group, Rollout, check_error_rate, run_groups
from mrgym.sampler import SamplingParams
from mrgym.scoring import Scorer
from mrgym.tasks import Task
from mrgym_trainers.advantages import AdvantageResult, compute_advantages
from mrgym_trainers.gdpo.batch import build_batch
from mrgym_trainers.gdpo.config import GDPOConfig
from mrgym_trainers.gdpo.metrics import Stopwatch, TimedScorer, reward_metrics, rollout_metrics
from mrgym_trainers.gdpo.policy import load_policy
from mrgym_trainers.gdpo.progress import ConsoleProgress, ProgressView, SilentProgress
from mrgym_trainers.gdpo.run_folder import RunFolder
from mrgym_trainers.gdpo.setup import make_scorer, resolve_weights, task_order, text_env
from mrgym_trainers.gdpo.update import learning_rate_factor, make_optimizer, update
from mrgym_trainers.samplers.transformers import TransformersSampler

__all__ = ["GDPOTrainer"]

EVAL_SEED = 20_250  # evaluations of a run draw the same random numbers, so that they compare


class GDPOTrainer:
    """Trains a causal language model on an environment with several named rewards.

    Each step draws groups of completions, scores them, turns every component into an advantage of
    its own within its group (GDPO, arXiv 2601.05242), and takes a clipped policy-gradient step.

    Args:
        env: An id, ``"pkg.module:Class"``, or an environment.
        config: The run's configuration.
        out: Run folder; nothing is written if left out.
        env_kwargs: Arguments for an environment given by id.
        overwrite: Whether ``out`` may hold an earlier run, which is removed.
        progress: Whether to show a progress bar.

    Raises:
        ConfigError: If weights name unknown components, the model cannot be loaded, or ``out``
            holds a run.
        TaskError: If tasks cannot be loaded, or held-out ones stand in the training tasks.
    """

    def __init__(
        self,
        env: str | MultiRewardEnv[Any, Any],
        config: GDPOConfig | None = None,
        *,
        out: str | Path | None = None,
        env_kwargs: dict[str, Any] | None = None,
        overwrite: bool = False,
        progress: bool = False,
    ) -> None:
        self.config = config or GDPOConfig()
        self.env = text_env(env, env_kwargs or {})
        self.env_name = env if isinstance(env, str) else self.env.contract_name
        self.weights = resolve_weights(self.config.advantage, self.env)
        self.train_tasks = self.env.task_source("train")
        self.eval_tasks = self.env.task_source("eval")[: self.config.eval_tasks]
        self.policy = load_policy(
            self.config.model, device=self.config.device, dtype=self.config.dtype
        )
        self.folder = RunFolder(out, overwrite=overwrite) if out is not None else None
        self.watch = Stopwatch()
        self.history: list[dict[str, Any]] = []
        self._scorer: Scorer = TimedScorer(make_scorer(self.config), self.watch)
        self._progress = progress
        self._completions = 0
        self._steps_done = 0

    def train(self) -> dict[str, Any]:
        """Run all steps and return the summary, which ``summary.json`` holds as well.

        However the run ends - finished, interrupted by Ctrl-C, failed - checkpoint and summary
        are written first.

        Raises:
            ConfigError: If it was called before.
            KeyboardInterrupt: After Ctrl-C.
            MrgymError: When the environment, the sampler or too many scores fail.
        """
        if self.history:
            raise ConfigError(
                f"GDPOTrainer: got a second train() of {self.env_name}, expected one; "
                "make a new trainer"
            )
        start, status = time.perf_counter(), "failed"
        torch.manual_seed(self.config.seed)
        sampler = TransformersSampler(
            self.policy.model,
            self.policy.tokenizer,
            max_rows=self.config.sample_rows,
            seed=self.config.seed,
        )
        if self.folder:
            self.folder.write_config(self._resolved(), self.env_name)
        view: ProgressView = SilentProgress()
        if self._progress:
            view = ConsoleProgress([*self.env.components], self.config.steps)
        try:
            with view:
                self._run_steps(sampler, view)
            status = "finished"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            self._scorer.close()
            summary = self._finish(status, time.perf_counter() - start)
        return summary

    def _run_steps(self, sampler: TransformersSampler, view: ProgressView) -> None:
        """The loop."""
        config = self.config
        optimizer = make_optimizer(self.policy, config)
        order = task_order(self.train_tasks, config.seed)
        control = torch.Generator().manual_seed(config.seed)
        self._evaluate(view, step=0)
        for step in range(1, config.steps + 1):
            with self.watch("step"):
                groups = self._draw_groups(sampler, order, step)
                batch = build_batch(
                    groups,
                    self.env.components,
                    mask_truncated=config.loss.truncated == "mask",
                )
                if config.shuffle_rewards:
                    batch = _shuffled(batch, control)
                advantages = self._advantages(batch)
                rollouts = [rollout for group in groups for rollout in group.rollouts]
                _set_learning_rate(optimizer, step, config)
                with self.watch("update"):
                    losses = update(
                        self.policy,
                        optimizer,
                        rollouts,
                        advantages.advantages,
                        batch["valid"],
                        config,
                    )
                sampler.update_weights(self.policy.named_tensors(), step)
            self._report_step(view, step, groups, batch, advantages, losses)
            self._store_rollouts(step, rollouts, advantages)
            if step % config.eval_every == 0 or step == config.steps:
                self._evaluate(view, step=step)
            if self.folder and config.checkpoint_every and step % config.checkpoint_every == 0:
                self.folder.write_checkpoint(self.policy, step)
            self._steps_done = step

    def _draw_groups(
        self, sampler: TransformersSampler, order: Iterator[Task], step: int
    ) -> list[Group]:
        config = self.config
        tasks = [next(order) for _ in range(config.prompts_per_step)]
        params = SamplingParams(config.max_completion_tokens, config.temperature)
        with self.watch("draw"):
            groups = run_groups(
                self.env,
                sampler,
                tasks,
                config.group_size,
                params,
                scorer=self._scorer,
                first_group=(step - 1) * config.prompts_per_step,
                on_score_error=config.on_score_error,
                seed=config.seed + step,
            )
        check_error_rate(groups, config.max_error_rate)
        self._completions += sum(len(r.turns) for group in groups for r in group.rollouts)
        return groups

    def _advantages(self, batch: dict[str, Tensor]) -> AdvantageResult:
        return compute_advantages(
            batch,
            batch["group_ids"],
            self.config.advantage.model_copy(update={"weights": self.weights}),
            valid=batch["valid"],
            completion_lengths=batch["completion_lengths"],
        )

    def _report_step(
        self,
        view: ProgressView,
        step: int,
        groups: Sequence[Group],
        batch: dict[str, Tensor],
        advantages: AdvantageResult,
        losses: dict[str, float],
    ) -> None:
        seconds = self.watch.take()
        seconds["sample"] = seconds.pop("draw") - seconds.get("score", 0.0)
        line = {
            "kind": "train",
            "step": step,
            **reward_metrics(batch, self.weights),
            **advantages.metrics(),
            **rollout_metrics(groups),
            **losses,
            "lr": self.config.learning_rate * learning_rate_factor(step - 1, self.config),
            **{f"time/{name}_s": spent for name, spent in seconds.items()},
        }
        self._log(line)
        view.step(line)

    def _evaluate(self, view: ProgressView, *, step: int) -> None:
        config = self.config
        for mode, temperature in (("sampled", config.temperature), ("greedy", 0.0)):
            params = SamplingParams(config.max_completion_tokens, temperature)
            # A generator of its own: evaluating must not change what training samples next.
            probe = TransformersSampler(
                self.policy.model,
                self.policy.tokenizer,
                max_rows=config.sample_rows,
                seed=EVAL_SEED,
            )
            means, _ = evaluate(
                self.env,
                probe,
                self.eval_tasks,
                params,
                scorer=self._scorer,
                max_error_rate=config.max_error_rate,
            )
            line = {"kind": "eval", "step": step, "mode": mode, **means}
            self._log(line)
            view.evaluated(line)
        self.watch.take()

    def _store_rollouts(
        self, step: int, rollouts: Sequence[Rollout], advantages: AdvantageResult
    ) -> None:
        wanted = step in (1, self.config.steps) or step % self.config.rollouts_every == 0
        if self.folder is None or not wanted:
            return
        by_component = {name: a.tolist() for name, a in advantages.by_component.items()}
        for i, rollout in enumerate(rollouts):
            rollout.step = step
            rollout.advantage = float(advantages.advantages[i])
            rollout.component_advantages = {n: values[i] for n, values in by_component.items()}
        self.folder.write_rollouts(step, rollouts)

    def _log(self, line: dict[str, Any]) -> None:
        self.history.append(line)
        if self.folder:
            self.folder.append_metrics(line)

    def _resolved(self) -> GDPOConfig:
        advantage = self.config.advantage.model_copy(update={"weights": self.weights})
        return self.config.model_copy(update={"advantage": advantage})

    def _finish(self, status: str, seconds: float) -> dict[str, Any]:
        summary = {
            "env": self.env_name,
            "model": self.config.model,
            "seed": self.config.seed,
            "steps": self._steps_done,
            "wall_s": round(seconds, 3),
            "completions": self._completions,
            "status": status,
            "estimator": self.config.advantage.estimator,
            "weights": self.weights,
            "eval": self._first_and_last("sampled"),
            "eval_greedy": self._first_and_last("greedy"),
        }
        if self.folder:
            self.folder.write_checkpoint(self.policy, self._steps_done)
            self.folder.write_summary(summary)
        return summary

    def _first_and_last(self, mode: str) -> dict[str, dict[str, float]]:
        lines = [line for line in self.history if line.get("mode") == mode]
        if not lines:
            return {}
        return {"start": _means(lines[0]), "end": _means(lines[-1])}


def _means(line: dict[str, Any]) -> dict[str, float]:
    return {
        key: value
        for key, value in line.items()
        if key == "reward" or (key.startswith(REWARD_PREFIX) and not key.endswith("/se"))
    }


def _set_learning_rate(optimizer: torch.optim.Optimizer, step: int, config: GDPOConfig) -> None:
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate * learning_rate_factor(step - 1, config)


def _shuffled(batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Hand every usable rollout the scores of another usable one."""
    usable = batch["valid"].nonzero().squeeze(1)
    order = torch.arange(len(batch["valid"]))
    order[usable] = usable[torch.randperm(len(usable), generator=generator)]
    prefixes = (REWARD_PREFIX, PRESENT_PREFIX)
    return {k: v[order] if k.startswith(prefixes) else v for k, v in batch.items()}
