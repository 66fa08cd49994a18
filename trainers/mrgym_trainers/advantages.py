"""Advantages from several named rewards: the one place where scores become a training signal.

Everything that needs an advantage, or asks whether a group carries signal, calls
:func:`compute_advantages`. GDPO (arXiv 2601.05242) in four steps: gates are the environment's; each
component is normalised within its group; components are added up with their weights; the batch
is whitened. :class:`AdvantageConfig` names every choice other implementations make differently.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mrgym.components import present_key, reward_key
from mrgym.errors import ConfigError, RolloutError
from mrgym_trainers.advantage_config import AdvantageConfig, Constraint
from mrgym_trainers.advantage_estimators import ESTIMATORS, register_estimator
from mrgym_trainers.advantage_inputs import Column, Inputs, is_torch, read_inputs
from mrgym_trainers.advantage_metrics import batch_metrics
from mrgym_trainers.group_stats import BoolArray, FloatArray, Groups, mean_and_std, normalise
from mrgym_trainers.score_batch import Estimate, Estimator, ScoreBatch, weighted_sum

__all__ = [
    "ESTIMATORS",
    "AdvantageConfig",
    "AdvantageResult",
    "Constraint",
    "Estimate",
    "Estimator",
    "Groups",
    "ScoreBatch",
    "compute_advantages",
    "normalise",
    "register_estimator",
    "weighted_sum",
]

Vector: TypeAlias = Any
"""A torch.float64 tensor [B] if any input was a tensor (on its device), else a NumPy array."""

_logger = logging.getLogger("mrgym")
_ZERO = 1e-12
_ULPS = 8


@dataclass(frozen=True, slots=True)
class AdvantageResult:
    """Advantages of a batch, in the order of its rollouts.

    Attributes:
        advantages: [B] what the loss multiplies; 0 on unusable rollouts.
        before_whitening: [B] the estimator's result; exactly 0 in a group without signal.
        by_component: Name to [B], each component's advantage, without its weight.
        informative: [B] True where the rollout's group carries signal.
        state: What to pass as ``state`` with the next batch; ``{}`` unless the estimator keeps one.
    """

    advantages: Vector
    before_whitening: Vector
    by_component: dict[str, Vector]
    informative: Vector
    state: dict[str, float]
    _scores: ScoreBatch = field(repr=False)
    _estimate: Estimate = field(repr=False)
    _final_B: FloatArray = field(repr=False)
    _informative_B: BoolArray = field(repr=False)

    def metrics(self) -> dict[str, float]:
        """Return the diagnostics of the batch, by the name they are logged under.

        ``advantage/frac_constant/<name>``: groups in which the component cannot tell rollouts
        apart; ``advantage/frac_no_signal``: groups in which nothing can; ``groups/size_min``: 1
        points at group ids that are unique per rollout; ``reward/corr/<a>/<b>``: how two
        components go together (docs/metrics.md lists all).
        """
        out = batch_metrics(
            self._scores, self._estimate.advantages_B, self._final_B, self._informative_B
        )
        return out | {f"estimator/{key}": value for key, value in self._estimate.metrics.items()}


def compute_advantages(
    batch: Mapping[str, Column],
    group_ids: Column,
    config: AdvantageConfig | None = None,
    valid: Column | None = None,
    completion_lengths: Column | None = None,
    *,
    state: Mapping[str, float] | None = None,
) -> AdvantageResult:
    """Return the advantage of every rollout, the same bits in any order of rollouts and ranks.

    Args:
        batch: ``reward/<name>`` to scores [B], optionally ``present/<name>`` to a mask [B]; other
            keys are ignored. Take the whole optimiser batch, all ranks together.
        group_ids: [B] integers, equal for the rollouts of one task; any order, any sizes.
        config: The estimator and its options; None means GDPO with its defaults.
        valid: [B] mask of rollouts that count (not errored, not masked); None means all.
        completion_lengths: [B] tokens a rollout, for ``whiten="token"``.
        state: For ``lagrangian``: ``{}`` with the first batch, then the previous result's
            ``state``. It is not changed in place, so a batch can be computed twice.

    Raises:
        RolloutError: The batch cannot be read, a score that counts is no finite number, or every
            group is a single rollout.
        ConfigError: The weights do not cover exactly the batch's components, token whitening
            lacks the lengths, or the estimator cannot use the weights, constraints or state.
    """
    config = config if config is not None else AdvantageConfig()
    inputs = read_inputs(batch, group_ids, config, valid, completion_lengths)
    scores = _score_batch(inputs, config, state)
    zero = _zero_tolerance(inputs, config)
    estimate, informative_B = _clear_noise(_estimate(scores, config), scores, zero)
    final_B = _whiten(estimate, informative_B, inputs, config, zero)
    columns = [batch.get(key(name)) for name in scores.names for key in (reward_key, present_key)]
    like = _first_tensor([*columns, group_ids, valid, completion_lengths])
    return _result(scores, estimate, final_B, informative_B, like)


def _score_batch(
    inputs: Inputs, config: AdvantageConfig, state: Mapping[str, float] | None
) -> ScoreBatch:
    """Return the estimator's view of the inputs, with step 2 (component advantages) done."""
    return ScoreBatch(
        names=inputs.names,
        weights_K=inputs.weights_K,
        scores_KB=inputs.scores_KB,
        present_KB=inputs.present_KB,
        usable_B=inputs.usable_B,
        groups=inputs.groups,
        component_advantages_KB=normalise(
            inputs.scores_KB, inputs.present_KB, inputs.groups, config
        ),
        state=state,
    )


def _estimate(scores: ScoreBatch, config: AdvantageConfig) -> Estimate:
    """Return the estimator's advantages [B], checked; 0 on rollouts unusable or left out."""
    if config.estimator == "gdpo" and len(scores.names) == 1:
        _say_single_component()
    result = ESTIMATORS[config.estimator](scores, config)
    if not isinstance(result, Estimate):
        result = Estimate(np.asarray(result, dtype=np.float64))
    result_B = result.advantages_B
    if result_B.shape != scores.usable_B.shape or not np.isfinite(result_B).all():
        raise RolloutError(
            f"estimator {config.estimator!r}: got shape {list(result_B.shape)} or values that are "
            f"not finite, expected one finite advantage a rollout, [{len(scores.usable_B)}]"
        )
    kept_B = scores.usable_B if result.kept_B is None else scores.usable_B & result.kept_B
    return replace(result, advantages_B=np.where(kept_B, result_B, 0.0), kept_B=kept_B)


@functools.cache
def _say_single_component() -> None:
    _logger.warning(
        "gdpo: got one component, expected several; it runs as grpo followed by whitening"
    )


def _zero_tolerance(inputs: Inputs, config: AdvantageConfig) -> float:
    """Return the magnitude below which an advantage is rounding noise of the scores' type."""
    return max(_ZERO, _ULPS * inputs.resolution) if config.scale else _ZERO


def _clear_noise(estimate: Estimate, scores: ScoreBatch, zero: float) -> tuple[Estimate, BoolArray]:
    """Return the estimate, exactly 0 in groups without signal, and which rows' groups carry one.

    The weighted component advantages decide, never the sum of scores; a group that another
    estimator learns from anyway counts as well, so that no filter can drop it.
    """
    combined_B = weighted_sum(scores.component_advantages_KB, scores.weights_K)
    sizes_B = np.abs(np.stack([estimate.advantages_B, combined_B]))
    largest_P = scores.groups.reduce(np.maximum, sizes_B)
    learns_B, informed_B = scores.groups.spread(largest_P > zero)
    cleared_B = np.where(learns_B, estimate.advantages_B, 0.0)
    return replace(estimate, advantages_B=cleared_B), learns_B | informed_B


def _whiten(
    estimate: Estimate,
    informative_B: BoolArray,
    inputs: Inputs,
    config: AdvantageConfig,
    zero: float,
) -> FloatArray:
    """Return the advantages whitened over the batch, [B] (step 4); 0 on rows left out."""
    before_B = estimate.advantages_B
    if config.whiten == "none":
        return before_B
    counted_B = inputs.usable_B if estimate.kept_B is None else estimate.kept_B
    if config.whiten_over == "informative":
        counted_B = counted_B & informative_B
    weights_B = counted_B * _copies(inputs, config)
    weighed_B = before_B[weights_B > 0]
    if not np.any(np.abs(weighed_B) > zero) or np.ptp(weighed_B) == 0:
        return np.zeros_like(before_B)
    mean, std = mean_and_std(before_B, weights_B, config.float32_factors)
    divisor = std + config.batch_eps
    if config.batch_eps_in_root:
        divisor = math.hypot(std, config.batch_eps**0.5)
    return np.where(counted_B, (before_B - mean) / divisor, 0.0)


def _copies(inputs: Inputs, config: AdvantageConfig) -> FloatArray:
    """Return how often each rollout enters the batch statistics, [B]."""
    if config.whiten == "rollout":
        return np.ones(inputs.usable_B.shape)
    if inputs.tokens_B is None:
        raise ConfigError(
            "AdvantageConfig: whiten: got 'token' without completion_lengths, expected one length "
            "a rollout; pass completion_lengths, or choose whiten='rollout'"
        )
    return inputs.tokens_B


def _result(
    scores: ScoreBatch,
    estimate: Estimate,
    final_B: FloatArray,
    informative_B: BoolArray,
    like: Any | None,
) -> AdvantageResult:
    """Return the result in the caller's order and kind of array."""

    def deliver(sorted_B: npt.NDArray[Any]) -> Vector:
        return _to_kind(scores.groups.restore(sorted_B), like)

    by_component = {
        name: deliver(advantages_B)
        for name, advantages_B in zip(scores.names, scores.component_advantages_KB, strict=True)
    }
    return AdvantageResult(
        advantages=deliver(final_B),
        before_whitening=deliver(estimate.advantages_B),
        by_component=by_component,
        informative=deliver(informative_B),
        state=dict(estimate.state),
        _scores=scores,
        _estimate=estimate,
        _final_B=final_B,
        _informative_B=informative_B,
    )


def _first_tensor(columns: list[Any]) -> Any | None:
    return next((column for column in columns if is_torch(column)), None)


def _to_kind(array: npt.NDArray[Any], like: Any | None) -> Vector:
    if like is None:
        return array
    import torch

    return torch.from_numpy(array).to(like.device)
