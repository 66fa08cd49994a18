"""Declaring score methods: the ``@mrgym.component`` decorator and what a class collects of it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from mrgym.components import Component, Gate, Reduction
from mrgym.errors import RewardDefinitionError

__all__ = ["EVERY", "ScoreMethod", "collect_score_methods", "component", "score_every"]

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__mrgym_component__"
EVERY = "*"
"""The component name of a method that scores all components at once."""


@dataclass(frozen=True, slots=True)
class ScoreMethod:
    """How one component is scored.

    Attributes:
        component: Name of the component.
        attribute: Name of the method on the environment.
        declared: The component's declaration.
        batched: Whether the method takes lists and returns one score an item.
        wants_state: Whether the first argument is the episode's state instead of its task.
    """

    component: str
    attribute: str
    declared: Component
    batched: bool
    wants_state: bool


@overload
def component(function: F, /) -> F: ...
@overload
def component(
    *,
    name: str | None = None,
    low: float = -math.inf,
    high: float = math.inf,
    weight: float = 1.0,
    optional: bool = False,
    gate: Gate | None = None,
    reduce: Reduction = "last",
    doc: str = "",
    batched: bool = False,
) -> Callable[[F], F]: ...
def component(
    function: F | None = None,
    /,
    *,
    name: str | None = None,
    low: float = -math.inf,
    high: float = math.inf,
    weight: float = 1.0,
    optional: bool = False,
    gate: Gate | None = None,
    reduce: Reduction = "last",
    doc: str = "",
    batched: bool = False,
) -> F | Callable[[F], F]:
    """Mark a method of a text environment as the score function of a component.

    The method takes ``(task, completion)`` - or ``(state, completion)`` if its first parameter is
    called ``state`` - and returns one number; it may be ``async``. With ``batched=True`` it takes
    two lists and returns one number an item.

    Args:
        function: The method, when the decorator is used without parentheses.
        name: Component name; the method's own name by default.
        low: Least score.
        high: Greatest score.
        weight: Default weight in training.
        optional: Whether it may abstain with ``mrgym.ABSENT``.
        gate: Condition under which the score counts.
        reduce: How the scores of several turns become the episode's.
        doc: What is measured; the docstring's first line by default.
        batched: Whether the method scores whole lists.
    """

    def mark(f: F) -> F:
        text = doc or next(iter((inspect.getdoc(f) or "").splitlines()), "")
        declared = Component(low, high, weight, optional, gate, reduce, text)
        setattr(f, _MARK, (name or f.__name__, declared, batched))
        return f

    return mark if function is None else mark(function)


def collect_score_methods(cls: type) -> dict[str, ScoreMethod]:
    """Return the score methods of a class by component name, base classes first.

    A method that overrides a marked one without a mark of its own keeps the declaration; setting
    the attribute to ``None`` removes the component.

    Raises:
        RewardDefinitionError: If two methods score the same component.
    """
    marks: dict[str, tuple[str, Component, bool]] = {}
    for base in reversed(cls.__mro__):
        for attribute, value in vars(base).items():
            mark = _mark_of(value)
            if mark is not None:
                marks[attribute] = mark
            elif value is None:
                marks.pop(attribute, None)
    methods: dict[str, ScoreMethod] = {}
    for attribute, (name, declared, batched) in marks.items():
        if name in methods:
            raise RewardDefinitionError(
                f"{cls.__qualname__}: got component {name!r} from {methods[name].attribute!r} and "
                f"{attribute!r}, expected one method a component; rename one with name=..."
            )
        method = getattr(cls, attribute)
        methods[name] = ScoreMethod(name, attribute, declared, batched, _wants_state(method))
    return methods


def score_every(cls: type) -> dict[str, ScoreMethod]:
    """Return the one score method of a class that scores all its components in ``scores``."""
    method: Callable[..., Any] = cls.scores  # type: ignore[attr-defined]
    return {EVERY: ScoreMethod(EVERY, "scores", Component(), False, _wants_state(method))}


def _mark_of(value: object) -> tuple[str, Component, bool] | None:
    """Return the mark of a function, also under ``staticmethod`` or ``classmethod``."""
    return getattr(value, _MARK, None) or getattr(getattr(value, "__wrapped__", None), _MARK, None)


def _wants_state(method: Callable[..., Any]) -> bool:
    first_two = list(inspect.signature(method).parameters)[:2]  # "self" may come before it
    return "state" in first_two or "states" in first_two
