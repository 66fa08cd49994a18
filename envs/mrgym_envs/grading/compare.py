"""Whether an answer states what the gold states, structure by structure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from mrgym_envs.grading.exact import key
from mrgym_envs.grading.floats import NoValueError
from mrgym_envs.grading.intervals import looks_like_set, pieces_of
from mrgym_envs.grading.relations import named_value, same_relation, shortened, value_of
from mrgym_envs.grading.scalars import Scalars
from mrgym_envs.grading.tree import (
    Add,
    Call,
    Const,
    Matrix,
    Mul,
    NeedsWorkerError,
    Node,
    Num,
    Percent,
    PlusMinus,
    Pow,
    Rel,
    Seq,
    Sym,
    Text,
    TooLargeError,
    UndefinedValueError,
    negated,
    walk,
)
from mrgym_envs.grading.verdict import Options

__all__ = ["Comparison"]

_MAX_PAIRED: Final = 200
_UNIT_SYMBOLS: Final = frozenset("m g s h L J N W V A K C F l".split())


class Comparison:
    """Compares parsed answers.

    Args:
        options: The caller's policies.
        may_prove: Whether sympy may be used.
    """

    def __init__(self, options: Options, *, may_prove: bool) -> None:
        self.options = options
        self.scalars = Scalars(options, may_prove=may_prove)

    def same(self, gold: Node, answer: Node) -> bool:
        """Return whether an answer is right.

        Raises:
            NeedsWorkerError: If that takes sympy and it may not be used.
            TooLargeError: If it would take too long in any case.
        """
        if self.options.percent == "ignore":
            gold, answer = _without_percent(gold), _without_percent(answer)
        try:
            return self._same(_tidied(gold), _tidied(answer))
        except UndefinedValueError:
            return False

    def _same(self, gold: Node, answer: Node) -> bool:
        gold, answer = _single(_expanded(gold)), _single(_expanded(answer))
        if key(gold) == key(answer):
            return True
        if isinstance(gold, Rel) or isinstance(answer, Rel):
            return self._same_relations(gold, answer)
        if (isinstance(gold, Seq) and gold.kind == ":") or (
            isinstance(answer, Seq) and answer.kind == ":"
        ):
            return self._same_ratio(gold, answer)
        if looks_like_set(gold) or looks_like_set(answer):
            return self._same_sets(gold, answer)
        if isinstance(gold, (Seq, Matrix)) or isinstance(answer, (Seq, Matrix)):
            return self._same_sequences(gold, answer)
        return self._same_scalars(gold, answer)

    def _same_relations(self, gold: Node, answer: Node) -> bool:
        if isinstance(gold, Rel) and isinstance(answer, Rel):
            verdict = same_relation(gold, answer, self.scalars)
            if verdict is not None:
                return verdict
        gold_value, answer_value = self._value(gold), self._value(answer)
        if looks_like_set(gold) or looks_like_set(answer):
            return self._same_sets(gold, answer)
        if gold_value is None or answer_value is None:
            return False
        if isinstance(gold_value, Rel) or isinstance(answer_value, Rel):
            return False
        return self._same(gold_value, answer_value)

    def _value(self, node: Node) -> Node | None:
        return value_of(node, self.scalars) if isinstance(node, Rel) else node

    def _same_ratio(self, gold: Node, answer: Node) -> bool:
        """Compare 1:2 with 2:4, and with 1/2."""
        left, right = _ratio(gold), _ratio(answer)
        if len(left) != len(right):
            return False
        crossed = (
            (Mul((left[0], r)), Mul((right[0], g))) for g, r in zip(left, right, strict=True)
        )
        return all(self.scalars.same(a, b) for a, b in crossed)

    def _same_sets(self, gold: Node, answer: Node) -> bool:
        try:
            left, right = pieces_of(gold), pieces_of(answer)
        except (NoValueError, UndefinedValueError):
            left = right = None
        if left is None or right is None:
            return self._same_solutions(gold, answer)
        if len(left) != len(right):
            return False
        return all(
            g[2:] == a[2:] and self.scalars.same(g[0], a[0]) and self.scalars.same(g[1], a[1])
            for g, a in zip(left, right, strict=True)
        )

    def _same_solutions(self, gold: Node, answer: Node) -> bool:
        """Compare sets that must be solved for."""
        if not all(isinstance(n, Seq) or looks_like_set(n) for n in (gold, answer)):
            return False
        if not self.scalars.may_prove:
            raise NeedsWorkerError("needs solving")
        from mrgym_envs.grading.symbolic import same_solutions

        return same_solutions(gold, answer)

    def _same_sequences(self, gold: Node, answer: Node) -> bool:
        if isinstance(gold, Matrix) and isinstance(answer, Matrix):
            return self._same_matrices(gold, answer)
        left, right = _items(gold), _items(answer)
        if left is None or right is None or len(left) != len(right):
            return self._same_after_dropping_repeats(gold, answer, left, right)
        if self._is_ordered(gold, answer):
            return all(self._same(g, a) for g, a in zip(left, right, strict=True))
        return self._same_in_any_order(left, right)

    def _same_after_dropping_repeats(
        self, gold: Node, answer: Node, left: Sequence[Node] | None, right: Sequence[Node] | None
    ) -> bool:
        if not (isinstance(gold, Seq) and isinstance(answer, Seq)) or left is None or right is None:
            return False
        if self._is_ordered(gold, answer):
            return False
        fewer, other = _without_repeats(left), _without_repeats(right)
        return len(fewer) == len(other) and self._same_in_any_order(fewer, other)

    def _same_matrices(self, gold: Matrix, answer: Matrix) -> bool:
        if [len(row) for row in gold.rows] != [len(row) for row in answer.rows]:
            return False
        pairs = zip(gold.rows, answer.rows, strict=True)
        return all(self._same(g, a) for rows in pairs for g, a in zip(*rows, strict=True))

    def _is_ordered(self, gold: Node, answer: Node) -> bool:
        """Whether order counts; raises the mismatch of brackets as an undefined comparison."""
        kinds = {node.kind if isinstance(node, Seq) else "[]" for node in (gold, answer)}
        if kinds == {"()", "[]"} and isinstance(gold, Seq) and isinstance(answer, Seq):
            if len(gold.items) == 2:
                raise UndefinedValueError("open against closed brackets")
            return True
        if "{}" in kinds and kinds & {"()", "[]"}:
            raise UndefinedValueError("a set against a tuple")
        if kinds <= {"list", "{}"}:
            return (self.options.ordered and kinds == {"list"}) or _names_differ(gold, answer)
        return True

    def _same_in_any_order(self, gold: Sequence[Node], answer: Sequence[Node]) -> bool:
        """Pair off what is equal at sight, then what is equal on a closer look."""
        left, right = _unmatched(gold, answer), _unmatched(answer, gold)
        if len(left) > _MAX_PAIRED:
            raise TooLargeError("too many items to pair off")
        for item in left:
            match = next((i for i, other in enumerate(right) if self._same(item, other)), None)
            if match is None:
                return False
            del right[match]
        return not right

    def _same_scalars(self, gold: Node, answer: Node) -> bool:
        if isinstance(gold, Text) or isinstance(answer, Text):
            return _spelled(gold) == _spelled(answer) is not None
        if isinstance(gold, Percent) or isinstance(answer, Percent):
            return self._same_percent(gold, answer)
        if isinstance(gold, Call) and gold.name == "base" and isinstance(answer, Num):
            return self.scalars.same(gold.args[0], answer)
        answer = _without_unit(gold, answer)
        return self.scalars.same(gold, answer)

    def _same_percent(self, gold: Node, answer: Node) -> bool:
        """Compare with a percent sign on at least one side, as the policy says."""
        if self.scalars.same(gold, answer):
            return True
        if self.options.percent != "value" or isinstance(answer, Percent):
            return False
        return isinstance(gold, Percent) and self.scalars.same(gold.arg, answer)


def _tidied(node: Node) -> Node:
    """Return a node with its chains shortened and assignments to tuples opened."""
    if isinstance(node, Rel):
        short = shortened(node)
        return _tidied(short) if not isinstance(short, Rel) else short
    if isinstance(node, Seq):
        return Seq(node.kind, tuple(map(_tidied, node.items)))
    return _scaled(node) if isinstance(node, Mul) else node


def _scaled(node: Mul) -> Node:
    """Return a number times a matrix as a matrix."""
    matrices = [arg for arg in node.args if isinstance(arg, Matrix)]
    if len(matrices) != 1:
        return node
    factors = tuple(arg for arg in node.args if not isinstance(arg, Matrix))
    rows = matrices[0].rows
    return Matrix(tuple(tuple(Mul((*factors, entry)) for entry in row) for row in rows))


def _without_percent(node: Node) -> Node:
    """Return a node with the percent signs of its items dropped."""
    if isinstance(node, Seq):
        return Seq(node.kind, tuple(map(_without_percent, node.items)))
    return node.arg if isinstance(node, Percent) else node


def _single(node: Node) -> Node:
    """Return the only element of a set, or of a list that repeats it in other words."""
    if not isinstance(node, Seq) or isinstance(node.items[0], Seq):
        return node
    if len(node.items) == 1:
        return node.items[0]
    if node.kind == "list" and len(set(map(key, node.items))) == 1:
        return node.items[0]
    return node


def _expanded(node: Node) -> Node:
    """Return a node with each plus-minus written out as two answers."""
    if isinstance(node, Seq) and node.kind in ("list", "{}"):
        if not any(isinstance(n, PlusMinus) for n in walk(node)):
            return node
        items: list[Node] = []
        for item in node.items:
            wide = _expanded(item)
            items += wide.items if wide is not item and isinstance(wide, Seq) else (wide,)
        return Seq(node.kind, tuple(items))
    if isinstance(node, Seq) or not any(isinstance(n, PlusMinus) for n in walk(node)):
        return node
    return Seq("list", (_resolved(node, 1), _resolved(node, -1)))


def _resolved(node: Node, sign: int) -> Node:
    """Return a node with the upper (1) or lower (-1) signs taken."""
    match node:
        case PlusMinus(arg, own):
            inner = _resolved(arg, sign)
            return inner if own == sign else negated(inner)
        case Add(args):
            return Add(tuple(_resolved(arg, sign) for arg in args))
        case Mul(args):
            return Mul(tuple(_resolved(arg, sign) for arg in args))
        case Pow(base, exp):
            return Pow(_resolved(base, sign), _resolved(exp, sign))
        case Call(name, args):
            return Call(name, tuple(_resolved(arg, sign) for arg in args))
        case Rel(parts, ops):
            return Rel(tuple(_resolved(part, sign) for part in parts), ops)
    return node


def _ratio(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Seq) and node.kind == ":":
        return node.items
    return (node, Num(Fraction(1)))


def _items(node: Node) -> Sequence[Node] | None:
    """Return the items of a sequence or vector."""
    if isinstance(node, Seq):
        return node.items
    if isinstance(node, Matrix):
        if len(node.rows) == 1:
            return node.rows[0]
        if len(node.rows[0]) == 1:
            return [row[0] for row in node.rows]
    return None


def _names_differ(gold: Node, answer: Node) -> bool:
    """Whether one side names its values (x = 1, y = 2) and the other just lists them."""
    sides = [[named_value(item) for item in _items(node) or ()] for node in (gold, answer)]
    named = [side for side in sides if side and all(side)]
    if len(named) != 1 or any(any(side) for side in sides if side is not named[0]):
        return False
    names = [pair[0].partition("_")[0] for pair in named[0] if pair]
    return len(set(names)) == len(names)


def _without_repeats(items: Sequence[Node]) -> list[Node]:
    return list({key(item): item for item in items}.values())


def _unmatched(items: Sequence[Node], others: Sequence[Node]) -> list[Node]:
    """Return the items that have no equal at sight among the others."""
    available = Counter(map(key, others))
    left = []
    for item in items:
        if available[key(item)] > 0:
            available[key(item)] -= 1
        else:
            left.append(item)
    return left


def _spelled(node: Node) -> str | None:
    """Return the letters of a word or a product of variables."""
    match node:
        case Text(words):
            return words.casefold()
        case Sym(name) | Const(name):
            return name.casefold()
        case Mul(args) if all(isinstance(arg, (Sym, Const)) for arg in args):
            return "".join(_spelled(arg) or "" for arg in args)
    return None


def _without_unit(gold: Node, answer: Node) -> Node:
    """Drop a letter such as the m of ``5 m`` where the gold has no variables."""
    if not isinstance(answer, Mul) or any(isinstance(n, Sym) for n in walk(gold)):
        return answer
    *values, last = answer.args
    unit = last.base if isinstance(last, Pow) else last
    if isinstance(unit, Sym) and unit.name in _UNIT_SYMBOLS and isinstance(values[0], Num):
        return values[0] if len(values) == 1 else Mul(tuple(values))
    return answer
