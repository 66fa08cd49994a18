"""Where a step's time goes: a stopwatch, and sampler and scorer that report to it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mrgym.sampler import Completion, Prompt, SamplingParams
from mrgym.scoring import Outcome, Scorer
from mrgym.streaming import StreamingSampler
from mrgym.text import State, TextEnv

__all__ = ["Stopwatch", "TimedScorer", "phase_metrics", "timed_sampler"]


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
            self.add({name: time.perf_counter() - start})

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add what another stopwatch has measured."""
        for name, spent in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave out what is measured inside ``with``."""
        kept, self.seconds = self.seconds, {}
        try:
            yield
        finally:
            self.seconds = kept

    def take(self) -> dict[str, float]:
        """Return the seconds so far and begin again."""
        seconds, self.seconds = self.seconds, {}
        return seconds


def phase_metrics(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return ``time/<phase>_s`` of a step.

    ``draw`` is the time until the last completion is scored, in which ``sample`` and ``score`` run
    side by side where the sampler streams; ``other`` is what no phase accounts for.
    """
    named = sum(seconds.get(name, 0.0) for name in ("draw", "update", "sync", "probe"))
    phases = {**seconds, "other": max(seconds.get("step", 0.0) - named, 0.0)}
    return {f"time/{name}_s": spent for name, spent in phases.items()}


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


class _TimedSampler:
    """A sampler that tells a stopwatch how long sampling took; the rest is the sampler's own."""

    def __init__(self, sampler: Any, watch: Stopwatch) -> None:
        self._sampler = sampler
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def sample(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams
    ) -> list[list[Completion]]:
        """Sample, and add the time to ``sample``."""
        with self._watch("sample"):
            sampled: list[list[Completion]] = self._sampler.sample(prompts, n, params)
            return sampled


class _TimedStream(_TimedSampler):
    def stream(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams
    ) -> Iterator[tuple[int, int, Completion]]:
        """Sample, and add the time until the last completion to ``sample``."""
        with self._watch("sample"):
            yield from self._sampler.stream(prompts, n, params)


def timed_sampler(sampler: Any, watch: Stopwatch) -> Any:
    """Return the sampler, with a stopwatch that is told how long sampling took."""
    kind = _TimedStream if isinstance(sampler, StreamingSampler) else _TimedSampler
    return kind(sampler, watch)
