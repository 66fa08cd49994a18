"""Environments made of plain score functions, without writing a class."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mrgym.components import Component, ComponentSet
from mrgym.errors import RewardDefinitionError
from mrgym.scoring.declare import EVERY, ScoreMethod
from mrgym.text import SingleTurnEnv, Tasks

__all__ = ["from_functions", "from_verifier"]

ScoreFunction = Callable[..., Any]


class _FunctionsEnv(SingleTurnEnv):
    """A single-turn environment whose score functions were handed in."""

    def __init__(
        self,
        functions: Mapping[str, ScoreFunction],
        declared: ComponentSet,
        tasks: Tasks,
        eval_tasks: Tasks | None,
    ) -> None:
        super().__init__(tasks=tasks, eval_tasks=eval_tasks)
        self.components = declared
        methods = {}
        for name, function in functions.items():
            attribute = f"_function_{name}"
            setattr(self, attribute, function)
            methods[name] = ScoreMethod(
                name, attribute, declared.get(name, Component()), batched=False, wants_state=False
            )
        self.score_methods = methods  # type: ignore[misc]


def from_functions(
    tasks: Tasks,
    functions: Mapping[str, ScoreFunction] | Sequence[ScoreFunction],
    *,
    components: Mapping[str, Component] | None = None,
    eval_tasks: Tasks | None = None,
) -> SingleTurnEnv:
    """Return an environment with one component a function ``(task, completion) -> score``.

    Args:
        tasks: A source, tasks, a JSONL file, or a dataset id.
        functions: Function by component name, or functions whose own names are taken.
        components: Declarations by name; unbounded where left out.
        eval_tasks: Held-out tasks; a stable fifth of ``tasks`` by default.

    Raises:
        RewardDefinitionError: If a name cannot be derived or is taken twice.
    """
    named = dict(functions) if isinstance(functions, Mapping) else _named(functions)
    declared = {name: Component() for name in named} | dict(components or {})
    if declared.keys() != named.keys():
        raise RewardDefinitionError(
            f"from_functions: got declarations for {[*(components or {})]}, expected names among "
            f"the functions {[*named]}; use the same names"
        )
    return _FunctionsEnv(named, ComponentSet(declared), tasks, eval_tasks)


def from_verifier(
    tasks: Tasks,
    verifier: ScoreFunction,
    *,
    components: Mapping[str, Component] | None = None,
    eval_tasks: Tasks | None = None,
) -> SingleTurnEnv:
    """Return an environment scored by one function that yields every score.

    Args:
        tasks: A source, tasks, a JSONL file, or a dataset id.
        verifier: ``(task, completion)`` to a mapping over ``components``, or to a single number
            when ``components`` is left out; that number is the one component ``"reward"``.
        components: Declarations of what the mapping holds.
        eval_tasks: Held-out tasks; a stable fifth of ``tasks`` by default.
    """
    if components is None:
        return _FunctionsEnv(
            {"reward": verifier}, ComponentSet({"reward": Component()}), tasks, eval_tasks
        )
    return _FunctionsEnv({EVERY: verifier}, ComponentSet(components), tasks, eval_tasks)


def _named(functions: Sequence[ScoreFunction]) -> dict[str, ScoreFunction]:
    named: dict[str, ScoreFunction] = {}
    for function in functions:
        name = _name_of(function)
        if name in named:
            raise RewardDefinitionError(
                f"from_functions: got two functions named {name!r}, expected different names; "
                "pass a mapping {name: function}"
            )
        named[name] = function
    return named


def _name_of(function: ScoreFunction) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name: str | None = getattr(function, "__name__", None)
    if name is None:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(function).__name__).lower()
    if name == "<lambda>":
        raise RewardDefinitionError(
            "from_functions: got a lambda without a name, expected a named function; "
            "pass a mapping {name: function}"
        )
    return name
