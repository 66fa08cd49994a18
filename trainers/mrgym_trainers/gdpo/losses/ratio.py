"""Ratios of probabilities that stay finite."""

from __future__ import annotations

from typing import Final, Literal

from torch import Tensor

__all__ = ["MAX_LOG_RATIO", "importance_ratio", "log_ratio"]

MAX_LOG_RATIO: Final = 20.0
"""Log ratios are held within plus and minus this (a ratio of 5e8), beyond it without gradient."""


def log_ratio(logprobs_BT: Tensor, other_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the first minus the second, within :data:`MAX_LOG_RATIO`, and 0 at masked tokens.

    Masked tokens are filled before the subtraction: infinities there would turn into NaN in the
    gradient even where the result is thrown away.
    """
    ignored_BT = ~mask_BT
    delta_BT = logprobs_BT.masked_fill(ignored_BT, 0.0) - other_logprobs_BT.masked_fill(
        ignored_BT, 0.0
    )
    return delta_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_ratio(
    policy_logprobs_BT: Tensor,
    old_policy_logprobs_BT: Tensor,
    mask_BT: Tensor,
    level: Literal["token", "sequence"],
) -> Tensor:
    """Return policy over old policy, with gradient.

    ``sequence`` is GSPO's length-normalised ratio, the same for all tokens of a rollout, in the
    form that gives each token its own gradient (GSPO-token; both arXiv 2507.18071): where a
    rollout's tokens have one advantage and one weight, the gradient is that of the plain form, and
    weights of tokens keep their meaning.
    """
    log_ratio_BT = log_ratio(policy_logprobs_BT, old_policy_logprobs_BT, mask_BT)
    if level == "token":
        return log_ratio_BT.exp()
    means_B = log_ratio_BT.detach().sum(1) / mask_BT.sum(1).clamp(min=1)
    own_BT = policy_logprobs_BT.masked_fill(~mask_BT, 0.0)
    return (means_B[:, None] + (own_BT - own_BT.detach())).exp()
