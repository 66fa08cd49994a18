"""JSON and msgpack on the wire: strict, plain values only, nothing that runs."""

from __future__ import annotations

import math
import re
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from mrgym.errors import WireError
from mrgym.server.problems import Problem

__all__ = [
    "JSON",
    "MSGPACK",
    "check_plain",
    "decode",
    "encode",
    "plain",
    "read",
    "wanted",
    "why_not_plain",
]

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
_SAME: Final = {JSON: JSON, MSGPACK: MSGPACK, "application/x-msgpack": MSGPACK}
_DEEPEST: Final = 64
_BYTES: Final = (bytes, bytearray, memoryview)  # not spelled as text
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
T = TypeVar("T")


def media_type(header: str) -> str | None:
    """Return which of the two a ``Content-Type`` means, ``None`` for any other."""
    return _SAME.get(header.partition(";")[0].strip().lower())


def wanted(accept: str, content_type: str) -> str:
    """Return the format of the answer: what is accepted, else that of the request, else JSON."""
    for part in accept.split(","):
        chosen = media_type(part)
        if chosen is not None:
            return chosen
    return media_type(content_type) or JSON


def encode(value: Any, media: str) -> bytes:
    """Return a record as bytes.

    Raises:
        WireError: If a text is no Unicode or a value has no form on the wire.
    """
    encoder = msgspec.msgpack.encode if media == MSGPACK else msgspec.json.encode
    try:
        return encoder(value, enc_hook=_plain)
    except (UnicodeEncodeError, TypeError, NotImplementedError, OverflowError) as error:
        raise WireError(
            f"message: got a value that cannot be sent ({error}), expected numbers, Unicode text, "
            "lists and mappings; convert it"
        ) from error


def decode(data: bytes, type: type[T], media: str) -> T:
    """Return the record of bytes.

    Raises:
        WireError: If they are anything else.
    """
    decoder = msgspec.msgpack.decode if media == MSGPACK else msgspec.json.decode
    try:
        return decoder(data, type=type)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(
            f"message: got {data[:80]!r} ({error}), expected {type.__name__}"
        ) from error


def read(data: bytes, type: type[T], content_type: str) -> T:
    """Return the record of a request's body.

    Raises:
        Problem: 415 for another format, 400 for bytes that are none, 422 for other fields.
    """
    media = media_type(content_type)
    if media is None:
        raise Problem(
            415,
            "UnsupportedMediaType",
            f"request: got Content-Type {content_type[:80]!r}, expected {JSON} or {MSGPACK}; "
            "name the one that was sent",
        )
    decoder = msgspec.msgpack.decode if media == MSGPACK else msgspec.json.decode
    try:
        value = decoder(data, type=type)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(
            400, "MalformedBody", f"request: got no {media} ({error}), expected one object"
        ) from error
    return value


def _invalid(reason: str) -> Problem:
    found = _PATH.search(reason)
    path = found["path"] if found else ""
    text = _PATH.sub("", reason)
    return Problem(
        422, "InvalidRequest", f"{path or 'request'}: {text}; see /openapi.json", subject=path
    )


def check_plain(value: Any, where: str) -> None:
    """Refuse what JSON cannot carry: NaN, huge integers, bytes, extension types, deep nesting.

    Raises:
        Problem: 422 that names the place.
    """
    reason = why_not_plain(value)
    if reason is not None:
        raise Problem(
            422,
            "InvalidRequest",
            f"{where}: got {reason}, expected plain JSON values (finite numbers, integers of 64 "
            f"bits, at most {_DEEPEST} levels); convert it",
            subject=where,
        )


def why_not_plain(value: Any) -> str | None:
    """Return what JSON and msgpack would change or cannot carry of a value, if anything."""
    return _not_plain(value, 0)


def _not_plain(value: Any, depth: int) -> str | None:
    if value is None or isinstance(value, (str, bool)):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else repr(value)
    if isinstance(value, int):
        return None if -(2**63) <= value < 2**64 else "an integer of more than 64 bits"
    if depth >= _DEEPEST:
        return "values nested too deeply"
    if isinstance(value, list):
        reasons = (_not_plain(item, depth + 1) for item in value)
        return next((r for r in reasons if r is not None), None)
    if isinstance(value, dict):
        odd = [type(key).__name__ for key in value if not isinstance(key, str)]
        reasons = (_not_plain(item, depth + 1) for item in value.values())
        return f"a key of type {odd[0]}" if odd else next((r for r in reasons if r), None)
    return f"a {type(value).__name__}"


def plain(info: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the entries that have a form on the wire as plain values, and the others' names."""
    kept: dict[str, Any] = {}
    left_out: list[str] = []
    for name, value in info.items():
        try:
            built = msgspec.to_builtins(value, enc_hook=_plain, str_keys=True, builtin_types=_BYTES)
            built = _as_lists(built)
        except (TypeError, NotImplementedError, RecursionError):
            left_out.append(str(name))
            continue
        if why_not_plain(built) is None:
            kept[str(name)] = built
        else:
            left_out.append(str(name))
    return kept, left_out


def _as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_lists(item) for key, item in value.items()}
    return [_as_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise NotImplementedError(f"{type(value).__name__}: {value!r}"[:200])
