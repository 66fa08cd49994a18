"""Estimators of the advantage before whitening: one registry, a plain function each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from mrgym.errors import ConfigError
from mrgym_trainers.advantage_constrained import lagrangian
from mrgym_trainers.group_stats import FloatArray, group_std, mean_and_std, normalise, positive
from mrgym_trainers.score_batch import Estimate, Estimator, ScoreBatch, weighted_sum

if TYPE_CHECKING:
    from mrgym_trainers.advantage_config import AdvantageConfig

__all__ = [
    "BUILT_IN",
    "ESTIMATORS",
    "Estimate",
    "Estimator",
    "ScoreBatch",
    "register_estimator",
    "weighted_sum",
]

_NO_SIGN = 1e-8
"""A component advantage this small takes no side (the value of the method's authors)."""


def gdpo(batch: ScoreBatch, config: AdvantageConfig) -> FloatArray:
    """Return the weighted sum of component advantages, [B] (arXiv 2601.05242, steps 2 and 3)."""
    return weighted_sum(batch.component_advantages_KB, batch.weights_K)


def grpo(batch: ScoreBatch, config: AdvantageConfig) -> FloatArray:
    """Return the normalised weighted sum of scores, [B] (DeepSeekMath, arXiv 2402.03300).

    With ``scale=False`` it is Dr. GRPO (arXiv 2503.20783), with a leave-one-out baseline as well
    it is RLOO (arXiv 2402.14740).
    """
    total_B = weighted_sum(batch.scores_KB, batch.weights_K)
    (advantages_B,) = normalise(total_B[None], batch.usable_B[None], batch.groups, config)
    return np.asarray(advantages_B)


def dvao(batch: ScoreBatch, config: AdvantageConfig) -> Estimate:
    """Return component advantages weighted by their std in the group (arXiv 2605.25604, Eq. 9).

    ``A = sum_k v[k] * a[k]`` with ``v[k] = w[k] * std[k] / sum_l w[l] * std[l]`` in each group. A
    std is in units of the score, so a component of a larger range weighs more.

    Raises:
        ConfigError: A weight is negative.
    """
    _refuse_negative_weights(batch)
    std_KP = group_std(batch.scores_KB, batch.present_KB, batch.groups, config)
    std_KP = std_KP / positive(std_KP.max(axis=0))  # a ratio is all that counts; no overflow
    total_P = weighted_sum(std_KP, batch.weights_K)
    share_KP = std_KP * batch.weights_K[:, None] / positive(total_P)
    advantages_KB = batch.component_advantages_KB * batch.groups.spread(share_KP)
    informed_P = (total_P > 0).astype(np.float64)
    metrics = {
        f"weight/{name}": mean_and_std(share_P, informed_P)[0]
        for name, share_P in zip(batch.names, share_KP, strict=True)
        if informed_P.any()
    }
    return Estimate(weighted_sum(advantages_KB, np.ones(len(share_KP))), metrics=metrics)


def _refuse_negative_weights(batch: ScoreBatch) -> None:
    for name, weight in zip(batch.names, batch.weights_K, strict=True):
        if weight < 0:
            raise ConfigError(
                f"AdvantageConfig: weights: got {name}={weight:g}, expected no negative weight for "
                "estimator 'dvao'; turn the score round instead"
            )


def gd2po(batch: ScoreBatch, config: AdvantageConfig) -> Estimate:
    """Return GDPO's advantages without rollouts whose components disagree (arXiv 2606.16771).

    A rollout with weighted component advantages of both signs and
    ``|sum| < min_agreement * sum of sizes`` is left out; what stays of a group is multiplied by
    the share of its rollouts that stayed.
    """
    parts_KB = batch.component_advantages_KB * batch.weights_K[:, None]
    each_K = np.ones(len(parts_KB))
    total_B = weighted_sum(parts_KB, each_K)
    sides_KB = batch.component_advantages_KB * np.sign(batch.weights_K)[:, None]
    conflict_B = (sides_KB > _NO_SIGN).any(axis=0) & (sides_KB < -_NO_SIGN).any(axis=0)
    size_B = weighted_sum(np.abs(parts_KB), each_K) + _NO_SIGN  # a tie is left out, not rounded
    kept_B = batch.usable_B & ~(conflict_B & (np.abs(total_B) < config.min_agreement * size_B))
    counts = batch.groups.counts
    share_P = counts(kept_B) / np.maximum(counts(batch.usable_B), 1)
    usable = max(int(batch.usable_B.sum()), 1)
    metrics = {
        "frac_conflict": float(np.sum(conflict_B & batch.usable_B) / usable),
        "frac_left_out": float(np.sum(batch.usable_B & ~kept_B) / usable),
    }
    return Estimate(total_B * batch.groups.spread(share_P), kept_B, metrics=metrics)


ESTIMATORS: dict[str, Estimator] = {
    "gdpo": gdpo,
    "mo_grpo": gdpo,
    "grpo": grpo,
    "rloo": grpo,
    "dr_grpo": grpo,
    "dvao": dvao,
    "gd2po": gd2po,
    "lagrangian": lagrangian,
}
"""Every estimator by name; see :func:`register_estimator`."""

BUILT_IN: Final = frozenset(ESTIMATORS)
"""The names that come with the package."""


def register_estimator(name: str) -> Callable[[Estimator], Estimator]:
    """Return a decorator that makes a function available as ``AdvantageConfig(estimator=name)``.

    Raises:
        ConfigError: The name is taken.
    """
    if name in ESTIMATORS:
        raise ConfigError(f"register_estimator: {name!r} is taken, expected a new name; rename it")

    def add(function: Estimator) -> Estimator:
        ESTIMATORS[name] = function
        return function

    return add
