"""A parser of LaTeX and plain mathematics: text becomes nodes or an error, and never runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mrgym_envs.grading.commands import Commands
from mrgym_envs.grading.tokens import Token, tokenize
from mrgym_envs.grading.tree import (
    Add,
    Call,
    Mul,
    Node,
    Percent,
    PlusMinus,
    Pow,
    Rel,
    Seq,
    SetOp,
    UnreadableError,
    divided,
    negated,
)

__all__ = ["parse"]

_RELATIONS: Final = frozenset(["=", "<", "<=", ">", ">=", "!=", "~", "equiv", "in", "notin", "to"])
_SET_OPERATIONS: Final = {"cup": "cup", "cap": "cap", "setminus": "setminus"}
_INFIX: Final = frozenset(["over", "choose"])
_SEPARATORS: Final = frozenset([",", ";", "&"])
_STARTS: Final = frozenset(["(", "[", "{", "{.", "lfloor", "lceil"])


def parse(text: str, *, max_depth: int, max_tokens: int) -> Node:
    """Return the node a cleaned answer stands for.

    Raises:
        UnreadableError: If it is not mathematics.
        NeedsWorkerError: If it is nested deeper or has more tokens than is allowed.
        TooLargeError: If it has numbers with too many digits.
    """
    return _Parser(tokenize(text, max_tokens), max_depth).answer()


class _Parser(Commands):
    """One method a level of precedence, loosest first."""

    def answer(self) -> Node:
        """Return the whole text as one node."""
        node = self.listed(lambda token: token.kind == "stop")
        self.expect_stop()
        return node

    def listed(self, ends: Callable[[Token], bool]) -> Node:
        """Return what is separated by commas and words, as a list if there are several."""
        items = self.items(ends)
        return items[0] if len(items) == 1 else Seq("list", tuple(items))

    def items(self, ends: Callable[[Token], bool]) -> list[Node]:
        """Return what stands between separators, up to a token that ends the list."""
        items: list[Node] = []
        self.skip_separators()
        while not ends(self.here) and self.here.kind != "stop":
            items.append(self.relation())
            if not ends(self.here) and not self.skip_separators():
                raise UnreadableError(f"did not expect {self.here.text!r}")
        if not items:
            raise UnreadableError("nothing there")
        return items

    def skip_separators(self) -> bool:
        """Step over separators and return whether there were any."""
        start = self.position
        while self.here.kind in ("sep", "row") or self.at_operator(_SEPARATORS):
            self.step()
        return self.position > start

    def relation(self) -> Node:
        """Return a chain of relations, or a single expression."""
        parts, ops = [self.ratio()], []
        while self.at_operator(_RELATIONS):
            ops.append(self.step().text)
            parts.append(self.ratio())
        return Rel(tuple(parts), tuple(ops)) if ops else parts[0]

    def ratio(self) -> Node:
        """Return parts separated by colons."""
        parts = [self.stacked()]
        while not self.in_builder and self.take(":"):
            parts.append(self.stacked())
        return parts[0] if len(parts) == 1 else Seq(":", tuple(parts))

    def stacked(self) -> Node:
        """Return what TeX's infix commands for fractions and binomials join."""
        node = self.union()
        while self.here.kind == "cmd" and self.here.text in _INFIX:
            choose = self.step().text == "choose"
            right = self.union()
            node = Call("binom", (node, right)) if choose else divided(node, right)
        return node

    def union(self) -> Node:
        """Return set operations, from the left."""
        node = self.sum()
        while self.here.kind == "op" and self.here.text in _SET_OPERATIONS:
            op = self.step().text
            right = self.sum()
            if isinstance(node, SetOp) and node.op == op == "cup":
                node = SetOp("cup", (*node.items, right))
            else:
                node = SetOp(op, (node, right))  # type: ignore[arg-type]
        return node

    def sum(self) -> Node:
        """Return a sum."""
        terms = [self.signed(self.sign() or "+")]
        while sign := self.sign():
            terms.append(self.signed(sign))
        return terms[0] if len(terms) == 1 else Add(tuple(terms))

    def sign(self) -> str:
        """Step over signs and return them as one of + - pm mp, or an empty string."""
        sign = ""
        while self.here.kind == "op" and self.here.text in ("+", "-", "pm", "mp"):
            symbol = self.step().text
            if sign in ("pm", "mp"):
                continue
            sign = symbol if symbol in ("pm", "mp") else _combined(sign, symbol)
        return sign

    def signed(self, sign: str) -> Node:
        """Return the next term under a sign."""
        term = self.term()
        if sign in ("pm", "mp"):
            return PlusMinus(term, 1 if sign == "pm" else -1)
        return negated(term) if sign == "-" else term

    def term(self) -> Node:
        """Return a product or quotient, from the left."""
        self.enter()
        node = self.factor()
        while True:
            if self.take("*"):
                node = _product(node, self.factor())
            elif self.take("/"):
                node = divided(node, self.factor())
            elif self.take("mod"):
                node = Call("mod", (node, self.factor()))
            elif self.here.kind == "cmd" and self.here.text in ("pmod", "mod"):
                self.step()
                node = Call("pmod", (node, self.argument()))
            elif self.starts_factor():
                node = _product(node, self.power())
            else:
                break
        self.leave()
        return node

    def starts_factor(self) -> bool:
        """Whether the next token begins a factor without a sign of multiplication."""
        kind, text = self.here
        if kind == "cmd" and text in _INFIX:
            return False
        if self.after_unit or (kind == "num" and self.after_number):
            return False
        if self.in_integral and text == "d" and self.peek().kind == "name":
            return False
        if kind in ("num", "name", "func", "cmd", "begin"):
            return True
        if kind == "op" and text == "|":
            return not self.bars and not self.in_builder
        return kind == "op" and text in _STARTS

    def factor(self) -> Node:
        """Return a factor with its own signs."""
        sign = self.sign()
        node = self.power()
        if sign in ("pm", "mp"):
            return PlusMinus(node, 1 if sign == "pm" else -1)
        return negated(node) if sign == "-" else node

    def power(self) -> Node:
        """Return a primary with all that is attached to it: powers, factorials, units."""
        self.after_unit = False
        self.after_number = self.here.kind == "num"
        node = self.primary()
        while True:
            if self.at_degree():
                node = self.degree(node)
            elif self.take("^"):
                node = Pow(node, self.exponent())
                self.after_number = False
            elif self.take("!"):
                node = Call("factorial", (node,))
            elif self.take("%"):
                node = Percent(node)
            elif self.here.kind == "text":
                self.unit()
            else:
                return node

    def exponent(self) -> Node:
        """Return what stands after a ``^``; towers grow to the right."""
        self.enter()
        sign = self.sign()
        node = self.argument(whole_numbers=True)
        if self.take("!"):
            node = Call("factorial", (node,))
        if self.take("^"):
            node = Pow(node, self.exponent())
        self.leave()
        return negated(node) if sign == "-" else node


def _combined(sign: str, symbol: str) -> str:
    if not sign:
        return symbol
    return "+" if sign == symbol else "-"


def _product(left: Node, right: Node) -> Node:
    if isinstance(left, Mul):
        return Mul((*left.args, right))
    return Mul((left, right))
