"""Checkpoints, stops and resume of a run, as the training loop sees them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mrgym.errors import ConfigError
from mrgym.tasks import TaskSource
from mrgym.text import TextEnv
from mrgym_trainers.gdpo.ahead import DrawAhead, DrawInTurn
from mrgym_trainers.gdpo.config import GDPOConfig
from mrgym_trainers.gdpo.keeper import CheckpointKeeper, check_best
from mrgym_trainers.gdpo.policy import Policy
from mrgym_trainers.gdpo.ranks import Ranks
from mrgym_trainers.gdpo.resume import Resume, run_identity
from mrgym_trainers.gdpo.run_folder import RunFolder
from mrgym_trainers.gdpo.run_state import RunState
from mrgym_trainers.gdpo.stopping import Stopping

__all__ = ["Recovery", "run_path"]

_log = logging.getLogger(__name__)


class Recovery:
    """Keeps a run such that it can be gone on with; without a run folder there is nothing to keep.

    Args:
        env: The environment.
        env_args: Its arguments; None where it was given as an object.
        tasks: The training tasks.
        policy: The policy.
        config: The configuration, weights resolved.
        folder: Path of the run folder.
        resume: The run to go on with.
        force: Whether it may be another run than this one.
        ranks: The processes of the run.

    Raises:
        ConfigError: If the run to go on with is another one, or ``checkpoint_best`` is unknown.
    """

    def __init__(
        self,
        env: TextEnv,
        env_args: Mapping[str, Any] | None,
        tasks: TaskSource,
        policy: Policy,
        config: GDPOConfig,
        folder: Path | None,
        resume: Resume | None,
        *,
        force: bool,
        ranks: Ranks,
    ) -> None:
        check_best(config, env.components)
        self.stopping = Stopping(config.time_limit)
        self._policy, self._config, self._env = policy, config, env
        self._resume, self._ranks = resume, ranks
        self._folder: RunFolder | None = None
        self._keeper: CheckpointKeeper | None = None
        self._source: DrawInTurn | DrawAhead | None = None
        self._start = time.perf_counter()
        self.wall_before = 0.0
        if folder is None:
            return
        identity = run_identity(env, env_args, tasks, policy, config)
        if resume is not None:
            resume.check(identity, steps=config.steps, force=force)
        self._keeper = CheckpointKeeper(
            folder / "checkpoints", policy, config, env, identity, self._failed, ranks
        )

    def begin(
        self,
        folder: RunFolder | None,
        optimizer: torch.optim.Optimizer,
        source: DrawInTurn | DrawAhead,
        control: torch.Generator,
    ) -> tuple[RunState, list[dict[str, Any]]]:
        """Bring everything to where the run stood, and return that with the metrics so far.

        Args:
            folder: The run folder, on the rank that writes there.
            optimizer: The optimiser.
            source: Where groups come from.
            control: The generator of ``shuffle_rewards``.

        Raises:
            ConfigError: If the checkpoint does not fit.
        """
        self._folder, self._source = folder, source
        if self._keeper is None:
            return RunState(), []
        self._keeper.attach(optimizer, control)
        if self._resume is None:
            return RunState(), []
        run = self._resume.load(self._policy, optimizer, control, self._env, self._ranks)
        source.load_state(run.tasks)
        self.wall_before = run.wall_s
        history = folder.cut(run.step, run.metrics_bytes) if folder else []
        self._keeper.clear_after(run.step)
        if self._resume.checkpoint is not None:
            self._keeper.resumed(run)
        return run, history

    def mark(
        self, step: int, *, evaluated: bool, completions: int, estimator: dict[str, float]
    ) -> None:
        """Say that everything is as it is at the end of a step."""
        if self._keeper is None or self._source is None:
            return
        run = RunState(
            step=step,
            evaluated=evaluated,
            completions=completions,
            wall_s=self.wall_s(),
            metrics_bytes=self._folder.metrics_bytes() if self._folder else 0,
            tasks=self._source.state(),
            estimator=estimator,
        )
        self._keeper.mark(run)

    def evaluated(self, line: Mapping[str, Any]) -> bool:
        """Return whether an evaluation is the best so far, and a checkpoint of it is wanted."""
        weights = self._config.advantage.weights or {}
        return self._keeper is not None and self._keeper.is_best(line, weights)

    def save(self) -> None:
        """Write a checkpoint of the last mark."""
        if self._keeper is not None:
            self._sync()
            self._keeper.save()

    def close(self) -> None:
        """Write the last mark, if it is not written, and wait until it is."""
        if self._keeper is not None and self._source is not None:
            self._sync()
            self._keeper.close()

    def wall_s(self) -> float:
        """Return the seconds the run has taken, in all its parts."""
        return self.wall_before + time.perf_counter() - self._start

    def started(self) -> None:
        """Count the run's seconds from here on."""
        self._start = time.perf_counter()

    def _sync(self) -> None:
        if self._folder:
            with contextlib.suppress(OSError):  # the checkpoint will tell
                self._folder.sync()

    def _failed(self, step: int, reason: str) -> None:
        """Log a checkpoint that could not be written."""
        line = {"kind": "checkpoint", "step": step, "checkpoint/failed": 1.0, "error": reason}
        if self._folder:
            with contextlib.suppress(OSError):  # the disk that is full is the same
                self._folder.append_metrics(line)


def run_path(
    out: str | Path | None, resume: Resume | None, *, overwrite: bool = False
) -> Path | None:
    """Return the run folder: the given one, or that of the run to go on with.

    Raises:
        ConfigError: If both are given and differ, or the run to go on with may be overwritten.
    """
    if resume is None:
        return None if out is None else Path(out)
    if overwrite:
        raise ConfigError(
            f"resume {resume.folder}: got overwrite as well, expected one of the two; "
            "leave out what you do not want"
        )
    if out is not None and Path(out).resolve() != resume.folder.resolve():
        raise ConfigError(
            f"resume {resume.folder}: got another run folder {out}, expected the same; "
            "leave out --out, or copy the folder and resume the copy"
        )
    return resume.folder
