"""GDPOTrainer: the training loop, top to bottom."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrgym.env import MultiRewardEnv
from mrgym.errors import ConfigError
from mrgym.evaluate import component_means
from mrgym.rollout import Group, Rollout, check_error_rate
from mrgym_trainers.advantages import AdvantageResult, compute_advantages
from mrgym_trainers.gdpo.ahead import DrawAhead, DrawInTurn
from mrgym_trainers.gdpo.batch import build_batch
from mrgym_trainers.gdpo.config import GDPOConfig
from mrgym_trainers.gdpo.control import shuffled_scores
from mrgym_trainers.gdpo.draw import Draw, GroupSource, PromptFilter, TaskOrder, sampling_params
from mrgym_trainers.gdpo.exchange import run_groups_on
from mrgym_trainers.gdpo.metrics import first_and_last, peak_memory_gib
from mrgym_trainers.gdpo.probe import LogprobProbe
from mrgym_trainers.gdpo.progress import ConsoleProgress, ProgressView, SilentProgress
from mrgym_trainers.gdpo.ranks import start_ranks
from mrgym_trainers.gdpo.recovery import Recovery, run_path
from mrgym_trainers.gdpo.resume import open_run, plain_args
from mrgym_trainers.gdpo.run_folder import RunFolder
from mrgym_trainers.gdpo.run_state import seed_random
from mrgym_trainers.gdpo.setup import (
    load_reference,
    load_trained,
    make_sampler,
    make_scorer,
    resolve_weights,
    text_env,
)
from mrgym_trainers.gdpo.step_report import annotate, step_line
from mrgym_trainers.gdpo.timing import Stopwatch
from mrgym_trainers.gdpo.update import make_optimizer, set_learning_rate, update

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
        resume: A run folder to go on with, or one of the checkpoints in it; ``out`` and ``config``
            are that run's if left out.
        force: Go on even if it is another run than this one, without what does not fit.

    Raises:
        ConfigError: If weights name unknown components, the model cannot be loaded, ``out``
            holds a run, or the run to go on with differs.
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
        resume: str | Path | None = None,
        force: bool = False,
    ) -> None:
        resumed = open_run(resume) if resume is not None else None
        path = run_path(out, resumed, overwrite=overwrite)
        self.config = config or (resumed.config if resumed else GDPOConfig())
        self.ranks = start_ranks(device=self.config.device, timeout=self.config.ranks_timeout)
        path = self.ranks.same_path(path)
        self.env = text_env(env, env_kwargs or {})
        self.env_name = env if isinstance(env, str) else self.env.contract_name
        self.weights = resolve_weights(self.config.advantage, self.env)
        self.train_tasks = self.env.task_source("train")
        self.eval_tasks = self.env.task_source("eval")[: self.config.eval_tasks]
        self.policy = load_trained(self.config, self.ranks)
        self._env_args = (env_kwargs or {}) if isinstance(env, str) else None
        self.recovery = Recovery(
            self.env, self._env_args, self.train_tasks, self.policy, self._resolved(), path,
            resumed, force=force, ranks=self.ranks,
        )  # fmt: skip
        self.folder = self.ranks.on_first(
            partial(_open_folder, path, overwrite=overwrite, resume=resumed is not None)
        )
        self.watch = Stopwatch()
        self.history: list[dict[str, Any]] = []
        self._scorer = make_scorer(self.config)
        self._progress = progress and self.ranks.first
        self._trained = self._complete = False
        self._own_sampler = self.config.sampler == "transformers"
        self._completions = 0
        self._steps_done = 0
        self._estimator_state: dict[str, float] = {}

    def train(self) -> dict[str, Any]:
        """Run all steps and return the summary, which ``summary.json`` holds as well.

        However the run ends - finished, stopped on request (:attr:`recovery`) or for the time
        limit, interrupted by Ctrl-C, failed - checkpoint and summary are written first.

        Raises:
            ConfigError: If it was called before.
            KeyboardInterrupt: After Ctrl-C.
            MrgymError: When the environment, the sampler or too many scores fail.
        """
        if self._trained:
            raise ConfigError(
                f"GDPOTrainer: got a second train() of {self.env_name}, expected one; "
                "make a new trainer"
            )
        self._trained, status = True, "failed"
        self.recovery.started()
        seed_random(self.config.seed)
        if self.folder:
            env_args = plain_args(self._env_args or {})
            self.folder.write_config(self._resolved(), self.env_name, env_args)
        view: ProgressView = SilentProgress()
        if self._progress:
            view = ConsoleProgress([*self.env.components], self.config.steps)
        try:
            with view:
                self._run(view)
            status = "finished" if self._complete else "stopped"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            self._scorer.close()
            summary = self._finish(status)
        return summary

    def _run(self, view: ProgressView) -> None:
        """Start the sampler, and end it however the steps end."""
        sampler = make_sampler(self.config, self.policy, self.ranks)
        # Model and libraries are a million objects that every full collection would walk through.
        gc.collect()
        gc.freeze()
        try:
            self._run_steps(sampler, view)
        finally:
            gc.unfreeze()
            sampler.close()

    def _run_steps(self, sampler: Any, view: ProgressView) -> None:
        """Make what the loop needs, and end it however the loop ends."""
        config = self.config
        optimizer = make_optimizer(self.policy, config)
        source = self._group_source(sampler)
        probe = None if self._own_sampler else self._probe(sampler)
        control = torch.Generator().manual_seed(config.seed)
        self.eval_tasks = PromptFilter(self.env, sampler, config).fitting(self.eval_tasks)
        draws = self._draws(source, partial(self._sync, sampler, probe), sampler)
        try:
            self._learn(sampler, draws, optimizer, control, view)
        finally:
            draws.close()

    def _learn(
        self,
        sampler: Any,
        draws: DrawInTurn | DrawAhead,
        optimizer: torch.optim.Optimizer,
        control: torch.Generator,
        view: ProgressView,
    ) -> None:
        """The loop."""
        config = self.config
        loss_config = config.loss.resolved(own_sampler=self._own_sampler)
        reference = load_reference(config, self.ranks, self.policy.tokenizer)
        run, history = self.recovery.begin(self.folder, optimizer, draws, control)
        self.history += history
        self._steps_done, self._completions = run.step, run.completions
        self._estimator_state = run.estimator
        draws.begin(run.step)
        self._complete = run.evaluated and run.step == config.steps
        if not run.evaluated:
            self._end_step(sampler, draws, view, run.step)
        self.recovery.stopping.begin()
        for step in range(run.step + 1, config.steps + 1):
            if self.ranks.any(self.recovery.stopping.due()):
                break
            with self.watch("step"):
                drawn, synced = draws.take(step)
                self.watch.add(drawn.seconds)
                batch = self._batch(drawn.groups)
                if config.shuffle_rewards:
                    batch = shuffled_scores(batch, control)
                advantages = self._advantages(batch, self._estimator_state)
                self._estimator_state = advantages.state
                rollouts = [rollout for group in drawn.groups for rollout in group.rollouts]
                set_learning_rate(optimizer, step, config)
                with self.watch("update"), self.ranks.answering("updating the policy"):
                    losses = update(
                        self.policy,
                        optimizer,
                        rollouts,
                        advantages.advantages,
                        batch["valid"],
                        config,
                        reference=reference,
                        loss_config=loss_config,
                        ranks=self.ranks,
                    )
                losses |= synced | draws.learned(step)
            self._completions += drawn.completions
            self._report_step(view, step, drawn, batch, advantages, losses)
            self._store_rollouts(step, rollouts, advantages)
            self._end_step(sampler, draws, view, step)

    def _end_step(
        self, sampler: Any, draws: DrawInTurn | DrawAhead, view: ProgressView, step: int
    ) -> None:
        """Evaluate and write a checkpoint where they are due."""
        config = self.config
        due = step % config.eval_every == 0 or step == config.steps
        self._mark(step, evaluated=not due)
        best = False
        if due and not (step and self.ranks.any(self.recovery.stopping.reason is not None)):
            draws.settle(step)
            best = self._evaluate(sampler, view, step=step)
            self._mark(step, evaluated=True)
        if best or (step and config.checkpoint_every and step % config.checkpoint_every == 0):
            self.recovery.save()

    def _mark(self, step: int, *, evaluated: bool) -> None:
        self._steps_done = step
        self._complete = evaluated and step == self.config.steps
        self.recovery.mark(
            step,
            evaluated=evaluated,
            completions=self._completions,
            estimator=self._estimator_state,
        )

    def _group_source(self, sampler: Any) -> GroupSource:
        order = TaskOrder(self.train_tasks, self.config.seed)
        return GroupSource(
            self.env,
            sampler,
            self._scorer,
            order,
            self.config,
            self._signal,
            self.ranks.channel(),
        )

    def _draws(
        self, source: GroupSource, sync: Callable[[int], dict[str, float]], sampler: Any
    ) -> DrawInTurn | DrawAhead:
        if self.config.one_step_off:
            return DrawAhead(source, sync, last=self.config.steps, watch=self.watch)
        rest = _nothing if self._own_sampler else sampler.rest
        return DrawInTurn(source, sync, rest, self.watch)

    def _probe(self, sampler: Any) -> LogprobProbe:
        fitting = PromptFilter(self.env, sampler, self.config)
        fit = (prompt for task in self.train_tasks if (prompt := fitting.prompt(task)) is not None)
        prompts = [*islice(fit, max(self.config.probe.completions, 1))]
        return LogprobProbe(self.policy, sampler, prompts, self.config, self.ranks)

    def _sync(self, sampler: Any, probe: LogprobProbe | None, step: int) -> dict[str, float]:
        """Let the sampler have the policy's weights, and prove that it has."""
        with self.watch("sync"), self.ranks.answering("syncing weights"):
            shared = self._own_sampler and self.ranks.world == 1
            sampler.update_weights(() if shared else self.policy.named_tensors(), step)
            self.ranks.agree(None)  # what one rank sends to shared servers, all wait for
        if probe is None:
            return {}
        with self.watch("probe"), self.ranks.answering("probing the sampler"):
            return probe.check(step)

    def _batch(self, groups: Sequence[Group]) -> dict[str, Tensor]:
        mask_truncated = self.config.loss.truncated == "mask"
        return build_batch(groups, self.env.components, mask_truncated=mask_truncated)

    def _advantages(self, batch: dict[str, Tensor], state: dict[str, float]) -> AdvantageResult:
        return compute_advantages(
            batch,
            batch["group_ids"],
            self.config.advantage.model_copy(update={"weights": self.weights}),
            valid=batch["valid"],
            completion_lengths=batch["completion_lengths"],
            state=state,
        )

    def _signal(self) -> Callable[[Sequence[Group]], list[bool]]:
        """Return what says which groups carry signal, by the estimator's state of now."""
        return partial(self._have_signal, self._estimator_state)

    def _have_signal(self, state: dict[str, float], groups: Sequence[Group]) -> list[bool]:
        """Return which groups carry signal; the weighted component advantages decide."""
        informative = self._advantages(self._batch(groups), state).informative.tolist()
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
        line = step_line(
            step, drawn, batch, advantages, self.env.components, self._resolved(), self.watch.take()
        )
        line |= losses
        line["memory/peak_gib"] = self.ranks.most(peak_memory_gib(self.policy.device))
        self._log(line)
        view.step(line)

    def _evaluate(self, sampler: Any, view: ProgressView, *, step: int) -> bool:
        config, best = self.config, False
        for mode, temperature in (("sampled", config.temperature), ("greedy", 0.0)):
            params = sampling_params(config, EVAL_SEED, temperature=temperature)
            groups = run_groups_on(
                self.ranks, self.env, sampler, self.eval_tasks, 1, params, scorer=self._scorer
            )
            check_error_rate(groups, config.max_error_rate)
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            means = component_means(rollouts, [*self.env.components])
            line = {"kind": "eval", "step": step, "mode": mode, **means}
            self._log(line)
            view.evaluated(line)
            best = best or (mode == "sampled" and self.recovery.evaluated(line))
        return best

    def _store_rollouts(
        self, step: int, rollouts: Sequence[Rollout], advantages: AdvantageResult
    ) -> None:
        wanted = step in (1, self.config.steps) or step % self.config.rollouts_every == 0
        if self.folder is None or not wanted:
            return
        annotate(rollouts, step, advantages)
        self.folder.write_rollouts(step, rollouts)

    def _log(self, line: dict[str, Any]) -> None:
        self.history.append(line)
        if self.folder:
            self.folder.append_metrics(line)

    def _resolved(self) -> GDPOConfig:
        advantage = self.config.advantage.model_copy(update={"weights": self.weights})
        return self.config.model_copy(update={"advantage": advantage})

    def _finish(self, status: str) -> dict[str, Any]:
        summary = {
            "env": self.env_name,
            "model": self.config.model,
            "seed": self.config.seed,
            "steps": self._steps_done,
            "wall_s": round(self.recovery.wall_s(), 3),
            "completions": self._completions,
            "status": status,
            "estimator": self.config.advantage.estimator,
            "weights": self.weights,
            "eval": first_and_last(self.history, "sampled"),
            "eval_greedy": first_and_last(self.history, "greedy"),
        }
        # Ranks that were interrupted are not at the same place, and could not gather the weights.
        if self.ranks.world == 1 or status in ("finished", "stopped"):
            self.recovery.close()
        if self.folder:
            self.folder.write_summary(summary)
        if status in ("finished", "stopped"):
            self.ranks.close()
        else:
            self.ranks.leave()
        return summary


def _open_folder(path: Path | None, *, overwrite: bool, resume: bool) -> RunFolder | None:
    return None if path is None else RunFolder(path, overwrite=overwrite, resume=resume)


def _nothing() -> None:
    return
