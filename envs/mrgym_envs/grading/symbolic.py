"""Algebra by sympy, on trees built by its constructors: no text ever reaches it.

Only worker processes import this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import sympy  # type: ignore[import-untyped]

from mrgym_envs.grading.budget import OutOfTimeError, within
from mrgym_envs.grading.exact import MAX_BITS
from mrgym_envs.grading.intervals import Piece, pieces_of
from mrgym_envs.grading.tree import (
    Add,
    Call,
    Const,
    Matrix,
    Mul,
    Node,
    Num,
    Percent,
    Pow,
    Rel,
    Seq,
    SetOp,
    Sym,
    TooLargeError,
    UndefinedValueError,
    UnreadableError,
)

__all__ = ["equal", "same_solutions"]

_PRECISION: Final = 100
_CONSTANT_PRECISION: Final = 1000
_POINTS: Final = (sympy.Rational(7, 5), sympy.Rational(19, 23), sympy.Rational(3, 7))
_MAX_FACTORIAL: Final = 3000
_MAX_SERIES: Final = 10**5
_PROOF_SECONDS: Final = 0.4
_CONSTANTS: Final = {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "oo": sympy.oo}


def equal(left: Node, right: Node) -> bool:
    """Return whether two expressions are equal.

    They must agree to 90 digits at three points, or to 990 if they are constants. Then algebra has
    a short while to prove or refute that they do everywhere; if it can do neither, digits count.

    Raises:
        TooLargeError: If they are too large to evaluate.
    """
    return _decided(_equal, left, right)


def same_solutions(gold: Node, answer: Node) -> bool:
    """Return whether two sets or conditions describe the same real numbers."""
    return _decided(_same_solutions, gold, answer)


def _decided(question: Callable[[Node, Node], bool], left: Node, right: Node) -> bool:
    """Return sympy's answer to a question; where it fails there is none."""
    try:
        return question(left, right)
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError) as error:
        raise UnreadableError(f"sympy: {error!r}") from error


def _equal(left: Node, right: Node) -> bool:
    a, b = _expression(left), _expression(right)
    if a == b:
        return True
    if not all(_agree(a, b, shift) for shift in range(len(_POINTS))):
        return False
    try:
        return within(_PROOF_SECONDS, _proved, a - b) is not False
    except OutOfTimeError:
        return True


def _agree(a: Any, b: Any, shift: int) -> bool:
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    points = {
        symbol: _POINTS[(index + shift) % len(_POINTS)] + index
        for index, symbol in enumerate(symbols)
    }
    digits = _PRECISION if symbols else _CONSTANT_PRECISION
    left, right = (sympy.N(side.subs(points), digits) for side in (a, b))
    if not (left.is_number and right.is_number) or not (left.is_finite and right.is_finite):
        return False
    unit = sympy.Rational(1, 10 ** (digits - 10))
    return bool(abs(left - right) <= unit * max(abs(left), abs(right)))


def _proved(gap: Any) -> bool | None:
    """Return whether a difference is zero, ``None`` if that cannot be told."""
    if sympy.expand(gap) == 0:
        return True
    simpler = sympy.simplify(gap)
    if simpler == 0:
        return True
    verdict = simpler.equals(0)
    return None if verdict is None else bool(verdict)


def _same_solutions(gold: Node, answer: Node) -> bool:
    left, right = _set(gold), _set(answer)
    if left is None or right is None:
        return False
    if left == right:
        return True
    return bool(left.symmetric_difference(right) == sympy.S.EmptySet)


def _set(node: Node) -> Any:
    """Return a node as a set of real numbers."""
    pieces = pieces_of(node)
    if pieces is not None:
        return sympy.Union(*map(_piece, pieces))
    if isinstance(node, Rel):
        return _solved(node)
    if isinstance(node, Seq) and node.kind == "list":
        parts = [_set(item) for item in node.items]
        return None if any(part is None for part in parts) else sympy.Union(*parts)
    if isinstance(node, SetOp):
        return _combined(node)
    return None


def _combined(node: SetOp) -> Any:
    parts = [_set(item) for item in node.items]
    if any(part is None for part in parts):
        return None
    if node.op == "setminus":
        return sympy.Complement(*parts)
    return sympy.Union(*parts) if node.op == "cup" else sympy.Intersection(*parts)


def _piece(piece: Piece) -> Any:
    low, high = _expression(piece.low), _expression(piece.high)
    return sympy.Interval(low, high, not piece.left_closed, not piece.right_closed)


_RELATIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "=": sympy.Eq, "!=": sympy.Ne, "<": sympy.Lt, "<=": sympy.Le, ">": sympy.Gt, ">=": sympy.Ge,
}  # fmt: skip


def _solved(node: Rel) -> Any:
    """Return the real solutions of a condition on one variable."""
    if any(op not in _RELATIONS for op in node.ops):
        return None
    sides = [_expression(part, real=True) for part in node.parts]
    variables = set().union(*(side.free_symbols for side in sides))
    if len(variables) != 1:
        return None
    (x,) = variables
    solutions = sympy.S.Reals
    for op, left, right in zip(node.ops, sides, sides[1:], strict=False):
        condition = _RELATIONS[op](left, right)
        part = sympy.solveset(condition, x, sympy.S.Reals)
        solutions = sympy.Intersection(solutions, part)
    return solutions


def _expression(node: Node, *, real: bool = False) -> Any:
    """Return a node as a sympy expression, with positive or else real variables."""

    def built(inner: Node) -> Any:
        return _expression(inner, real=real)

    match node:
        case Num() | Sym() | Const():
            return _leaf(node, real)
        case Percent(arg):
            return built(arg) / 100
        case Add(args):
            return sympy.Add(*map(built, args))
        case Mul(args):
            return sympy.Mul(*map(built, args))
        case Pow(base, exp):
            return _power(built(base), built(exp))
        case Call(name, args):
            return _call(name, args, built)
        case Matrix(rows):
            return sympy.Matrix([[built(entry) for entry in row] for row in rows])
    raise UnreadableError(f"no expression: {type(node).__name__}")


def _leaf(node: Num | Sym | Const, real: bool) -> Any:
    if isinstance(node, Num):
        return sympy.Rational(node.value.numerator, node.value.denominator)
    if isinstance(node, Sym):
        return sympy.Symbol(node.name, **{"real" if real else "positive": True})
    if node.name not in _CONSTANTS:
        raise UnreadableError(f"no number: {node.name}")
    return _CONSTANTS[node.name]


def _power(base: Any, exp: Any) -> Any:
    if base.is_Rational and exp.is_Rational:
        size = max(int(base.p).bit_length(), int(base.q).bit_length())
        if abs(base) != 1 and base != 0 and size * abs(exp) > MAX_BITS:
            raise TooLargeError("power with too many digits")
        if base.is_negative and exp.q % 2:
            root = (-base) ** exp
            return -root if exp.p % 2 else root
    if base == 0 and exp.is_negative:
        raise UndefinedValueError("division by zero")
    return base**exp


def _call(name: str, args: tuple[Node, ...], built: Callable[[Node], Any]) -> Any:
    if name in ("sum", "prod", "int"):
        return _bounded(name, args, built)
    if name == "log" and len(args) == 2:
        return sympy.log(built(args[0]), built(args[1]))
    values = [built(arg) for arg in args]
    if name in ("factorial", "binom") and any(map(_is_large, values)):
        raise TooLargeError("factorial with too many digits")
    if name in _FUNCTIONS:
        return _FUNCTIONS[name](*values)
    return sympy.Function(name)(*values)


def _is_large(value: Any) -> bool:
    return bool(value.is_number and abs(value) > _MAX_FACTORIAL)


def _bounded(name: str, args: tuple[Node, ...], built: Callable[[Node], Any]) -> Any:
    """Return a sum, product or integral, evaluated as far as sympy can."""
    body, variable, lower, upper = map(built, args)
    if name != "int" and (upper - lower).is_number and _MAX_SERIES < (upper - lower) < sympy.oo:
        raise TooLargeError("series with too many terms")
    kind = {"sum": sympy.Sum, "prod": sympy.Product, "int": sympy.Integral}[name]
    return kind(body, (variable, lower, upper)).doit()


_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "sin": sympy.sin, "cos": sympy.cos, "tan": sympy.tan, "sec": sympy.sec, "csc": sympy.csc,
    "cot": sympy.cot, "arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan,
    "arcsec": sympy.asec, "arccsc": sympy.acsc, "arccot": sympy.acot, "sinh": sympy.sinh,
    "cosh": sympy.cosh, "tanh": sympy.tanh, "exp": sympy.exp, "ln": sympy.log, "log": sympy.log,
    "lg": lambda x: sympy.log(x, 10), "abs": sympy.Abs, "floor": sympy.floor,
    "ceil": sympy.ceiling, "factorial": sympy.factorial, "binom": sympy.binomial,
    "max": sympy.Max, "min": sympy.Min, "gcd": sympy.gcd, "lcm": sympy.lcm, "mod": sympy.Mod,
    "Re": sympy.re, "Im": sympy.im, "arg": sympy.arg, "sign": sympy.sign,
    "overline": sympy.conjugate, "bar": sympy.conjugate, "det": lambda m: m.det(),
}  # fmt: skip
