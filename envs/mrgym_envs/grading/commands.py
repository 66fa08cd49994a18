"""The parser's functions and LaTeX commands: fractions, roots, series, integrals, matrices."""

from __future__ import annotations

from fractions import Fraction
from typing import Final

from mrgym_envs.grading.brackets import FRACTIONS, Brackets
from mrgym_envs.grading.tree import (
    Call,
    Matrix,
    Mul,
    Node,
    Num,
    Pow,
    Rel,
    Seq,
    Sym,
    UnreadableError,
    divided,
)

__all__ = ["Commands"]

_BINOMIALS: Final = frozenset(["binom", "dbinom", "tbinom"])
_ACCENTS: Final = frozenset(["overline", "vec", "hat", "bar", "widehat", "tilde", "overrightarrow"])
_IGNORED: Final = frozenset(["angle", "triangle", "therefore", "boxed", "fbox", "square"])
_BIG: Final = frozenset(["sum", "prod", "int", "lim"])
_TRIGONOMETRIC: Final = frozenset(["sin", "cos", "tan", "sec", "csc", "cot"])
_ALIASES: Final = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "sgn": "sign"}
_HALF: Final = Num(Fraction(1, 2))
_ENVIRONMENTS: Final = frozenset(
    "matrix pmatrix bmatrix vmatrix Bmatrix smallmatrix array cases aligned".split()
)


class Commands(Brackets):
    """Reads functions and commands with their arguments."""

    def function(self, name: str) -> Node:
        """Return a function with its argument, which needs no parentheses."""
        name = _ALIASES.get(name, name)
        if name in ("sqrt", "cbrt", "frac", "binom"):
            return self.command(name)
        if name == "Eq":
            return self.equation()
        base = self.base() if name in ("log", "max", "min") and self.take("_") else None
        power = self.exponent_of_function()
        outer, self.in_trigonometric = self.in_trigonometric, name in _TRIGONOMETRIC
        args = self.arguments() if self.at("(") or self.at("[") else (self.bare_argument(),)
        self.in_trigonometric = outer
        return _raised(name, args if base is None else (*args, base), power)

    def base(self) -> Node:
        """Return the base of a logarithm."""
        return self.argument()

    def equation(self) -> Node:
        """Return sympy's ``Eq(left, right)``."""
        sides = self.arguments()
        if len(sides) != 2:
            raise UnreadableError("Eq takes two sides")
        return Rel(sides, ("=",))

    def exponent_of_function(self) -> Node | None:
        r"""Return the 2 of a ``\\sin^2 x``."""
        return self.argument(whole_numbers=True) if self.take("^") else None

    def bare_argument(self) -> Node:
        r"""Return the argument of a function without parentheses: ``2x`` in ``\\sin 2x + 1``."""
        self.enter()
        factors = [self.power()]
        while self.starts_factor() and self.here.kind not in ("func", "begin") and not self.at("("):
            factors.append(self.power())
        self.leave()
        return factors[0] if len(factors) == 1 else Mul(tuple(factors))

    def command(self, name: str) -> Node:
        """Return what a LaTeX command stands for."""
        self.enter()
        node = self.command_node(name)
        self.leave()
        return node

    def command_node(self, name: str) -> Node:
        """Return the node of a LaTeX command."""
        if name in FRACTIONS:
            return divided(self.argument(), self.argument())
        if name in _BINOMIALS:
            return Call("binom", self.arguments() if self.at("(") else self.two_arguments())
        if name in ("sqrt", "cbrt"):
            return self.root(Num(Fraction(3)) if name == "cbrt" else None)
        if name in _ACCENTS:
            return Call(name, (self.argument(),))
        if name in _IGNORED:
            return self.primary()
        if name in _BIG:
            return self.big(name)
        if name == "iint" or self.at("{"):
            raise UnreadableError(f"command \\{name}")
        return Sym(f"\\{name}{self.subscript()}")

    def two_arguments(self) -> tuple[Node, Node]:
        """Return two LaTeX arguments."""
        return self.argument(), self.argument()

    def root(self, degree: Node | None) -> Node:
        """Return a square root, or one of the degree given in brackets."""
        if self.at("["):
            degree = self.parentheses("[")
        radicand = self.argument(whole_numbers=True)
        if degree is None:
            return Pow(radicand, _HALF)
        return Pow(radicand, divided(Num(Fraction(1)), degree))

    def big(self, name: str) -> Node:
        """Return a sum, product, integral or limit with its bounds and body."""
        bounds: dict[str, Node] = {}
        while self.at("_") or self.at("^"):
            mark = self.step().text
            bounds[mark] = self.argument(whole_numbers=True)
        if name == "int":
            return self.integral(bounds)
        lower, upper = bounds.get("_"), bounds.get("^", Sym("?"))
        if not isinstance(lower, Rel) or len(lower.parts) != 2:
            raise UnreadableError(f"bounds of \\{name}")
        return Call(name, (self.term(), *lower.parts, upper))

    def integral(self, bounds: dict[str, Node]) -> Node:
        """Return an integral up to its differential."""
        outer, self.in_integral = self.in_integral, True
        body = self.sum()
        self.in_integral = outer
        if self.step() != ("name", "d"):
            raise UnreadableError("integral without differential")
        variable = self.name()
        if "_" not in bounds or "^" not in bounds:
            raise UnreadableError("indefinite integral")
        return Call("int", (body, variable, bounds["_"], bounds["^"]))

    def matrix(self) -> Node:
        """Return a matrix environment."""
        name = self.step().text
        if name not in _ENVIRONMENTS:
            raise UnreadableError(f"environment {name}")
        self.enter()
        rows: list[tuple[Node, ...]] = []
        while self.here.kind != "end":
            rows.append(self.row())
            while self.here.kind == "row":
                self.step()
        self.step()
        self.leave()
        node = Matrix(tuple(rows))
        if len({len(row) for row in rows}) != 1:
            raise UnreadableError("ragged matrix")
        if name in ("cases", "aligned") and len(rows[0]) == 1:
            return Seq("list", tuple(row[0] for row in rows))
        return Call("det", (node,)) if name == "vmatrix" else node

    def row(self) -> tuple[Node, ...]:
        """Return the entries of a matrix row."""
        entries = [self.relation()]
        while self.take("&"):
            entries.append(self.relation())
        if self.here.kind not in ("row", "end"):
            raise UnreadableError("broken matrix")
        return tuple(entries)


def _raised(name: str, args: tuple[Node, ...], power: Node | None) -> Node:
    """Return a call; a power of -1 on a trigonometric function means its inverse."""
    if power == Num(Fraction(-1)) and name in _TRIGONOMETRIC:
        return Call(f"arc{name}", args)
    node = Call(name, args)
    return node if power is None else Pow(node, power)
