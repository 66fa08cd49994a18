"""Gymnasium spaces and their values as plain data: numbers arrive with the dtype they left with.

Arrays travel as nested lists in JSON and as bytes (little-endian, C order) in msgpack; shape and
dtype are the space's, which both sides know.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from mrgym.errors import SpaceError
from mrgym.spaces import MessagesSpace, TextSpace

__all__ = ["describe_space", "read_space", "value_from_wire", "value_to_wire"]


def describe_space(space: Space[Any]) -> dict[str, Any]:
    """Return what :func:`read_space` makes the same space of.

    Raises:
        SpaceError: If it is of a type that has no form on the wire.
    """
    kind = type(space).__name__
    if kind not in _READERS:  # also a subclass, whose values may be others
        raise _without_form(space)
    match space:
        case TextSpace() | MessagesSpace():
            return {"type": kind, "max_length": space.max_length}
        case spaces.Text():
            return {
                "type": kind,
                "min_length": space.min_length,
                "max_length": space.max_length,
                "characters": "".join(space.character_list),
            }
        case spaces.Box():
            return {
                "type": kind,
                "dtype": space.dtype.str,
                "shape": [*space.shape],
                "low": _numbers(space.low),
                "high": _numbers(space.high),
            }
        case spaces.Discrete():
            return {
                "type": kind,
                "dtype": space.dtype.str,
                "n": int(space.n),
                "start": int(space.start),
            }
        case spaces.MultiDiscrete():
            return {
                "type": kind,
                "dtype": space.dtype.str,
                "nvec": space.nvec.tolist(),
                "start": space.start.tolist(),
            }
        case spaces.MultiBinary():
            n = space.n
            return {"type": kind, "n": n if isinstance(n, int) else [*space.shape]}
        case spaces.Dict() if all(isinstance(key, str) for key in space.spaces):
            return {"type": kind, "spaces": {k: describe_space(s) for k, s in space.items()}}
        case spaces.Tuple():
            return {"type": kind, "spaces": [describe_space(s) for s in space.spaces]}
    raise _without_form(space)


def _without_form(space: Space[Any]) -> SpaceError:
    return SpaceError(
        f"service: got a space {space}, expected text, messages, Box, Discrete, MultiDiscrete, "
        "MultiBinary, Dict (with text as keys) or Tuple of these; flatten it, or serve a wrapped "
        "environment"
    )


def read_space(described: dict[str, Any]) -> Space[Any]:
    """Return the space of a description.

    Raises:
        SpaceError: If it is no description.
    """
    try:
        return _READERS[described["type"]](described)
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise SpaceError(
            f"service: got {str(described)[:120]} as a space ({error!r}), expected a description "
            "of one; is the other side a mrgym service?"
        ) from error


_READERS: dict[str, Callable[[dict[str, Any]], Space[Any]]] = {
    "TextSpace": lambda d: TextSpace(d["max_length"]),
    "MessagesSpace": lambda d: MessagesSpace(d["max_length"]),
    "Text": lambda d: spaces.Text(
        d["max_length"], min_length=d["min_length"], charset=d["characters"]
    ),
    "Box": lambda d: spaces.Box(
        _array(d["low"], d["dtype"], d["shape"]),
        _array(d["high"], d["dtype"], d["shape"]),
        tuple(d["shape"]),
        np.dtype(d["dtype"]).type,
    ),
    "Discrete": lambda d: spaces.Discrete(d["n"], start=d["start"], dtype=np.dtype(d["dtype"])),
    "MultiDiscrete": lambda d: spaces.MultiDiscrete(
        d["nvec"], dtype=np.dtype(d["dtype"]).type, start=d["start"]
    ),
    "MultiBinary": lambda d: spaces.MultiBinary(d["n"]),
    # As pairs, whose order is kept: flattened values and samples depend on it.
    "Dict": lambda d: spaces.Dict([(k, read_space(s)) for k, s in d["spaces"].items()]),
    "Tuple": lambda d: spaces.Tuple([read_space(s) for s in d["spaces"]]),
}


def value_to_wire(space: Space[Any], value: Any, *, binary: bool) -> Any:
    """Return a value of a space as plain data.

    Args:
        space: The space.
        value: An observation or action.
        binary: Whether bytes may be used (in msgpack).

    Raises:
        SpaceError: If the value has another shape or type than the space.
    """
    try:
        return _to_wire(space, value, binary)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise _not_of(space, value, error) from error


def value_from_wire(space: Space[Any], data: Any) -> Any:
    """Return the value of a space that plain data stand for.

    A bounded continuous value may lie outside its bounds, as it may for an environment in
    process; everything else must belong to the space.

    Raises:
        SpaceError: If they stand for none.
    """
    try:
        value = _from_wire(space, data)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise _not_of(space, data, error) from error
    return value


def _to_wire(space: Space[Any], value: Any, binary: bool) -> Any:
    if isinstance(space, spaces.Dict):
        _same_keys(space, value)
        return {k: _to_wire(s, value[k], binary) for k, s in space.items()}
    if isinstance(space, spaces.Tuple):
        pairs = zip(space.spaces, value, strict=True)
        return [_to_wire(s, item, binary) for s, item in pairs]
    if isinstance(space, spaces.Discrete):
        return operator.index(value)
    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        array = np.asarray(value)
        if array.shape != space.shape or not np.can_cast(array.dtype, space.dtype, "same_kind"):
            raise ValueError(f"shape {array.shape}, dtype {array.dtype}")
        array = _cast(array, space.dtype)
        return _little(array).tobytes() if binary else _numbers(array)
    if isinstance(space, MessagesSpace):
        return [{"role": m["role"], "content": m["content"]} for m in value]
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__}")
    return str.__str__(value)


def _cast(array: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
    """Return an array with a dtype; floats may be rounded, but nothing wraps or overflows."""
    with np.errstate(over="raise"):
        try:
            out = array.astype(dtype)
        except FloatingPointError as error:
            raise ValueError(str(error)) from error
    if out.dtype.kind in "iu" and not np.array_equal(out, array):
        raise ValueError(f"numbers that do not fit {out.dtype}")
    return out


def _from_wire(space: Space[Any], data: Any) -> Any:
    if isinstance(space, spaces.Dict):
        _same_keys(space, data)
        return {k: _from_wire(s, data[k]) for k, s in space.items()}
    if isinstance(space, spaces.Tuple):
        if not isinstance(data, list):
            raise TypeError("no list")
        return tuple(_from_wire(s, item) for s, item in zip(space.spaces, data, strict=True))
    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        value: Any = _array(data, space.dtype, space.shape)
        return value if isinstance(space, spaces.Box) else _member(space, value)
    if isinstance(space, spaces.Discrete):
        if isinstance(data, bool) or not isinstance(data, int):
            raise TypeError("no integer")
        return _member(space, space.dtype.type(data))
    return _member(space, data)


def _member(space: Space[Any], value: Any) -> Any:
    if not space.contains(value):
        raise ValueError("outside of the space")
    return value


def _same_keys(space: spaces.Dict, value: Any) -> None:
    if not isinstance(value, dict) or value.keys() != space.spaces.keys():
        raise KeyError(f"expected keys {[*space.spaces]}")


def _array(data: Any, dtype: Any, shape: Any) -> np.ndarray[Any, Any]:
    dtype = np.dtype(dtype)
    if isinstance(data, bytes):
        return np.frombuffer(data, dtype.newbyteorder("<")).reshape(shape).astype(dtype)
    values = np.array(_parsed(data, dtype.kind), dtype=dtype)
    if values.shape != tuple(shape):
        raise ValueError(f"shape {values.shape}")
    return values


def _parsed(data: Any, kind: str) -> Any:
    """Return numbers, of a type that fits the dtype: nothing is rounded or cut in silence."""
    if isinstance(data, list):
        return [_parsed(item, kind) for item in data]
    if kind == "f" and data in ("nan", "inf", "-inf"):
        return float(data)
    allowed = {"f": (int, float), "b": (bool, int)}.get(kind, (int,))
    if isinstance(data, allowed) and (kind == "b" or not isinstance(data, bool)):
        return data
    raise TypeError(f"{data!r:.40} for a number of kind {kind!r}")


def _numbers(array: np.ndarray[Any, Any]) -> Any:
    """Return nested lists; what JSON has no number for is spelled."""
    values = array.tolist()
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return values
    return _spelled(values)


def _spelled(values: Any) -> Any:
    if isinstance(values, list):
        return [_spelled(value) for value in values]
    return values if math.isfinite(values) else str(values)


def _little(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.astype(array.dtype.newbyteorder("<"), order="C")


def _not_of(space: Space[Any], value: Any, error: Exception) -> SpaceError:
    return SpaceError(
        f"service: got {str(value)[:80]!r} ({error}), expected a value of {space}; look at the "
        "spaces in GET /env"
    )
