"""The worker processes that all graders of a process share."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from mrgym.errors import ConfigError
from mrgym.scoring import CallResult, WorkerPool
from mrgym_envs.grading.budget import OutOfTimeError, within
from mrgym_envs.grading.judge import Judgement, judge
from mrgym_envs.grading.tree import NeedsWorkerError
from mrgym_envs.grading.verdict import Options

__all__ = ["Case", "close_workers", "judge_in_workers", "set_workers", "warm_up"]

Case = tuple[str, str, Options]

MEMORY_LIMIT: Final = 900 << 20
_RECURSION_LIMIT: Final = 100_000
_POOLS_KEPT: Final = 4
_SOFT: Final = 0.9


class _Pools:
    """Pools by deadline: a pool has one deadline for all its calls.

    Args:
        workers: Processes a pool.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._lock = threading.Lock()
        self._pools: dict[float, WorkerPool] = {}
        self._used: dict[float, int] = {}

    @contextmanager
    def pool(self, deadline: float) -> Iterator[WorkerPool]:
        """Lend the pool of a deadline; while it is lent it is not closed."""
        with self._lock:
            pool = self._pools.pop(deadline, None) or WorkerPool(
                self.workers, deadline=deadline, memory_limit=MEMORY_LIMIT
            )
            self._pools[deadline] = pool
            self._used[deadline] = self._used.get(deadline, 0) + 1
        try:
            yield pool
        finally:
            with self._lock:
                self._used[deadline] -= 1
                idle = self._surplus()
            for old in idle:
                old.close()

    def _surplus(self) -> list[WorkerPool]:
        """Take out the pools that were not used for longest, beyond those that are kept."""
        idle = [deadline for deadline in self._pools if not self._used[deadline]]
        return [self._pools.pop(deadline) for deadline in idle[: len(self._pools) - _POOLS_KEPT]]

    def close(self) -> None:
        """End all workers."""
        with self._lock:
            pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            pool.close()


def _default_workers() -> int:
    return max(1, min(4, os.cpu_count() or 1))


_pools = _Pools(_default_workers())


def set_workers(workers: int) -> None:
    """Set how many worker processes this process may use for grading, for later calls.

    Args:
        workers: At least 1. The default is the number of cores, at most 4.

    Raises:
        ConfigError: If it is below 1.
    """
    global _pools
    if workers < 1:
        raise ConfigError(f"set_workers: got {workers}, expected at least 1; give 1 or more")
    old, _pools = _pools, _Pools(workers)
    old.close()


def close_workers() -> None:
    """End the worker processes; they start again when they are needed."""
    _pools.close()


def warm_up(timeout: float = 1.0) -> None:
    """Start the workers of a timeout ahead of the first answer that needs one."""
    with _pools.pool(timeout) as pool:
        pool.map(_ready, [()] * _pools.workers)


def judge_in_workers(cases: Sequence[Case], timeout: float) -> list[Judgement]:
    """Return the judgements of cases too heavy for this process, in order.

    Args:
        cases: Extracted golds and answers with the options.
        timeout: Seconds each may take.
    """
    program = _judge_case
    with _pools.pool(timeout) as pool:
        items = [(gold, answer, options, timeout * _SOFT) for gold, answer, options in cases]
        return [_judgement(result) for result in pool.map(program, items)]


def _judgement(result: CallResult) -> Judgement:
    if result.status == "ok":
        status, reason = result.value
        return status, reason
    if result.status == "timeout":
        return "timeout", result.error or ""
    memory = "MemoryError" in (result.error or "")
    return ("too_large", "out of memory") if memory else ("error", result.error or "")


def _judge_case(gold: str, answer: str, options: Options, seconds: float) -> Judgement:
    """Judge a case; runs in a worker."""
    _ready()
    try:
        return within(seconds, _judge_deeply, gold, answer, options)
    except OutOfTimeError:
        return "timeout", f"no verdict within {seconds:g} s"
    except (RecursionError, NeedsWorkerError):
        return "too_large", "nested too deep"


def _judge_deeply(gold: str, answer: str, options: Options) -> Judgement:
    return judge(gold, answer, options, in_worker=True)


def _ready() -> None:
    """Load what judging needs, so that it is loaded before a deadline runs."""
    import mrgym_envs.grading.symbolic  # noqa: F401

    sys.setrecursionlimit(_RECURSION_LIMIT)
