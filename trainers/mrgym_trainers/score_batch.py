"""What an advantage estimator is given and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from mrgym_trainers.group_stats import BoolArray, FloatArray, Groups

if TYPE_CHECKING:
    from collections.abc import Callable

    from mrgym_trainers.advantage_config import AdvantageConfig

__all__ = ["Estimate", "Estimator", "ScoreBatch", "weighted_sum"]


@dataclass(frozen=True, slots=True)
class ScoreBatch:
    """What an estimator sees. Rows are sorted by group, components by name.

    Attributes:
        names: [K] component names.
        weights_K: [K] weights, in the order of ``names``.
        scores_KB: [K, B] scores, 0 where absent.
        present_KB: [K, B] True where the score counts (measured, on a usable rollout).
        usable_B: [B] True where the rollout counts (valid, with at least one score).
        groups: The groups of the rows, with ``reduce`` and ``spread``.
        component_advantages_KB: [K, B] step 2 of GDPO, unweighted.
        state: What the estimator returned with the previous batch, ``{}`` before the first; None
            if the caller keeps no state.
    """

    names: tuple[str, ...]
    weights_K: FloatArray
    scores_KB: FloatArray
    present_KB: BoolArray
    usable_B: BoolArray
    groups: Groups
    component_advantages_KB: FloatArray
    state: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """Advantages, with what an estimator may have to say besides.

    Attributes:
        advantages_B: [B] finite advantages before whitening.
        kept_B: [B] False where the rollout is left out: advantage exactly 0, in no batch
            statistics. None keeps all.
        state: What the estimator wants back with the next batch; plain floats, for a checkpoint.
        metrics: Diagnostics, logged as ``estimator/<key>``.
    """

    advantages_B: FloatArray
    kept_B: BoolArray | None = None
    state: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


Estimator: TypeAlias = "Callable[[ScoreBatch, AdvantageConfig], FloatArray | Estimate]"
"""Takes the batch and the config, returns finite advantages [B] before whitening."""


def weighted_sum(values_KB: FloatArray, weights_K: FloatArray) -> FloatArray:
    """Return ``sum_k w[k] * values[k]``, [B], added in the order of the component names."""
    # Not a matrix product: BLAS may round rows differently by their position in the batch.
    total_B = np.zeros(values_KB.shape[1])
    for values_B, weight in zip(values_KB, weights_K, strict=True):
        total_B += weight * values_B
    return total_B
