"""What a step reports: means by component, weighted beside plain, and where time went."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mrgym.components import present_key, reward_key
from mrgym.rollout import Group, Rollout
from mrgym.sampler import Completion
from mrgym.scoring import Outcome, Scorer
from mrgym.text import State, TextEnv

__all__ = ["Stopwatch", "TimedScorer", "reward_metrics", "rollout_metrics"]


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


class Stopwatch:
    """Adds up seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure what happens inside ``with``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def take(self) -> dict[str, float]:
        """Return the seconds so far and begin again."""
        seconds, self.seconds = self.seconds, {}
        return seconds


class TimedScorer:
    """A scorer that tells a stopwatch how long scoring took."""

    def __init__(self, scorer: Scorer, watch: Stopwatch) -> None:
        self._scorer = scorer
        self._watch = watch

    def score(
        self, env: TextEnv, states: Sequence[State], completions: Sequence[Completion]
    ) -> list[Outcome]:
        """Score, and add the time to ``score``."""
        with self._watch("score"):
            return self._scorer.score(env, states, completions)

    def close(self) -> None:
        """Close the scorer."""
        self._scorer.close()
