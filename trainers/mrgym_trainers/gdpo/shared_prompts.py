"""Hidden states of rollouts, where a prompt that several of them share is read once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from mrgym_trainers.gdpo.output_layer import REFUSALS, evaluating, vocabulary_rows
from mrgym_trainers.gdpo.token_line import TokenLine

__all__ = ["SharedPrompts"]

_NAME = "mrgym_shared_prompts"
_TOLERANCE = 1e-3  # of the norm, or what the dtype can tell apart
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_LINE: ContextVar[TokenLine] = ContextVar("line")


class SharedPrompts:
    """The body of a causal language model, run on a line of tokens instead of padded rows.

    Everything but attention looks at one token at a time, so that every token of a
    :class:`~mrgym_trainers.gdpo.token_line.TokenLine` is computed once. For attention, queries,
    keys and values are spread over the rollouts' rows; there it is the causal one of any padded
    batch, which needs no mask: rows do not see each other, and padding stands after every token.

    Args:
        model: The causal language model.
        body: The part that gives hidden states.
    """

    def __init__(self, model: Any, body: Any) -> None:
        self._model, self._body = model, body
        self._longest: float | None = None

    def takes(self, line: TokenLine) -> bool:
        """Return whether the hidden states of a line are those of its rows.

        They are not where a layer sees less than a whole row, or where the model, tried once with
        gradient, gave something else: it may compute layers again in the backward pass, or mix
        tokens by other means than attention.
        """
        if self._longest is None:
            self._longest = self._find_longest()
        return line.shape[1] <= self._longest

    def hidden(self, line: TokenLine) -> Tensor:
        """Return the hidden states [N, H] of a line's tokens."""
        return self._run(line, input_ids=line.input_ids_N[None])

    def _run(self, line: TokenLine, **tokens: Tensor) -> Tensor:
        with _attending(self._body.config, line):
            output = self._body(position_ids=line.positions_N[None], use_cache=False, **tokens)
        hidden_NH: Tensor = output.last_hidden_state[0]
        return hidden_NH

    def _find_longest(self) -> float:
        config = self._body.config
        if config._attn_implementation != "sdpa" or getattr(config, "sub_configs", None):
            return 0.0
        try:
            with evaluating(self._model), torch.enable_grad():
                return _narrowest_window(config) if self._agrees() else 0.0
        except REFUSALS:
            return 0.0

    def _agrees(self) -> bool:
        """Return whether a small line has the hidden states and the gradients of its rows."""
        line = _small_line(vocabulary_rows(self._model), self._model.device)
        embeds_NE = self._model.get_input_embeddings()(line.input_ids_N).detach()
        embeds_BTE = embeds_NE[line.sources_L].unflatten(0, line.shape).requires_grad_()
        embeds_NE.requires_grad_()
        hidden_BTH = self._body(inputs_embeds=embeds_BTE, use_cache=False).last_hidden_state
        expected_NH = hidden_BTH.flatten(0, 1)[line.places_N]
        got_NH = self._run(line, inputs_embeds=embeds_NE[None])
        weight_NH = torch.linspace(-1, 1, got_NH.numel(), device=got_NH.device).view_as(got_NH)
        (expected_BTE,) = torch.autograd.grad((expected_NH * weight_NH).sum(), embeds_BTE)
        (got_NE,) = torch.autograd.grad((got_NH * weight_NH).sum(), embeds_NE)
        expected_NE = torch.zeros_like(got_NE)
        expected_NE.index_add_(0, line.sources_L, expected_BTE.flatten(0, 1))
        return _near(got_NH, expected_NH) and _near(got_NE, expected_NE)


def _narrowest_window(config: Any) -> float:
    """Return the length up to which every layer sees whole rows; 0 if that is not known."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    sizes = {kind: getattr(config, name, None) for kind, name in _WINDOWS.items()}
    if any(sizes.get(kind) is None for kind in kinds):
        return 0.0
    return min((float(size) for size in sizes.values() if size is not None), default=math.inf)


def _small_line(vocabulary: int, device: Any) -> TokenLine:
    """Return rollouts of mixed lengths, of two prompts."""
    tokens = [(7 + 11 * i) % vocabulary for i in range(12)]
    prompts = [tokens[:4], tokens[4:6], tokens[:4], tokens[4:6]]
    following = [tokens[6:11], tokens[8:11], tokens[3:6], tokens[:1]]
    return TokenLine.of(
        prompts, following, [[True] * len(ids) for ids in following], device=device
    )


def _near(got: Tensor, expected: Tensor) -> bool:
    tolerance = max(_TOLERANCE, 4 * torch.finfo(expected.dtype).eps)
    difference = (got.detach().double() - expected.detach().double()).norm()
    return bool(difference <= tolerance * expected.detach().double().norm())


# --- attention ------------------------------------------------------------------------------


@contextmanager
def _attending(config: Any, line: TokenLine) -> Iterator[None]:
    """Let a model's attention find the rows of a line; its layers look the function up by name."""
    before, token = config._attn_implementation, _LINE.set(line)
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _LINE.reset(token)


def _attention(
    module: Any,
    query_HND: Tensor,
    key_HND: Tensor,
    value_HND: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return Transformers' SDPA attention over the rows of the line that is being run."""
    if attention_mask is not None:
        raise ValueError("attention of a line: got a mask, expected none; run padded rows")
    line = _LINE.get()
    options.pop("position_ids", None)  # of the line, not of the rows
    out_BTHD, _ = AttentionInterface()["sdpa"](
        module,
        _to_rows(query_HND, line, shared=False),
        _to_rows(key_HND, line, shared=True),
        _to_rows(value_HND, line, shared=True),
        None,
        **options,
    )
    out_NHD: Tensor = _ToLine.apply(out_BTHD, line)  # type: ignore[no-untyped-call]
    return out_NHD[None], None


AttentionInterface.register(_NAME, _attention)


def _to_rows(heads_HND: Tensor, line: TokenLine, *, shared: bool) -> Tensor:
    """Return [B, heads, T, D] of [1, heads, N, D]."""
    line_NHD = heads_HND[0].transpose(0, 1)
    rows_BTHD: Tensor = _ToRows.apply(line_NHD, line, shared)  # type: ignore[no-untyped-call]
    return rows_BTHD.transpose(1, 2)


class _ToRows(torch.autograd.Function):
    """What stands in a line, in all of its places.

    ``shared`` says whether the gradients of a prompt's places are to be added up: those of
    queries are zero but in the first row, whose output alone is taken.
    """

    @staticmethod
    def forward(ctx: Any, line_NHD: Tensor, line: TokenLine, shared: bool) -> Tensor:
        ctx.line, ctx.shared = line, shared
        return line_NHD.index_select(0, line.sources_L).unflatten(0, line.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTHD: Tensor) -> tuple[Tensor, None, None]:
        line: TokenLine = ctx.line
        places_LHD = grad_BTHD.flatten(0, 1)
        if not ctx.shared:
            return places_LHD.index_select(0, line.places_N), None, None
        prompts = len(line.prompt_places_C)
        out_NHD = places_LHD.new_empty(len(line.places_N), *places_LHD.shape[1:])
        torch.index_select(places_LHD, 0, line.places_N[prompts:], out=out_NHD[prompts:])
        in_rows = grad_BTHD[:, : line.longest_prompt].flatten(1)
        # A product adds rows up in the same order each time, which index_add does not on a GPU.
        summed = line.prompts_PB.to(in_rows.dtype) @ in_rows
        summed_HD = summed.view(-1, *places_LHD.shape[1:])
        torch.index_select(summed_HD, 0, line.prompt_places_C, out=out_NHD[:prompts])
        return out_NHD, None, None


class _ToLine(torch.autograd.Function):
    """What stands in each position's own place."""

    @staticmethod
    def forward(ctx: Any, rows_BTHD: Tensor, line: TokenLine) -> Tensor:
        ctx.line = line
        return rows_BTHD.flatten(0, 1).index_select(0, line.places_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHD: Tensor) -> tuple[Tensor, None]:
        line: TokenLine = ctx.line
        rows_LHD = grad_NHD.new_zeros(line.shape[0] * line.shape[1], *grad_NHD.shape[1:])
        rows_LHD.index_copy_(0, line.places_N, grad_NHD)
        return rows_LHD.unflatten(0, line.shape), None
