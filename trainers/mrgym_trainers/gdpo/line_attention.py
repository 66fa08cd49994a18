"""Attention among the rows of a token line, for any model that looks its attention up by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mrgym_trainers.gdpo.token_line import TokenLine

__all__ = ["attending_to_rows"]

_NAME = "mrgym_token_line"
_LINE: ContextVar[TokenLine] = ContextVar("line")


@contextmanager
def attending_to_rows(config: Any, line: TokenLine) -> Iterator[None]:
    """Let the attention of a model whose input is a line attend to its rows.

    Args:
        config: The model's configuration, where its layers look the attention function up.
        line: The line that goes through the model in this context, as a batch of one.
    """
    before, token = config._attn_implementation, _LINE.set(line)
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _LINE.reset(token)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return Transformers' SDPA attention; queries, keys and values are [1, heads, C, D].

    It is the causal one, of the rows that the line stands for: they do not see each other, and
    padding stands after every token, so that no mask is needed.
    """
    if attention_mask is not None:
        raise ValueError("attention of a line: got a mask, expected none; run padded rows")
    line = _LINE.get()
    options.pop("position_ids", None)  # of the line, not of the rows
    out_BT, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](
        module,
        _to_rows(query, line, summed=False),
        _to_rows(key, line, summed=True),
        _to_rows(value, line, summed=True),
        None,
        **options,
    )
    out_C: Tensor = _ToLine.apply(out_BT, line)  # type: ignore[no-untyped-call]
    return out_C[None], None


AttentionInterface.register(_NAME, _attention)


def _to_rows(heads: Tensor, line: TokenLine, *, summed: bool) -> Tensor:
    """Return [B, heads, T, D] of [1, heads, C, D]."""
    line_C = heads[0].transpose(0, 1)
    rows_BT: Tensor = _ToRows.apply(line_C, line, summed)  # type: ignore[no-untyped-call]
    return rows_BT.transpose(1, 2)


class _ToRows(torch.autograd.Function):
    """The rows [B, T, heads, D] that a line [C, heads, D] stands for.

    ``summed`` says whether the gradients of a prompt add up over the rows that have it. Those of
    queries are 0 but in the first, the only one whose output is taken.
    """

    @staticmethod
    def forward(ctx: Any, line_C: Tensor, line: TokenLine, summed: bool) -> Tensor:
        ctx.line, ctx.summed = line, summed
        return line_C.index_select(0, line.sources_BT.flatten()).view(
            *line.shape, *line_C.shape[1:]
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BT: Tensor) -> tuple[Tensor, None, None]:
        line: TokenLine = ctx.line
        by_place = grad_BT.flatten(0, 1)
        if not ctx.summed:
            return by_place.index_select(0, line.places_C), None, None
        prompts = len(line.prompt_places)
        grad_C = by_place.new_empty(len(line.places_C), *by_place.shape[1:])
        torch.index_select(_prompt_sums(grad_BT, line), 0, line.prompt_places, out=grad_C[:prompts])
        torch.index_select(by_place, 0, line.places_C[prompts:], out=grad_C[prompts:])
        return grad_C, None, None


class _ToLine(torch.autograd.Function):
    """What stands in the own places of a line's tokens, [C, heads, D] of [B, T, heads, D]."""

    @staticmethod
    def forward(ctx: Any, rows_BT: Tensor, line: TokenLine) -> Tensor:
        ctx.line = line
        return rows_BT.flatten(0, 1).index_select(0, line.places_C)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_C: Tensor) -> tuple[Tensor, None]:
        line: TokenLine = ctx.line
        grad_BT = grad_C.new_zeros(*line.shape, *grad_C.shape[1:])
        grad_BT.flatten(0, 1).index_copy_(0, line.places_C, grad_C)
        return grad_BT, None


def _prompt_sums(grad_BT: Tensor, line: TokenLine) -> Tensor:
    """Return the sum over each prompt's rows, one padded prompt after the other.

    A product adds up in the same order each time, which index_add does not on a GPU.
    """
    in_prompts = grad_BT[:, : line.longest_prompt].flatten(1)
    with torch.autocast(in_prompts.device.type, enabled=False):
        sums = line.prompts_PB.to(in_prompts.dtype) @ in_prompts
    return sums.view(-1, *grad_BT.shape[2:])
