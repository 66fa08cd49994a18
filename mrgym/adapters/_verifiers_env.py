"""The way back from verifiers: the tasks and rewards of a taskset as an environment."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import os
import threading
from collections.abc import Mapping
from typing import Any

from mrgym.adapters._common import need
from mrgym.components import ABSENT, Absent, Component, ComponentSet
from mrgym.errors import RewardContractError, RewardDefinitionError, ScoreError, TaskError
from mrgym.sampler import Completion
from mrgym.spaces import Message
from mrgym.tasks import Task, TaskSource
from mrgym.text import SingleTurnEnv

__all__ = ["VerifiersEnv", "from_verifiers"]


def from_verifiers(
    source: Any,
    *,
    components: Mapping[str, Component] | None = None,
    eval_source: Any = None,
    limit: int | None = None,
    **config: Any,
) -> VerifiersEnv:
    """Return a taskset of verifiers as an environment of one turn, scored by its rewards.

    A reward's score is the component's. Where
    verifiers leaves ``None`` (a reward that raised) the rollout has status ``"error"``; NaN, a
    missing or an undeclared key is a :class:`mrgym.RewardContractError`.

    Args:
        source: A taskset, its installed id, or a ``vf.SingleAgentEnv``.
        components: Declarations of the rewards, with their weights. Needed where a reward returns
            several scores at once; otherwise one component, without bounds and of the same weight,
            of every reward function and judge.
        eval_source: Held-out tasks; a stable fifth by prompt if left out.
        limit: Take so many tasks only; needed where a taskset is infinite.
        **config: Settings of the taskset, where its id is given.

    Raises:
        MissingExtraError: If verifiers is not installed.
        RewardDefinitionError: If rewards need what a single reply does not have: a runtime, tools,
            hooks of the task, or several agents.
        TaskError: If a task has no prompt in text.
    """
    sources = [source] if eval_source is None else [source, eval_source]
    loaded = [_tasks(one, limit, config) for one in sources]
    declared = components or _declared(loaded[0][0])
    return VerifiersEnv(loaded[0], loaded[1] if len(loaded) > 1 else None, declared)


class VerifiersEnv(SingleTurnEnv):
    """Tasks of a verifiers taskset; made by :func:`from_verifiers`.

    Reward Space:
        One component a reward, as declared by its caller.

    Observation Space:
        The prompt, as text (chat messages with the system prompt in ``info``).

    Action Space:
        The completion, as text.
    """

    def __init__(
        self, train: list[Any], held_out: list[Any] | None, declared: Mapping[str, Component]
    ) -> None:
        super().__init__(
            tasks=_source(train, "verifiers"),
            eval_tasks=None if held_out is None else _source(held_out, "verifiers eval"),
        )
        self.components = ComponentSet(declared)
        # Train and eval may use the same ids for different tasks.
        self._peers = {_identity(_as_task(task)): task for task in [*train, *(held_out or [])]}

    async def scores(self, task: Task, completion: Completion) -> dict[str, float | Absent]:
        """Return the rewards verifiers gives the completion.

        Raises:
            ScoreError: If verifiers leaves a reward unscored.
            TaskError: If the task is none of the taskset's.
        """
        peer = self._peers.get(_identity(task))
        if peer is None:
            raise TaskError(
                f"{self.contract_name}: got task {task.id!r}, expected one of its own, because "
                "verifiers scores its tasks alone; take it from env.task_source(...)"
            )
        scored = asyncio.run_coroutine_threadsafe(_score(peer, completion), _loop(os.getpid()))
        rewards: dict[str, float] = await asyncio.wrap_future(scored)
        found: dict[str, float | Absent] = {**rewards}
        for name, component in self._declared().items():
            if component.optional:
                found.setdefault(name, ABSENT)
        return found


async def _score(peer: Any, completion: Completion) -> dict[str, float]:
    trace = _trace(peer, completion)
    async with asyncio.timeout(peer.data.timeout.scoring):
        await peer.score(trace)
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored:
        raise ScoreError(
            f"verifiers: got None for rewards {unscored}, expected scores; mend the reward"
        )
    return {name: reward.score for name, reward in trace.rewards.items()}


def _trace(peer: Any, completion: Completion) -> Any:
    """Return the trace of a conversation that ended with one reply."""
    vf = need("verifiers.v1", "verifiers")
    data = peer.data
    asked = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
    system = [] if data.system_prompt is None else [vf.SystemMessage(content=data.system_prompt)]
    messages = [*system, *asked, vf.AssistantMessage(content=completion.text)]
    nodes = [
        vf.MessageNode(parent=i - 1 if i else None, message=m, sampled=i == len(messages) - 1)
        for i, m in enumerate(messages)
    ]
    reason = completion.stop_reason
    return _trace_class()(
        task=vf.TraceTask(type=type(peer).__name__, data=data, key=peer.key, hash=peer.hash),
        agent=vf.AgentInfo(config=vf.AgentConfig(runtime=vf.SubprocessConfig())),
        nodes=nodes,
        calls=[vf.ModelCall(node=len(nodes) - 1, finish_reason=reason)],
        is_completed=True,
        ok=True,
        stop_condition="agent_completed",
    )


@functools.cache
def _trace_class() -> Any:
    vf = need("verifiers.v1", "verifiers")

    class OnceTrace(vf.Trace):  # type: ignore[misc, name-defined]
        def record_reward(self, name: str, value: float, weight: float = 1.0) -> None:
            if self.rewards.get(name) is not None:  # verifiers would keep the later one alone
                raise RewardContractError(
                    f"verifiers: got reward {name!r} from two functions, expected one; rename one"
                )
            super().record_reward(name, value, weight)

    return OnceTrace


def _tasks(source: Any, limit: int | None, config: Mapping[str, Any]) -> list[Any]:
    taskset = _taskset(source, config)
    if limit is not None:
        taskset = taskset.take(limit)
    if not taskset.bounded:
        raise TaskError(
            f"from_verifiers: got {type(taskset).__name__}, which never ends, expected tasks that "
            "can be counted; pass limit=..."
        )
    tasks = list(taskset)
    if not tasks:
        raise TaskError(f"from_verifiers: got no tasks of {type(taskset).__name__}, expected some")
    shared_tools = type(taskset).toolsets(taskset.config)
    for one_of_its_kind in {type(task): task for task in tasks}.values():
        _check_task(one_of_its_kind, shared_tools)
    return tasks


def _taskset(source: Any, config: Mapping[str, Any]) -> Any:
    vf = need("verifiers.v1", "verifiers")
    if isinstance(source, str):
        loaders = need("verifiers.v1.utils.loaders", "verifiers")
        return loaders.load_taskset(loaders.taskset_config_type(source)(id=source, **config))
    if isinstance(source, vf.Env):
        if type(source).run is not vf.SingleAgentEnv.run or (
            type(source).finalize is not vf.Env.finalize
        ):
            raise RewardDefinitionError(
                f"from_verifiers: got {type(source).__name__}, which judges conversations of its "
                "own, expected a vf.SingleAgentEnv, whose tasks score one reply; pass its taskset"
            )
        return source.taskset
    if not isinstance(source, vf.Taskset):
        raise RewardDefinitionError(
            f"from_verifiers: got {type(source).__name__}, expected a vf.Taskset, its installed "
            "id, or a vf.SingleAgentEnv; make one with MyTaskset(MyTasksetConfig())"
        )
    return source


def _check_task(peer: Any, shared_tools: list[Any]) -> None:
    """Refuse tasks whose scores depend on more than the reply: none of it would run here."""
    vf = need("verifiers.v1", "verifiers")
    kind = type(peer)
    wants = [f"reward {fn.__name__!r} needs a runtime" for fn in _rewards(peer) if _needs_box(fn)]
    decorators = need("verifiers.v1.utils.decorators", "verifiers")
    wants += [
        f"{fn.__name__}() intercepts" for fn in decorators.discover_decorated(peer, "intercept")
    ]
    if kind.NEEDS_CONTAINER:
        wants.append("the task needs a container")
    if shared_tools or kind.toolsets(peer.config):
        wants.append("the task has tools")
    wants += [
        f"the task has {hook}()"
        for hook in ("setup", "finalize", "stage_verifier")
        if getattr(kind, hook) is not getattr(vf.Task, hook)
    ]
    if wants:
        raise RewardDefinitionError(
            f"from_verifiers: got {kind.__name__}, where {', '.join(wants)}, expected rewards of "
            "the reply alone; run it in verifiers"
        )


def _rewards(peer: Any) -> list[Any]:
    return [*peer.hooks("reward"), *(judge.score for judge in peer.plugged_judges())]


def _needs_box(function: Any) -> bool:
    runtime = inspect.signature(function).parameters.get("runtime")
    return runtime is not None and runtime.default is inspect.Parameter.empty


def _declared(peer: Any) -> dict[str, Component]:
    weights = {fn.__name__: getattr(fn, "_vf_weight", 1.0) for fn in peer.hooks("reward")}
    weights |= {judge.reward_name: judge.config.weight for judge in peer.plugged_judges()}
    if not weights:
        raise RewardDefinitionError(
            f"from_verifiers: got {type(peer).__name__} without rewards, expected one at least; "
            "mark a method with @vf.reward"
        )
    return {name: Component(-math.inf, math.inf, weight) for name, weight in weights.items()}


def _source(peers: list[Any], name: str) -> TaskSource:
    return TaskSource(map(_as_task, peers), name=name)


def _as_task(peer: Any) -> Task:
    data = peer.data
    messages = [] if data.system_prompt is None else [_message("system", data.system_prompt)]
    prompt = data.prompt or []
    if isinstance(prompt, str):
        prompt = prompt if not messages else [*messages, _message("user", prompt)]
    else:
        prompt = [*messages, *(_message(m.role, m.content) for m in prompt)]
    if not prompt or not all(isinstance(m, str) or m["content"] is not None for m in prompt):
        raise TaskError(
            f"from_verifiers: got task {data.idx} without a prompt in text, expected one; the user "
            "opens it, or it holds images"
        )
    shown = {"idx", "id", "prompt", "system_prompt", "answer"}
    metadata = data.model_dump(mode="json", exclude_defaults=True, exclude=shown)
    return Task(prompt, getattr(data, "answer", None), data.id or peer.key, metadata)


def _message(role: str, content: object) -> Message:
    return Message(role=role, content=content if isinstance(content, str) else None)  # type: ignore[typeddict-item]


def _identity(task: Task) -> tuple[str, str]:
    return task.id, repr(task.prompt)


@functools.cache
def _loop(pid: int) -> asyncio.AbstractEventLoop:
    """Return the loop of this process that rewards run on, which outlives every call.

    Judges keep connections, and those belong to the loop they were opened on.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"verifiers-{pid}", daemon=True).start()
    return loop
