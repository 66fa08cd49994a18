"""Moving over tokens, and what the levels of the parser share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from mrgym_envs.grading.tokens import Token
from mrgym_envs.grading.tree import NeedsWorkerError, Node, UnreadableError

__all__ = ["Cursor"]


class Cursor(ABC):
    """Reads tokens one after another.

    Args:
        tokens: What to read; the last is of kind ``stop``.
        max_depth: How deep things may nest.
    """

    def __init__(self, tokens: list[Token], max_depth: int) -> None:
        self.tokens = tokens
        self.position = 0
        self.here = tokens[0]
        self.depth_left = max_depth
        self.bars = 0
        self.in_builder = False
        self.in_integral = False
        self.in_trigonometric = False
        self.after_unit = False
        self.after_number = False

    # The levels of the subclasses that lower ones call.
    @abstractmethod
    def listed(self, ends: Callable[[Token], bool]) -> Node:
        """Return what is separated by commas and words."""

    @abstractmethod
    def items(self, ends: Callable[[Token], bool]) -> list[Node]:
        """Return what stands between separators."""

    @abstractmethod
    def relation(self) -> Node:
        """Return a chain of relations."""

    @abstractmethod
    def sum(self) -> Node:
        """Return a sum."""

    @abstractmethod
    def term(self) -> Node:
        """Return a product."""

    @abstractmethod
    def power(self) -> Node:
        """Return a primary with what is attached to it."""

    @abstractmethod
    def starts_factor(self) -> bool:
        """Whether a factor begins here."""

    @abstractmethod
    def function(self, name: str) -> Node:
        """Return a function with its argument."""

    @abstractmethod
    def command(self, name: str) -> Node:
        """Return what a LaTeX command stands for."""

    @abstractmethod
    def matrix(self) -> Node:
        """Return a matrix environment."""

    def step(self) -> Token:
        """Return this token and go to the next."""
        token = self.here
        if token.kind != "stop":
            self.position += 1
            self.here = self.tokens[self.position]
        return token

    def peek(self, ahead: int = 1) -> Token:
        """Return a later token."""
        return self.tokens[min(self.position + ahead, len(self.tokens) - 1)]

    def at(self, text: str) -> bool:
        """Whether an operator is next."""
        return self.here.text == text and self.here.kind == "op"

    def at_operator(self, texts: frozenset[str]) -> bool:
        """Whether one of some operators is next."""
        return self.here.kind == "op" and self.here.text in texts

    def take(self, text: str) -> bool:
        """Step over an operator and return whether it was there."""
        if self.at(text):
            self.step()
            return True
        return False

    def expect(self, text: str) -> None:
        """Step over an operator that must be there."""
        if not self.take(text):
            raise UnreadableError(f"expected {text!r}, got {self.here.text!r}")

    def expect_stop(self) -> None:
        """Make sure that nothing is left."""
        if self.here.kind != "stop":
            raise UnreadableError(f"did not expect {self.here.text!r}")

    def enter(self) -> None:
        """Go one level of nesting down."""
        self.depth_left -= 1
        if self.depth_left < 0:
            raise NeedsWorkerError("nested too deep")

    def leave(self) -> None:
        """Come back from a level of nesting."""
        self.depth_left += 1
