"""Scoring requests: on threads beside the event loop, within limits of time and number."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mrgym.components import ABSENT
from mrgym.episode import State, TurnOutcome
from mrgym.errors import RolloutError
from mrgym.rollout import Rollout
from mrgym.sampler import Completion
from mrgym.score import score_completions
from mrgym.scoring import InlineScorer, Scorer, WorkerScorer
from mrgym.server.config import ServerConfig
from mrgym.server.items import Items
from mrgym.server.lanes import Lanes
from mrgym.server.metrics import Metrics
from mrgym.server.problems import Problem, problem_of
from mrgym.server.random_state import read_random, write_random
from mrgym.server.schemas import (
    PromptOut,
    PromptsIn,
    ScoreIn,
    ScoreItem,
    ScoreResult,
    TasksOut,
    TurnItem,
    TurnResult,
    TurnsIn,
)
from mrgym.tasks import Task
from mrgym.text import Split, TextEnv

__all__ = ["Scoring"]

T = TypeVar("T")
R = TypeVar("R", bound=ScoreResult)


class Scoring:
    """What a service does with a text environment besides sessions.

    Args:
        env: The environment.
        config: Limits, and where score functions run.
        metrics: Where scores are counted.

    Attributes:
        items: The environment's tasks, and the checks of items.
    """

    def __init__(self, env: TextEnv, config: ServerConfig, metrics: Metrics) -> None:
        self._env = env
        self._config = config
        self._metrics = metrics
        self.items = Items(env, config.max_batch)
        self._lanes = Lanes(config.score_threads, "mrgym-score")
        self._scorer: Scorer = (
            WorkerScorer(config.score_workers, config.score_deadline)
            if config.scoring == "workers"
            else InlineScorer(config.request_timeout)
        )

    async def score(self, body: ScoreIn) -> list[ScoreResult]:
        """Return one result an item, in order.

        Raises:
            Problem: If an item cannot be scored (then none is), or there is too much to do.
        """
        tasks: list[Task] = []
        results = await self._run(lambda: self._score(body.items, tasks))
        if results is None:
            results = [ScoreResult(**self._timed_out(task)) for task in self._asked(tasks)]
        return self._counted(results)

    async def turns(self, body: TurnsIn) -> list[TurnResult]:
        """Return what the last turn of each conversation led to, in order.

        Raises:
            Problem: As :meth:`score`.
        """
        tasks: list[Task] = []
        results = await self._run(lambda: self._play(body.items, tasks))
        if results is None:
            empty: dict[str, Any] = {"messages": [], "answers": []}
            results = [TurnResult(**self._timed_out(t), **empty) for t in self._asked(tasks)]
        return self._counted(results)

    async def prompts(self, body: PromptsIn) -> list[PromptOut]:
        """Return the prompts of tasks, in order.

        Raises:
            Problem: If a task does not fit the environment, or there is too much to do.
        """
        return self._asked(await self._run(lambda: self.items.prompts(body.tasks)))

    async def page(self, split: Split, offset: int, limit: int) -> TasksOut:
        """Return a page of a split's tasks.

        Raises:
            Problem: If the environment has none, or is too slow.
        """
        (page,) = self._asked(await self._run(lambda: [self.items.page(split, offset, limit)]))
        return page

    def close(self) -> None:
        """End the threads and worker processes."""
        self._lanes.close()
        self._scorer.close()

    async def _run(self, work: Callable[[], list[T]]) -> list[T] | None:
        """Return what scoring returned, ``None`` where it took too long."""
        if self._lanes.pending >= self._config.max_pending:
            raise self._busy()
        started = asyncio.Event()
        loop = asyncio.get_running_loop()

        def call() -> list[T]:
            loop.call_soon_threadsafe(started.set)
            return work()

        future = self._lanes.submit(call)
        done, _ = await asyncio.wait({future}, timeout=self._config.request_timeout)
        if done:
            try:
                return future.result()
            except Problem:
                raise
            except Exception as error:
                raise problem_of(error, getattr(error, "subject", None)) from error
        if started.is_set():
            return None
        future.cancel()
        raise self._busy()

    def _busy(self) -> Problem:
        return Problem(
            429,
            "Overloaded",
            f"scoring: got more than {self._config.max_pending} requests at a time, or one that "
            f"waited for {self._config.request_timeout:g} s, expected fewer; ask again later",
            retry_after=1,
        )

    def _asked(self, got: list[T] | None) -> list[T]:
        """Return what the environment made of tasks, if it did in time."""
        if got:
            return got
        raise Problem(
            504,
            "EnvironmentTimeout",
            f"environment: got no prompts within {self._config.request_timeout:g} s, expected "
            "some; ask for fewer at a time",
        )

    def _score(self, items: Sequence[ScoreItem], tasks: list[Task]) -> list[ScoreResult]:
        tasks += self.items.tasks(items)
        self.items.check_starts(items, tasks)
        try:
            rollouts = score_completions(
                self._env, tasks, [_said(item) for item in items], scorer=self._scorer
            )
        except RolloutError as error:
            raise _placed(error, items, tasks) from error
        return [_result(rollout) for rollout in rollouts]

    def _play(self, items: Sequence[TurnItem], tasks: list[Task]) -> list[TurnResult]:
        tasks += self.items.tasks(items)
        self.items.check_starts(items, tasks)
        rngs = [read_random(item.random, f"items[{i}].random") for i, item in enumerate(items)]
        states = [self._env.start(task, rng) for task, rng in zip(tasks, rngs, strict=True)]
        said = [_said(item) for item in items]
        last: list[TurnOutcome | None] = [None] * len(items)
        for turn in range(max(map(len, said))):
            live = [i for i, turns in enumerate(said) if turn < len(turns)]
            for i in live:
                _check_goes_on(last[i], turn, f"items[{i}].completion")
            live = [i for i in live if (o := last[i]) is None or not o.over]
            outcomes = self._env.play_turn(
                [states[i] for i in live], [said[i][turn] for i in live], self._scorer
            )
            for i, outcome in zip(live, outcomes, strict=True):
                last[i] = outcome
        return [
            _turn_result(state, outcome, write_random(rng))
            for state, outcome, rng in zip(states, last, rngs, strict=True)
            if outcome is not None
        ]

    def _timed_out(self, task: Task) -> dict[str, Any]:
        return {
            "task_id": task.id,
            "components": {},
            "raw_components": {},
            "reward": 0.0,
            "status": "timeout",
            "error": f"no score within {self._config.request_timeout:g} s",
            "terminated": True,
            "truncated": False,
        }

    def _counted(self, results: list[R]) -> list[R]:
        self._metrics.scored((result.status, result.components) for result in results)
        return results


def _said(item: ScoreItem) -> list[Completion]:
    turns = item.turns
    return [
        Completion(
            text,
            token_ids=ids,
            sampler_logprobs=[math.nan] * len(ids),  # not sent, so not to be scored in silence
            stop_reason="length" if item.truncated and left == 1 else "stop",
        )
        for text, ids, left in zip(
            turns, item.token_ids or [[]] * len(turns), range(len(turns), 0, -1), strict=True
        )
    ]


def _placed(error: RolloutError, items: Sequence[ScoreItem], tasks: Sequence[Task]) -> Problem:
    """Return the problem of turns after an end, at the first item that it can be about."""
    about = [
        i
        for i, (item, task) in enumerate(zip(items, tasks, strict=True))
        if len(item.turns) > 1 and f"task {task.id}:" in str(error)
    ]
    where = f"items[{about[0]}].completion" if about else "items"
    return Problem(422, "RolloutError", f"{where}: {error}", subject=where)


def _check_goes_on(outcome: TurnOutcome | None, turn: int, where: str) -> None:
    if outcome is not None and outcome.over and outcome.status == "ok":
        raise Problem(
            422,
            "RolloutError",
            f"{where}: got turns after the end of the episode, expected none; the environment "
            f"ended it after {turn}",
            subject=where,
        )


def _result(rollout: Rollout) -> ScoreResult:
    return ScoreResult(
        task_id=rollout.task_id,
        components=rollout.components,
        raw_components=rollout.raw_components,
        reward=rollout.reward,
        status=rollout.status,
        error=rollout.error,
        terminated=rollout.terminated,
        truncated=rollout.truncated,
        turn_scores=rollout.turns[-1].scores,
    )


def _turn_result(state: State, outcome: TurnOutcome, random: str) -> TurnResult:
    vector = outcome.vector
    scores = state.turn_scores[-1] if len(state.turn_scores) == state.turn else {}
    return TurnResult(
        task_id=state.task.id,
        components=vector.values if vector else {},
        raw_components=vector.raw if vector else {},
        reward=vector.reward if vector else 0.0,
        status=outcome.status,
        error=outcome.error,
        terminated=outcome.terminated,
        truncated=outcome.truncated,
        messages=state.messages,
        answers=outcome.answers,
        random=random,
        turn_scores={n: float(s) for n, s in scores.items() if s is not ABSENT},
    )
