"""The sampler's log-probabilities against the trainer's: how far apart, and what is done."""

from __future__ import annotations

import torch
from torch import Tensor

from mrgym.errors import ConfigError
from mrgym_trainers.gdpo.loss_config import LossConfig
from mrgym_trainers.gdpo.losses.ratio import log_ratio

__all__ = ["mismatch_metrics", "mismatch_weight"]


@torch.no_grad()
def mismatch_weight(
    old_policy_logprobs_BT: Tensor, sampler_logprobs_BT: Tensor, mask_BT: Tensor, config: LossConfig
) -> Tensor:
    """Return the weight of each token's surrogate, without gradient; 1 at masked tokens.

    With the mismatch ratio ``k = exp(old policy - sampler)``, ``tis`` gives ``min(k, tis_cap)``
    (truncated importance sampling); ``mask`` gives ``k`` for ``mask_low <= k <= mask_high`` and 0
    outside (IcePop, arXiv 2510.18855; its objective divides by all tokens, so tokens of weight 0
    stay in the denominator); ``off`` gives 1.

    Raises:
        ConfigError: If the correction is still ``auto``.
    """
    if config.mismatch == "auto":
        raise ConfigError(
            "LossConfig: mismatch: got 'auto' in a loss, expected a decision; "
            "call config.resolved(own_sampler=...)"
        )
    ratio_BT = log_ratio(old_policy_logprobs_BT, sampler_logprobs_BT, mask_BT).exp()
    if config.mismatch == "off":
        return torch.ones_like(ratio_BT)
    if config.mismatch == "tis":
        return ratio_BT.clamp(max=config.tis_cap)
    return ratio_BT.masked_fill(_changed(ratio_BT, config), 0.0)


@torch.no_grad()
def mismatch_metrics(
    old_policy_logprobs_BT: Tensor, sampler_logprobs_BT: Tensor, mask_BT: Tensor, config: LossConfig
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return sums over counted tokens, and largest values.

    Returns:
        ``kl`` (k3 estimate of KL(sampler || old policy)), ``abs``, ``ratio`` and ``changed``
        (tokens that ``tis`` truncates or ``mask`` drops); and ``abs``, ``ratio``.
    """
    delta_BT = log_ratio(old_policy_logprobs_BT, sampler_logprobs_BT, mask_BT)
    ratio_BT = delta_BT.exp()
    sums = {
        "kl": (torch.expm1(delta_BT) - delta_BT).sum(),
        "abs": delta_BT.abs().sum(),
        "ratio": ratio_BT.masked_fill(~mask_BT, 0.0).sum(),
        "changed": _changed(ratio_BT, config).sum(),
    }
    largest = {
        "abs": delta_BT.abs().amax(),
        "ratio": ratio_BT.masked_fill(~mask_BT, 0.0).amax(),
    }
    return sums, largest


def _changed(ratio_BT: Tensor, config: LossConfig) -> Tensor:
    """A ratio of 1, as masked tokens have, is in every range."""
    if config.mismatch == "tis":
        return ratio_BT > config.tis_cap
    if config.mismatch == "mask":
        return (ratio_BT < config.mask_low) | (ratio_BT > config.mask_high)
    return torch.zeros_like(ratio_BT, dtype=torch.bool)
