"""From values of tokens to one number a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mrgym_trainers.gdpo.loss_config import LossConfig

__all__ = ["Denominator", "aggregate"]


@dataclass(frozen=True, slots=True)
class Denominator:
    """Counts of the whole step, over micro-batches and ranks, that a loss is divided by.

    Attributes:
        tokens: Sampled tokens of usable rollouts.
        rollouts: Usable rollouts.
    """

    tokens: int
    rollouts: int


def aggregate(
    values_BT: Tensor, mask_BT: Tensor, denominator: Denominator, config: LossConfig
) -> Tensor:
    """Return a micro-batch's share of the step's mean; the shares of all add up to it.

    Args:
        values_BT: A value a token; whatever stands at masked ones does not count.
        mask_BT: True where a token was sampled and counts.
        denominator: Counts of the whole step.
        config: Its ``aggregation`` and ``constant_length``.
    """
    values_BT = values_BT.masked_fill(~mask_BT, 0.0)
    if config.aggregation == "sequence_mean":
        means_B = values_BT.sum(1) / mask_BT.sum(1).clamp(min=1)
        return means_B.sum() / max(denominator.rollouts, 1)
    if config.aggregation == "constant":
        return values_BT.sum() / (max(denominator.rollouts, 1) * config.constant_length)
    return values_BT.sum() / max(denominator.tokens, 1)
