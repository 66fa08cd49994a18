"""Log-probabilities of chosen tokens, without the logits of all of them at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

__all__ = ["checkpointed_logprobs", "rows_per_chunk", "selected_logprobs"]

# Measured on a CPU (benchmarks/results/2026-12-01-memory.md): 16 MB of float32 logits at a time,
# but no fewer rows than make it worth reading the weight again. A GPU's arithmetic is faster
# beside its memory, so that it takes more rows (reckoned, not measured).
_CHUNK_ELEMENTS = 1 << 22
_LEAST_ROWS_CPU, _LEAST_ROWS = 128, 512


def rows_per_chunk(vocabulary: int, device: str = "cpu") -> int:
    """Return how many rows of logits to hold at a time: thousands of a small vocabulary's."""
    least = _LEAST_ROWS_CPU if device == "cpu" else _LEAST_ROWS
    return max(least, _CHUNK_ELEMENTS // vocabulary)


def selected_logprobs(
    hidden_MH: Tensor,
    head_weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_M: Tensor,
    *,
    temperature: float,
    chunk: int | None = None,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log-probability of each row's target, and entropy, under a linear output layer.

    The distribution is softmax((hidden W^T + b) / temperature). Logits exist for ``chunk`` rows
    at a time and are computed again in the backward pass, where the gradient of the weight adds
    up in place.

    Args:
        hidden_MH: Hidden states; the product with the weight is taken in their dtype.
        head_weight_VH: Weight of the output layer, of any floating dtype.
        bias_V: Its bias, if it has one.
        targets_M: Token ids.
        temperature: Logits are divided by it.
        chunk: Rows at a time; :func:`rows_per_chunk` chooses if left out.
        entropy_grad: Whether the entropy carries gradient.

    Returns:
        Two tensors [M], float32 (float64 for float64 hidden states): the softmax and the gradient
        of the weight are summed in that precision, whatever the hidden states are.
    """
    device = hidden_MH.device.type
    rows = rows_per_chunk(len(head_weight_VH), device) if chunk is None else chunk
    logprobs_M, entropy_M = _SelectedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_MH, head_weight_VH, bias_V, targets_M, temperature, rows
    )
    return logprobs_M, entropy_M if entropy_grad else entropy_M.detach()


def checkpointed_logprobs(
    logits_of: Callable[[Tensor], Tensor],
    inputs_MH: Tensor,
    targets_M: Tensor,
    *,
    temperature: float,
    chunk: int,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return what :func:`selected_logprobs` does, for any differentiable ``logits_of(rows)``.

    Every chunk is computed again in the backward pass.
    """

    def part(inputs_CH: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_CV = (_wide(logits_of(inputs_CH)) / temperature).log_softmax(-1)
        chosen_C = logprobs_CV.gather(1, targets_C[:, None])[:, 0]
        # An impossible token has -inf here, and 0 * -inf would be NaN; exp is 0 long before.
        finite_CV = logprobs_CV.clamp(min=-1e4)
        return chosen_C, -(logprobs_CV.exp() * finite_CV).sum(1)

    chunks = zip(torch.split(inputs_MH, chunk), torch.split(targets_M, chunk), strict=True)
    parts = [checkpoint(part, *c, use_reentrant=False, preserve_rng_state=False) for c in chunks]
    logprobs_M, entropy_M = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs_M, entropy_M if entropy_grad else entropy_M.detach()


class _SelectedLogprobs(torch.autograd.Function):
    """The chunked computation and its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_M: Tensor,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        head = _Head(weight_VH, bias_V, temperature, hidden_MH, chunk)
        shape, like = (len(hidden_MH),), _wide(hidden_MH[:0])
        logprobs_M, entropy_M, normaliser_M = (like.new_empty(shape) for _ in range(3))
        for rows in _slices(len(hidden_MH), chunk):
            logprobs_M[rows], entropy_M[rows], normaliser_M[rows] = _values(
                head.logits(hidden_MH[rows]), targets_M[rows]
            )
        ctx.save_for_backward(hidden_MH, weight_VH, bias_V, targets_M, entropy_M, normaliser_M)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return logprobs_M, entropy_M

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_M: Tensor | None, grad_entropy_M: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_MH, weight_VH, bias_V, targets_M, entropy_M, normaliser_M = ctx.saved_tensors
        head = _Head(weight_VH, bias_V, ctx.temperature, hidden_MH, ctx.chunk)
        grads = _Gradients(ctx.needs_input_grad, hidden_MH, head, weight_VH)
        if grad_logprobs_M is None:
            grad_logprobs_M = torch.zeros_like(entropy_M)
        for rows in _slices(len(hidden_MH), ctx.chunk):
            grad_CV = _grad_logits(
                head.logits(hidden_MH[rows]).sub_(normaliser_M[rows, None]).exp_(),
                targets_M[rows],
                entropy_M[rows],
                grad_logprobs_M[rows] / ctx.temperature,
                None if grad_entropy_M is None else grad_entropy_M[rows] / ctx.temperature,
            )
            grads.add(head.rounded(grad_CV), hidden_MH, rows)
        return *grads.result(weight_VH, bias_V), None, None, None


class _Head:
    """A linear output layer in the dtype of the hidden states, and the one buffer of its logits."""

    def __init__(
        self,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        temperature: float,
        hidden_MH: Tensor,
        chunk: int,
    ) -> None:
        self.weight_VH = weight_VH.to(hidden_MH.dtype)
        self.bias_V = None if bias_V is None else bias_V.to(hidden_MH.dtype)
        self.temperature = temperature
        self._product_CV = hidden_MH.new_empty(min(chunk, len(hidden_MH)), len(weight_VH))
        wide = _wide(hidden_MH[:0]).dtype
        self._wide_CV = self._product_CV
        if wide != hidden_MH.dtype:
            self._wide_CV = torch.empty_like(self._product_CV, dtype=wide)

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """Return tempered logits, to be written over; the last ones are lost."""
        out_CV = self._product_CV[: len(hidden_CH)]
        # Autocast would round float32 hidden states a caller asked to keep.
        with torch.autocast(hidden_CH.device.type, enabled=False):
            if self.bias_V is None:
                torch.mm(hidden_CH, self.weight_VH.T, out=out_CV)
            else:
                torch.addmm(self.bias_V, hidden_CH, self.weight_VH.T, out=out_CV)
        return self._widened(out_CV).div_(self.temperature)

    def rounded(self, grad_CV: Tensor) -> Tensor:
        """Return what was written over the logits in the dtype of the hidden states."""
        if self._wide_CV is self._product_CV:
            return grad_CV
        return self._product_CV[: len(grad_CV)].copy_(grad_CV)

    def _widened(self, product_CV: Tensor) -> Tensor:
        if self._wide_CV is self._product_CV:
            return product_CV
        return self._wide_CV[: len(product_CV)].copy_(product_CV)


class _Gradients:
    """Gradients of hidden states, weight and bias, as far as they are needed."""

    def __init__(
        self, needed: tuple[bool, ...], hidden_MH: Tensor, head: _Head, weight_VH: Tensor
    ) -> None:
        self._head_VH = head.weight_VH
        wide = _wide(hidden_MH[:0]).dtype
        self.hidden_MH = torch.empty_like(hidden_MH) if needed[0] else None
        self.weight_VH = torch.zeros_like(weight_VH, dtype=wide) if needed[1] else None
        self.bias_V = weight_VH.new_zeros(len(weight_VH), dtype=wide) if needed[2] else None

    def add(self, grad_CV: Tensor, hidden_MH: Tensor, rows: slice) -> None:
        """Add what a chunk contributes."""
        with torch.autocast(grad_CV.device.type, enabled=False):
            if self.hidden_MH is not None:
                torch.mm(grad_CV, self._head_VH, out=self.hidden_MH[rows])
            if self.weight_VH is not None:
                _add_product(self.weight_VH, grad_CV.T, hidden_MH[rows])
        if self.bias_V is not None:
            self.bias_V.add_(grad_CV.sum(0))

    def result(self, weight_VH: Tensor, bias_V: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients in the dtypes of what they belong to."""
        weight_grad = None if self.weight_VH is None else self.weight_VH.to(weight_VH.dtype)
        bias_grad = None
        if self.bias_V is not None and bias_V is not None:
            bias_grad = self.bias_V.to(bias_V.dtype)
        return self.hidden_MH, weight_grad, bias_grad


def _add_product(sum_VH: Tensor, grad_VC: Tensor, hidden_CH: Tensor) -> None:
    """Add a matrix product in place, with little beside it where its dtype is another."""
    if sum_VH.dtype == grad_VC.dtype:
        sum_VH.addmm_(grad_VC, hidden_CH)
        return
    elements = _CHUNK_ELEMENTS * (1 if sum_VH.device.type == "cpu" else 16)
    block = max(1, elements // sum_VH.shape[1])
    for rows in _slices(len(sum_VH), block):
        sum_VH[rows].add_(grad_VC[rows] @ hidden_CH)


def _values(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probability, entropy and log of the normaliser [C]; the logits are written over.

    Subtracting the largest logit first keeps more digits than log_softmax does on a CPU.
    """
    top_C = logits_CV.amax(1)
    logits_CV.sub_(top_C[:, None])
    chosen_C = logits_CV.gather(1, targets_C[:, None])[:, 0]
    exp_CV = logits_CV.exp_()
    total_C = exp_CV.sum(1)
    log_total_C = total_C.log()
    torch.special.entr(exp_CV, out=exp_CV)  # 0 where a token is impossible
    entropy_C = exp_CV.sum(1) / total_C + log_total_C
    return chosen_C - log_total_C, entropy_C, top_C + log_total_C


def _grad_logits(
    probabilities_CV: Tensor,
    targets_C: Tensor,
    entropy_C: Tensor,
    grad_logprobs_C: Tensor,
    grad_entropy_C: Tensor | None,
) -> Tensor:
    """Return the gradient of the logits, written over the probabilities.

    d logprob[y] / d z[j] = [j = y] - p[j] and d H / d z[j] = -p[j] (log p[j] + H).
    """
    if grad_entropy_C is None:
        grad_CV = probabilities_CV.mul_(-grad_logprobs_C[:, None])
    else:
        surprise_CV = torch.special.entr(probabilities_CV)
        factor_C = -(grad_logprobs_C + grad_entropy_C * entropy_C)
        grad_CV = probabilities_CV.mul_(factor_C[:, None])
        grad_CV.addcmul_(surprise_CV, grad_entropy_C[:, None])
    return grad_CV.scatter_add_(1, targets_C[:, None], grad_logprobs_C[:, None])


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in the precision sums are taken in."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _slices(rows: int, chunk: int) -> Iterator[slice]:
    return (slice(at, at + chunk) for at in range(0, rows, chunk))
