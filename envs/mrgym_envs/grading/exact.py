"""Structural normal forms with exact rational folding, without algebra and without sympy."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from typing import Final, TypeAlias

from mrgym_envs.grading.tree import (
    Add,
    Call,
    Const,
    Interval,
    Matrix,
    Mul,
    Node,
    Num,
    Percent,
    PlusMinus,
    Pow,
    Rel,
    Seq,
    SetOp,
    Sym,
    Text,
    TooLargeError,
    UndefinedValueError,
)

__all__ = ["MAX_BITS", "integer_power", "is_defined", "key", "rational"]

MAX_BITS: Final = 1 << 16
_MAX_FACTORIAL: Final = 3000
_HUNDREDTH: Final = Fraction(1, 100)

Key: TypeAlias = Hashable
Product: TypeAlias = frozenset[tuple[Key, Fraction]]
Terms: TypeAlias = dict[Product, Fraction]

_ONE: Final[Product] = frozenset()
_INFINITY: Final = ("c", "oo")


def key(node: Node) -> Key:
    """Return a hashable normal form: equal keys mean equal values, not the other way round.

    Raises:
        UndefinedValueError: If the node has no value.
    """
    match node:
        case Seq(kind, items):
            return ("seq", kind, tuple(map(key, items)))
        case Interval(low, high, left, right):
            return ("interval", key(low), key(high), left, right)
        case SetOp(op, items):
            return (op, tuple(map(key, items)))
        case Matrix(rows):
            return ("matrix", tuple(tuple(map(key, row)) for row in rows))
        case Rel(parts, ops):
            return ("rel", ops, tuple(map(key, parts)))
        case Text(words):
            return ("text", words.casefold())
    return _frozen(_terms(node))


def is_defined(node: Node) -> bool:
    """Return whether a node is free of such as 1/0, as far as its normal form shows."""
    try:
        key(node)
    except UndefinedValueError:
        return False
    return True


def rational(node: Node) -> Fraction | None:
    """Return the value of a node that is an exact rational, else ``None``."""
    if isinstance(node, Num):
        return node.value
    if isinstance(node, (Sym, Const, Text, Seq, Matrix, Rel, Interval, SetOp)):
        return None
    value = key(node)
    return value if isinstance(value, Fraction) else None


def integer_power(base: Fraction, exponent: int) -> Fraction | None:
    """Return an exact power, ``None`` where it would be too large.

    Raises:
        UndefinedValueError: For a negative power of zero.
    """
    if not base and exponent < 0:
        raise UndefinedValueError("division by zero")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size * abs(exponent) > MAX_BITS and abs(base) not in (0, 1):
        return None
    return (
        base**exponent if abs(base) not in (0, 1) else base ** (exponent % 2 or 2 * bool(exponent))
    )


def _frozen(terms: Terms) -> Key:
    if not terms:
        return Fraction(0)
    if len(terms) == 1:
        ((product, factor),) = terms.items()
        if not product:
            return factor
        if factor == 1 and len(product) == 1:
            ((base, exponent),) = product
            if exponent == 1:
                return base
    return ("+", frozenset(terms.items()))


def _thawed(value: Key) -> Terms:
    if isinstance(value, Fraction):
        return {_ONE: value} if value else {}
    if isinstance(value, tuple) and value[0] == "+":
        return dict(value[1])
    return {frozenset([(value, Fraction(1))]): Fraction(1)}


def _terms(node: Node) -> Terms:
    match node:
        case Num(value, _):
            return {_ONE: value} if value else {}
        case Add(args):
            return _sum([_terms(arg) for arg in args])
        case Mul(args):
            return _product([_terms(arg) for arg in args])
        case Percent(arg):
            return _product([_terms(arg), {_ONE: _HUNDREDTH}])
        case Pow(base, exp):
            return _power(_terms(base), key(exp))
        case Call(name, args):
            return _thawed(_call(name, [key(arg) for arg in args]))
        case PlusMinus(arg, sign):
            return _thawed(("pm", sign, key(arg)))
        case Sym(name):
            return _thawed(("s", name))
        case Const(name):
            return _thawed(("c", name))
    return _thawed(key(node))


def _sum(parts: Sequence[Terms]) -> Terms:
    total: Terms = {}
    for terms in parts:
        for product, factor in terms.items():
            total[product] = total.get(product, Fraction(0)) + factor
    if any(not f and _is_infinite(p) for p, f in total.items()):
        raise UndefinedValueError("infinity minus infinity")
    return {product: _bounded(factor) for product, factor in total.items() if factor}


def _bounded(value: Fraction) -> Fraction:
    """Return a value whose size further arithmetic can stand."""
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > 4 * MAX_BITS:
        raise TooLargeError("number with too many digits")
    return value


def _is_infinite(product: Product) -> bool:
    return any(base == _INFINITY for base, _ in product)


def _product(parts: Sequence[Terms]) -> Terms:
    factor, powers = Fraction(1), dict[Key, Fraction]()
    for terms in parts:
        if len(terms) == 1:
            ((product, coefficient),) = terms.items()
            factor = _bounded(factor * coefficient)
        elif terms:
            product = frozenset([(_frozen(terms), Fraction(1))])
        else:
            factor, product = Fraction(0), _ONE
        for base, exponent in product:
            powers[base] = powers.get(base, Fraction(0)) + exponent
    if not factor and _INFINITY in powers:
        raise UndefinedValueError("zero times infinity")
    return _collected(factor, powers)


def _collected(factor: Fraction, powers: dict[Key, Fraction]) -> Terms:
    """Return a product with the powers that are rational folded into the factor."""
    left: dict[Key, Fraction] = {}
    for base, exponent in powers.items():
        folded = _folded(base, exponent)
        if folded is None:
            left[base] = exponent
        else:
            factor *= folded
    if len(left) == 1 and factor == 1:
        ((base, exponent),) = left.items()
        if exponent == 1:
            return _thawed(base)
    return {frozenset(left.items()): factor} if factor else {}


def _folded(base: Key, exponent: Fraction) -> Fraction | None:
    if not exponent and base != _INFINITY:
        return Fraction(1)
    if base == ("c", "i") and exponent.denominator == 1 and not exponent % 2:
        return Fraction(-1 if exponent % 4 else 1)
    if isinstance(base, Fraction) and exponent.denominator == 1:
        return integer_power(base, exponent.numerator)
    return None


def _power(base: Terms, exponent: Key) -> Terms:
    if not isinstance(exponent, Fraction):
        return _thawed(("^", _frozen(base), exponent))
    if exponent == 1:
        return base
    value = _frozen(base)
    if isinstance(value, Fraction):
        return _rational_power(value, exponent)
    if exponent.denominator == 1 and len(base) == 1:
        ((product, factor),) = base.items()
        raised = integer_power(factor, exponent.numerator)
        if raised is not None:
            return _collected(raised, {b: e * exponent for b, e in product})
    return _collected(Fraction(1), {value: exponent})


def _rational_power(base: Fraction, exponent: Fraction) -> Terms:
    """Return a power of a rational, folded where it is rational."""
    root = base if exponent.denominator == 1 else _exact_root(base, exponent.denominator)
    if root is not None:
        raised = integer_power(root, exponent.numerator)
        if raised is not None:
            return {_ONE: raised} if raised else {}
    return {frozenset([(base, exponent)]): Fraction(1)}


def _exact_root(base: Fraction, degree: int) -> Fraction | None:
    if degree > 64 or (base < 0 and degree % 2 == 0):
        return base if base in (0, 1) else None
    top = _integer_root(abs(base.numerator), degree)
    bottom = _integer_root(base.denominator, degree)
    if top is None or bottom is None:
        return None
    return Fraction(top if base >= 0 else -top, bottom)


def _integer_root(value: int, degree: int) -> int | None:
    if value < 2:
        return value
    if value.bit_length() > 2000:
        return None
    root = 1 << -(-value.bit_length() // degree)
    while (smaller := ((degree - 1) * root + value // root ** (degree - 1)) // degree) < root:
        root = smaller
    return root if root**degree == value else None


def _call(name: str, args: list[Key]) -> Key:
    numbers = [arg for arg in args if isinstance(arg, Fraction)]
    rule = _RULES.get(name)
    if rule is not None and len(numbers) == len(args):
        folded = rule(numbers)
        if folded is not None:
            return folded
    return ("f", name, tuple(args))


def _factorial(args: list[Fraction]) -> Fraction | None:
    (n,) = args
    if n.denominator != 1 or not 0 <= n <= _MAX_FACTORIAL:
        return None
    return Fraction(math.factorial(n.numerator))


def _binomial(args: list[Fraction]) -> Fraction | None:
    if len(args) != 2 or any(a.denominator != 1 or not 0 <= a <= _MAX_FACTORIAL for a in args):
        return None
    return Fraction(math.comb(args[0].numerator, args[1].numerator))


def _modulo(args: list[Fraction]) -> Fraction | None:
    return args[0] % args[1] if args[1] else None


def _integers(args: list[Fraction], function: Callable[..., int]) -> Fraction | None:
    if any(a.denominator != 1 for a in args):
        return None
    return Fraction(function(*(a.numerator for a in args)))


_RULES: Final[dict[str, Callable[[list[Fraction]], Fraction | None]]] = {
    "factorial": _factorial,
    "binom": _binomial,
    "mod": _modulo,
    "abs": lambda args: abs(args[0]),
    "floor": lambda args: Fraction(math.floor(args[0])),
    "ceil": lambda args: Fraction(math.ceil(args[0])),
    "max": lambda args: max(args),
    "min": lambda args: min(args),
    "gcd": lambda args: _integers(args, math.gcd),
    "lcm": lambda args: _integers(args, math.lcm),
}
