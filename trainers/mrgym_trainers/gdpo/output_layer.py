"""From token ids to hidden states to logits, in whatever way a model does it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

__all__ = ["REFUSALS", "Kind", "OutputLayer", "evaluating", "vocabulary_rows"]

Kind = Literal["linear", "own", "whole"]

_logger = logging.getLogger("mrgym")

_SCALES = (1.0, 1e2, 1e4)  # soft-capping shows on large logits only
_TOLERANCE = 1e-3  # of the largest logit, or what its dtype can tell apart
# What an unusual model may raise where it is called in an unusual way.
REFUSALS = (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError)


class OutputLayer:
    """How a causal language model gets from hidden states to logits; found by trying it once.

    Models may cap (Gemma 2) or scale (Granite, Cohere) what their last layer gives, so that layer
    alone is used only where it gave the model's own logits, also for large hidden states.

    Attributes:
        model: The causal language model.
        body: The part that gives hidden states; the model itself where ``kind`` is ``"whole"``.
        kind: ``"linear"``: logits are a linear layer of the hidden states. ``"own"``: the model's
            own forward turns hidden states into logits. ``"whole"``: only the model from tokens
            on gives its logits.
    """

    def __init__(self, model: Any, name: str) -> None:
        self.model = model
        with evaluating(model), torch.no_grad():
            self.kind, self.body, self._answer = _find(model)
        if self.kind != "linear":
            way = "the model's own forward, in chunks" if self.kind == "own" else "whole logits"
            _logger.warning(
                "model %r: got logits that are not a linear layer of its hidden states, expected "
                "one; log-probabilities are taken from %s (right, but slower)", name, way,
            )  # fmt: skip

    @property
    def head(self) -> Any:
        """The linear output layer as it is now; None if another one, or hooks, stand there."""
        if self.kind != "linear":
            return None
        head = self.model.get_output_embeddings()
        plain = type(head) is nn.Linear and not head._forward_hooks and not head._forward_pre_hooks
        return head if plain else None

    @property
    def vocabulary(self) -> int:
        """How many tokens the model has embeddings for."""
        return vocabulary_rows(self.model)

    def logits(self, hidden_MH: Tensor) -> Tensor:
        """Return the logits [M, V] that the model's own forward makes of hidden states."""
        return _own_logits(self.model, self.body, self._answer, hidden_MH)


def _find(model: Any) -> tuple[Kind, Any, Any]:
    """Return the kind, the body, and the class of the body's output."""
    ids_BT = torch.arange(1, 9, device=model.device)[None] % vocabulary_rows(model)
    expected_TV = model(input_ids=ids_BT, use_cache=False).logits[0]
    for body in _bodies(model):
        try:
            output = body(input_ids=ids_BT, use_cache=False)
            hidden_TH, answer = output.last_hidden_state[0], type(output)
            if _same(_own_logits(model, body, answer, hidden_TH), expected_TV):
                linear = _is_linear(model, body, answer, hidden_TH)
                return "linear" if linear else "own", body, answer
        except REFUSALS:
            continue
    return "whole", model, None


def _own_logits(model: Any, body: Any, answer: Any, hidden_MH: Tensor) -> Tensor:
    with _replaced_forward(body, answer(last_hidden_state=hidden_MH[None])):
        logits_MV: Tensor = model(inputs_embeds=hidden_MH[None], use_cache=False).logits[0]
    return logits_MV


def _is_linear(model: Any, body: Any, answer: Any, hidden_TH: Tensor) -> bool:
    head = model.get_output_embeddings()
    return type(head) is nn.Linear and all(
        _same(_own_logits(model, body, answer, hidden_TH * scale), head(hidden_TH * scale))
        for scale in _SCALES
    )


def vocabulary_rows(model: Any) -> int:
    """Return how many tokens a model has embeddings for."""
    rows: int = model.get_input_embeddings().weight.shape[0]
    return rows


def _bodies(model: Any) -> Iterator[Any]:
    """Yield what may give the hidden states, likeliest first."""
    for body in (model.base_model, model.get_decoder() if hasattr(model, "get_decoder") else None):
        if body is not None and body is not model:
            yield body


def _same(got: Tensor, expected: Tensor) -> bool:
    if got.shape != expected.shape:
        return False
    tolerance = max(_TOLERANCE, 2 * torch.finfo(expected.dtype).eps)
    return bool((got - expected).abs().max() <= tolerance * expected.abs().max())


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Switch dropout off, and every module back to what it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def _replaced_forward(module: Any, output: Any) -> Iterator[None]:
    """Let a module answer every call with an output, whatever it is given."""
    before = module.__dict__.get("forward")
    module.forward = lambda *_, **__: output
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
