"""GDPOTrainer: the training loop, top to bottom."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrgym.env import MultiRewardEnv
from mrgym.errors import ConfigError
from mrgym.evaluate import evaluate
from mrgym.rollout import Group, Rollout
from mrgym.scoring import Scorer
from mrgym_trainers.advantages import AdvantageResult, compute_advantages
from mrgym_trainers.gdpo.batch import build_batch
from mrgym_trainers.gdpo.config import GDPOConfig
from mrgym_trainers.gdpo.control import shuffled_scores
from mrgym_trainers.gdpo.draw import Draw, GroupSource, PromptFilter, TaskOrder, sampling_params
from mrgym_trainers.gdpo.metrics import (
    first_and_last,
    gate_metrics,
    peak_memory_gib,
    reward_metrics,
    rollout_metrics,
    speed_metrics,
)
from mrgym_trainers.gdpo.probe import LogprobProbe
from mrgym_trainers.gdpo.progress import ConsoleProgress, ProgressView, SilentProgress
from mrgym_trainers.gdpo.run_folder import RunFolder
from mrgym_trainers.gdpo.setup import (
    load_reference,
    load_trained,
    make_sampler,
    make_scorer,
    resolve_weights,
    text_env,
)
from mrgym_trainers.gdpo.timing import Stopwatch, TimedScorer, phase_metrics, timed_sampler
from mrgym_trainers.gdpo.update import learning_rate_factor, make_optimizer, update

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
        self.policy = load_trained(self.config)
        self.folder = RunFolder(out, overwrite=overwrite) if out is not None else None
        self.watch = Stopwatch()
        self.history: list[dict[str, Any]] = []
        self._scorer: Scorer = TimedScorer(make_scorer(self.config), self.watch)
        self._progress = progress
        self._completions = 0
        self._steps_done = 0
        self._estimator_state: dict[str, float] = {}

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
        if self.folder:
            self.folder.write_config(self._resolved(), self.env_name)
        view: ProgressView = SilentProgress()
        if self._progress:
            view = ConsoleProgress([*self.env.components], self.config.steps)
        try:
            with view:
                self._run(view)
            status = "finished"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            self._scorer.close()
            summary = self._finish(status, time.perf_counter() - start)
        return summary

    def _run(self, view: ProgressView) -> None:
        """Start the sampler, and end it however the steps end."""
        sampler = make_sampler(self.config, self.policy)
        # Model and libraries are a million objects that every full collection would walk through.
        gc.collect()
        gc.freeze()
        try:
            self._run_steps(sampler, view)
        finally:
            gc.unfreeze()
            sampler.close()

    def _run_steps(self, sampler: Any, view: ProgressView) -> None:
        """The loop."""
        config = self.config
        own_sampler = config.sampler == "transformers"
        loss_config = config.loss.resolved(own_sampler=own_sampler)
        optimizer = make_optimizer(self.policy, config)
        reference = load_reference(config)
        source = self._group_source(timed_sampler(sampler, self.watch))
        probe = None if own_sampler else self._probe(sampler)
        control = torch.Generator().manual_seed(config.seed)
        self.eval_tasks = PromptFilter(self.env, sampler, config).fitting(self.eval_tasks)
        self._sync(sampler, probe, 0)
        self._evaluate(sampler, view, step=0)
        for step in range(1, config.steps + 1):
            with self.watch("step"):
                with self.watch("draw"):
                    drawn = source.draw(step)
                if not own_sampler:
                    sampler.rest()
                batch = self._batch(drawn.groups)
                if config.shuffle_rewards:
                    batch = shuffled_scores(batch, control)
                advantages = self._advantages(batch)
                self._estimator_state = advantages.state
                rollouts = [rollout for group in drawn.groups for rollout in group.rollouts]
                _set_learning_rate(optimizer, step, config)
                with self.watch("update"):
                    losses = update(
                        self.policy,
                        optimizer,
                        rollouts,
                        advantages.advantages,
                        batch["valid"],
                        config,
                        reference=reference,
                        loss_config=loss_config,
                    )
                losses |= self._sync(sampler, probe, step)
            self._completions += drawn.completions
            self._report_step(view, step, drawn, batch, advantages, losses)
            self._store_rollouts(step, rollouts, advantages)
            if step % config.eval_every == 0 or step == config.steps:
                self._evaluate(sampler, view, step=step)
            if self.folder and config.checkpoint_every and step % config.checkpoint_every == 0:
                self.folder.write_checkpoint(self.policy, step)
            self._steps_done = step

    def _group_source(self, sampler: Any) -> GroupSource:
        order = TaskOrder(self.train_tasks, self.config.seed)
        return GroupSource(self.env, sampler, self._scorer, order, self.config, self._signal)

    def _probe(self, sampler: Any) -> LogprobProbe:
        fitting = PromptFilter(self.env, sampler, self.config)
        tasks = self.train_tasks[: max(self.config.probe.completions, 1) * 4]
        prompts = [prompt for task in tasks if (prompt := fitting.prompt(task)) is not None]
        return LogprobProbe(self.policy, sampler, prompts, self.config)

    def _sync(self, sampler: Any, probe: LogprobProbe | None, step: int) -> dict[str, float]:
        """Let the sampler have the policy's weights, and prove that it has."""
        with self.watch("sync"):
            sampler.update_weights(self.policy.named_tensors(), step)
        if probe is None:
            return {}
        with self.watch("probe"):
            return probe.check(step)

    def _batch(self, groups: Sequence[Group]) -> dict[str, Tensor]:
        mask_truncated = self.config.loss.truncated == "mask"
        return build_batch(groups, self.env.components, mask_truncated=mask_truncated)

    def _advantages(self, batch: dict[str, Tensor]) -> AdvantageResult:
        return compute_advantages(
            batch,
            batch["group_ids"],
            self.config.advantage.model_copy(update={"weights": self.weights}),
            valid=batch["valid"],
            completion_lengths=batch["completion_lengths"],
            state=self._estimator_state,
        )

    def _signal(self, groups: Sequence[Group]) -> list[bool]:
        """Return which groups carry signal; the weighted component advantages decide."""
        informative = self._advantages(self._batch(groups)).informative.tolist()
        sizes = [len(group.rollouts) for group in groups]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [informative[end - 1] for end in ends]

    def _report_step(
        self,
        view: ProgressView,
        step: int,
        drawn: Draw,
        batch: dict[str, Tensor],
        advantages: AdvantageResult,
        losses: dict[str, float],
    ) -> None:
        seconds = self.watch.take()
        line = {
            "kind": "train",
            "step": step,
            **reward_metrics(batch, self.weights),
            **gate_metrics(drawn.groups, self.env.components),
            **advantages.metrics(),
            **rollout_metrics(drawn.groups),
            **drawn.counts,
            **losses,
            "lr": self.config.learning_rate * learning_rate_factor(step - 1, self.config),
            **speed_metrics(drawn.groups, seconds["step"]),
            "memory/peak_gib": peak_memory_gib(self.policy.device),
            **phase_metrics(seconds),
        }
        self._log(line)
        view.step(line)

    def _evaluate(self, sampler: Any, view: ProgressView, *, step: int) -> None:
        config = self.config
        for mode, temperature in (("sampled", config.temperature), ("greedy", 0.0)):
            params = sampling_params(config, EVAL_SEED, temperature=temperature)
            means, _ = evaluate(
                self.env,
                sampler,
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
            "eval": first_and_last(self.history, "sampled"),
            "eval_greedy": first_and_last(self.history, "greedy"),
        }
        if self.folder:
            self.folder.write_checkpoint(self.policy, self._steps_done)
            self.folder.write_summary(summary)
        return summary


def _set_learning_rate(optimizer: torch.optim.Optimizer, step: int, config: GDPOConfig) -> None:
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate * learning_rate_factor(step - 1, config)
