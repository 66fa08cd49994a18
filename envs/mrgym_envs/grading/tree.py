"""The parsed form of an answer: immutable nodes, and what may go wrong while handling them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal, TypeAlias

__all__ = [
    "MINUS_ONE",
    "Add",
    "Call",
    "Const",
    "Interval",
    "Matrix",
    "Mul",
    "NeedsWorkerError",
    "Node",
    "Num",
    "Percent",
    "PlusMinus",
    "Pow",
    "Rel",
    "Seq",
    "SetOp",
    "Sym",
    "Text",
    "TooLargeError",
    "UndefinedValueError",
    "UnreadableError",
    "children",
    "divided",
    "negated",
    "walk",
]


class UnreadableError(Exception):
    """A text cannot be parsed."""


class TooLargeError(Exception):
    """A text, number or structure is beyond what is handled."""


class NeedsWorkerError(Exception):
    """The comparison is too heavy for the caller's process."""


class UndefinedValueError(Exception):
    """An expression has no value, such as 1/0."""


@dataclass(frozen=True, slots=True)
class Num:
    """An exact rational; ``digits`` counts the significant digits of a decimal, 0 elsewhere."""

    value: Fraction
    digits: int = 0


@dataclass(frozen=True, slots=True)
class Sym:
    """A variable or a name."""

    name: str


@dataclass(frozen=True, slots=True)
class Const:
    """One of ``pi``, ``e``, ``i``, ``oo``, or a named set such as ``R``."""

    name: str


@dataclass(frozen=True, slots=True)
class Add:
    """A sum."""

    args: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Mul:
    """A product."""

    args: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Pow:
    """A power; a fractional exponent of odd denominator means the real root."""

    base: Node
    exp: Node


@dataclass(frozen=True, slots=True)
class Call:
    """A function or big operator applied to arguments."""

    name: str
    args: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class PlusMinus:
    """``arg`` with the upper sign first: ``sign`` is 1 for plus-minus and -1 for minus-plus."""

    arg: Node
    sign: int


@dataclass(frozen=True, slots=True)
class Percent:
    """So many hundredths."""

    arg: Node


@dataclass(frozen=True, slots=True)
class Seq:
    """Several things: ``list`` without brackets, ``()``, ``[]``, ``{}``, or a ratio ``:``."""

    kind: Literal["list", "()", "[]", "{}", ":"]
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Interval:
    """A half-open interval."""

    low: Node
    high: Node
    left_closed: bool
    right_closed: bool


@dataclass(frozen=True, slots=True)
class SetOp:
    """A union, intersection or difference of sets."""

    op: Literal["cup", "cap", "setminus"]
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix or column vector."""

    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True)
class Rel:
    """A chain of relations: one operator fewer than parts."""

    parts: tuple[Node, ...]
    ops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """Words."""

    words: str


Node: TypeAlias = (
    Num
    | Sym
    | Const
    | Add
    | Mul
    | Pow
    | Call
    | PlusMinus
    | Percent
    | Seq
    | Interval
    | SetOp
    | Matrix
    | Rel
    | Text
)

MINUS_ONE: Final = Num(Fraction(-1))


def negated(node: Node) -> Node:
    """Return the node times -1."""
    if isinstance(node, Num):
        return Num(-node.value, node.digits)
    return Mul((MINUS_ONE, node))


def divided(top: Node, bottom: Node) -> Node:
    """Return a quotient."""
    match top, bottom:
        case Num(above, 0), Num(below, 0) if below:
            return Num(above / below)
    return Mul((top, Pow(bottom, MINUS_ONE)))


def children(node: Node) -> tuple[Node, ...]:
    """Return the nodes right below a node."""
    match node:
        case Add(args) | Mul(args) | Call(_, args):
            return args
        case Pow(base, exp):
            return (base, exp)
        case PlusMinus(arg, _) | Percent(arg):
            return (arg,)
        case Seq(_, items) | SetOp(_, items):
            return items
        case Interval(low, high, _, _):
            return (low, high)
        case Matrix(rows):
            return tuple(entry for row in rows for entry in row)
        case Rel(parts, _):
            return parts
    return ()


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and all nodes below it."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(children(node))
