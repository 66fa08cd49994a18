"""What a step leaves behind: a line of metrics, and its rollouts with their advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mrgym.components import ComponentSet
from mrgym.rollout import Rollout
from mrgym_trainers.advantages import AdvantageResult
from mrgym_trainers.gdpo.config import GDPOConfig
from mrgym_trainers.gdpo.draw import Draw
from mrgym_trainers.gdpo.metrics import (
    gate_metrics,
    reward_metrics,
    rollout_metrics,
    speed_metrics,
)
from mrgym_trainers.gdpo.timing import phase_metrics
from mrgym_trainers.gdpo.update import learning_rate_factor

__all__ = ["annotate", "step_line"]


def step_line(
    step: int,
    drawn: Draw,
    batch: dict[str, Tensor],
    advantages: AdvantageResult,
    declared: ComponentSet,
    config: GDPOConfig,
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """Return the metrics of a step, but for what the update and the ranks know.

    Args:
        step: The step.
        drawn: Its groups.
        batch: Their scores.
        advantages: Their advantages.
        declared: The environment's components.
        config: The configuration, weights resolved.
        seconds: The step's seconds by phase.
    """
    return {
        "kind": "train",
        "step": step,
        **reward_metrics(batch, config.advantage.weights or {}),
        **gate_metrics(drawn.groups, declared),
        **advantages.metrics(),
        **rollout_metrics(drawn.groups),
        **drawn.counts,
        "lr": config.learning_rate * learning_rate_factor(step - 1, config),
        **speed_metrics(drawn.groups, seconds["step"]),
        **phase_metrics(seconds),
    }


def annotate(rollouts: Sequence[Rollout], step: int, advantages: AdvantageResult) -> None:
    """Write step and advantages into the rollouts of a step."""
    by_component = {name: a.tolist() for name, a in advantages.by_component.items()}
    for i, rollout in enumerate(rollouts):
        rollout.step = step
        rollout.advantage = float(advantages.advantages[i])
        rollout.component_advantages = {n: values[i] for n, values in by_component.items()}
