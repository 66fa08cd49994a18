"""Spaces for text and chat messages, with the rules that Gymnasium's vector envs need.

Gymnasium's own ``Text`` needs an explicit character set and its shared-memory reader loses
characters; model output is any Unicode. Importing this module registers both spaces with
Gymnasium's vector utilities, shared memory included.
"""

from __future__ import annotations

import ctypes
import string
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, TypedDict, TypeGuard

import msgspec
from gymnasium import Space
from gymnasium.spaces import Tuple as TupleSpace
from gymnasium.vector.utils import (
    batch_differing_spaces,
    create_shared_memory,
    read_from_shared_memory,
    write_to_shared_memory,
)

from mrgym.errors import SpaceError

__all__ = ["Message", "MessagesSpace", "TextSpace", "is_messages"]

_SAMPLE_ALPHABET = string.ascii_letters + string.digits + " .,<>/\n"
_BYTES_PER_CHARACTER = 4
_LENGTH_BYTES = 4
_FRAMING_BYTES = 1024  # what msgpack puts around a text, or around some 30 messages


class Message(TypedDict):
    """One chat message, as chat templates take it."""

    role: str
    content: str


def is_messages(value: object) -> TypeGuard[list[Message]]:
    """Return whether ``value`` is a list of ``{"role": str, "content": str}``."""
    return isinstance(value, (list, tuple)) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in value
    )


class TextSpace(Space[str]):
    """Any Unicode text of at most ``max_length`` characters.

    Args:
        max_length: Greatest number of characters.
        seed: Seed of :meth:`sample`.
    """

    def __init__(self, max_length: int = 65_536, seed: int | None = None) -> None:
        if max_length < 1:
            raise SpaceError(
                f"TextSpace: got max_length={max_length}, expected at least 1; give a larger one"
            )
        self.max_length = max_length
        super().__init__(dtype=str, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Texts have no fixed-size array form."""
        return False

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is a string that is short enough."""
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return a short random text (for checkers, not for models)."""
        length = int(self.np_random.integers(0, min(32, self.max_length) + 1))
        picks = self.np_random.integers(0, len(_SAMPLE_ALPHABET), length)
        return "".join(_SAMPLE_ALPHABET[i] for i in picks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace) and other.max_length == self.max_length

    def __repr__(self) -> str:
        return f"TextSpace({self.max_length})"


class MessagesSpace(Space[list[Message]]):
    """A list of chat messages whose contents hold at most ``max_length`` characters together."""

    def __init__(self, max_length: int = 65_536, seed: int | None = None) -> None:
        self.text = TextSpace(max_length)
        self.max_length = max_length
        super().__init__(dtype=object, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Messages have no fixed-size array form."""
        return False

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is a list of messages that is short enough."""
        return is_messages(x) and sum(len(m["content"]) for m in x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> list[Message]:
        """Return one random user message."""
        self.text._np_random = self.np_random
        return [Message(role="user", content=self.text.sample())]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MessagesSpace) and other.max_length == self.max_length

    def __repr__(self) -> str:
        return f"MessagesSpace({self.max_length})"


def _batch_differing(spaces: Sequence[Space[Any]]) -> TupleSpace[Any]:
    return TupleSpace([deepcopy(space) for space in spaces])


# Gymnasium dispatches on the type of the first item, which its annotations cannot say.
_register_differing: Any = batch_differing_spaces.register
_register_differing(TextSpace, _batch_differing)
_register_differing(MessagesSpace, _batch_differing)


@create_shared_memory.register(TextSpace)
@create_shared_memory.register(MessagesSpace)
def _create_shared(space: Any, n: int = 1, ctx: Any = None) -> tuple[Any, ...]:
    size = _LENGTH_BYTES + space.max_length * _BYTES_PER_CHARACTER + _FRAMING_BYTES
    return tuple(ctx.Array(ctypes.c_uint8, size) for _ in range(n))


@write_to_shared_memory.register(TextSpace)
@write_to_shared_memory.register(MessagesSpace)
def _write_shared(space: Any, index: int, value: Any, shared_memory: tuple[Any, ...]) -> None:
    data = msgspec.msgpack.encode(value)
    target = memoryview(shared_memory[index].get_obj()).cast("B")
    room = len(target) - _LENGTH_BYTES
    if len(data) > room:
        raise SpaceError(
            f"{space}: got an observation of {len(data)} bytes, expected at most {room}; "
            "raise max_length or use AsyncVectorEnv(shared_memory=False)"
        )
    target[:_LENGTH_BYTES] = len(data).to_bytes(_LENGTH_BYTES, "little")
    target[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = data


class _SharedView(Sequence[Any]):
    """Observations of all environments, decoded from shared memory when they are looked at.

    Gymnasium reads shared memory once, at construction, and trusts the result to follow later
    writes (as a numpy view does); decoding at access keeps that promise for text.
    """

    def __init__(self, buffers: tuple[Any, ...]) -> None:
        self._buffers = buffers

    def __len__(self) -> int:
        return len(self._buffers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self)[index]
        data = memoryview(self._buffers[index].get_obj()).cast("B")
        size = int.from_bytes(data[:_LENGTH_BYTES], "little")
        packed = data[_LENGTH_BYTES : _LENGTH_BYTES + size]
        return msgspec.msgpack.decode(packed) if size else ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> tuple[Any, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        return repr(tuple(self))


@read_from_shared_memory.register(TextSpace)
@read_from_shared_memory.register(MessagesSpace)
def _read_shared(space: Any, shared_memory: tuple[Any, ...], n: int = 1) -> _SharedView:
    return _SharedView(shared_memory)
