"""How far the policy is from the frozen reference policy."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mrgym_trainers.gdpo.losses.ratio import log_ratio

__all__ = ["kl_estimate"]


def kl_estimate(
    policy_logprobs_BT: Tensor,
    reference_logprobs_BT: Tensor,
    mask_BT: Tensor,
    kind: Literal["k1", "k2", "k3"],
) -> Tensor:
    """Return the estimate of KL(policy || reference) at each token; 0 at masked ones.

    With ``d = policy - reference``: k1 is ``d``, k2 is ``d^2 / 2``, k3 is ``exp(-d) - 1 + d``
    (Schulman 2020, "Approximating KL divergence"), for tokens that the policy sampled. As values,
    k1 and k3 are unbiased. As losses, over the policy's own samples, the gradient of k1 has mean
    zero and pulls nowhere, that of k2 is the gradient of KL(policy || reference), and that of k3
    the gradient of KL(reference || policy) (arXiv 2506.09477). In later passes over the same
    samples they stay as they are: no importance ratio is applied.
    """
    delta_BT = log_ratio(policy_logprobs_BT, reference_logprobs_BT, mask_BT)
    if kind == "k1":
        return delta_BT
    if kind == "k2":
        return 0.5 * delta_BT.square()
    return torch.expm1(-delta_BT) + delta_BT
