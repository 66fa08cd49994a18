"""The ``/verify`` endpoint of a NeMo Gym resources server as an environment."""

from __future__ import annotations

import asyncio
import functools
import math
import ssl
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import httpx

from mrgym.adapters._nemo_gym_response import response_of, text_of
from mrgym.components import ABSENT, SUM_ABS_TOL, SUM_REL_TOL, Component, ComponentSet, as_score
from mrgym.errors import ConfigError, RewardContractError, ScoreError, TaskError
from mrgym.sampler import Completion
from mrgym.spaces import Message
from mrgym.tasks import Task, TaskSource, jsonl_tasks
from mrgym.text import SingleTurnEnv

__all__ = ["NeMoGymVerified", "from_nemo_gym", "task_of_row"]

Rows: TypeAlias = "str | Path | Iterable[Mapping[str, Any]]"

ROW = "nemo_gym_row"
AT_ONCE = 256
"""Completions under way at a time: each holds a connection, and processes have few files."""

_thread = threading.local()
_SHOWN = 200


def from_nemo_gym(
    url: str,
    *,
    components: Mapping[str, Component] | Sequence[str],
    tasks: Rows,
    eval_tasks: Rows | None = None,
    timeout: float = 30.0,
) -> NeMoGymVerified:
    """Return an environment whose scores a NeMo Gym resources server gives.

    Example:
        >>> env = from_nemo_gym(
        ...     "http://127.0.0.1:8000",
        ...     components={"correctness": mrgym.Component(low=0, high=1)},
        ...     tasks="train.jsonl",
        ... )  # doctest: +SKIP

    Args:
        url: Address of the server.
        components: What it scores: declarations by name, or names of unbounded components. A
            server of a single reward has the one component ``reward``.
        tasks: Rows of its dataset, or a JSONL file of them.
        eval_tasks: Held-out rows; a stable fifth of ``tasks`` otherwise.
        timeout: Seconds one completion may take.

    Raises:
        ConfigError: If address or timeout cannot work.
        TaskError: If a row cannot be used; one with tools cannot, scores here are of text.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"from_nemo_gym: got url {url!r}, expected 'http://host:port'; mend it")
    if not (isinstance(timeout, (int, float)) and 0 < timeout < math.inf):
        raise ConfigError(
            f"from_nemo_gym: got timeout={timeout!r}, expected a finite number of seconds above 0; "
            "a server that hangs must not hang the run"
        )
    if not isinstance(components, Mapping):
        components = {name: Component() for name in components}
    held_out = None if eval_tasks is None else _source(eval_tasks)
    return NeMoGymVerified(url, ComponentSet(components), _source(tasks), held_out, timeout)


def task_of_row(row: Mapping[str, Any]) -> Task:
    """Return the task of a row of a NeMo Gym dataset; the row itself goes with it.

    Raises:
        TaskError: If it has no input of text, or offers tools.
    """
    asked = row.get("responses_create_params")
    if not isinstance(asked, Mapping) or not asked.get("input"):
        raise TaskError(
            f"row: got fields {[*row]}, expected 'responses_create_params' with an 'input'; "
            "give rows of a NeMo Gym dataset"
        )
    if asked.get("tools"):
        raise TaskError(
            "row: got tools, expected none, because completions are text here and the server would "
            "look for tool calls; train on such rows with NeMo Gym's own agents"
        )
    given = asked["input"]
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in messages):
        raise TaskError(
            f"row: got input {messages!r}"[:_SHOWN] + ", expected text or messages with role and "
            "content; leave out rows that begin in the middle of a tool call"
        )
    prompt = [Message(role=m["role"], content=text_of(m["content"])) for m in messages]
    return Task(prompt, metadata={ROW: dict(row)})


class NeMoGymVerified(SingleTurnEnv):
    """Tasks and scores of a NeMo Gym resources server; made by :func:`from_nemo_gym`.

    Reward Space:
        As declared: the server's ``reward_components``, unchanged. One that is missing, unknown,
        out of range or not finite is an error, as is a ``reward`` that is not their sum.

    Observation Space:
        The row's input, as text (chat messages in ``info``).

    Action Space:
        The completion, as text; it is sent as a response with one assistant message.
    """

    components = ComponentSet({"reward": Component()})

    def __init__(
        self,
        url: str,
        components: ComponentSet,
        tasks: TaskSource,
        eval_tasks: TaskSource | None,
        timeout: float,
    ) -> None:
        super().__init__(tasks=tasks, eval_tasks=eval_tasks)
        self.components = components
        self.url = url.rstrip("/")
        self.timeout = timeout

    async def scores(self, task: Task, completion: Completion) -> dict[str, object]:
        """Return what the server says of a completion.

        Raises:
            ScoreError: If the server is down, hangs, or answers with an error; a status of the
                rollout, not the end of the run.
            RewardContractError: If its answer breaks the contract.
        """
        row = task.metadata[ROW]
        try:
            async with _place(), asyncio.timeout(self.timeout):
                answer = await self._verify(row, completion)
        except TimeoutError as error:
            raise ScoreError(
                f"{self.url}: got no score within {self.timeout:g} s, expected one; look at the "
                "server, or raise timeout"
            ) from error
        return _components(answer, self._declared(), self.url)

    async def _verify(self, row: Mapping[str, Any], completion: Completion) -> Any:
        options: dict[str, Any] = {"timeout": self.timeout, "verify": _certificates()}
        async with httpx.AsyncClient(base_url=self.url, **options) as client:
            await self._post(client, "/seed_session", row)  # its cookie goes with /verify
            return await self._post(client, "/verify", {**row, "response": response_of(completion)})

    async def _post(self, client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> Any:
        try:
            reply = await client.post(path, json=body)
        except httpx.TransportError as error:
            raise ScoreError(
                f"{self.url}{path}: got {type(error).__name__} ({error}), expected an answer; "
                "is the server running?"
            ) from error
        if not reply.is_success:
            raise ScoreError(
                f"{self.url}{path}: got HTTP {reply.status_code} ({reply.text[:_SHOWN]}), expected "
                "success; look at the server's log"
            )
        try:
            return reply.json()
        except ValueError as error:
            raise ScoreError(
                f"{self.url}{path}: got {reply.text[:_SHOWN]!r}, expected JSON; is this a "
                "NeMo Gym resources server?"
            ) from error


def _place() -> asyncio.Semaphore:
    """Return what lets :data:`AT_ONCE` completions out at a time; a batch has a loop of its own."""
    loop = asyncio.get_running_loop()
    if getattr(_thread, "loop", None) is not loop:
        _thread.loop, _thread.places = loop, asyncio.Semaphore(AT_ONCE)
    places: asyncio.Semaphore = _thread.places
    return places


@functools.cache
def _certificates() -> ssl.SSLContext:
    # Loading them takes longer than most scores; a client a completion shares them.
    return httpx.create_ssl_context()


def _source(rows: Rows) -> TaskSource:
    if isinstance(rows, (str, Path)):
        return jsonl_tasks(rows, parse=task_of_row)
    return TaskSource((task_of_row(row) for row in rows), name="rows")


def _components(answer: Any, declared: ComponentSet, url: str) -> dict[str, object]:
    """Return the components of an answer of ``/verify``, checked against its reward."""
    if not isinstance(answer, dict) or "reward" not in answer:
        raise RewardContractError(
            f"{url}/verify: got {answer!r}"[:_SHOWN] + ", expected an object with a reward; "
            "is this a NeMo Gym resources server?"
        )
    failure = answer.get("_ng_failure_class")
    if failure is not None:
        raise ScoreError(
            f"{url}/verify: got a row marked as failed ({failure!r}) with reward "
            f"{answer['reward']!r}, expected scores; mend the server's verifier"
        )
    got = answer.get("reward_components")
    if got is None and [*declared] == ["reward"]:
        return {"reward": answer["reward"]}
    if not isinstance(got, dict):
        raise RewardContractError(
            f"{url}/verify: got reward_components {got!r}, expected a number for each of "
            f"{[*declared]}; declare components=['reward'] for a server of a single reward"
        )
    total = math.fsum(as_score(value, name, url) for name, value in got.items())
    reward = as_score(answer["reward"], "reward", url)
    if not math.isclose(reward, total, rel_tol=SUM_REL_TOL, abs_tol=SUM_ABS_TOL):
        raise RewardContractError(
            f"{url}/verify: got reward {reward!r}, expected {total!r}, the sum of {got}; a trainer "
            "with one reward would learn something else than one with components"
        )
    left_out = {n: ABSENT for n, c in declared.items() if c.optional and n not in got}
    return {**got, **left_out}
