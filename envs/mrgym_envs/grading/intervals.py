"""Sets of real numbers as pieces in order: intervals, points, unions, conditions on a variable."""

from __future__ import annotations

from typing import NamedTuple

from mrgym_envs.grading.floats import NoValueError, Sample
from mrgym_envs.grading.tree import (
    Call,
    Const,
    Interval,
    Node,
    Rel,
    Seq,
    SetOp,
    Sym,
    negated,
    walk,
)

__all__ = ["Piece", "looks_like_set", "pieces_of", "variable_of"]

_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "=", "!=": "!="}
_INFINITY = Const("oo")
_MINUS_INFINITY = negated(_INFINITY)


class Piece(NamedTuple):
    """An interval or, with equal ends, a point."""

    low: Node
    high: Node
    left_closed: bool
    right_closed: bool


def looks_like_set(node: Node) -> bool:
    """Whether a node can only be a set of numbers."""
    if isinstance(node, Rel):
        return "!=" in node.ops or any(op[0] in "<>" for op in node.ops)
    return isinstance(node, (Interval, SetOp)) or node == Const("R")


def variable_of(node: Node) -> Sym | None:
    """Return the only variable of a node, ``None`` if there is none or more than one."""
    names = {n for n in walk(node) if isinstance(n, Sym)}
    calls = any(isinstance(n, Call) for n in walk(node))
    return names.pop() if len(names) == 1 and not calls else None


def pieces_of(node: Node) -> list[Piece] | None:
    """Return the pieces of a set from left to right, ``None`` where they are not plain to see."""
    pieces = _pieces(node)
    if pieces is None:
        return None
    try:
        ordered = sorted(pieces, key=lambda piece: (_position(piece.low), _position(piece.high)))
    except NoValueError:
        return None
    return _joined(ordered)


def _pieces(node: Node) -> list[Piece] | None:
    match node:
        case Interval(low, high, left, right):
            return [Piece(low, high, left and not _endless(low), right and not _endless(high))]
        case Seq("()" | "[]" as kind, (low, high)):
            closed = kind == "[]"
            return [Piece(low, high, closed and not _endless(low), closed and not _endless(high))]
        case Seq("{}" | "list", items):
            return _points(items)
        case SetOp("cup", items):
            return _all_pieces(items)
        case SetOp("setminus", (whole, holes)):
            return _without(_pieces(whole), _pieces(holes))
        case Const("R"):
            return [Piece(_MINUS_INFINITY, _INFINITY, False, False)]
        case Rel():
            return _condition(node)
    return None


def _endless(node: Node) -> bool:
    return any(n == _INFINITY for n in walk(node))


def _points(items: tuple[Node, ...]) -> list[Piece] | None:
    if any(isinstance(item, Rel) or looks_like_set(item) for item in items):
        return _all_pieces(items)
    return [Piece(item, item, True, True) for item in items]


def _all_pieces(items: tuple[Node, ...]) -> list[Piece] | None:
    pieces: list[Piece] = []
    for item in items:
        part = _pieces(item)
        if part is None:
            return None
        pieces += part
    return pieces


def _without(whole: list[Piece] | None, holes: list[Piece] | None) -> list[Piece] | None:
    """Return pieces with points cut out."""
    if whole is None or holes is None or any(h.low != h.high for h in holes):
        return None
    for hole in holes:
        cut: list[Piece] = []
        for piece in whole:
            if _position(piece.low) < _position(hole.low) < _position(piece.high):
                cut.append(piece._replace(high=hole.low, right_closed=False))
                cut.append(piece._replace(low=hole.low, left_closed=False))
            else:
                cut.append(piece)
        whole = cut
    return whole


def _condition(node: Rel) -> list[Piece] | None:
    """Return the solutions of a condition that has its variable alone on one side."""
    if variable_of(node) is None:
        return None
    parts, ops = node.parts, node.ops
    if len(parts) == 2 and isinstance(parts[1], Sym):
        parts, ops = parts[::-1], (_FLIPPED.get(ops[0], ""),)
    if len(parts) == 2 and isinstance(parts[0], Sym):
        return _half_line(ops[0], parts[1])
    if len(parts) == 3 and isinstance(parts[1], Sym):
        return _between(parts[0], ops, parts[2])
    return None


def _half_line(op: str, bound: Node) -> list[Piece] | None:
    if any(isinstance(n, Sym) for n in walk(bound)):
        return None
    if op in ("<", "<="):
        return [Piece(_MINUS_INFINITY, bound, False, op == "<=")]
    if op in (">", ">="):
        return [Piece(bound, _INFINITY, op == ">=", False)]
    if op == "!=":
        below, above = _half_line("<", bound), _half_line(">", bound)
        return (below or []) + (above or [])
    return [Piece(bound, bound, True, True)] if op == "=" else None


def _between(low: Node, ops: tuple[str, ...], high: Node) -> list[Piece] | None:
    if all(op[0] == ">" for op in ops):
        low, high, ops = high, low, (_FLIPPED[ops[1]], _FLIPPED[ops[0]])
    if not all(op in ("<", "<=") for op in ops):
        return None
    closed = [op == "<=" and not _endless(end) for op, end in zip(ops, (low, high), strict=True)]
    return [Piece(low, high, *closed)]


def _position(node: Node) -> float:
    """Return where a bound lies, to put pieces in order."""
    if _endless(node):
        return float("-inf") if node != _INFINITY else float("inf")
    value = Sample().value(node)
    if abs(value.imag) > 1e-12:
        raise NoValueError("not real")
    return value.real


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Join pieces that touch in a point one of them holds."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and last.high == piece.low and (last.right_closed or piece.left_closed):
            joined[-1] = last._replace(high=piece.high, right_closed=piece.right_closed)
        else:
            joined.append(piece)
    return joined
