"""Which checkpoints of a run are written, and which are kept."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch

from mrgym.components import reward_key
from mrgym.errors import ConfigError, closest
from mrgym_trainers.gdpo.checkpoint import (
    MANIFEST,
    PARTIAL,
    SaveError,
    Snapshot,
    TrainerRecord,
    remove,
    step_folder,
    take_snapshot,
    write_checkpoint,
)
from mrgym_trainers.gdpo.config import GDPOConfig
from mrgym_trainers.gdpo.policy import Policy
from mrgym_trainers.gdpo.ranks import Ranks
from mrgym_trainers.gdpo.run_state import Best, RankState, RunState, rank_state

__all__ = ["BEST", "CheckpointKeeper", "check_best", "stored_steps"]

BEST = "best"
"""The link to the best checkpoint, beside them."""

_STEP = re.compile(r"step_(\d{6,})")
_log = logging.getLogger(__name__)


class CheckpointKeeper:
    """Writes checkpoints, keeps the last ones and the best, and survives a disk that is full.

    :meth:`mark` is called whenever weights and run are those of the end of a step; :meth:`save`
    and :meth:`close` write what was marked last, so that a checkpoint never mixes two steps.

    Args:
        root: The folder of the checkpoints.
        policy: The policy.
        config: ``checkpoint_keep``, ``checkpoint_best`` and ``checkpoint_async``.
        env: The environment, whose state is kept where it has one.
        identity: What the run is of, for a later resume to compare with.
        on_failure: Told step and reason of a checkpoint that could not be written.
        ranks: Who writes.

    Attributes:
        run: Where the run stood at the last mark.
        saved: The last step that was written; None before.
    """

    def __init__(
        self,
        root: Path,
        policy: Policy,
        config: GDPOConfig,
        env: Any,
        identity: dict[str, Any],
        on_failure: Callable[[int, str], None],
        ranks: Ranks | None = None,
    ) -> None:
        self._root, self._policy, self._config, self._env = root, policy, config, env
        self._identity, self._on_failure = identity, on_failure
        self._ranks = ranks or Ranks()
        self.run = RunState()
        self.saved: int | None = None
        self._rank_state: RankState | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._control = torch.Generator()
        self._moved = False
        self._best: Best | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._writing: tuple[int, Future[None]] | None = None

    def attach(self, optimizer: torch.optim.Optimizer, control: torch.Generator) -> None:
        """Take the optimiser whose state is kept, and the generator of ``shuffle_rewards``."""
        self._optimizer, self._control = optimizer, control
        optimizer.register_step_pre_hook(self._on_update)
        if self._config.checkpoint_async:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="mrgym-checkpoint")
            self._ranks = self._ranks.channel()

    def mark(self, run: RunState) -> None:
        """Take where the run stands now, with its random states, as what is to be written."""
        self.run = msgspec.structs.replace(run, best=self._best)
        self._rank_state = rank_state(self._control, self._env)
        self._moved = False

    def resumed(self, run: RunState) -> None:
        """Begin from a checkpoint."""
        self._best, self.saved = run.best, run.step
        self.mark(run)

    def clear_after(self, step: int) -> None:
        """Remove checkpoints of later steps, and what was left half written."""
        if self._ranks.first:
            for path in self._root.glob("step_*"):
                match = _STEP.match(path.name)
                if match and (int(match[1]) > step or path.name.endswith(PARTIAL)):
                    remove(path)

    def is_best(self, line: Mapping[str, Any], weights: Mapping[str, float]) -> bool:
        """Return whether an evaluation is better than all before it, and remember it if so."""
        metric = self._config.checkpoint_best
        if metric is None:
            return False
        value = line.get(metric)
        if metric == "reward_weighted":
            value = sum(w * line.get(reward_key(name), 0.0) for name, w in weights.items())
        if value is None or (self._best is not None and value <= self._best.value):
            return False
        self._best = Best(metric, float(value), int(line["step"]))
        return True

    def save(self) -> None:
        """Write a checkpoint of the last mark, unless it is written; a failure is reported."""
        self.wait()
        step = self.run.step
        if self.saved == step:
            self._link_best(self.run)
            return
        background = self._thread is not None
        snapshot = self._snapshot(copy=background)
        if self._thread is None:
            self._settle(step, lambda: self._write(snapshot))
        else:
            self._writing = step, self._thread.submit(self._write, snapshot)

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            Exception: What the writing raised, unless it is a failure that was reported.
        """
        if self._writing is not None:
            step, writing = self._writing
            self._writing = None
            self._settle(step, writing.result)

    def close(self) -> None:
        """Write what was marked last, and wait for it."""
        try:
            self.save()
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()

    def _on_update(self, *_: Any) -> None:
        """Note that the weights are no longer those of the last mark."""
        self._moved = True

    def _snapshot(self, *, copy: bool) -> Snapshot:
        torn = self._moved or self._optimizer is None
        record = TrainerRecord(self.run, self._identity)
        optimizer = None if torn else self._optimizer
        return take_snapshot(
            self._policy, optimizer, record, self._rank_state, self._ranks, copy=copy
        )

    def _settle(self, step: int, finish: Callable[[], None]) -> None:
        try:
            finish()
            self.saved = step
        except SaveError as error:
            _log.error(
                "checkpoint of step %d: got %s, expected to write it; the run goes on without, "
                "make room in %s",
                step,
                error,
                self._root,
            )
            self._on_failure(step, str(error))

    def _write(self, snapshot: Snapshot) -> None:
        step = snapshot.record.run.step
        write_checkpoint(step_folder(self._root, step), snapshot, self._policy, ranks=self._ranks)
        self._link_best(snapshot.record.run)
        if self._ranks.first and snapshot.tensors is not None:
            self._prune()

    def _link_best(self, run: RunState) -> None:
        if self._ranks.first and run.best is not None and run.best.step == run.step:
            _link(self._root / BEST, step_folder(self._root, run.step).name)

    def _prune(self) -> None:
        """Remove all but the last checkpoints and the best."""
        keep = self._config.checkpoint_keep
        if not keep:
            return
        best = (self._root / BEST).resolve()
        for step in stored_steps(self._root)[:-keep]:
            folder = step_folder(self._root, step)
            if folder.resolve() != best:
                discarded = folder.with_name(folder.name + PARTIAL)
                os.replace(folder, discarded)  # half removed, it is no checkpoint any more
                remove(discarded)


def stored_steps(root: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder that were written to the end, in order."""
    found = (_STEP.fullmatch(path.parent.name) for path in root.glob(f"step_*/{MANIFEST}"))
    return sorted(int(match[1]) for match in found if match)


def check_best(config: GDPOConfig, names: Mapping[str, Any]) -> None:
    """Refuse a ``checkpoint_best`` that no evaluation has.

    Raises:
        ConfigError: If it is neither ``reward``, ``reward_weighted`` nor a component's key.
    """
    known = ["reward", "reward_weighted", *(reward_key(name) for name in names)]
    if config.checkpoint_best is not None and config.checkpoint_best not in known:
        raise ConfigError(
            f"checkpoint_best: got {config.checkpoint_best!r}, expected one of {known}"
            f"{closest(config.checkpoint_best, known)}; name a metric of the evaluation"
        )


def _link(path: Path, target: str) -> None:
    partial = path.with_name(path.name + PARTIAL)
    remove(partial)
    os.symlink(target, partial)
    os.replace(partial, path)
