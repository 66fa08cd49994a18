"""What is maximised: importance ratio times advantage, within bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrgym_trainers.gdpo.loss_config import LossConfig

__all__ = ["Surrogate", "surrogate"]


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The surrogate of each token, and which bounds were at work.

    Attributes:
        values_BT: To be maximised.
        clipped_low_BT: Where the ratio's lower bound decided.
        clipped_high_BT: Where its upper bound decided.
        dual_clipped_BT: Where the dual clip decided.
    """

    values_BT: Tensor
    clipped_low_BT: Tensor
    clipped_high_BT: Tensor
    dual_clipped_BT: Tensor


def surrogate(
    policy_logprobs_BT: Tensor, ratio_BT: Tensor, advantages_BT: Tensor, config: LossConfig
) -> Surrogate:
    """Return the surrogate that ``config.surrogate`` names.

    Args:
        policy_logprobs_BT: Log-probabilities under the policy, with gradient.
        ratio_BT: Importance ratios, with gradient.
        advantages_BT: Advantages.
        config: The surrogate and its bounds.
    """
    bounded_BT = ratio_BT.clamp(1 - config.clip_low, 1 + config.clip_high)
    below_BT, above_BT = ratio_BT < 1 - config.clip_low, ratio_BT > 1 + config.clip_high
    nowhere_BT = torch.zeros_like(below_BT)
    if config.surrogate == "cispo":
        values_BT = bounded_BT.detach() * advantages_BT * policy_logprobs_BT
        return Surrogate(values_BT, below_BT, above_BT, nowhere_BT)
    worse_BT, better_BT = advantages_BT < 0, advantages_BT > 0
    values_BT = torch.minimum(ratio_BT * advantages_BT, bounded_BT * advantages_BT)
    if config.dual_clip is None:
        return Surrogate(values_BT, below_BT & worse_BT, above_BT & better_BT, nowhere_BT)
    floor_BT = torch.where(worse_BT, config.dual_clip * advantages_BT, -torch.inf)
    far_BT = worse_BT & (ratio_BT > config.dual_clip)
    values_BT = torch.maximum(values_BT, floor_BT)
    return Surrogate(values_BT, below_BT & worse_BT, above_BT & better_BT, far_BT)
