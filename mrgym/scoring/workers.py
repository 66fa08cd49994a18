"""Running score functions in worker processes, so that none can hang or take down a run."""

from __future__ import annotations

import asyncio
import functools
import numbers
import threading
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from mrgym.components import ABSENT, as_score
from mrgym.errors import RewardContractError
from mrgym.scoring._worker import note
from mrgym.scoring.declare import ScoreMethod
from mrgym.scoring.inline import InlineScorer, Outcome, _score_batch, _score_one
from mrgym.scoring.pool import CallResult, Program, WorkerPool
from mrgym.tasks import Task

if TYPE_CHECKING:
    from mrgym.sampler import Completion
    from mrgym.text import State, TextEnv

__all__ = ["WorkerScorer"]

Subject: TypeAlias = "State | Task"
Job: TypeAlias = "tuple[str | None, list[Subject], list[Completion]]"

_ENVS_KEPT = 8
_EPISODE = frozenset({"_state", "_sources", "_inside_step", "_np_random", "_np_random_seed"})
"""Attributes of an environment that scoring does not depend on."""


class WorkerScorer:
    """Runs score functions in worker processes, each call with a deadline.

    One call scores one completion on all components; a ``batched`` component is one call for the
    whole list. A call that hangs gives status ``"timeout"``, one that raises, exits or crashes
    ``"error"``, with the component's name, and leaves the others alone.

    The environment is pickled and shipped once a worker. Setting one of its attributes ships it
    anew; a change *inside* an attribute (a dict that is filled) is not noticed. What a score
    function does to its arguments or to the environment stays in the worker.

    ``async`` score functions of one completion run together, completions one after another: for
    functions that only wait on a network, :class:`~mrgym.scoring.InlineScorer` is faster.

    Args:
        workers: Number of processes.
        deadline: Seconds one call may take, not counting the start of its worker.
        memory_limit: Bytes one call may allocate; ``None`` is off.
        start_timeout: Seconds a worker may take to start and load the environment.

    Raises:
        ConfigError: If a number cannot work.
    """

    def __init__(
        self,
        workers: int = 1,
        deadline: float = 5.0,
        *,
        memory_limit: int | None = 1 << 30,
        start_timeout: float = 60.0,
    ) -> None:
        self._pool = WorkerPool(
            workers, deadline=deadline, memory_limit=memory_limit, start_timeout=start_timeout
        )
        self._shipped: dict[int, _Shipped] = {}
        self._lock = threading.Lock()

    def score(
        self, env: TextEnv, states: Sequence[State], completions: Sequence[Completion]
    ) -> list[Outcome]:
        """Return one outcome a completion, in order.

        Raises:
            RewardContractError: If a score function raised it or returned no number, or a batched
                one another number of scores than it was given completions.
            ScoreError: If the environment or a state cannot be sent to a worker.
        """
        outcomes = [Outcome() for _ in completions]
        jobs = _jobs(env, states, completions)
        results = self._pool.map(self._program(env), [job for _, job in jobs])
        for (indices, job), result in zip(jobs, results, strict=True):
            _record([outcomes[i] for i in indices], job, result)
        return outcomes

    @property
    def pids(self) -> list[int]:
        """Ids of the worker processes that run now."""
        return self._pool.pids

    def close(self) -> None:
        """End all workers. May be called again."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _program(self, env: TextEnv) -> Program:
        with self._lock:
            shipped = self._shipped.get(id(env))
            if shipped is None or not shipped.still_is(env):
                self._shipped.pop(id(env), None)
                shipped = self._shipped[id(env)] = _Shipped(env)
            if len(self._shipped) > _ENVS_KEPT:
                del self._shipped[next(iter(self._shipped))]
            return shipped.program


class _Shipped:
    """An environment as it was when it was pickled."""

    def __init__(self, env: TextEnv) -> None:
        self._env = env
        self._attributes = _attributes(env)
        self.program = Program.of(functools.partial(_score_job, env), name=env.contract_name)

    def still_is(self, env: TextEnv) -> bool:
        now = _attributes(env)
        return (
            env is self._env
            and now.keys() == self._attributes.keys()
            and all(value is self._attributes[name] for name, value in now.items())
        )


def _attributes(env: TextEnv) -> dict[str, Any]:
    return {name: value for name, value in vars(env).items() if name not in _EPISODE}


def _jobs(
    env: TextEnv, states: Sequence[State], completions: Sequence[Completion]
) -> list[tuple[Sequence[int], Job]]:
    """Return the calls to make, each with the completions it speaks of."""
    everything = range(len(completions))
    singles = [m for m in env.score_methods.values() if not m.batched]
    with_state = any(method.wants_state for method in singles)
    jobs: list[tuple[Sequence[int], Job]] = []
    for method in env.score_methods.values():
        if method.batched and completions:
            subjects = [_subject(state, method.wants_state) for state in states]
            jobs.append((everything, (method.component, subjects, list(completions))))
    if singles:
        jobs += [
            ([i], (None, [_subject(states[i], with_state)], [completions[i]])) for i in everything
        ]
    return jobs


def _subject(state: State, with_state: bool) -> Subject:
    return state if with_state else state.task


def _record(outcomes: Sequence[Outcome], job: Job, result: CallResult) -> None:
    """Write what a call returned, or that it failed, into the outcomes it speaks of."""
    if result.status != "ok":
        for outcome in outcomes:
            outcome.fail(result.status, result.at or job[0] or "score", result.error or "")
        return
    if "contract" in result.value:
        raise RewardContractError(result.value["contract"])
    for outcome, (scores, status, error) in zip(outcomes, result.value["scored"], strict=True):
        outcome.scores.update(scores)
        if outcome.status == "ok":
            outcome.status, outcome.error = status, error


# What runs in the worker


def _score_job(
    env: TextEnv,
    component: str | None,
    subjects: list[Subject],
    completions: list[Completion],
) -> dict[str, Any]:
    """Score a list on one batched component, or one completion on all the others."""
    outcomes = [Outcome() for _ in completions]
    try:
        if component is None:
            _score_completion(env, subjects[0], completions[0], outcomes[0])
        else:
            note(component)
            method = env.score_methods[component]
            _score_batch(method, getattr(env, method.attribute), subjects, completions, outcomes)
        return {"scored": [_row(env, s, o) for s, o in zip(subjects, outcomes, strict=True)]}
    except RewardContractError as error:
        return {"contract": str(error)}


def _score_completion(
    env: TextEnv, subject: Subject, completion: Completion, outcome: Outcome
) -> None:
    pending: list[tuple[Outcome, str, Awaitable[Any]]] = []
    for method in env.score_methods.values():
        if not method.batched:
            note(method.component)
            function = getattr(env, method.attribute)
            argument = _argument(method, subject)
            _score_one(method.component, function, argument, completion, outcome, pending)
    if pending:
        note(", ".join(component for _, component, _ in pending))
        asyncio.run(InlineScorer(timeout=None)._gather(pending))


def _argument(method: ScoreMethod, subject: Subject) -> Subject:
    return subject if method.wants_state else _task(subject)


def _task(subject: Subject) -> Task:
    return subject if isinstance(subject, Task) else subject.task


def _row(env: TextEnv, subject: Subject, outcome: Outcome) -> tuple[Mapping[str, Any], str, Any]:
    """Return an outcome as plain values; numbers of any kind become floats here."""
    where = f"{env.contract_name}, task {_task(subject).id}"
    scores = {
        str(name): value if value is ABSENT else as_score(value, str(name), where)
        for name, value in outcome.scores.items()
        if outcome.status == "ok" or value is ABSENT or isinstance(value, numbers.Real)
    }
    return scores, outcome.status, outcome.error
