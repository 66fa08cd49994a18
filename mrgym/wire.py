"""Rollouts as bytes: strict JSON lines with a schema version, on disk and on the network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mrgym.errors import WireError
from mrgym.rollout import SCHEMA_VERSION, Rollout

__all__ = ["decode_rollout", "encode_rollout", "read_rollouts", "write_rollouts"]


class _Header(msgspec.Struct):
    schema: int = 0


def encode_rollout(rollout: Rollout) -> bytes:
    """Return a rollout as one line of strict JSON (no newline).

    Raises:
        WireError: If a number is NaN or infinite, a text is no Unicode, or a value has no JSON
            form.
    """
    builtin = _to_builtins(rollout)
    _check_finite(builtin, "rollout")
    try:
        return msgspec.json.encode(builtin)
    except UnicodeEncodeError as error:
        raise WireError(
            f"rollout of task {rollout.task_id!r}: got text that is no Unicode ({error}), expected "
            "no lone surrogates; decode with errors='replace'"
        ) from error


def decode_rollout(data: bytes) -> Rollout:
    """Return the rollout of a line.

    Raises:
        WireError: If it is not JSON, has another schema version, or misses fields.
    """
    try:
        version = msgspec.json.decode(data, type=_Header).schema
        if version != SCHEMA_VERSION:
            raise WireError(
                f"rollout: got schema {version}, expected {SCHEMA_VERSION}; "
                "read it with the release that wrote it"
            )
        return msgspec.json.decode(data, type=Rollout)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(
            f"rollout: got {data[:80]!r} ({error}), expected a rollout record; "
            "check that the file is complete"
        ) from error


def write_rollouts(path: Path, rollouts: Iterable[Rollout]) -> None:
    """Write rollouts as JSON lines, replacing the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as out:
        for rollout in rollouts:
            out.write(encode_rollout(rollout) + b"\n")


def read_rollouts(path: Path) -> Iterator[Rollout]:
    """Yield the rollouts of a JSON-lines file.

    Raises:
        WireError: As :func:`decode_rollout`, with file and line.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield decode_rollout(line)
            except WireError as error:
                raise WireError(f"{path}, line {number}: {error}") from error


def _to_builtins(rollout: Rollout) -> dict[str, Any]:
    try:
        out: dict[str, Any] = msgspec.to_builtins(rollout, enc_hook=_plain, str_keys=True)
    except (TypeError, NotImplementedError) as error:
        raise WireError(
            f"rollout of task {rollout.task_id!r}: got a value without a JSON form ({error}), "
            "expected text, numbers, lists and mappings; convert it in the environment"
        ) from error
    return out


def _plain(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise NotImplementedError(f"{type(value).__name__}: {value!r}"[:200])


def _check_finite(value: Any, where: str) -> None:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise WireError(
                f"{where}: got {value!r}, expected a finite number; strict JSON has no NaN"
            )
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_finite(item, f"{where}.{key}")
    elif isinstance(value, list):
        if {*map(type, value)} <= {int, bool, str}:  # token ids and masks are long
            return
        for i, item in enumerate(value):
            _check_finite(item, f"{where}[{i}]")
