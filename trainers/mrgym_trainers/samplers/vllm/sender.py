"""The trainer's side of a weight sync: tensors go layer by layer into shared memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mrgym.errors import SamplerError

__all__ = ["SharedMemorySender", "WeightSender", "WeightSyncClient"]

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64


class WeightSyncClient(Protocol):
    """What an engine offers for a sync (vLLM's own verbs), in this process or over HTTP."""

    def start_weight_update(self) -> None:
        """Begin."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load some tensors."""

    def finish_weight_update(self, weight_version: str) -> None:
        """End; from here on completions are of this version."""


class WeightSender(Protocol):
    """Sends a policy's weights to one or more engines."""

    def send(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Send all tensors and return when every engine samples with them."""

    def close(self) -> None:
        """Free what the sender holds."""


class SharedMemorySender:
    """Sends through a file in shared memory, for engines on the same host.

    Tensors are gathered and sent a layer or so at a time: more than ``chunk_bytes`` (or the
    largest tensor) is never held.

    Args:
        clients: The engines.
        dtype: What the engines compute in; tensors are sent in it.
        chunk_bytes: Most bytes of one message.
    """

    def __init__(
        self,
        clients: Iterable[WeightSyncClient],
        *,
        dtype: torch.dtype,
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> None:
        self._clients = [*clients]
        self._dtype = dtype
        self._chunk_bytes = chunk_bytes
        shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        handle, path = tempfile.mkstemp(prefix="mrgym-weights-", dir=shared)
        self._path = Path(path)
        self._file = os.fdopen(handle, "r+b")
        self._size = 0

    def send(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Send all tensors and return when every engine samples with them."""
        for client in self._clients:
            client.start_weight_update()
        for chunk in _chunks(named_tensors, self._dtype, self._chunk_bytes):
            info = self._write(chunk)
            for client in self._clients:
                client.update_weights(info)
        for client in self._clients:
            client.finish_weight_update(str(version))

    def close(self) -> None:
        """Remove the file. May be called again."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _write(self, chunk: list[tuple[str, Tensor]]) -> dict[str, Any]:
        """Write tensors to the file and return where they lie."""
        offsets, end = [], 0
        for _, tensor in chunk:
            offsets.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._grow(end)
        with mmap.mmap(self._file.fileno(), self._size) as view:
            for (_, tensor), offset in zip(chunk, offsets, strict=True):
                raw = tensor.view(-1).view(torch.uint8).numpy()
                view[offset : offset + tensor.nbytes] = raw.data
        return {
            "path": str(self._path),
            "names": [name for name, _ in chunk],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk],
            "shapes": [list(tensor.shape) for _, tensor in chunk],
            "offsets": offsets,
        }

    def _grow(self, size: int) -> None:
        """Reserve the file's bytes; written beyond what is left, the process would be killed."""
        if size <= self._size:
            return
        try:
            os.posix_fallocate(self._file.fileno(), 0, size)
        except OSError as error:
            raise SamplerError(
                f"{self._path.parent}: got {error.strerror}, expected {size >> 20} MiB for the "
                "weights on their way to vLLM; enlarge shared memory (docker run --shm-size=2g)"
            ) from error
        self._size = size


def _chunks(
    named_tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, most: int
) -> Iterator[list[tuple[str, Tensor]]]:
    chunk: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in named_tensors:
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        ready = tensor.detach().to(device="cpu", dtype=kind).contiguous()
        if chunk and held + ready.nbytes > most:
            yield chunk
            chunk, held = [], 0
        chunk.append((name, ready))
        held += ready.nbytes
    if chunk:
        yield chunk
