"""Equations and inequalities: what value they state, and when two say the same."""

from __future__ import annotations

from typing import Final

from mrgym_envs.grading.exact import key
from mrgym_envs.grading.floats import NoValueError
from mrgym_envs.grading.scalars import Scalars, difference, is_name
from mrgym_envs.grading.tree import (
    MINUS_ONE,
    Call,
    Matrix,
    Mul,
    Node,
    Pow,
    Rel,
    Seq,
    Sym,
    Text,
    TooLargeError,
    UndefinedValueError,
    walk,
)

__all__ = ["named_value", "same_relation", "shortened", "value_of"]

_FLIPPED: Final = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def shortened(rel: Rel) -> Node:
    """Return a chain by its ends: ``z = 1 + 1 = 2`` states ``z = 2``, ``x = 1/3 ~ 0.3`` the third.

    A chain of nothing but constants is left whole, so that it can be checked.
    """
    parts, ops = list(rel.parts), list(rel.ops)
    while ops and ops[-1] == "~" and ("=" in ops or not _has_names(parts[-2])):
        parts.pop(), ops.pop()
    if not ops:
        return parts[0]
    if ops[0] == "in" and len(ops) == 1:
        return parts[1]
    named = [part for part in parts[:-1] if _has_names(part)]
    if len(ops) > 1 and all(op == "=" for op in ops) and named:
        return Rel((named[0], parts[-1]), ("=",))
    return Rel(tuple(parts), tuple("=" if op == "~" else op for op in ops))


def value_of(rel: Rel, scalars: Scalars) -> Node | None:
    """Return the value that an equation gives to a name, ``None`` if it states no value."""
    if any(op != "=" for op in rel.ops):
        return None
    if not any(map(_has_names, rel.parts)):
        *others, last = rel.parts
        return last if all(scalars.same(last, part) for part in others) else None
    if len(rel.parts) != 2:
        return rel.parts[-1]
    left, right = rel.parts
    if _is_label(left) and not (_is_label(right) and not is_name(left)):
        return right
    if is_name(right) and not _has_names(left):
        return left
    if _is_product_of_names(left) and not _has_names(right):
        return right
    return None


def named_value(rel: Node) -> tuple[str, Node] | None:
    """Return the name and the value of an assignment to a variable."""
    if isinstance(rel, Rel) and rel.ops == ("=",):
        left, right = rel.parts
        if isinstance(left, Sym):
            return left.name, right
    return None


def same_relation(gold: Rel, answer: Rel, scalars: Scalars) -> bool | None:
    """Return whether two relations say the same, ``None`` where that is not plain to see."""
    gold, answer = _oriented(gold), _oriented(answer)
    if key(gold) == key(answer):
        return True
    if gold.ops == answer.ops and _same_parts(gold, answer, scalars):
        return True
    if len(gold.ops) != 1 or gold.ops != answer.ops:
        return None if gold.ops[0] != "=" or answer.ops[0] != "=" else False
    if gold.ops == ("=",) and is_name(gold.parts[0]) and is_name(answer.parts[0]):
        return _same_assignment(gold, answer, scalars)
    return _proportional(gold, answer, scalars)


def _same_parts(gold: Rel, answer: Rel, scalars: Scalars) -> bool:
    pairs = list(zip(gold.parts, answer.parts, strict=True))
    if any(isinstance(part, (Seq, Matrix, Text)) for pair in pairs for part in pair):
        return False
    try:
        return all(scalars.same(g, a) for g, a in pairs)
    except UndefinedValueError:
        return False


def _same_assignment(gold: Rel, answer: Rel, scalars: Scalars) -> bool:
    """Compare ``y = ...`` with ``f(x) = ...``; other names must be the same."""
    (gold_name, gold_value), (answer_name, answer_value) = gold.parts, answer.parts
    names = (gold_name, answer_name)
    functions = all(isinstance(n, Call) or n == Sym("y") for n in names)
    if key(gold_name) == key(answer_name) or (functions and gold_name != answer_name):
        return scalars.same(gold_value, answer_value)
    return _proportional(gold, answer, scalars)


def _proportional(gold: Rel, answer: Rel, scalars: Scalars) -> bool:
    """Compare what is left when all is brought to one side."""
    sides = (difference(*gold.parts), difference(*answer.parts))
    try:
        return scalars.proportional(*sides, positive=gold.ops[0] in ("<", "<="))
    except (NoValueError, UndefinedValueError, TooLargeError):
        return False


def _oriented(rel: Rel) -> Rel:
    """Return a chain that points to the larger side."""
    if all(op in (">", ">=") for op in rel.ops):
        return Rel(rel.parts[::-1], tuple(_FLIPPED[op] for op in rel.ops[::-1]))
    return rel


def _has_names(node: Node) -> bool:
    return any(isinstance(n, (Sym, Text)) for n in walk(node))


def _is_label(node: Node) -> bool:
    """Whether a node can be what an equation gives a value to."""
    if isinstance(node, Seq):
        return all(map(is_name, node.items))
    return is_name(node) or isinstance(node, Text)


def _is_product_of_names(node: Node) -> bool:
    """Whether a node is a quantity such as AB, NO/BO, |AB| or V1:V2."""
    if isinstance(node, (Sym, Text)):
        return True
    if isinstance(node, Pow):
        return node.exp == MINUS_ONE and _is_product_of_names(node.base)
    if isinstance(node, (Mul, Call)):
        return all(map(_is_product_of_names, node.args))
    return isinstance(node, Seq) and node.kind == ":" and all(map(_is_product_of_names, node.items))
