"""Diagnostics of a batch's scores and advantages, by the name they are logged under."""

from __future__ import annotations

import numpy as np

from mrgym_trainers.group_stats import (
    BoolArray,
    FloatArray,
    correlations,
    group_range,
    mean_and_std,
)
from mrgym_trainers.score_batch import ScoreBatch

__all__ = ["batch_metrics"]

_SAME = 1e-9
"""Advantages this close (relatively, above 1) are the same value."""


def batch_metrics(
    batch: ScoreBatch, before_B: FloatArray, final_B: FloatArray, informative_B: BoolArray
) -> dict[str, float]:
    """Return the diagnostics, the same bits in any order of the rollouts.

    Args:
        batch: The scores.
        before_B: [B] advantages before whitening.
        final_B: [B] advantages.
        informative_B: [B] True where the rollout's group carries signal.
    """
    groups = batch.groups
    usable_B = batch.usable_B.astype(np.float64)
    return {
        "groups/count": float(len(groups.sizes_P)),
        "groups/size_min": float(groups.sizes_P.min()),
        "groups/size_max": float(groups.sizes_P.max()),
        "advantage/abs_mean": mean_and_std(np.abs(final_B), usable_B)[0],
        "advantage/frac_no_signal": float(np.mean(~informative_B[groups.starts_P])),
        "advantage/distinct": _distinct(before_B[batch.usable_B]),
        **_by_component(batch, usable_B),
        **_by_pair("reward/corr", batch, batch.scores_KB),
        **_by_pair("reward/corr_within", batch, batch.component_advantages_KB),
    }


def _by_component(batch: ScoreBatch, usable_B: FloatArray) -> dict[str, float]:
    _, span_KP = group_range(batch.scores_KB, batch.present_KB, batch.groups)
    out = {}
    for k, name in enumerate(batch.names):
        out[f"advantage/frac_constant/{name}"] = float(np.mean(span_KP[k] == 0))
        _, out[f"advantage/std/{name}"] = mean_and_std(batch.component_advantages_KB[k], usable_B)
    return out


def _distinct(values_B: FloatArray) -> float:
    """Return how many different values there are."""
    sorted_B = np.sort(values_B)
    gaps = np.diff(sorted_B) > _SAME * np.maximum(1.0, np.abs(sorted_B[1:]))
    return float(np.sum(gaps) + (len(sorted_B) > 0))


def _by_pair(prefix: str, batch: ScoreBatch, values_KB: FloatArray) -> dict[str, float]:
    """Return the correlation of every two components that both vary."""
    pairs = zip(*correlations(values_KB, batch.present_KB), strict=True)
    return {
        f"{prefix}/{batch.names[left]}/{batch.names[right]}": float(value)
        for left, right, value in pairs
        if not np.isnan(value)
    }
