"""A session: one environment, on one thread, and answers that can be asked again.

Every request of a session has a number. A client that did not get an answer sends the same number
again and gets the answer that was made the first time: nothing is stepped twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import gymnasium as gym
import msgspec

from mrgym.env import MultiRewardEnv
from mrgym.errors import TaskError
from mrgym.server.codec import check_plain, plain
from mrgym.server.config import ServerConfig
from mrgym.server.lanes import Lanes
from mrgym.server.problems import Problem, problem_of
from mrgym.server.schemas import ResetIn, StepIn, TaskIn, TransitionOut
from mrgym.server.space_wire import value_from_wire
from mrgym.text import Split, TextEnv

__all__ = ["OnStep", "Session", "Transition"]

AnyEnv = MultiRewardEnv[Any, Any]
OnStep = Callable[[Mapping[str, float]], None]


class Transition(msgspec.Struct):
    """What ``reset`` or ``step`` returned, before it takes a format."""

    observation: Any
    out: TransitionOut


class _TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    task_id: str | None = None
    split: Split | None = None
    task: TaskIn | None = None


class Session:
    """One environment, touched by one thread only."""

    def __init__(self, make: Callable[[], AnyEnv], config: ServerConfig, stepped: OnStep) -> None:
        self.id = secrets.token_urlsafe(24)
        self.key: str | None = None
        self.seen = time.monotonic()
        self.abandoned = False
        self.broken: str | None = None
        self.busy = 0
        self._config = config
        self._make = make
        self._stepped = stepped
        self._env: AnyEnv | None = None
        self._lane = Lanes(1, "mrgym-session")
        self._lock = asyncio.Lock()
        self._seq = 0
        self._begun = False
        self._last: tuple[bytes, Transition | Problem] | None = None

    async def open(self) -> None:
        """Make the environment."""
        self._env = await self._run(self._make)

    async def reset(self, request: ResetIn, body: bytes) -> Transition:
        """Start an episode.

        Args:
            request: What is asked.
            body: The bytes it came in, by which the same request is known again.

        Raises:
            Problem: If the options do not fit, or the environment failed.
        """
        return await self._once(request, body, lambda: self._reset(request))

    async def step(self, request: StepIn, body: bytes) -> Transition:
        """Take an action.

        Args:
            request: What is asked.
            body: As for :meth:`reset`.

        Raises:
            Problem: If it does not fit, or the environment failed.
        """
        return await self._once(request, body, lambda: self._step(request.action))

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Keep the session from expiring meanwhile."""
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1
            self.seen = time.monotonic()

    def end(self) -> asyncio.Future[Any]:
        """Close the environment, once what it is doing is done."""
        self.broken = self.broken or "it was ended"  # for who waits for the lock
        env = self._env
        done = self._lane.submit(lambda: None if env is None else env.close())
        self._lane.close()
        return done

    async def _once(
        self, request: ResetIn | StepIn, body: bytes, call: Callable[[], Transition]
    ) -> Transition:
        digest = hashlib.blake2b(body, digest_size=16).digest()
        async with self._lock:
            number = self._seq + 1 if request.seq is None else request.seq
            if number != self._seq + 1:
                return self._answer_again(number, digest)
            if self.broken is not None:
                raise Problem(410, "SessionBroken", f"session: {self.broken}; open another")
            answer = await self._attempt(call, number)
            self._seq, self._last = number, (digest, answer)
        return _given(answer)

    async def _attempt(self, call: Callable[[], Transition], number: int) -> Transition | Problem:
        try:
            transition: Transition = await self._run(call)
        except Exception as error:  # an environment may raise anything; it is the answer
            return problem_of(error)
        transition.out.seq = number
        return transition

    def _answer_again(self, number: int, digest: bytes) -> Transition:
        if self._last is None or number != self._seq or self._last[0] != digest:
            got = "another request" if number == self._seq else f"seq {number}"
            raise Problem(
                409,
                "OutOfTurn",
                f"session: got {got} after seq {self._seq}, expected seq {self._seq + 1}, or the "
                "last request as it was; number the requests of a session in order",
                subject="seq",
            )
        return _given(self._last[1])

    async def _run(self, call: Callable[[], Any]) -> Any:
        limit = self._config.request_timeout
        future = self._lane.submit(call)
        done, _ = await asyncio.wait({future}, timeout=limit)
        if not done:
            self.broken = f"its environment took more than {limit:g} s"
            raise Problem(
                504,
                "EnvironmentTimeout",
                f"environment: got no result within {limit:g} s, expected one; its session is "
                "given up",
            )
        return future.result()

    def _reset(self, request: ResetIn) -> Transition:
        assert self._env is not None
        options = request.options
        check_plain(options, "options")
        if isinstance(self._env, TextEnv):
            options = _text_options(options)
        observation, info = self._env.reset(seed=request.seed, options=options)
        self._begun = True
        kept, left_out = plain(info)
        return Transition(
            observation, TransitionOut(observation=None, info=kept, seq=0, left_out=left_out)
        )

    def _step(self, data: Any) -> Transition:
        assert self._env is not None
        if not self._begun:
            raise gym.error.ResetNeeded("session: got a step before a reset, expected a reset")
        action = value_from_wire(self._env.action_space, data)
        observation, reward, terminated, truncated, info = self._env.step(action)
        self._stepped(info["reward_components"])
        kept, left_out = plain(info)
        out = TransitionOut(
            observation=None,
            info=kept,
            seq=0,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            left_out=left_out,
        )
        return Transition(observation, out)


def _given(answer: Transition | Problem) -> Transition:
    if isinstance(answer, Problem):
        raise answer
    return answer


def _text_options(options: dict[str, Any] | None) -> dict[str, Any] | None:
    if options is None:
        return None
    try:
        chosen = msgspec.convert(options, _TextOptions)
    except msgspec.ValidationError as error:
        raise TaskError(f"options: {error}; give task_id, split or task") from error
    given: dict[str, Any] = {}
    if chosen.task is not None:
        given["task"] = chosen.task.task()
    if chosen.task_id is not None:
        given["task_id"] = chosen.task_id
    if chosen.split is not None:
        given["split"] = chosen.split
    return given
