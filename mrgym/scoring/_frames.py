"""The frames between a pool and its worker processes.

A pool sends pickles, which its own workers trust. Workers answer in msgpack of plain values, so
that a worker which went wrong cannot make the pool's process run anything.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from mrgym.components import ABSENT

__all__ = [
    "MAX_REPLY",
    "NOTE_SIZE",
    "PROGRAMS_KEPT",
    "Load",
    "Reply",
    "decode_reply",
    "encode_reply",
    "pack_frame",
    "read_frame",
    "remember",
    "to_wire",
]

MAX_REPLY: Final = 64 << 20
NOTE_SIZE: Final = 128
PROGRAMS_KEPT: Final = 8

_LENGTH = struct.Struct(">Q")
_CHUNK = 1 << 20
_ABSENT_CODE = 1


class Load(msgspec.Struct, frozen=True):
    """Asks a worker to load what later calls refer to by ``token``.

    Attributes:
        token: Its name.
        payload: The pickled callable.
        path: The pool's ``sys.path``.
        main: How to import the pool's ``__main__``, as ``multiprocessing.spawn.prepare`` takes it;
            empty if the callable does not need it.
    """

    token: str
    payload: bytes
    path: list[str]
    main: dict[str, str]


class Reply(msgspec.Struct):
    """A worker's answer to one request.

    Attributes:
        value: What the call returned, as plain values.
        error: What it raised instead.
        retire: Whether the worker should be replaced before the next call.
    """

    value: Any = None
    error: str | None = None
    retire: bool = False


def to_wire(value: Any) -> Any:
    """Return ``value`` as what msgpack can carry, ``ABSENT`` marked as such.

    Raises:
        TypeError: If it holds anything but plain values, arrays and ``ABSENT``.
    """
    if value is ABSENT:
        return msgspec.msgpack.Ext(_ABSENT_CODE, b"")
    if value is None or isinstance(value, (bool, bytes)):
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (list, tuple)):
        return [to_wire(item) for item in value]
    if isinstance(value, Mapping):
        return {_to_key(key): to_wire(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return to_wire(value.tolist())
    raise TypeError(
        f"result: got a {type(value).__name__}, expected numbers, text, lists, mappings or "
        "mrgym.ABSENT; return plain values"
    )


def _to_key(key: Any) -> str | int:
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, int):
        return int(key)
    raise TypeError(
        f"result: got a mapping with the key {key!r:.80}, expected text or whole numbers as keys; "
        "convert them"
    )


def encode_reply(reply: Reply) -> bytes:
    """Return a reply as msgpack."""
    return _ENCODER.encode(reply)


def decode_reply(data: bytes) -> Reply:
    """Return the reply of :func:`encode_reply`, checked.

    Raises:
        msgspec.MsgspecError: If the data are anything else.
    """
    return _DECODER.decode(data)


def pack_frame(payload: bytes) -> bytes:
    """Return ``payload`` behind its length."""
    return _LENGTH.pack(len(payload)) + payload


def read_frame(receive: Callable[[int], bytes], limit: int | None = None) -> bytes:
    """Return the next payload.

    Args:
        receive: Returns at most so many bytes, none at the end, like ``socket.recv``.
        limit: Most bytes allowed.

    Raises:
        EOFError: If the other side closed.
        ValueError: If the payload is longer than ``limit``.
    """
    length: int = _LENGTH.unpack(_read(receive, _LENGTH.size))[0]
    if limit is not None and length > limit:
        raise ValueError(f"frame: got {length} bytes, expected at most {limit}; return less")
    return _read(receive, length)


def remember(kept: dict[str, Any], token: str, value: Any = None) -> None:
    """Keep a program; a pool and its workers drop the oldest by the same rule."""
    kept[token] = value
    if len(kept) > PROGRAMS_KEPT:
        del kept[next(iter(kept))]


def _read(receive: Callable[[int], bytes], count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        chunk = receive(min(count - len(data), _CHUNK))
        if not chunk:
            raise EOFError("the other side closed")
        data += chunk
    return bytes(data)


def _from_ext(code: int, data: memoryview) -> Any:
    if code == _ABSENT_CODE:
        return ABSENT
    raise ValueError(f"reply: got extension {code}, expected {_ABSENT_CODE}; same mrgym release?")


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Reply, ext_hook=_from_ext)
