"""A checkpoint on disk: a Hugging Face folder with the trainer's state, whole or not at all.

``step_NNNNNN/`` holds what Transformers and vLLM load, ``state/`` what the trainer goes on from,
and ``manifest.json``, written last, every file with its size. A folder without a manifest that
fits is no checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from mrgym.errors import ConfigError
from mrgym_trainers.gdpo.checkpoint_tensors import (
    copied,
    save_tensors,
    trainer_tensors,
    whole_weights,
    why,
)
from mrgym_trainers.gdpo.policy import Policy
from mrgym_trainers.gdpo.ranks import Ranks
from mrgym_trainers.gdpo.run_state import RankState, RunState

__all__ = [
    "MANIFEST",
    "PARTIAL",
    "TENSORS",
    "Manifest",
    "SaveError",
    "Snapshot",
    "TrainerRecord",
    "read_rank_state",
    "read_record",
    "remove",
    "step_folder",
    "take_snapshot",
    "verify",
    "write_checkpoint",
    "write_synced",
]

MANIFEST = "manifest.json"
PARTIAL = ".partial"
SCHEMA = 1
_HASHED_UP_TO = 1 << 20  # bytes; hashing weights would take as long as writing them
TENSORS = Path("state", "tensors")
_RECORD = Path("state", "run.json")
T = TypeVar("T")
_FAILURES = (OSError, SafetensorError)


class SaveError(Exception):
    """A checkpoint could not be written; the run may go on."""


class StoredFile(msgspec.Struct, frozen=True):
    """Size of a file, and the SHA-256 of a small one."""

    bytes: int
    sha256: str | None = None


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint consists of.

    Attributes:
        schema: Version of this layout.
        step: Steps that were done.
        resumable: Whether a run can go on from it; the weights of a run that was interrupted in
            the middle of an update are of no step.
        ranks: Number of ranks that wrote it.
        versions: Versions of the libraries.
        files: Every file by its path in the folder.
        complete: True.
    """

    schema: int
    step: int
    resumable: bool
    ranks: int
    versions: dict[str, str]
    files: dict[str, StoredFile]
    complete: bool


class TrainerRecord(msgspec.Struct, frozen=True):
    """Where the run stands, and what it is a run of."""

    run: RunState
    identity: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a checkpoint is written from.

    Attributes:
        record: Goes to ``state/run.json``.
        rank_state: State of this rank.
        tokenizer: The tokenizer, for rank 0 to export.
        weights: The whole model by name, for rank 0 to export.
        tensors: This rank's share of weights and optimiser state; None if not to be resumed from.
    """

    record: TrainerRecord
    rank_state: RankState | None
    tokenizer: Any
    weights: dict[str, Tensor]
    tensors: dict[str, Any] | None


def step_folder(root: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return root / f"step_{step:06d}"


def take_snapshot(
    policy: Policy,
    optimizer: torch.optim.Optimizer | None,
    record: TrainerRecord,
    rank_state: RankState | None,
    ranks: Ranks | None = None,
    *,
    copy: bool = False,
) -> Snapshot:
    """Return what a checkpoint is written from; every rank must call it.

    Args:
        policy: The policy.
        optimizer: Its optimiser; without one the checkpoint cannot be resumed from.
        record: Where the run stands.
        rank_state: State of this rank.
        ranks: Who writes.
        copy: Copy tensors to the CPU, so that training may go on while they are written.
    """
    ranks, tokenizer = ranks or Ranks(), policy.tokenizer
    weights = whole_weights(policy, keep=ranks.first)
    tensors = None if optimizer is None else trainer_tensors(policy.model, optimizer)
    if copy:
        weights, tensors = copied(weights), copied(tensors)
        tokenizer = deepcopy(tokenizer)  # one that is being saved may refuse to encode
    return Snapshot(record, rank_state, tokenizer, weights, tensors)


def write_checkpoint(
    folder: Path, snapshot: Snapshot, policy: Policy, *, ranks: Ranks | None = None
) -> None:
    """Write a checkpoint, whole or not at all; every rank must call it.

    Raises:
        SaveError: If it cannot be written, e.g. on a full disk. Nothing is left of it.
    """
    ranks = ranks or Ranks()
    partial = folder.with_name(folder.name + PARTIAL)
    try:
        _write_partial(partial, snapshot, policy, ranks)
        _together(ranks, lambda: _complete(folder, snapshot, ranks) if ranks.first else None)
    except (*_FAILURES, CheckpointException) as error:
        raise SaveError(why(error)) from error
    finally:
        if ranks.first:
            shutil.rmtree(partial, ignore_errors=True)


def _write_partial(partial: Path, snapshot: Snapshot, policy: Policy, ranks: Ranks) -> None:
    _together(ranks, lambda: _export(partial, snapshot, policy) if ranks.first else None)
    if snapshot.tensors is not None:
        save_tensors(partial / TENSORS, snapshot.tensors, ranks)
    if snapshot.rank_state is not None:
        path, state = partial / _rank_file(ranks.rank), msgspec.json.encode(snapshot.rank_state)
        _together(ranks, lambda: path.write_bytes(state))


def _export(partial: Path, snapshot: Snapshot, policy: Policy) -> None:
    remove(partial)
    (partial / "state").mkdir(parents=True)
    if policy.adapter is None:
        policy.model.save_pretrained(partial, state_dict=dict(snapshot.weights))
    else:
        weights = {f"base_model.model.{name}": tensor for name, tensor in snapshot.weights.items()}
        policy.adapter.save_pretrained(partial, state_dict=weights)
    snapshot.tokenizer.save_pretrained(partial)
    (partial / _RECORD).write_bytes(msgspec.json.encode(snapshot.record))


def _together(ranks: Ranks, write: Callable[[], object]) -> None:
    """Write on every rank, and fail on all of them if it fails on one: none waits in vain."""
    reason = ""
    try:
        write()
    except _FAILURES as error:
        reason = why(error)
    reasons = [message.decode() for message in ranks.gather(reason.encode())]
    if any(reasons):
        raise SaveError(next(filter(None, reasons)))


def _complete(folder: Path, snapshot: Snapshot, ranks: Ranks) -> None:
    """Write the manifest and give the folder its name; only then it is a checkpoint."""
    partial = folder.with_name(folder.name + PARTIAL)
    _write_manifest(partial, snapshot, ranks.world)
    remove(folder)
    os.replace(partial, folder)
    _sync(folder.parent)


def _write_manifest(partial: Path, snapshot: Snapshot, ranks: int) -> None:
    files = {}
    for path in sorted(partial.rglob("*")):
        _sync(path)
        if path.is_file():
            files[path.relative_to(partial).as_posix()] = _stored(path)
    manifest = Manifest(
        schema=SCHEMA,
        step=snapshot.record.run.step,
        resumable=snapshot.tensors is not None,
        ranks=ranks,
        versions={name: version(name) for name in ("mrgym", "torch", "transformers")},
        files=files,
        complete=True,
    )
    write_synced(partial / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))


def verify(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint whose files are all there, of the size they had.

    Raises:
        ConfigError: If it is not complete; says what is missing.
    """
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise _damaged(folder, "no manifest.json") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise _damaged(folder, f"an unreadable manifest.json ({error})") from error
    if manifest.schema != SCHEMA:
        raise ConfigError(
            f"{folder}: got checkpoint schema {manifest.schema}, expected {SCHEMA}; "
            "read it with the release that wrote it"
        )
    for name, stored in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise _damaged(folder, f"no {name}")
        if path.stat().st_size != stored.bytes:
            raise _damaged(folder, f"{name} of {path.stat().st_size} bytes, not {stored.bytes}")
        if stored.sha256 is not None and _sha256(path) != stored.sha256:
            raise _damaged(folder, f"{name} of other content")
    return manifest


def read_record(folder: Path) -> TrainerRecord:
    """Return where the run stood, and what it was a run of.

    Raises:
        ConfigError: If it cannot be read.
    """
    return _decoded(folder / _RECORD, TrainerRecord)


def read_rank_state(folder: Path, rank: int = 0) -> RankState | None:
    """Return the state of a rank, None where fewer ranks wrote the checkpoint.

    Raises:
        ConfigError: If it cannot be read.
    """
    path = folder / _rank_file(rank)
    return _decoded(path, RankState) if path.is_file() else None


def write_synced(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all, and have it on disk before returning."""
    partial = path.with_name(path.name + PARTIAL)
    partial.write_bytes(data)
    _sync(partial)
    os.replace(partial, path)
    _sync(path.parent)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _rank_file(rank: int) -> Path:
    return Path("state", f"rank_{rank:05d}.json")


def _decoded(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise _damaged(path.parent.parent, f"an unreadable {path.name} ({error})") from error


def _damaged(folder: Path, got: str) -> ConfigError:
    return ConfigError(
        f"{folder}: got {got}, expected a complete checkpoint; it was cut off or changed, "
        "so take another one"
    )


def _stored(path: Path) -> StoredFile:
    size = path.stat().st_size
    return StoredFile(size, _sha256(path) if size <= _HASHED_UP_TO else None)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
