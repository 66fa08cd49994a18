"""Evaluation on held-out tasks: plain component means, no group statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mrgym.components import reward_key
from mrgym.errors import ScoreError
from mrgym.rollout import Rollout, check_error_rate, run_groups
from mrgym.sampler import Sampler, SamplingParams
from mrgym.scoring import Scorer
from mrgym.tasks import Task
from mrgym.text import TextEnv

__all__ = ["component_means", "evaluate"]


def evaluate(
    env: TextEnv,
    sampler: Sampler,
    tasks: Sequence[Task],
    params: SamplingParams,
    *,
    n: int = 1,
    scorer: Scorer | None = None,
    max_error_rate: float = 0.1,
) -> tuple[dict[str, Any], list[Rollout]]:
    """Return the means of every component over ``n`` completions of every task, and the rollouts.

    Raises:
        ScoreError: If more than ``max_error_rate`` of the rollouts could not be scored.
    """
    groups = run_groups(env, sampler, tasks, n, params, scorer=scorer)
    check_error_rate(groups, max_error_rate)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return component_means(rollouts, [*env.components]), rollouts


def component_means(rollouts: Sequence[Rollout], names: Sequence[str]) -> dict[str, Any]:
    """Return ``reward/<name>`` (mean) and ``reward/<name>/se`` (its standard error), and the sum.

    Rollouts that could not be scored are left out and counted; so is a component where it
    abstained.

    Raises:
        ScoreError: If no rollout was scored.
    """
    valid = [r for r in rollouts if r.valid]
    if not valid:
        raise ScoreError(
            f"evaluation: got no scored rollout out of {len(rollouts)}, expected some; "
            "look at the errors"
        )
    out: dict[str, Any] = {"n": len(rollouts), "failed": len(rollouts) - len(valid)}
    for name in names:
        scores = [r.components[name] for r in valid if name in r.components]
        if scores:
            out[reward_key(name)], out[f"{reward_key(name)}/se"] = _mean_and_se(scores)
    out["reward"], out["reward_se"] = _mean_and_se([r.reward for r in valid])
    return out


def _mean_and_se(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1)
    return mean, math.sqrt(variance / len(values))
