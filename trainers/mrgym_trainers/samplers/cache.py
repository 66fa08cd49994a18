"""A key/value cache with room ahead, so that a token's keys are written and not all copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

__all__ = ["growing_cache"]

# Share of a row's length kept free behind it. More room means fewer copies, and gaps between rows
# that attention on CPU reads across at up to twice the time.
_ROOM = 1 / 8


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer, as views of buffers that are longer.

    ``keys`` and ``values`` hold what was seen and no more, as in the class it stands for, whose
    other methods work on them as they are.
    """

    keys: Tensor
    values: Tensor
    _room = 0
    _buffers: tuple[Tensor, Tensor]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens and return all of them [B, heads, T, head_dim]."""
        start = self.get_seq_length()
        if start == 0:
            first: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return first
        end = start + key_states.shape[-2]
        if end > self._room:
            self._move(end, None)
        keys, values = self._buffers
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        rows = torch.arange(len(self.keys), device=self.keys.device)
        self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        if self.get_seq_length() > 0:
            self._move(self.get_seq_length(), indices)

    def _move(self, length: int, rows: Tensor | None) -> None:
        """Move the states to buffers with room behind ``length`` tokens."""
        self._room = length + 1 + int(length * _ROOM)
        keys, values = (_moved(states, self._room, rows) for states in (self.keys, self.values))
        seen = self.keys.shape[-2]
        self._buffers = keys, values
        self.keys, self.values = keys[:, :, :seen], values[:, :, :seen]


def growing_cache(config: Any) -> DynamicCache:
    """Return an empty cache for a model: layers that see everything grow, others are its own."""
    cache = DynamicCache(config=config)
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[i] = GrowingLayer()  # type: ignore[no-untyped-call]
    if cache.layer_class_to_replicate is not None:
        cache.layer_class_to_replicate = GrowingLayer
    return cache


def _moved(states: Tensor, room: int, rows: Tensor | None) -> Tensor:
    """Return a buffer that begins with the states of these rows, in one copy."""
    batch, heads, length, width = states.shape
    buffer = states.new_empty(batch if rows is None else len(rows), heads, room, width)
    if rows is None:
        buffer[:, :, :length] = states
    else:
        torch.index_select(states, 0, rows, out=buffer[:, :, :length])
    return buffer
