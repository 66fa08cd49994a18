"""The clipped surrogate loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrgym_trainers.gdpo.config import LossConfig

__all__ = ["Denominator", "clipped_loss"]


@dataclass(frozen=True, slots=True)
class Denominator:
    """Counts of the whole step, over micro-batches and ranks, that a loss is divided by.

    Attributes:
        tokens: Sampled tokens of usable rollouts.
        rollouts: Usable rollouts.
    """

    tokens: int
    rollouts: int


def clipped_loss(
    policy_logprobs_BT: Tensor,
    old_policy_logprobs_BT: Tensor,
    advantages_B: Tensor,
    mask_BT: Tensor,
    denominator: Denominator,
    config: LossConfig,
) -> tuple[Tensor, dict[str, float]]:
    """Return a micro-batch's share of the step's loss, and sums for its metrics.

    ``rho = exp(policy - old policy)``; per token ``-min(rho A, clip(rho) A)`` (PPO's clipped
    surrogate, with clip bounds of their own on either side as in DAPO).

    Args:
        policy_logprobs_BT: Log-probabilities under the policy, with gradient.
        old_policy_logprobs_BT: Under the policy that the step began with.
        advantages_B: One advantage a rollout.
        mask_BT: True where a token was sampled and counts.
        denominator: Counts of the whole step; shares of all micro-batches add up to its loss.
        config: Clip bounds and aggregation.

    Returns:
        The scalar loss (finite, 0 where nothing counts) and ``clipped``, ``tokens``, ``kl``.
    """
    log_ratio_BT = (policy_logprobs_BT - old_policy_logprobs_BT).masked_fill(~mask_BT, 0.0)
    ratio_BT = log_ratio_BT.exp()
    bounded_BT = ratio_BT.clamp(1 - config.clip_low, 1 + config.clip_high)
    advantages_BT = advantages_B.to(ratio_BT.dtype)[:, None].expand_as(ratio_BT)
    surrogate_BT = torch.minimum(ratio_BT * advantages_BT, bounded_BT * advantages_BT)
    loss = -_aggregate(surrogate_BT * mask_BT, mask_BT, denominator, config)
    with torch.no_grad():
        clipped = (bounded_BT * advantages_BT < ratio_BT * advantages_BT) & mask_BT
        sums = {
            "clipped": float(clipped.sum()),
            "tokens": float(mask_BT.sum()),
            "kl": float(((ratio_BT - 1 - log_ratio_BT) * mask_BT).sum()),
        }
    return loss, sums


def _aggregate(
    values_BT: Tensor, mask_BT: Tensor, denominator: Denominator, config: LossConfig
) -> Tensor:
    if config.aggregation == "sequence_mean":
        means_B = values_BT.sum(1) / mask_BT.sum(1).clamp(min=1)
        return means_B.sum() / max(denominator.rollouts, 1)
    if config.aggregation == "constant":
        return values_BT.sum() / (max(denominator.rollouts, 1) * config.constant_length)
    return values_BT.sum() / max(denominator.tokens, 1)
