"""The parser's tightest level: numbers, names, brackets, functions, matrices."""

from __future__ import annotations

from fractions import Fraction
from typing import Final

from mrgym_envs.grading.cursor import Cursor
from mrgym_envs.grading.numbers import number
from mrgym_envs.grading.tokens import CONSTANTS, Token
from mrgym_envs.grading.tree import (
    Add,
    Call,
    Const,
    Interval,
    Mul,
    Node,
    Num,
    Seq,
    Sym,
    Text,
    UnreadableError,
    divided,
)

__all__ = ["FRACTIONS", "Brackets"]

FRACTIONS: Final = frozenset(["frac", "dfrac", "tfrac", "cfrac"])
_FUNCTION_NAMES: Final = frozenset("fghFG")
_REALS: Final = frozenset(["real numbers", "real number", "reals", "all real numbers"])
_DEGREE: Final = Mul((Const("pi"), Num(Fraction(1, 180))))
_CLOSING: Final = {"lfloor": ("rfloor", "floor"), "lceil": ("rceil", "ceil")}


class Brackets(Cursor):
    """Reads what holds together by itself; commands and the looser levels are in subclasses."""

    def primary(self) -> Node:
        """Return a number, name, function or something in brackets."""
        kind, text = self.here
        if kind == "num":
            return self.numeral()
        if kind == "name":
            return self.name()
        if kind == "func":
            return self.function(self.step().text)
        if kind == "cmd":
            return self.command(self.step().text)
        if kind == "begin":
            return self.matrix()
        if kind == "text":
            return self.words()
        if kind == "op":
            return self.bracket(text)
        raise UnreadableError(f"did not expect {text!r}")

    def numeral(self) -> Node:
        """Return a number, mixed number or numeral in another base."""
        text = self.step().text
        node: Node = number(text)
        if text.isdigit():
            if fraction := self.mixed_part():
                return Add((node, fraction))
            if self.take("_"):
                return Call("base", (node, self.argument(whole_numbers=True)))
        return node

    def mixed_part(self) -> Node | None:
        """Return the fraction of a mixed number such as 1 1/2, if one follows."""
        first, slash, second = self.here, self.peek(), self.peek(2)
        if first.kind == "num" and (slash.text != "/" or second.kind != "num"):
            raise UnreadableError("two numbers in a row")
        if first.kind == "num":
            self.step(), self.step(), self.step()
            return divided(number(first.text), number(second.text))
        if first.kind == "cmd" and first.text in FRACTIONS and self.is_plain_fraction():
            self.step()
            return divided(self.argument(), self.argument())
        return None

    def is_plain_fraction(self) -> bool:
        """Whether the fraction that follows is one of whole numbers."""
        kinds = [self.peek(i) for i in range(1, 7)]
        texts = [t.text for t in kinds]
        if texts[0] == "{":
            braced = texts[2] == "}" and texts[3] == "{" and texts[5] == "}"
            return braced and texts[1].isdigit() and texts[4].isdigit()
        return texts[0].isdigit() and (len(texts[0]) == 2 or texts[1].isdigit())

    def name(self) -> Node:
        """Return a variable, constant, named set, or a call such as f(x)."""
        name = self.step().text
        if name.startswith("set:"):
            return Const(name.removeprefix("set:"))
        name += self.subscript()
        while self.take("'"):
            name += "'"
        if name in CONSTANTS:
            return Const(CONSTANTS[name])
        if name[0] in _FUNCTION_NAMES and self.at("("):
            return Call(name, self.arguments())
        return Sym(name)

    def subscript(self) -> str:
        """Return a subscript as part of the name, empty if there is none."""
        if not self.take("_"):
            return ""
        if not self.take("{"):
            return f"_{self.step().text}"
        parts = []
        while not self.at("}"):
            if self.here.kind == "stop" or self.at("{"):
                raise UnreadableError("unbalanced subscript")
            parts.append(self.step().text)
        self.step()
        return f"_{''.join(parts)}"

    def words(self) -> Node:
        """Return words: alone an answer in words, before a relation a name."""
        text = self.step().text
        while self.here.kind == "text":
            text = f"{text} {self.step().text}"
        return Const("R") if text.casefold() in _REALS else Text(text)

    def unit(self) -> None:
        """Step over a unit and its power."""
        self.step()
        self.after_unit = True
        if self.at("^"):
            self.step()
            self.argument()
        while self.at("/") and self.peek().kind in ("text", "name"):
            self.step(), self.step()

    def at_degree(self) -> bool:
        """Whether a degree sign is next, raised or not."""
        if self.here.kind == "deg":
            return True
        if not self.at("^"):
            return False
        return "deg" in (self.peek().kind, self.peek(2).kind if self.peek().text == "{" else "")

    def degree(self, node: Node) -> Node:
        """Step over a degree sign: a unit, except in the argument of a trigonometric function."""
        raised = self.take("^")
        braced = raised and self.take("{")
        self.step()
        if braced:
            self.expect("}")
        self.after_unit = not self.in_trigonometric
        return Mul((node, _DEGREE)) if self.in_trigonometric else node

    def bracket(self, opening: str) -> Node:
        """Return what stands in brackets."""
        self.enter()
        if opening == "|":
            node = self.absolute()
        elif opening == "{.":
            node = self.braces(".}")
        elif opening == "{":
            node = self.braces("}")
        elif opening in _CLOSING:
            self.step()
            closing, name = _CLOSING[opening]
            node = Call(name, (self.sum(),))
            self.expect(closing)
        elif opening in ("(", "["):
            node = self.parentheses(opening)
        elif opening == "dots":
            self.step()
            node = Sym("...")
        else:
            raise UnreadableError(f"did not expect {opening!r}")
        self.leave()
        self.after_unit = self.after_number = False
        return node

    def absolute(self) -> Node:
        """Return an absolute value."""
        self.step()
        self.bars += 1
        node = self.sum()
        self.expect("|")
        self.bars -= 1
        return Call("abs", (node,))

    def braces(self, closing: str) -> Node:
        """Return a set, the condition of a set builder, or a plain LaTeX group."""
        self.step()
        if self.take(closing):
            return Const("empty")
        outer = (self.in_builder, self.bars)
        self.in_builder, self.bars = closing == ".}", 0
        items = self.items(lambda t: t.kind == "op" and t.text in (closing, "|", ":"))
        self.in_builder = False
        if self.take("|") or self.take(":"):
            items = [self.listed(lambda t: t == ("op", closing))]
        elif closing == ".}" or len(items) > 1:
            items = [Seq("{}", tuple(items))]
        self.in_builder, self.bars = outer
        self.expect(closing)
        return items[0]

    def parentheses(self, opening: str) -> Node:
        """Return a tuple, an interval, or a single thing in parentheses."""
        self.step()
        outer = (self.in_builder, self.bars)
        self.in_builder, self.bars = False, 0
        items = self.items(lambda t: t.kind == "op" and t.text in (")", "]"))
        self.in_builder, self.bars = outer
        closing = self.step().text
        if len(items) == 1 and (opening, closing) in (("(", ")"), ("[", "]")):
            return items[0]
        if (opening, closing) == ("(", ")"):
            return Seq("()", tuple(items))
        if (opening, closing) == ("[", "]"):
            return Seq("[]", tuple(items))
        if len(items) != 2 or not closing:
            raise UnreadableError("unbalanced parentheses")
        return Interval(items[0], items[1], opening == "[", closing == "]")

    def arguments(self) -> tuple[Node, ...]:
        """Return the arguments in parentheses."""
        self.enter()
        node = self.parentheses(self.here.text)
        self.leave()
        return node.items if isinstance(node, Seq) and node.kind == "()" else (node,)

    def argument(self, *, whole_numbers: bool = False) -> Node:
        """Return a LaTeX argument: a group, one digit (or a whole number), or one thing."""
        kind, text = self.here
        if kind == "num" and len(text) > 1 and text.isdigit() and not whole_numbers:
            self.tokens[self.position] = self.here = Token("num", text[1:])
            return number(text[0])
        if kind == "num":
            return number(self.step().text)
        if kind == "op" and text == "{":
            return self.group()
        return self.primary()

    def group(self) -> Node:
        """Return what stands in a LaTeX group."""
        self.enter()
        self.step()
        outer = (self.in_builder, self.bars)
        self.in_builder, self.bars = False, 0
        node = self.relation()
        self.in_builder, self.bars = outer
        self.expect("}")
        self.leave()
        self.after_unit = self.after_number = False
        return node
