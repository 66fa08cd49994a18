"""Quick numerical values, to tell unequal expressions apart without algebra."""

from __future__ import annotations

import cmath
import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Final

from mrgym_envs.grading.tree import (
    Add,
    Call,
    Const,
    Mul,
    Node,
    Num,
    Percent,
    Pow,
    Sym,
    TooLargeError,
    UndefinedValueError,
)

__all__ = ["MAX_TERMS", "NoValueError", "Sample", "whole_bounds"]

MAX_TERMS: Final = 2000
_CONSTANTS: Final = {"pi": complex(math.pi), "e": complex(math.e), "i": 1j}


class NoValueError(Exception):
    """There is no rule for the value of a node."""


class Sample:
    """Evaluates nodes with variables at fixed numbers.

    Args:
        point: Which of the endless points to take.
        negative: Whether the variables are negative.

    Attributes:
        scale: The largest magnitude met; differences far below it mean nothing.
    """

    def __init__(self, point: int = 0, *, negative: bool = False) -> None:
        self.point = point
        self.negative = negative
        self.scale = 0.0
        self.bound: dict[str, complex] = {}

    def value(self, node: Node) -> complex:
        """Return the value of a node.

        Raises:
            NoValueError: If there is no rule for it.
            TooLargeError: If it is beyond floating-point numbers.
            UndefinedValueError: If it does not exist.
        """
        try:
            value = self._value(node)
        except ZeroDivisionError:
            raise UndefinedValueError("division by zero") from None
        except OverflowError:
            raise TooLargeError("value beyond floating-point numbers") from None
        except ValueError:
            raise UndefinedValueError("outside the domain") from None
        if not cmath.isfinite(value):
            raise TooLargeError("value beyond floating-point numbers")
        return value

    def _value(self, node: Node) -> complex:
        value = self._apply(node)
        self.scale = max(self.scale, abs(value))
        return value

    def _apply(self, node: Node) -> complex:
        match node:
            case Num(value, _):
                return complex(float(value))
            case Sym(name):
                return self._variable(name)
            case Const(name) if name in _CONSTANTS:
                return _CONSTANTS[name]
            case Add(args):
                return sum(map(self._value, args), 0j)
            case Mul(args):
                return self._product(args)
            case Pow(base, exp):
                return self._power(base, exp)
            case Percent(arg):
                return self._value(arg) / 100
            case Call(name, args):
                return self._call(name, args)
        raise NoValueError(type(node).__name__)

    def _variable(self, name: str) -> complex:
        if name == "...":
            raise NoValueError(name)
        if name not in self.bound:
            seed = hashlib.blake2b(f"{self.point} {name}".encode(), digest_size=4).digest()
            size = 0.4 + int.from_bytes(seed) / 2**32
            self.bound[name] = complex(-size if self.negative else size)
        return self.bound[name]

    def _product(self, args: tuple[Node, ...]) -> complex:
        product = 1 + 0j
        for arg in args:
            product *= self._value(arg)
        return product

    def _power(self, base: Node, exp: Node) -> complex:
        value = self._value(base)
        if isinstance(exp, Num):
            return _raised(value, exp)
        power = self._value(exp)
        return value**power

    def _call(self, name: str, args: tuple[Node, ...]) -> complex:
        if name in ("sum", "prod"):
            return self._series(name, args)
        rule = _RULES.get(name)
        if rule is None:
            raise NoValueError(name)
        try:
            return complex(rule(*map(self._value, args)))
        except TypeError:
            raise NoValueError(name) from None

    def _series(self, name: str, args: tuple[Node, ...]) -> complex:
        body, variable, lower, upper = args
        low, high = whole_bounds(self.value, lower, upper)
        if not isinstance(variable, Sym):
            raise NoValueError(name)
        outer = self.bound.get(variable.name)
        total = 0j if name == "sum" else 1 + 0j
        for index in range(low, high + 1):
            self.bound[variable.name] = complex(index)
            value = self._value(body)
            total = total + value if name == "sum" else total * value
        self.bound.pop(variable.name, None)
        if outer is not None:
            self.bound[variable.name] = outer
        return total


def whole_bounds(value: Callable[[Node], complex], lower: Node, upper: Node) -> tuple[int, int]:
    """Return the bounds of a finite series.

    Raises:
        NoValueError: If they are not whole numbers.
        TooLargeError: If there are too many terms.
    """
    bounds = [value(lower), value(upper)]
    if any(b.imag or b.real != math.floor(b.real) for b in bounds):
        raise NoValueError("bounds")
    low, high = (int(b.real) for b in bounds)
    if high - low > MAX_TERMS:
        raise TooLargeError("series with too many terms")
    return low, high


def _raised(value: complex, exp: Num) -> complex:
    """Return a rational power; odd roots of negative numbers are real."""
    power = float(exp.value)
    if not value:
        return value**power if power else 1 + 0j
    if not value.imag and value.real < 0 and exp.value.denominator % 2:
        size = (-value.real) ** power
        return complex(-size if exp.value.numerator % 2 else size)
    return value**power


def _real(value: complex) -> float:
    if abs(value.imag) > 1e-12 * abs(value):
        raise NoValueError("not real")
    return value.real


def _log(value: complex, base: complex = math.e + 0j) -> complex:
    return cmath.log(value) / (cmath.log(base) if base != math.e else 1)


def _factorial(value: complex) -> float:
    return math.gamma(_real(value) + 1)


def _binomial(n: complex, k: complex) -> float:
    top, bottom = _real(n), _real(k)
    if top < 0 or not 0 <= bottom <= top:
        raise NoValueError("binomial")
    logs = math.lgamma(top + 1) - math.lgamma(bottom + 1) - math.lgamma(top - bottom + 1)
    return math.exp(logs)


_RULES: Final[Mapping[str, Callable[..., complex]]] = {
    "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan,
    "sec": lambda x: 1 / cmath.cos(x), "csc": lambda x: 1 / cmath.sin(x),
    "cot": lambda x: 1 / cmath.tan(x),
    "arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan,
    "sinh": cmath.sinh, "cosh": cmath.cosh, "tanh": cmath.tanh, "exp": cmath.exp,
    "ln": _log, "log": _log, "lg": cmath.log10, "abs": abs,
    "floor": lambda x: math.floor(_real(x)), "ceil": lambda x: math.ceil(_real(x)),
    "max": lambda *xs: max(map(_real, xs)), "min": lambda *xs: min(map(_real, xs)),
    "mod": lambda x, n: _real(x) % _real(n), "factorial": _factorial, "binom": _binomial,
    "Re": lambda x: x.real, "Im": lambda x: x.imag, "arg": cmath.phase,
    "sign": lambda x: math.copysign(1, _real(x)) if x else 0,
    "overline": lambda x: x.conjugate(), "bar": lambda x: x.conjugate(),
}  # fmt: skip
