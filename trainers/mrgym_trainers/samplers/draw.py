"""Drawing tokens by inverse transform: one uniform a token, exact in the tails as well."""

from __future__ import annotations

import torch
from torch import Tensor

from mrgym.errors import SamplerError

__all__ = ["draw_tokens", "draw_uniforms"]

_MOST_ELEMENTS = 1 << 22  # float64 sums of a large vocabulary are made for so many at a time


def draw_uniforms(rows: int, tokens: int, generator: torch.Generator) -> Tensor:
    """Return uniform numbers in [0, 1) [B, T], in the precision tokens are drawn in."""
    device = generator.device
    # In float32 a token rarer than 6e-8 could never be drawn; Apple's GPUs have nothing wider.
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.rand(rows, tokens, generator=generator, device=device, dtype=dtype)


def draw_tokens(logits_BV: Tensor, uniforms_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return a token a row, and its log-probability under the tempered distribution.

    The token is the first whose cumulated probability exceeds the row's uniform number, so one of
    probability 0 is never drawn. At temperature 0 it is the likeliest one, with its untempered
    log-probability, and the uniform numbers are not looked at.

    Args:
        logits_BV: The model's logits, in any floating type.
        uniforms_B: Numbers from :func:`draw_uniforms`.
        temperature: Logits are divided by it.

    Raises:
        SamplerError: If a row's logits are no distribution (NaN, +inf, or -inf throughout).
    """
    rows = max(1, _MOST_ELEMENTS // logits_BV.shape[1])
    chunks = zip(torch.split(logits_BV, rows), torch.split(uniforms_B, rows), strict=True)
    parts = [_draw(logits, uniforms, temperature) for logits, uniforms in chunks]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _draw(logits_BV: Tensor, uniforms_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    scaled_BV = logits_BV.float() / (temperature or 1.0)
    below_peak_BV = scaled_BV - scaled_BV.amax(1, keepdim=True)
    # Widened first: cumsum(dtype=...) is several times slower on CPU.
    mass_BV = below_peak_BV.exp().to(uniforms_B.dtype).cumsum(1)
    total_B = mass_BV[:, -1]
    if not bool(total_B.isfinite().all()):
        raise SamplerError(
            "TransformersSampler: got no distribution from the model (logits NaN or infinite), "
            "expected finite logits; the weights have diverged, try a lower learning_rate"
        )
    if temperature == 0.0:
        tokens_B = below_peak_BV.argmax(1)
    else:
        tokens_B = _first_above(mass_BV, uniforms_B * total_B)
    logprobs_B = below_peak_BV.gather(1, tokens_B[:, None])[:, 0] - total_B.log()
    return tokens_B, logprobs_B.float()


def _first_above(mass_BV: Tensor, target_B: Tensor) -> Tensor:
    """Return the first index whose cumulated mass exceeds the target, which rounding may lift."""
    total_B = mass_BV[:, -1]
    below_B = torch.nextafter(total_B, torch.zeros_like(total_B))
    target_B = target_B.minimum(below_B)
    return torch.searchsorted(mass_BV, target_B[:, None], right=True)[:, 0]
