"""NeMo Gym: an environment as its resources server; :func:`from_nemo_gym` is the way back.

    mrgym serve math_multi_reward --protocol nemo-gym --port 8000

    from mrgym.adapters import nemo_gym
    with open("train.jsonl", "w") as lines:
        for row in nemo_gym.rows("math_multi_reward"):
            print(json.dumps(row), file=lines)

NeMo Gym starts its servers itself; ``resources_servers/mrgym/app.py`` for it is three lines::

    import uvicorn
    from mrgym.adapters.nemo_gym import create_app
    uvicorn.run(create_app("math_multi_reward"), host="127.0.0.1", port=8000)

with this in its configuration (host and port are where it looks for the server)::

    mrgym:
      resources_servers:
        mrgym: {entrypoint: app.py, domain: math, host: 127.0.0.1, port: 8000}
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import msgspec
from pydantic import BaseModel, ConfigDict

from mrgym.adapters._common import (
    need,
    no_abstention,
    no_clash,
    no_prefill,
    scored,
    text_env,
    warn_one_at_a_time,
)
from mrgym.adapters._nemo_gym_metrics import aggregate
from mrgym.adapters._nemo_gym_response import completion_of
from mrgym.adapters.nemo_gym_client import from_nemo_gym
from mrgym.env import MultiRewardEnv
from mrgym.errors import MrgymError, TaskError, WireError, closest
from mrgym.rollout import Rollout
from mrgym.scoring import Scorer
from mrgym.tasks import Task
from mrgym.text import Split, TextEnv

__all__ = ["TAKEN", "create_app", "from_nemo_gym", "rows"]

EnvOrFactory: TypeAlias = "MultiRewardEnv[Any, Any] | str | Callable[[], MultiRewardEnv[Any, Any]]"

PEER = "NeMo Gym"
METADATA = "verifier_metadata"
COOKIE = "mrgym_session"
CAPTURE = "/ng-rollout/{rollout_id}"
"""Prefix that NeMo Gym puts before a path where its observability is on."""

# Fields of a row or of a verify response, columns of the metrics, and numbers of the token usage,
# which the metrics write over a field of the same name.
TAKEN = frozenset(
    "responses_create_params response reward reward_components verifier_metadata agent_ref "
    "agent_name skills_ref instance_config rollout_id input_tokens output_tokens total_tokens "
    "usage input_tokens_details output_tokens_details".split()
)


class _Row(BaseModel):
    """A row as ``/seed_session`` gets it."""

    model_config = ConfigDict(extra="allow")

    verifier_metadata: dict[str, Any] | None = None


class _Verify(BaseModel):
    """A row with the policy's response."""

    model_config = ConfigDict(extra="allow")

    responses_create_params: dict[str, Any]
    response: dict[str, Any]
    verifier_metadata: dict[str, Any]


class _Aggregate(BaseModel):
    """Verify responses, stripped of their texts."""

    verify_responses: list[dict[str, Any]]


def create_app(env: EnvOrFactory, *, scorer: Scorer | None = None) -> Any:
    """Return the FastAPI application of a NeMo Gym resources server for an environment.

    ``/verify`` finds the task by ``verifier_metadata`` (see :func:`rows`) and answers with the row,
    ``reward``, ``reward_components`` and each component as a number of its own. A row or response
    that cannot be used gives 422; a score function that fails gives 500, never a reward.

    Args:
        env: A single-turn text environment, its id, or a function that makes it.
        scorer: Where score functions run. Here by default, one completion at a time; give a
            :class:`mrgym.scoring.WorkerScorer` for functions that may hang.

    Raises:
        MissingExtraError: If FastAPI is not installed.
        RewardDefinitionError: If NeMo Gym would lose or change something: several turns, a
            component that may abstain, a name that is taken, a prefill.
    """
    fastapi = need("fastapi", "serve")
    server = _Server(_usable(env), scorer)

    def seed_session(row: _Row) -> Any:
        server.check_row(row.model_dump())
        reply = fastapi.responses.JSONResponse({})
        reply.set_cookie(COOKIE, uuid.uuid4().hex, httponly=True)
        return reply

    def verify(row: _Verify) -> Any:
        return _json(fastapi, server.verify(row.model_dump()))

    def aggregate_metrics(body: _Aggregate) -> Any:
        return _json(fastapi, aggregate(body.verify_responses))

    def reverify_mode() -> str:
        return "stateless"

    def failed(_: Any, error: Exception) -> Any:
        asked_wrongly = isinstance(error, (TaskError, WireError))
        return fastapi.responses.JSONResponse({"detail": str(error)}, 422 if asked_wrongly else 500)

    app = fastapi.FastAPI(title=f"{server.env.contract_name} for NeMo Gym")
    app.get("/")(server.about)
    router = fastapi.APIRouter()
    for route in (seed_session, verify, aggregate_metrics):
        router.post(f"/{route.__name__}")(route)
    router.get("/reverify_mode")(reverify_mode)
    app.include_router(router)
    app.include_router(router, prefix=CAPTURE, include_in_schema=False)
    app.add_exception_handler(MrgymError, failed)
    return app


def rows(
    env: MultiRewardEnv[Any, Any] | str, split: Split = "train", *, agent: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a NeMo Gym dataset, one a task, in order.

    ``verifier_metadata`` names split and id of the task, which the server looks up. A row of one's
    own may hold the task itself instead: ``{"task": {"prompt": ..., "answer": ...}}``.

    Args:
        env: The environment that is served, or its id.
        split: Which tasks.
        agent: Name of the agent that plays the rows, written as ``agent_ref``.
    """
    served = _usable(env)
    played_by = {"agent_ref": {"name": agent}} if agent else {}
    for task in served.task_source(split):
        yield {
            "responses_create_params": {"input": served.messages(task)},
            METADATA: {"task_id": task.id, "split": split},
            **played_by,
        }


class _Server:
    """What the routes do."""

    def __init__(self, env: TextEnv, scorer: Scorer | None) -> None:
        self.env = env
        self._scorer = scorer
        self._one_at_a_time = threading.Lock()

    def about(self) -> dict[str, Any]:
        return {
            "env": self.env.contract_name,
            "protocol": "nemo-gym",
            "components": [*self.env._declared()],
        }

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise for a row that ``/verify`` could not use, before the policy is asked."""
        if row.get(METADATA) is not None:
            self._task(row)

    def verify(self, row: Mapping[str, Any]) -> dict[str, Any]:
        task = self._task(row)
        rollout = self._score(task, completion_of(row["response"]))
        components = rollout.components
        return {**row, **components, "reward": rollout.reward, "reward_components": components}

    def _score(self, task: Task, completion: str) -> Rollout:
        if self._scorer is not None:
            return scored(self.env, task, completion, PEER, self._scorer)
        with self._one_at_a_time:  # requests come on many threads, score functions may not
            return scored(self.env, task, completion, PEER)

    def _task(self, row: Mapping[str, Any]) -> Task:
        clashing = sorted({*row} & {*self.env._declared()})
        if clashing:
            raise TaskError(
                f"row: got fields {clashing}, expected none named like a component, which would be "
                "overwritten; rename the fields"
            )
        named = row[METADATA]
        if "task" in named:
            return _whole_task(named["task"])
        task_id, split = named.get("task_id"), named.get("split", "train")
        if not isinstance(task_id, str) or split not in ("train", "eval"):
            raise TaskError(
                f"row: got {METADATA} {named!r}"[:300] + ", expected 'task_id' (text) and 'split' "
                "('train' or 'eval'), or 'task'; write rows with mrgym.adapters.nemo_gym.rows"
            )
        with self._one_at_a_time:
            source = self.env.task_source(split)
        return source.by_id(task_id)


def _whole_task(value: Any) -> Task:
    fields = Task.__struct_fields__
    unknown = sorted({*value} - {*fields}) if isinstance(value, dict) else []
    if unknown:
        raise TaskError(
            f"row: got a task with fields {unknown}, expected some of {[*fields]}"
            f"{closest(unknown[0], fields)}; rename them, or put them into 'metadata'"
        )
    try:
        return msgspec.convert(value, Task)
    except (msgspec.ValidationError, TaskError) as error:
        raise TaskError(f"row: got a task that cannot be used ({error}); mend it") from error


def _usable(env: EnvOrFactory) -> TextEnv:
    made = text_env(
        env if isinstance(env, (str, MultiRewardEnv)) else env(), PEER, single_turn=True
    )
    no_abstention(made, PEER, "NeMo RL turns a missing component into 0.0")
    no_clash(made, PEER, TAKEN)
    no_prefill(made, PEER)
    warn_one_at_a_time(made, PEER)
    return made


def _json(fastapi: Any, content: Any) -> Any:
    try:
        body = json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:  # NaN, infinity or half a surrogate pair, from the request
        raise WireError(f"row: got what JSON cannot hold ({error}); mend the row") from error
    return fastapi.Response(body, media_type="application/json")
