"""What a step reports: means by component, weighted beside plain, gates, failures, and speed."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mrgym.components import REWARD_PREFIX, ComponentSet, present_key, reward_key
from mrgym.rollout import Group, Rollout

__all__ = [
    "first_and_last",
    "gate_metrics",
    "peak_memory_gib",
    "reward_metrics",
    "rollout_metrics",
    "speed_metrics",
]


def reward_metrics(batch: Mapping[str, Tensor], weights: Mapping[str, float]) -> dict[str, float]:
    """Return mean and std of every component, of the plain sum and of the weighted sum.

    ``reward/<name>/mean`` is over rollouts where the component is present, ``reward/mean`` is the
    plain sum and ``reward_weighted/mean`` the sum with weights; the two are never mixed.
    """
    valid_B = batch["valid"]
    out: dict[str, float] = {}
    plain_B = torch.zeros(len(valid_B), dtype=torch.float64)
    weighted_B = plain_B.clone()
    for name, weight in weights.items():
        scores_B, present_B = batch[reward_key(name)], batch[present_key(name)] & valid_B
        plain_B = plain_B + scores_B
        weighted_B = weighted_B + weight * scores_B
        out |= _mean_and_std(reward_key(name), scores_B[present_B])
        out[f"{present_key(name)}/frac"] = _mean(present_B[valid_B].double())
    out |= _mean_and_std("reward", plain_B[valid_B])
    if valid_B.any():
        out["reward_weighted/mean"] = _mean(weighted_B[valid_B])
    return out


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return lengths, truncation and failure rates of a step's rollouts."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]

    def share(condition: Iterator[bool]) -> float:
        return sum(condition) / max(len(rollouts), 1)

    return {
        "completion/length_mean": sum(map(_length, rollouts)) / max(len(rollouts), 1),
        "completion/truncated_frac": share(r.truncated for r in rollouts),
        "score/error_rate": share(r.status == "error" for r in rollouts),
        "score/timeout_rate": share(r.status == "timeout" for r in rollouts),
        "groups/size_min": float(min((len(g.rollouts) for g in groups), default=0)),
    }


def _length(rollout: Rollout) -> int:
    return rollout.completion_length


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0


def _mean_and_std(key: str, values: Tensor) -> dict[str, float]:
    if not len(values):  # nothing was measured, which is no zero
        return {}
    std = float(values.std()) if len(values) > 1 else 0.0
    return {f"{key}/mean": _mean(values), f"{key}/std": std}


def gate_metrics(groups: Sequence[Group], declared: ComponentSet) -> dict[str, float]:
    """Return ``gate/open_frac/<name>`` of every gated component: how often its score counted."""
    rollouts = [r for group in groups for r in group.rollouts if r.valid]
    out = {}
    for name, component in declared.items():
        gate = component.gate
        if gate is None:
            continue
        conditions = [r.components[gate.on] for r in rollouts if gate.on in r.components]
        if conditions:
            opened = sum(condition >= gate.at_least for condition in conditions)
            out[f"gate/open_frac/{name}"] = opened / len(conditions)
    return out


def speed_metrics(groups: Sequence[Group], seconds: float) -> dict[str, float]:
    """Return sampled tokens and completions of a step by its seconds."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tokens, turns = sum(map(_length, rollouts)), sum(len(r.turns) for r in rollouts)
    return {
        "speed/tokens_per_s": tokens / max(seconds, 1e-9),
        "speed/completions_per_s": turns / max(seconds, 1e-9),
    }


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory held so far, of the GPU or, for a policy on CPU, of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def first_and_last(history: Sequence[Mapping[str, Any]], mode: str) -> dict[str, dict[str, float]]:
    """Return the component means of a run's first and last evaluation in a mode."""
    lines = [line for line in history if line.get("mode") == mode]
    if not lines:
        return {}
    return {"start": _component_means(lines[0]), "end": _component_means(lines[-1])}


def _component_means(line: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: value
        for key, value in line.items()
        if key == "reward" or (key.startswith(REWARD_PREFIX) and not key.endswith("/se"))
    }
