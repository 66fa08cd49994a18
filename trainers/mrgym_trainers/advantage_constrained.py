"""The Lagrangian estimator: components held to a share of rollouts instead of being weighed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from mrgym.errors import ConfigError, closest
from mrgym_trainers.group_stats import BoolArray, normalise
from mrgym_trainers.score_batch import Estimate, ScoreBatch, weighted_sum

if TYPE_CHECKING:
    from mrgym_trainers.advantage_config import AdvantageConfig, Constraint

__all__ = ["MULTIPLIER", "constraints_of", "lagrangian"]

MULTIPLIER: Final = "multiplier/"
"""Prefix of a constraint's multiplier in the state."""


def lagrangian(batch: ScoreBatch, config: AdvantageConfig) -> Estimate:
    """Return ``sum_j w[j] Z[j] - sum_k m[k] Z_cost[k]``, and the multipliers of the next batch.

    Z is a component's advantage within its group. A constraint's cost is 1 on a rollout that
    violates it, else 0, standardised by itself before the multiplier m is applied
    ("scalarized advantages", arXiv 2602.05863). Its weight plays no part. Multipliers follow
    projected dual ascent, ``m += learning_rate * (at_least - satisfied share)``, held between 0
    and ``limit`` (as in RCPO, arXiv 1805.11074).

    Raises:
        ConfigError: The state is missing or not this estimator's, or a constraint names no
            component, or every component is constrained.
    """
    constraints = constraints_of(batch.names, config)
    multipliers = _multipliers(batch.state, constraints)
    rows = [batch.names.index(name) for name in constraints]
    satisfied_MB = _satisfied(batch, constraints, rows)
    terms_KB, weights_K = batch.component_advantages_KB.copy(), batch.weights_K.copy()
    # Z of "satisfied" is -Z of its cost.
    terms_KB[rows] = normalise(
        satisfied_MB.astype(np.float64), batch.present_KB[rows], batch.groups, config
    )
    weights_K[rows] = list(multipliers.values())
    state, metrics = {}, {}
    for (name, constraint), row, satisfied_B in zip(
        constraints.items(), rows, satisfied_MB, strict=True
    ):
        state[MULTIPLIER + name] = metrics[MULTIPLIER + name] = multipliers[name]
        if measured := int(batch.present_KB[row].sum()):
            share = float(satisfied_B.sum()) / measured
            state[MULTIPLIER + name] = _ascend(multipliers[name], share, constraint)
            metrics[f"satisfied/{name}"] = share
    return Estimate(weighted_sum(terms_KB, weights_K), state=state, metrics=metrics)


def constraints_of(names: Sequence[str], config: AdvantageConfig) -> dict[str, Constraint]:
    """Return the constraints on the components of these names, in their order.

    Raises:
        ConfigError: If one is on an unknown component, or none is left that is maximised.
    """
    given = config.constraints or {}
    for name in sorted(set(given) - set(names)):
        raise ConfigError(
            f"AdvantageConfig: constraints: got {name!r}, expected one of {list(names)}"
            + (closest(name, names) or "; constrain components of the environment")
        )
    if given and len(given) == len(names):
        raise ConfigError(
            f"AdvantageConfig: constraints: got one for every component {list(names)}, "
            "expected a component that is maximised; drop a constraint"
        )
    return {name: given[name] for name in names if name in given}


def _multipliers(
    state: Mapping[str, float] | None, constraints: Mapping[str, Constraint]
) -> dict[str, float]:
    """Return the multipliers in force, the constraint's ``start`` where the state has none."""
    if state is None:
        raise ConfigError(
            "estimator 'lagrangian': got no state, expected the multipliers so far; pass "
            "state={} with the first batch, then the previous result's state"
        )
    known = {MULTIPLIER + name for name in constraints}
    for key in state:
        value = state[key]
        if key not in known or not math.isfinite(value) or value < 0:
            raise ConfigError(
                f"estimator 'lagrangian': state: got {key}={value!r}, expected numbers from 0 by "
                f"{sorted(known)}; pass the previous result's state, or {{}} to start anew"
            )
    return {
        name: min(float(state.get(MULTIPLIER + name, constraint.start)), constraint.limit)
        for name, constraint in constraints.items()
    }


def _satisfied(
    batch: ScoreBatch, constraints: Mapping[str, Constraint], rows: list[int]
) -> BoolArray:
    """Return where each constraint is satisfied, [M, B]; False where its component is absent."""
    from_M = np.array([constraint.satisfied_from for constraint in constraints.values()])
    reached_MB: BoolArray = batch.scores_KB[rows] >= from_M[:, None]
    return reached_MB & batch.present_KB[rows]


def _ascend(multiplier: float, share: float, constraint: Constraint) -> float:
    """Return the multiplier after one step of projected dual ascent."""
    moved = multiplier + constraint.learning_rate * (constraint.at_least - share)
    return min(max(moved, 0.0), constraint.limit)
