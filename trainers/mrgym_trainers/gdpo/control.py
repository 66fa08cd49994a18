"""The control run: rollouts get each other's scores, so that nothing can be learned from them."""

from __future__ import annotations

import torch
from torch import Tensor

from mrgym.components import PRESENT_PREFIX, REWARD_PREFIX

__all__ = ["shuffled_scores"]


def shuffled_scores(batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Return the batch with every usable rollout holding the scores of a random usable one."""
    usable = batch["valid"].nonzero().squeeze(1)
    order = torch.arange(len(batch["valid"]))
    order[usable] = usable[torch.randperm(len(usable), generator=generator)]
    prefixes = (REWARD_PREFIX, PRESENT_PREFIX)
    return {k: v[order] if k.startswith(prefixes) else v for k, v in batch.items()}
