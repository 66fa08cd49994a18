"""Components: the named reward signals an environment declares, and their rules.

The rules live here and nowhere else: which names exist, what a score may be, what a gate does,
what an abstention means. :mod:`mrgym.env` applies them to every step.
"""

from __future__ import annotations

import enum
import math
import numbers
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from mrgym.errors import RewardContractError, RewardDefinitionError, closest

__all__ = [
    "ABSENT",
    "PRESENT_PREFIX",
    "REWARD_PREFIX",
    "SUM_ABS_TOL",
    "SUM_REL_TOL",
    "Absent",
    "Component",
    "ComponentSet",
    "Gate",
    "Reduction",
    "RewardVector",
    "as_score",
    "components",
    "present_key",
    "reward_key",
]

REWARD_PREFIX: Final = "reward/"
PRESENT_PREFIX: Final = "present/"
SUM_REL_TOL: Final = 1e-5
SUM_ABS_TOL: Final = 1e-6

Reduction: TypeAlias = Literal["sum", "last", "max", "mean"]

# A leading underscore is refused: Gymnasium's vector envs keep the mask of "x" under "_x".
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.\-]*")


class Absent(enum.Enum):
    """The type of :data:`ABSENT`."""

    ABSENT = "ABSENT"

    def __repr__(self) -> str:
        return "mrgym.ABSENT"


ABSENT: Final = Absent.ABSENT
"""The score of an optional component that was not measured (never NaN, ``None`` or 0)."""


def reward_key(name: str) -> str:
    """Return the batch key of a component's scores, ``"reward/<name>"``."""
    return REWARD_PREFIX + name


def present_key(name: str) -> str:
    """Return the batch key of a component's presence mask, ``"present/<name>"``."""
    return PRESENT_PREFIX + name


@dataclass(frozen=True, slots=True)
class Gate:
    """A condition on another component; where it is not met the gated score is replaced.

    The conditioned reward of GDPO (arXiv 2601.05242): a component gated on ``on`` keeps its score
    where ``score[on] >= at_least`` and becomes ``otherwise`` elsewhere, before the sum is taken.

    Attributes:
        on: Name of the component that is looked at.
        at_least: The least score of ``on`` that opens the gate.
        otherwise: The score while the gate is shut; must lie in the gated component's range.

    Raises:
        RewardDefinitionError: If a value is not a number, or ``otherwise`` is infinite.
    """

    on: str
    at_least: float
    otherwise: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers("Gate", at_least=self.at_least, otherwise=self.otherwise)
        if not isfinite(self.otherwise):
            raise RewardDefinitionError(
                f"Gate: got otherwise={self.otherwise}, expected a finite number; "
                "leave it out for 0"
            )


@dataclass(frozen=True, slots=True)
class Component:
    """One named reward signal: its range, default weight and rules.

    Attributes:
        low: Least score allowed.
        high: Greatest score allowed.
        weight: Default weight in training; overridden by name in the trainer's configuration.
            The environment's ``reward`` is always the plain, unweighted sum.
        optional: Whether the component may abstain with :data:`ABSENT`.
        gate: Condition under which the score counts.
        reduce: How the scores of several turns become the episode's score.
        doc: One line on what is measured.

    Raises:
        RewardDefinitionError: If a value cannot work, e.g. ``low > high`` or a NaN.
    """

    low: float = -math.inf
    high: float = math.inf
    weight: float = 1.0
    optional: bool = False
    gate: Gate | None = None
    reduce: Reduction = "last"
    doc: str = ""

    def __post_init__(self) -> None:
        _check_numbers("Component", low=self.low, high=self.high, weight=self.weight)
        if self.low > self.high:
            raise RewardDefinitionError(
                f"Component: got low={self.low}, high={self.high}, expected low <= high; "
                "give the least score first"
            )
        if not isfinite(self.weight):
            raise RewardDefinitionError(
                f"Component: got weight={self.weight}, expected a finite number; "
                "leave it out for a weight of 1"
            )
        if self.reduce not in ("sum", "last", "max", "mean"):
            raise RewardDefinitionError(
                f"Component: got reduce={self.reduce!r}, expected 'sum', 'last', 'max' or 'mean'; "
                "name one of them"
            )


@dataclass(frozen=True, slots=True)
class RewardVector:
    """Checked scores of one step or episode.

    Attributes:
        values: Score by component after gates, in declared order; an abstention has no key.
        raw: Score by component before gates; holds what abstained only because its gate's
            condition did, too.
        reward: The plain sum, ``math.fsum(values.values())``.
    """

    values: dict[str, float]
    raw: dict[str, float]
    reward: float


class ComponentSet(Mapping[str, Component]):
    """The declared components of an environment: an ordered, immutable mapping by name.

    Args:
        declared: Component by name.

    Raises:
        RewardDefinitionError: If the set is empty, a name is unusable, or a gate points nowhere,
            in a circle, or at an optional component from one that is not optional.
    """

    __slots__ = ("_by_name", "_gated", "_names", "_plain", "_required")

    def __init__(self, declared: Mapping[str, Component]) -> None:
        if not declared:
            raise RewardDefinitionError(
                "components: got none, expected at least one; "
                "declare components = mrgym.components(name=mrgym.Component(...))"
            )
        for name, component in declared.items():
            _check_declaration(name, component)
        self._by_name = MappingProxyType(dict(declared))
        self._names = self._by_name.keys()
        self._required = frozenset(n for n, c in declared.items() if not c.optional)
        self._gated = tuple(_gate_order(self._by_name))
        # The hot path of a step reads a plain tuple instead of dataclass attributes.
        self._plain = tuple((n, c.low, c.high) for n, c in declared.items())

    def __getitem__(self, name: str) -> Component:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __repr__(self) -> str:
        return f"components({', '.join(self._by_name)})"

    def __reduce__(self) -> tuple[type[ComponentSet], tuple[dict[str, Component]]]:
        return (ComponentSet, (dict(self._by_name),))

    @property
    def weights(self) -> dict[str, float]:
        """Default weight by component name."""
        return {name: component.weight for name, component in self._by_name.items()}

    def score(self, scores: Mapping[str, object], *, subject: str = "score") -> RewardVector:
        """Return the checked, gated and summed scores.

        Args:
            scores: One score by declared name; a number, a bool or :data:`ABSENT`.
            subject: Who is speaking, for the error message.

        Raises:
            RewardContractError: Missing or unknown name, not a number, NaN or infinite, out of
                the declared range, or an abstention of a component that is not optional.
        """
        raw = self._numbers(scores, subject)
        values = self._apply_gates(raw) if self._gated else dict(raw)
        return RewardVector(values, raw, math.fsum(values.values()))

    @property
    def has_gates(self) -> bool:
        """Whether any component is gated."""
        return bool(self._gated)

    def check(
        self, values: Mapping[str, object], *, subject: str, check_range: bool = True
    ) -> dict[str, float]:
        """Return ``values`` as floats after checking names, types, ranges and gates.

        For scores that were summed by somebody else: an abstention is a left-out key.

        Args:
            values: Score by component name, after gates.
            subject: Who is speaking, for the error message.
            check_range: Whether the declared ranges (and gates) hold for these values; not so
                for the steps of an episode before its last.

        Raises:
            RewardContractError: As :meth:`score`, or when a shut gate was not applied.
        """
        checked = self._numbers(values, subject, absent_is_left_out=True, check_range=check_range)
        if self._gated and check_range:
            self._check_gates(checked, subject)
        return checked

    def _check_gates(self, checked: dict[str, float], subject: str) -> None:
        expected = self._apply_gates(checked)
        for name, gate in self._gated:
            value = expected.get(name)
            if value != checked.get(name):
                condition = "shut" if value is not None else "unmeasured"
                raise RewardContractError(
                    f"{subject}: got {name}={checked[name]!r} while its gate on {gate.on!r} is "
                    f"{condition}, expected {'no score' if value is None else value}; "
                    "build the step with self.emit(...), which applies gates"
                )

    def check_turn(self, scores: Mapping[str, float | Absent], *, subject: str) -> None:
        """Check one turn of several: every declared name is there, and in range unless summed.

        Any component may abstain on a turn; ranges of summed ones hold for the episode.

        Raises:
            RewardContractError: Missing or unknown name, or out of the declared range.
        """
        if scores.keys() != self._names:
            self._check_names(scores, subject, absent_is_left_out=False)
        for name, low, high in self._plain:
            value = scores[name]
            if isinstance(value, Absent) or self[name].reduce == "sum":
                continue
            if not low <= value <= high:
                raise _out_of_range(value, name, low, high, subject)

    def _numbers(
        self,
        scores: Mapping[str, object],
        subject: str,
        absent_is_left_out: bool = False,
        check_range: bool = True,
    ) -> dict[str, float]:
        if scores.keys() != self._names:
            self._check_names(scores, subject, absent_is_left_out)
        out: dict[str, float] = {}
        for name, low, high in self._plain:
            value = scores.get(name, ABSENT)
            if value.__class__ is not float:
                if value is ABSENT:
                    self._check_may_abstain(name, subject)
                    continue
                value = as_score(value, name, subject)
            in_range = low <= value <= high or not check_range
            if not in_range or not isfinite(value):
                raise _out_of_range(value, name, low, high, subject)
            out[name] = value
        return out

    def _check_names(
        self, scores: Mapping[str, object], subject: str, absent_is_left_out: bool
    ) -> None:
        needed = self._required if absent_is_left_out else self._names
        missing = sorted(needed - scores.keys())
        unknown = [name for name in scores if name not in self._names]
        if not missing and not unknown:
            return
        hint = closest(str(unknown[0]), missing or self._names) if unknown else ""
        remedy = "score every declared component, no other"
        if missing and any(self[name].optional for name in missing):
            remedy += " (mrgym.ABSENT where an optional one was not measured)"
        raise RewardContractError(
            f"{subject}: got components {[*scores]}, expected exactly {[*self._names]}"
            f"{f', missing {missing}' if missing else ''}"
            f"{f', unknown {unknown}' if unknown else ''}{hint}; {remedy}"
        )

    def _check_may_abstain(self, name: str, subject: str) -> None:
        if name in self._required:
            raise RewardContractError(
                f"{subject}: got ABSENT for component {name!r}, expected a number; "
                "declare it with optional=True if it may go unmeasured"
            )

    def _apply_gates(self, raw: dict[str, float]) -> dict[str, float]:
        values = dict(raw)
        for name, gate in self._gated:
            if name not in values:
                continue
            condition = values.get(gate.on)
            if condition is None:
                # An unmeasured condition neither opens nor shuts: the gated one abstains too.
                del values[name]
            elif condition < gate.at_least:
                values[name] = float(gate.otherwise)
        return values


def components(**declared: Component) -> ComponentSet:
    """Return the set of components an environment declares, by name.

    Example:
        >>> components(correct=Component(low=0, high=1), short=Component(low=0, high=1, weight=0.1))
        components(correct, short)

    Raises:
        RewardDefinitionError: See :class:`ComponentSet`.
    """
    return ComponentSet(declared)


def _check_declaration(name: object, component: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RewardDefinitionError(
            f"components: got name {name!r}, expected a letter followed by letters, digits, "
            "'_', '-' or '.'; rename it"
        )
    if not isinstance(component, Component):
        raise RewardDefinitionError(
            f"components: got {component!r} for {name!r}, expected a mrgym.Component; "
            f"write {name}=mrgym.Component(low=..., high=...)"
        )


def _gate_order(declared: Mapping[str, Component]) -> Iterable[tuple[str, Gate]]:
    """Yield gated components so that a condition is settled before what depends on it."""
    gates = {name: c.gate for name, c in declared.items() if c.gate is not None}
    for name, gate in gates.items():
        _check_gate(name, gate, declared)
    settled = set(declared) - set(gates)
    while gates:
        ready = [name for name, gate in gates.items() if gate.on in settled]
        if not ready:
            raise RewardDefinitionError(
                f"components: got gates in a circle among {sorted(gates)}, expected an order; "
                "gate one of them on a component outside the circle"
            )
        for name in ready:
            yield name, gates.pop(name)
            settled.add(name)


def _check_numbers(subject: str, **values: object) -> None:
    for name, value in values.items():
        if not isinstance(value, numbers.Real) or math.isnan(value):
            raise RewardDefinitionError(
                f"{subject}: got {name}={value!r}, expected a number; write a float or an int"
            )


def _check_gate(name: str, gate: Gate, declared: Mapping[str, Component]) -> None:
    if gate.on not in declared:
        raise RewardDefinitionError(
            f"components: got {name!r} gated on {gate.on!r}, expected one of {[*declared]}"
            f"{closest(gate.on, declared)}; name a declared component"
        )
    component = declared[name]
    if not component.low <= gate.otherwise <= component.high:
        raise RewardDefinitionError(
            f"components: got {name!r} with {gate}, expected 'otherwise' in "
            f"[{component.low}, {component.high}]; widen the range or change the gate"
        )
    if declared[gate.on].optional and not component.optional:
        raise RewardDefinitionError(
            f"components: got {name!r} gated on the optional {gate.on!r}, expected {name!r} to be "
            "optional too; it abstains wherever its condition does"
        )


def as_score(value: object, name: str, subject: str) -> float:
    """Return ``value`` as a float.

    Raises:
        RewardContractError: If it is not one real number (NaN and infinity pass here).
    """
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    item: Callable[[], object] | None = getattr(value, "item", None)
    if item is not None and getattr(value, "shape", None) == ():
        return as_score(item(), name, subject)
    raise RewardContractError(
        f"{subject}: got {name}={value!r} ({type(value).__name__}), expected one real number; "
        "return a float, an int or a bool (mrgym.ABSENT if it was not measured)"
    )


def _out_of_range(
    value: float, name: str, low: float, high: float, subject: str
) -> RewardContractError:
    if not isfinite(value):
        return RewardContractError(
            f"{subject}: got {name}={value!r}, expected a finite number; "
            "handle the failed measurement, or abstain with mrgym.ABSENT"
        )
    return RewardContractError(
        f"{subject}: got {name}={value!r}, expected within the declared [{low}, {high}]; "
        "rescale the score or widen the component's low/high"
    )
