"""A queueing model of sampling, scoring, training and weight sync in three layouts.

``colocated``: engines and trainer take turns on all GPUs. ``one_step_off``: GPUs are split; the
next batch is sampled while this one trains, and both sides wait for each other at every sync.
``separate``: split as well, but engines never drain: they start completions as long as these
would be at most ``staleness`` versions old. Where nothing can be split, one_step_off shares GPUs
by time.

An iteration of an engine takes ``base + row x running + context x (tokens in its cache)`` seconds
and adds a token to every running completion. Expectations are taken over the distribution of
lengths; ``scaling_simulation.py`` draws lengths instead, and ``scaling_model.py`` runs both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LayoutName = Literal["colocated", "one_step_off", "separate"]
LAYOUTS: tuple[LayoutName, ...] = ("colocated", "one_step_off", "separate")


@dataclass(frozen=True)
class Lengths:
    """A distribution of completion lengths.

    Attributes:
        survival_T: [T] probability of more than t tokens, from t = 0; T is the token limit.
    """

    survival_T: Floats

    @classmethod
    def log_normal(cls, median: float, sigma: float, limit: int) -> Lengths:
        """Return a log-normal distribution, cut at the token limit."""
        tokens = np.arange(limit)
        with np.errstate(divide="ignore"):
            z = (np.log(tokens) - math.log(median)) / sigma
        return cls(np.array([0.5 * math.erfc(value / math.sqrt(2)) for value in z]))

    @classmethod
    def fixed(cls, tokens: int) -> Lengths:
        """Return the distribution in which every completion has so many tokens."""
        return cls(np.ones(tokens))

    @classmethod
    def observed(cls, lengths: Sequence[int]) -> Lengths:
        """Return the distribution of given lengths."""
        tokens = np.arange(max(lengths))
        return cls((np.asarray(lengths)[:, None] > tokens).mean(0))

    @property
    def mean(self) -> float:
        """Mean length."""
        return float(self.survival_T.sum())

    @property
    def mean_seen(self) -> float:
        """Mean tokens that a running completion has so far: long ones run for longer."""
        return float((self.survival_T * np.arange(len(self.survival_T))).sum()) / self.mean

    def mean_longest(self, n: int) -> float:
        """Mean of the longest of n lengths."""
        return float((1 - (1 - self.survival_T) ** n).sum())

    def draw(self, n: int, random: np.random.Generator) -> NDArray[np.int64]:
        """Return n lengths."""
        drawn = np.searchsorted(-self.survival_T, -random.random(n), side="left")
        return np.clip(drawn, 1, len(self.survival_T))


@dataclass(frozen=True)
class Work:
    """What a step needs: rollouts, groups, lengths, and seconds to score a completion."""

    rollouts: int
    lengths: Lengths
    prompt: int = 128
    group: int = 8
    score_s: float = 0.0
    workers: int = 1

    @property
    def tokens(self) -> float:
        """Mean tokens the trainer reads in a step."""
        return self.rollouts * (self.prompt + self.lengths.mean)


@dataclass(frozen=True)
class Engine:
    """An inference engine on ``gpus`` GPUs; seconds of an iteration by rows and context."""

    base_s: float
    row_s: float
    context_s: float
    prompt_s: float
    slots: int
    gpus: int = 1

    def seconds(self, iterations: float, rows: int, context: float) -> float:
        """Return the time of some iterations in which nobody starts or stops."""
        grown = context * iterations + rows * iterations * (iterations - 1) / 2
        return iterations * (self.base_s + rows * self.row_s) + self.context_s * grown


@dataclass(frozen=True)
class Trainer:
    """``token_s`` on all its GPUs together, but at least ``pass_s`` for every micro-batch."""

    token_s: float
    pass_s: float = 0.0
    pass_tokens: float = math.inf
    fixed_s: float = 0.0
    gpus: int = 1

    def seconds(self, tokens: float) -> float:
        """Return the time of an update."""
        passes = math.ceil(tokens / self.pass_tokens) if math.isfinite(self.pass_tokens) else 1
        return max(tokens * self.token_s, passes * self.pass_s) + self.fixed_s


@dataclass(frozen=True)
class Setup:
    """A layout on a machine: engines, trainer, and what a sync (and a change of turns) costs."""

    layout: LayoutName
    gpus: int
    engine: Engine
    engines: int
    trainer: Trainer
    sync_s: float
    switch_s: float = 0.0
    staleness: int = 1

    @property
    def shared(self) -> bool:
        """Whether engines and trainer use the same GPUs."""
        return self.engines * self.engine.gpus + self.trainer.gpus > self.gpus


@dataclass(frozen=True)
class Result:
    """Rollouts a second, share of GPU time in which a GPU neither decodes nor trains, step time."""

    rollouts_s: float
    idle: float
    step_s: float


def sampling_s(engine: Engine, work: Work, rows: float, engines: int = 1) -> float:
    """Return expected seconds until the last of ``engines`` has finished ``rows`` completions.

    With more rows than slots a steady phase comes first; what then runs has lived for a while, and
    its remaining lengths follow the distribution's residual.
    """
    prompts_s = rows / work.group * engine.prompt_s
    if rows <= engine.slots:
        steps = np.arange(len(work.lengths.survival_T)) + work.prompt
        return prompts_s + _drain_s(engine, work.lengths.survival_T, rows, engines, steps)
    residual_T = work.lengths.survival_T[::-1].cumsum()[::-1] / work.lengths.mean
    drained = engine.slots * float(residual_T.sum() - residual_T[0])
    seen = work.prompt + work.lengths.mean_seen + np.arange(len(residual_T)) / 2
    steady = (rows * work.lengths.mean - drained) / steady_tokens_s(engine, work, engine.slots)
    return prompts_s + steady + _drain_s(engine, residual_T, engine.slots, engines, seen)


def _drain_s(
    engine: Engine, survival_T: Floats, rows: float, engines: int, context_T: Floats
) -> float:
    """Return expected seconds until rows that run at once have all stopped."""
    any_running_T = -np.expm1(rows * engines * np.log1p(-np.minimum(survival_T, 1 - 1e-15)))
    rows_T = rows * survival_T
    seconds_T = any_running_T * engine.base_s + rows_T * (
        engine.row_s + engine.context_s * context_T
    )
    return float(seconds_T.sum())


def steady_tokens_s(engine: Engine, work: Work, rows: float) -> float:
    """Return tokens a second of an engine that always has so many rows."""
    context = rows * (work.prompt + work.lengths.mean_seen)
    prompts_s = rows / work.lengths.mean / work.group * engine.prompt_s
    return rows / (engine.base_s + rows * engine.row_s + engine.context_s * context + prompts_s)


def analytic(setup: Setup, work: Work) -> Result:
    """Return what the model expects of a layout."""
    train_s = setup.trainer.seconds(work.tokens)
    if setup.layout == "separate":
        return _analytic_separate(setup, work, train_s)
    rows = work.rollouts / setup.engines
    makespan_s = sampling_s(setup.engine, work, rows, setup.engines)
    ready_s = max(makespan_s, work.rollouts * work.score_s / work.workers) + last_group_s(work)
    if setup.layout == "colocated":
        step_s = ready_s + train_s
    elif setup.shared:
        step_s = max(makespan_s + train_s, ready_s)
    else:
        step_s = max(ready_s, train_s)
    step_s += setup.sync_s + setup.switch_s
    decode_s = sampling_s(setup.engine, work, rows)
    return outcome(setup, work, step_s, decode_s, train_s)


def _analytic_separate(setup: Setup, work: Work, train_s: float) -> Result:
    """Return the largest rate with no more rollouts in the system than staleness allows.

    By Little's law: those being sampled (until their group has stopped), scored or trained on, and
    half a batch that waits to become one.
    """
    allowed = (setup.staleness + 0.5) * work.rollouts
    train_rate = work.rollouts / (train_s + setup.sync_s)
    low, high = 0.0, min(train_rate, _scoring_rate(work))
    for _ in range(50):
        rate = (low + high) / 2
        iteration_s = _iteration_s(setup, work, rate)
        held_s = work.lengths.mean_longest(work.group) * iteration_s + last_group_s(work)
        fits = rate * (held_s + train_s + setup.sync_s) <= allowed
        low, high = (rate, high) if fits else (low, rate)
    step_s = work.rollouts / low
    return outcome(setup, work, step_s, step_s - setup.sync_s, train_s)


def _iteration_s(setup: Setup, work: Work, rate: float) -> float:
    """Return an iteration's seconds at so many rollouts a second; inf if slots are too few."""
    engine = setup.engine
    prompts_s = rate / setup.engines / work.group * engine.prompt_s
    tokens_s = rate / setup.engines * work.lengths.mean
    row_s = engine.row_s + engine.context_s * (work.prompt + work.lengths.mean_seen)
    # Syncs and prompts take their share of the time that is left for iterations.
    share = 1 - rate / work.rollouts * setup.sync_s - prompts_s
    left = share - tokens_s * row_s
    if left <= 0 or tokens_s * engine.base_s / left > engine.slots:
        return math.inf
    return engine.base_s / left


def _scoring_rate(work: Work) -> float:
    return work.workers / work.score_s if work.score_s else math.inf


def last_group_s(work: Work) -> float:
    """Return seconds to score one group."""
    return math.ceil(work.group / work.workers) * work.score_s


def outcome(setup: Setup, work: Work, step_s: float, decode_s: float, train_s: float) -> Result:
    """Return a step's result from the seconds an engine decodes and the trainer trains in it."""
    busy = decode_s * setup.engines * setup.engine.gpus + train_s * setup.trainer.gpus
    return Result(work.rollouts / step_s, 1 - busy / (step_s * setup.gpus), step_s)
