"""Hidden states of rollouts, where a prompt that several of them share is read once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mrgym_trainers.gdpo.line_attention import attending_to_rows
from mrgym_trainers.gdpo.output_layer import REFUSALS, evaluating, vocabulary_rows
from mrgym_trainers.gdpo.token_line import TokenLine

__all__ = ["SharedPrompts"]

_TOLERANCE = 1e-3  # of the norm, or what the dtype can tell apart
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


class SharedPrompts:
    """The body of a causal language model, run on a line of tokens instead of padded rows.

    Everything but attention looks at one token at a time, so that every token of a
    :class:`~mrgym_trainers.gdpo.token_line.TokenLine` is computed once. For attention, queries,
    keys and values are spread over the rollouts' rows.

    Args:
        model: The causal language model.
        body: The part that gives hidden states.
    """

    def __init__(self, model: Any, body: Any) -> None:
        self._model, self._body = model, body
        self._longest: float | None = None

    @property
    def longest(self) -> float:
        """Length up to which rollouts may be run as a line; 0 if they may not.

        A layer may see less than a whole row. The model, tried once with gradient, may give
        something else: where it computes layers again in the backward pass, or mixes tokens by
        other means than attention.
        """
        if self._longest is None:
            self._longest = self._find_longest()
        return self._longest

    def hidden(self, line: TokenLine) -> Tensor:
        """Return the hidden states [C, H] of a line's tokens."""
        return self._run(line, input_ids=line.input_ids_C[None])

    def _run(self, line: TokenLine, **tokens: Tensor) -> Tensor:
        with attending_to_rows(self._body.config, line):
            output = self._body(position_ids=line.positions_C[None], use_cache=False, **tokens)
        hidden_CH: Tensor = output.last_hidden_state[0]
        return hidden_CH

    def _find_longest(self) -> float:
        try:
            config = self._body.config
            if config._attn_implementation != "sdpa" or getattr(config, "sub_configs", None):
                return 0.0
            with evaluating(self._model), torch.enable_grad():
                return _narrowest_window(config) if self._agrees() else 0.0
        except REFUSALS:
            return 0.0

    def _agrees(self) -> bool:
        """Return whether a small line has the hidden states and the gradients of its rows."""
        line = _small_line(vocabulary_rows(self._model), self._model.device)
        embeds_CH = self._model.get_input_embeddings()(line.input_ids_C).detach()
        embeds_BTH = embeds_CH[line.sources_BT].requires_grad_()
        embeds_CH.requires_grad_()
        hidden_BTH = self._body(inputs_embeds=embeds_BTH, use_cache=False).last_hidden_state
        expected_CH = hidden_BTH.flatten(0, 1)[line.places_C]
        got_CH = self._run(line, inputs_embeds=embeds_CH[None])
        if not _near(got_CH, expected_CH):
            return False
        in_rows_BTH = _gradient(expected_CH, embeds_BTH)
        expected_CH = torch.zeros_like(embeds_CH).index_put_(
            (line.sources_BT,), in_rows_BTH, accumulate=True
        )
        return _near(_gradient(got_CH, embeds_CH), expected_CH)


def _narrowest_window(config: Any) -> float:
    """Return the length up to which every layer sees whole rows; 0 if that is not known."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    sizes = {kind: getattr(config, name, None) for kind, name in _WINDOWS.items()}
    if any(sizes.get(kind) is None for kind in kinds):
        return 0.0
    return min((float(size) for size in sizes.values() if size is not None), default=math.inf)


def _small_line(vocabulary: int, device: Any) -> TokenLine:
    """Return four rollouts of different lengths, of two prompts."""
    tokens = [(7 + 11 * i) % vocabulary for i in range(12)]
    prompts = [tokens[:4], tokens[4:6], tokens[:4], tokens[4:6]]
    following = [tokens[6:11], tokens[8:11], tokens[3:6], tokens[:1]]
    return TokenLine.of(prompts, following, [[True] * len(ids) for ids in following], device=device)


def _gradient(hidden_CH: Tensor, embeds: Tensor) -> Tensor:
    """Return the gradient of a sum in which every hidden state has a weight of its own."""
    weights = torch.linspace(-1, 1, hidden_CH.numel(), device=hidden_CH.device)
    (gradient,) = torch.autograd.grad((hidden_CH * weights.view_as(hidden_CH)).sum(), embeds)
    return gradient


def _near(got: Tensor, expected: Tensor) -> bool:
    tolerance = max(_TOLERANCE, 4 * torch.finfo(expected.dtype).eps)
    difference = (got.detach().float() - expected.detach().float()).norm()
    return bool(difference <= tolerance * expected.detach().float().norm())
