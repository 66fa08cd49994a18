"""The whole loss: surrogate, mismatch correction, divergence from a reference, entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from mrgym.errors import ConfigError
from mrgym_trainers.gdpo.loss_config import LossConfig
from mrgym_trainers.gdpo.losses.aggregation import Denominator, aggregate
from mrgym_trainers.gdpo.losses.kl import kl_estimate
from mrgym_trainers.gdpo.losses.mismatch import mismatch_weight
from mrgym_trainers.gdpo.losses.ratio import importance_ratio, log_ratio
from mrgym_trainers.gdpo.losses.surrogate import Surrogate, surrogate

__all__ = ["policy_loss"]


def policy_loss(
    policy_logprobs_BT: Tensor,
    old_policy_logprobs_BT: Tensor,
    advantages_B: Tensor,
    mask_BT: Tensor,
    denominator: Denominator,
    config: LossConfig,
    *,
    sampler_logprobs_BT: Tensor | None = None,
    reference_logprobs_BT: Tensor | None = None,
    entropy_BT: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a micro-batch's share of the step's loss, and sums for its metrics.

    A token's loss is ``-weight * surrogate + kl_coef * KL - entropy_coef * entropy``; the weight
    of the mismatch correction is the surrogate's alone.

    Args:
        policy_logprobs_BT: Log-probabilities under the policy, with gradient.
        old_policy_logprobs_BT: Under the policy that the step began with.
        advantages_B: One advantage a rollout.
        mask_BT: True where a token was sampled and counts; what stands elsewhere is not looked at.
        denominator: Counts of the whole step; shares of all micro-batches add up to its loss.
        config: The options, with ``mismatch`` resolved.
        sampler_logprobs_BT: As the sampler reported them; needed to correct a mismatch.
        reference_logprobs_BT: Under the frozen reference policy; needed with ``kl_coef``.
        entropy_BT: Entropy of the policy, with gradient; needed with ``entropy_coef``.

    Returns:
        The scalar loss (finite, 0 where nothing counts), and without gradient ``policy`` (the
        surrogate's part of the loss) and sums over counted tokens: ``tokens``, ``clipped_low``,
        ``clipped_high``, ``dual_clipped``, ``kl`` (k3 estimate of KL(old policy || policy)) and,
        with ``kl_coef``, ``kl_reference``.

    Raises:
        ConfigError: If an option lacks the log-probabilities it needs, or is not resolved.
    """
    ratio_BT = importance_ratio(policy_logprobs_BT, old_policy_logprobs_BT, mask_BT, config.ratio)
    advantages_BT = advantages_B.to(ratio_BT.dtype)[:, None].expand_as(ratio_BT)
    terms = surrogate(policy_logprobs_BT, ratio_BT, advantages_BT, config)
    values_BT = terms.values_BT
    if config.mismatch != "off":
        sampler_BT = _needed(sampler_logprobs_BT, "mismatch", config.mismatch, "sampler_logprobs")
        values_BT = values_BT * mismatch_weight(old_policy_logprobs_BT, sampler_BT, mask_BT, config)
    loss = -aggregate(values_BT, mask_BT, denominator, config)
    sums = {"policy": loss.detach()}
    sums |= _counts(terms, policy_logprobs_BT, old_policy_logprobs_BT, mask_BT)
    if config.kl_coef:
        reference_BT = _needed(
            reference_logprobs_BT, "kl_coef", config.kl_coef, "reference_logprobs"
        )
        kl_BT = kl_estimate(policy_logprobs_BT, reference_BT, mask_BT, config.kl)
        loss = loss + config.kl_coef * aggregate(kl_BT, mask_BT, denominator, config)
        sums["kl_reference"] = kl_BT.detach().sum()
    if config.entropy_coef:
        bonus_BT = _needed(entropy_BT, "entropy_coef", config.entropy_coef, "entropy")
        loss = loss - config.entropy_coef * aggregate(bonus_BT, mask_BT, denominator, config)
    return loss, sums


@torch.no_grad()
def _counts(
    terms: Surrogate, policy_logprobs_BT: Tensor, old_policy_logprobs_BT: Tensor, mask_BT: Tensor
) -> dict[str, Tensor]:
    delta_BT = log_ratio(policy_logprobs_BT, old_policy_logprobs_BT, mask_BT)
    return {
        "tokens": mask_BT.sum(),
        "clipped_low": (terms.clipped_low_BT & mask_BT).sum(),
        "clipped_high": (terms.clipped_high_BT & mask_BT).sum(),
        "dual_clipped": (terms.dual_clipped_BT & mask_BT).sum(),
        "kl": (torch.expm1(delta_BT) - delta_BT).sum(),
    }


def _needed(tensor: Tensor | None, option: str, value: object, name: str) -> Tensor:
    if tensor is None:
        raise ConfigError(
            f"LossConfig: {option}: got {value!r} without {name}, expected them; "
            f"pass {name}_BT to policy_loss, or turn {option} off"
        )
    return tensor
