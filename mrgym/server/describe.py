"""What a service says of its environment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mrgym
from mrgym.components import Component
from mrgym.env import MultiRewardEnv
from mrgym.errors import RewardDefinitionError
from mrgym.server.config import ServerConfig
from mrgym.server.schemas import (
    PROTOCOL_VERSION,
    ComponentOut,
    EnvOut,
    GateOut,
    LimitsOut,
    PromptOut,
)
from mrgym.server.space_wire import describe_space
from mrgym.tasks import Task
from mrgym.text import TextEnv

__all__ = ["describe", "prompt_out"]


def describe(
    env: MultiRewardEnv[Any, Any], config: ServerConfig, tasks: Mapping[str, int]
) -> EnvOut:
    """Return the description of an environment.

    Raises:
        SpaceError: If it has a space without a form on the wire.
        RewardDefinitionError: If a gate can never open.
    """
    out = EnvOut(
        protocol=PROTOCOL_VERSION,
        mrgym=mrgym.__version__,
        id=env.contract_name,
        kind="text" if isinstance(env, TextEnv) else "spaces",
        components=[_component(name, c) for name, c in env._declared().items()],
        limits=LimitsOut(
            max_batch=config.max_batch,
            max_body_bytes=config.max_body_bytes,
            max_sessions=config.max_sessions,
            request_timeout=config.request_timeout,
        ),
        tasks=dict(tasks),
        nondeterministic=env.spec is not None and env.spec.nondeterministic,
        action_space=describe_space(env.action_space),
        observation_space=describe_space(env.observation_space),
    )
    if isinstance(env, TextEnv):
        out.split, out.max_turns = env.split, env.max_turns
        out.conversation = _is_conversation(env)
        out.instruction, out.prefill = env.instruction, env.prefill
    return out


def prompt_out(env: TextEnv, task: Task) -> PromptOut:
    """Return a task's prompt as it travels."""
    prompt = env.prompt_for(task)
    out = PromptOut(
        text=prompt.text,
        messages=list(prompt.messages or []),
        prefill=prompt.prefill,
        chat_only=prompt.chat_only,
        gold=None,
    )
    try:
        out.gold = env.gold_completion(task)
    except Exception as error:  # a task can be asked and scored without it
        out.gold_error = repr(error)
    return out


def _is_conversation(env: TextEnv) -> bool:
    """Return whether an episode knows more than its task and one completion."""
    own = type(env)
    return env.max_turns > 1 or own.start is not TextEnv.start or own.respond is not TextEnv.respond


def _component(name: str, component: Component) -> ComponentOut:
    gate = component.gate
    if gate is not None and not math.isfinite(gate.at_least):
        raise RewardDefinitionError(
            f"service: got {name!r} with {gate}, expected a finite at_least, which is what JSON "
            "can say; give a number"
        )
    return ComponentOut(
        name=name,
        low=float(component.low) if math.isfinite(component.low) else None,
        high=float(component.high) if math.isfinite(component.high) else None,
        weight=float(component.weight),
        optional=component.optional,
        gate=None if gate is None else GateOut(gate.on, float(gate.at_least), gate.otherwise),
        reduce=component.reduce,
        doc=component.doc,
    )
