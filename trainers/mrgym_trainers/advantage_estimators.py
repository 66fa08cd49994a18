"""Estimators of the advantage before whitening: one registry, a plain function each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from mrgym.errors import ConfigError
from mrgym_trainers.group_stats import BoolArray, FloatArray, Groups, normalise

if TYPE_CHECKING:
    from mrgym_trainers.advantage_config import AdvantageConfig

__all__ = ["ESTIMATORS", "Estimator", "ScoreBatch", "register_estimator", "weighted_sum"]


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
    """

    names: tuple[str, ...]
    weights_K: FloatArray
    scores_KB: FloatArray
    present_KB: BoolArray
    usable_B: BoolArray
    groups: Groups
    component_advantages_KB: FloatArray


Estimator: TypeAlias = "Callable[[ScoreBatch, AdvantageConfig], FloatArray]"
"""Takes the batch and the config, returns finite advantages [B] before whitening."""


def weighted_sum(values_KB: FloatArray, weights_K: FloatArray) -> FloatArray:
    """Return ``sum_k w[k] * values[k]``, [B], added in the order of the component names."""
    # Not a matrix product: BLAS may round rows differently by their position in the batch.
    total_B = np.zeros(values_KB.shape[1])
    for values_B, weight in zip(values_KB, weights_K, strict=True):
        total_B += weight * values_B
    return total_B


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


ESTIMATORS: dict[str, Estimator] = {
    "gdpo": gdpo,
    "mo_grpo": gdpo,
    "grpo": grpo,
    "rloo": grpo,
    "dr_grpo": grpo,
}
"""Every estimator by name; see :func:`register_estimator`."""


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
