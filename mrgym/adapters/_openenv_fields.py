"""What travels between an OpenEnv server and its clients: actions, observations and ``info``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from mrgym.adapters._common import need
from mrgym.errors import SpaceError
from mrgym.spaces import MessagesSpace, TextSpace

__all__ = ["TEXT", "check_space", "decode", "encode", "info_for_json", "model"]

TEXT = (TextSpace, spaces.Text)
_PLAIN = (
    *(MessagesSpace, spaces.Discrete, spaces.Box),
    *(spaces.MultiDiscrete, spaces.MultiBinary),
)
LEFT_OUT = "info_left_out"


@cache
def model(kind: str, *, is_text: bool) -> Any:
    """Return the pydantic class of an ``"Action"`` or ``"Observation"``: ``text``, or a ``value``.

    A value is a space's sample as its ``to_jsonable`` has it.
    """
    base = getattr(need("openenv.core", "openenv"), kind)
    fields: dict[str, Any] = {"text": (str, ...)} if is_text else {"value": (Any, ...)}
    name = f"{'Text' if is_text else 'Value'}{kind}"
    return need("pydantic", "openenv").create_model(name, __base__=base, **fields)


def check_space(space: gym.Space[Any]) -> None:
    """Refuse a space whose samples JSON cannot carry.

    Raises:
        SpaceError: With the space.
    """
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        for part in space.values() if isinstance(space, spaces.Dict) else space.spaces:
            check_space(part)
    elif not isinstance(space, (*TEXT, *_PLAIN)):
        raise SpaceError(
            f"OpenEnv: got {space}, expected text, messages, Discrete, Box, MultiDiscrete, "
            "MultiBinary, or a Dict or Tuple of them; give the environment such a space"
        )


def encode(space: gym.Space[Any], sample: Any) -> Any:
    """Return a sample as JSON has it, without loss.

    Raises:
        SpaceError: If it holds NaN or infinity, which OpenEnv would turn into null, or half a
            surrogate pair.
    """
    value = _encode(space, sample)
    try:
        _json(value)
    except ValueError as error:
        raise SpaceError(
            f"OpenEnv: got {ascii(sample)[:80]} of {space}, expected finite numbers and Unicode, "
            "all that JSON holds; clean it in the environment"
        ) from error
    return value


def _encode(space: gym.Space[Any], sample: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: _encode(part, sample[name]) for name, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return [_encode(part, x) for part, x in zip(space.spaces, sample, strict=True)]
    return sample if isinstance(space, TEXT) else space.to_jsonable([sample])[0]


def decode(space: gym.Space[Any], value: Any) -> Any:
    """Return the sample that JSON says.

    Raises:
        SpaceError: If it is none of ``space``: 1.7 or ``"1"`` is no action of ``Discrete(2)``.
    """
    try:
        sample = _decode(space, value)
        fits = space.contains(sample) and _same(space, _encode(space, sample), value)
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError):
        fits = False
    if not fits:
        raise SpaceError(f"OpenEnv: got {ascii(value)[:80]}, expected a value of {space}; send one")
    return sample


def _decode(space: gym.Space[Any], value: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: _decode(part, value[name]) for name, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_decode(part, x) for part, x in zip(space.spaces, value, strict=True))
    return value if isinstance(space, TEXT) else space.from_jsonable([value])[0]


def _same(space: gym.Space[Any], encoded: Any, value: Any) -> bool:
    """Return whether nothing was cut off; rounding to a Box's own floats is."""
    if isinstance(space, spaces.Dict):
        return value.keys() == encoded.keys() and all(
            _same(part, encoded[name], value[name]) for name, part in space.items()
        )
    if isinstance(space, spaces.Tuple):
        return all(map(_same, space.spaces, encoded, value))
    is_float = isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating)
    return is_float or bool(encoded == value)


def info_for_json(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return what JSON can hold of ``info``; the names of the rest are in ``"info_left_out"``."""
    out: dict[str, Any] = {}
    left_out = []
    for name, value in info.items():
        try:
            out[name] = json.loads(_json(value))
        except (TypeError, ValueError):
            left_out.append(name)
    return {**out, LEFT_OUT: left_out} if left_out else out


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, default=_from_numpy).encode()


def _from_numpy(value: object) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
