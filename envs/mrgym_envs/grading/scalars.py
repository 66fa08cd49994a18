"""Whether two expressions have the same value: exactly first, then numerically, then by proof."""

from __future__ import annotations

from fractions import Fraction
from typing import Final

from mrgym_envs.grading.exact import key
from mrgym_envs.grading.field import PRIMES, Field, same_in_fields
from mrgym_envs.grading.floats import NoValueError, Sample
from mrgym_envs.grading.numbers import same_decimal
from mrgym_envs.grading.tree import (
    Add,
    Call,
    Const,
    Interval,
    NeedsWorkerError,
    Node,
    Num,
    Rel,
    Seq,
    SetOp,
    Sym,
    Text,
    TooLargeError,
    UndefinedValueError,
    negated,
    walk,
)
from mrgym_envs.grading.verdict import Options

__all__ = ["Scalars", "difference", "is_name"]

_POINTS: Final = 3
_CLOSE: Final = 1e-9
_FLOAT_DIGITS: Final = 15


class Scalars:
    """Compares expressions.

    Args:
        options: The caller's policies.
        may_prove: Whether sympy may be used; elsewhere a case that needs it raises
            :class:`NeedsWorkerError`.
    """

    def __init__(self, options: Options, *, may_prove: bool) -> None:
        self.options = options
        self.may_prove = may_prove

    def same(self, gold: Node, answer: Node) -> bool:
        """Return whether two expressions are equal.

        Raises:
            NeedsWorkerError: If that takes algebra beyond this process.
            TooLargeError: If they are too large to tell.
        """
        gold_key, answer_key = key(gold), key(answer)
        if gold_key == answer_key:
            return True
        if isinstance(gold_key, Fraction) and isinstance(answer_key, Fraction):
            return self._same_rational(gold, gold_key, answer, answer_key)
        if not (_is_finite_scalar(gold) and _is_finite_scalar(answer)):
            return False
        return self._same_numerically(gold, answer)

    def proportional(self, left: Node, right: Node, *, positive: bool) -> bool:
        """Return whether two expressions differ by a constant factor only, a positive one if so."""
        values = []
        for point in range(_POINTS):
            sample = Sample(point)
            values.append((sample.value(left), sample.value(right)))
        (first, second), *others = values
        if not first or not second or (positive and (second / first).real < 0):
            return first == second
        if any(abs(x * second - y * first) > _CLOSE * abs(x * second) for x, y in others):
            return False
        return self._proportional_exactly(left, right)

    def _proportional_exactly(self, left: Node, right: Node) -> bool:
        try:
            fields = [Field(PRIMES[0], point) for point in (0, 1)]
            (a, b), (c, d) = [(field.value(left), field.value(right)) for field in fields]
        except (NoValueError, ZeroDivisionError, ValueError):
            return True
        return (a * d - b * c) % PRIMES[0] == 0

    def _same_rational(
        self, gold: Node, gold_value: Fraction, answer: Node, answer_value: Fraction
    ) -> bool:
        """Compare unequal rationals: one may be a decimal that approximates the other."""
        gold_digits, answer_digits = self._digits(gold), self._digits(answer)
        if answer_digits and not gold_digits and not _is_decimal(gold):
            return same_decimal(Num(answer_value, answer_digits), gold_value)
        if gold_digits and not answer_digits and not _is_decimal(answer):
            return same_decimal(Num(gold_value, gold_digits), answer_value)
        return False

    def _digits(self, node: Node) -> int:
        """Return the digits of the least precise decimal, 0 if it is too short to approximate."""
        digits = [n.digits for n in walk(node) if isinstance(n, Num) and n.digits]
        shortest = min(digits, default=0)
        return shortest if shortest >= self.options.digits else 0

    def _same_numerically(self, gold: Node, answer: Node) -> bool:
        digits = max(self._digits(gold), self._digits(answer))
        for decimal, other in ((answer, gold), (gold, answer)):
            value = key(decimal)
            if self._digits(decimal) and isinstance(value, Fraction):
                return _approximates(Num(value, min(digits, _FLOAT_DIGITS)), other)
        try:
            if not all(_close(gold, answer, point, digits) for point in range(_POINTS)):
                return False
            if not _close_below_zero(gold, answer):
                return False
        except NoValueError:
            return self._prove(gold, answer)
        if digits or same_in_fields(gold, answer):
            return True
        return self._prove(gold, answer)

    def _prove(self, gold: Node, answer: Node) -> bool:
        if not self.may_prove:
            raise NeedsWorkerError("needs algebra")
        from mrgym_envs.grading.symbolic import equal

        return equal(gold, answer)


def _is_finite_scalar(node: Node) -> bool:
    """Whether a node is an expression for one finite number."""
    for part in walk(node):
        if isinstance(part, (Interval, Seq, SetOp, Rel, Text)):
            return False
        if isinstance(part, Const) and part.name not in ("pi", "e", "i"):
            return isinstance(node, Call) and node.name in ("sum", "prod", "int", "lim")
    return True


def _is_decimal(node: Node) -> bool:
    return any(isinstance(n, Num) and n.digits for n in walk(node))


def _approximates(decimal: Num, other: Node) -> bool:
    """Return whether a decimal is a real constant cut or rounded."""
    if any(isinstance(n, Sym) for n in walk(other)):
        return False
    try:
        value = Sample().value(other)
    except NoValueError:
        return False
    return abs(value.imag) <= _CLOSE * abs(value) and same_decimal(decimal, value.real)


def _close(gold: Node, answer: Node, point: int, digits: int) -> bool:
    """Return whether two expressions agree at a point, as far as floats can tell."""
    sample = Sample(point)
    left, right = sample.value(gold), sample.value(answer)
    tolerance = 10.0 ** (1 - digits) if digits else _CLOSE
    size = max(abs(left), abs(right)) if digits else sample.scale
    return abs(left - right) <= tolerance * size


def _close_below_zero(gold: Node, answer: Node) -> bool:
    """Return whether real values agree where variables are negative: ``|x|`` is not ``x``."""
    if not any(isinstance(n, Sym) for n in walk(gold)):
        return True
    sample = Sample(negative=True)
    try:
        left, right = sample.value(gold), sample.value(answer)
    except (UndefinedValueError, TooLargeError):
        return True
    if left.imag or right.imag:
        return True
    return abs(left - right) <= 1e-6 * sample.scale


def difference(left: Node, right: Node) -> Node:
    """Return left minus right."""
    return Add((left, negated(right)))


def is_name(node: Node) -> bool:
    """Whether a node is a variable or the value of a function of one."""
    return isinstance(node, Sym) or (isinstance(node, Call) and len(node.name.rstrip("'")) == 1)
