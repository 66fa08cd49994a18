"""Throughput and idle GPUs of three layouts on 1 to 512 H100s: a queueing model and a simulation.

    python benchmarks/scaling_model.py [--quick]     # H100s: model output, nothing measured on one
    python benchmarks/scaling_model.py --cpu         # predicted against measured steps, here

Layouts: ``colocated`` (engine and trainer take turns on all GPUs), ``one_step_off`` (GPUs are split;
the next batch is sampled while this one trains, and both sides wait for each other at every sync),
``separate`` (split as well, but engines never drain: they start new completions as long as these
would be at most ``staleness`` versions old). With one GPU there is nothing to split, and one_step_off
shares it by time.

An engine's iteration takes ``base + row x running + context x (tokens in its cache)`` seconds and adds
a token to every running completion. The analytic model takes expectations over the length
distribution; the simulation draws lengths, so that stragglers, whole groups and W scoring workers
matter. Both leave out what docs/scaling.md lists.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
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
    """One inference engine on ``gpus`` GPUs; seconds of an iteration by running rows and context."""

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
    """``token_s`` on all its GPUs together, but ``pass_s`` of communication for every micro-batch."""

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


# --- analytic model -------------------------------------------------------------------------------


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
    ready_s = max(makespan_s, work.rollouts * work.score_s / work.workers) + _last_group_s(work)
    if setup.layout == "colocated":
        step_s = ready_s + train_s
    elif setup.shared:
        step_s = max(makespan_s + train_s, ready_s)
    else:
        step_s = max(ready_s, train_s)
    step_s += setup.sync_s + setup.switch_s
    decode_s = sampling_s(setup.engine, work, rows)
    return _result(setup, work, step_s, decode_s, train_s)


def _analytic_separate(setup: Setup, work: Work, train_s: float) -> Result:
    """Return the slowest of the stations: engines, scoring, trainer; a sync stops all but scoring."""
    # A batch waits for the trainer or is trained on while the next ones are sampled.
    allowed = work.rollouts * (setup.staleness + 0.5) / setup.engines
    tokens_s = steady_tokens_s(setup.engine, work, min(setup.engine.slots, allowed))
    sample_s = work.rollouts * work.lengths.mean / tokens_s / setup.engines
    score_s = work.rollouts * work.score_s / work.workers
    step_s = max(max(sample_s, train_s) + setup.sync_s, score_s)
    return _result(setup, work, step_s, min(sample_s, step_s - setup.sync_s), train_s)


def _last_group_s(work: Work) -> float:
    return math.ceil(work.group / work.workers) * work.score_s


def _result(setup: Setup, work: Work, step_s: float, decode_s: float, train_s: float) -> Result:
    busy = decode_s * setup.engines * setup.engine.gpus + train_s * setup.trainer.gpus
    return Result(work.rollouts / step_s, 1 - busy / (step_s * setup.gpus), step_s)


# --- simulation -----------------------------------------------------------------------------------


@dataclass
class _Decoder:
    """An engine at work. ``clock`` counts iterations, ``now`` seconds."""

    engine: Engine
    prompt: int
    now: float = 0.0
    clock: float = 0.0
    context: float = 0.0
    busy: float = 0.0
    epoch: int = 0
    running: list[tuple[float, int, int]] = field(default_factory=list)

    def admit(self, completion: int, length: int, prompt_s: float) -> None:
        """Start a completion; reading its prompt holds all others up."""
        self.now += prompt_s
        self.busy += prompt_s
        heapq.heappush(self.running, (self.clock + length, completion, length))
        self.context += self.prompt

    def next_stop(self) -> float:
        """Return when the next completion stops, if nothing is admitted."""
        iterations = self.running[0][0] - self.clock
        return self.now + self.engine.seconds(iterations, len(self.running), self.context)

    def stop_next(self) -> int:
        """Run until a completion stops and return it."""
        end, completion, length = self.running[0]
        self._run(end - self.clock)
        heapq.heappop(self.running)
        self.context -= self.prompt + length
        return completion

    def run_until(self, time: float) -> None:
        """Run until a time before the next stop."""
        left = time - self.now
        if not self.running or left <= 0:
            self.now = max(self.now, time)
            return
        rows, engine = len(self.running), self.engine
        a = rows * engine.context_s / 2
        b = engine.base_s + rows * engine.row_s + engine.context_s * self.context - a
        self._run(2 * left / (b + math.sqrt(b * b + 4 * a * left)))

    def _run(self, iterations: float) -> None:
        seconds = self.engine.seconds(iterations, len(self.running), self.context)
        self.now += seconds
        self.busy += seconds
        self.clock += iterations
        self.context += iterations * len(self.running)


class _Scorer:
    """W workers that take completions, a whole group's at a time, first come first served."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._left: dict[int, int] = {}
        self._free = [0.0] * (work.workers if work.score_s else 0)

    def stopped(self, completion: int, time: float) -> float | None:
        """Return when the group is scored, if this was its last completion; call in time's order."""
        group = completion // self._work.group
        left = self._left[group] = self._left.get(group, self._work.group) - 1
        if left:
            return None
        if not self._free:
            return time
        ends = []
        for _ in range(self._work.group):
            end = max(time, self._free[0]) + self._work.score_s
            heapq.heapreplace(self._free, end)
            ends.append(end)
        return max(ends)


def simulate(setup: Setup, work: Work, *, steps: int = 12, seed: int = 0) -> Result:
    """Return what a layout does over some steps; the first ones, while it fills, are left out."""
    random = np.random.default_rng(seed)
    if setup.layout == "separate":
        return _Separate(setup, work, random).run(steps)
    total_s = decode_s = train_s = 0.0
    for _ in range(steps):
        lengths = work.lengths.draw(work.rollouts, random)
        busy_s, makespan_s, ready_s = _sample_batch(setup, work, lengths)
        update_s = setup.trainer.seconds(float(lengths.sum()) + work.prompt * work.rollouts)
        if setup.layout == "colocated":
            step_s = ready_s + update_s
        elif setup.shared:
            step_s = max(makespan_s + update_s, ready_s)
        else:
            step_s = max(ready_s, update_s)
        total_s += step_s + setup.sync_s + setup.switch_s
        decode_s += busy_s / setup.engines
        train_s += update_s
    return _result(setup, work, total_s / steps, decode_s / steps, train_s / steps)


def _sample_batch(
    setup: Setup, work: Work, lengths: NDArray[np.int64]
) -> tuple[float, float, float]:
    """Return busy seconds of all engines, time of the last completion and of the last score."""
    stops, busy = [], 0.0
    for i in range(setup.engines):
        mine = [c for c in range(len(lengths)) if (c // work.group) % setup.engines == i]
        decoder = _Decoder(setup.engine, work.prompt)
        stops += _decode_all(decoder, mine, lengths, work.group)
        busy += decoder.busy
    scorer, ready = _Scorer(work), 0.0
    for time, completion in sorted(stops):
        ready = max(ready, scorer.stopped(completion, time) or 0.0)
    return busy, max(stops)[0], ready


def _decode_all(
    decoder: _Decoder, mine: Sequence[int], lengths: NDArray[np.int64], group: int
) -> Iterator[tuple[float, int]]:
    waiting, prompt_s = deque(mine), decoder.engine.prompt_s / group
    while waiting or decoder.running:
        while waiting and len(decoder.running) < decoder.engine.slots:
            completion = waiting.popleft()
            decoder.admit(completion, int(lengths[completion]), prompt_s)
        yield decoder.next_stop(), decoder.stop_next()


class _Separate:
    """Engines, scoring workers and trainer as stations that only wait for their input."""

    def __init__(self, setup: Setup, work: Work, random: np.random.Generator) -> None:
        self._setup, self._work, self._random = setup, work, random
        self._decoders = [_Decoder(setup.engine, work.prompt) for _ in range(setup.engines)]
        self._loads = np.zeros(setup.engines, dtype=int)
        self._scorer = _Scorer(work)
        self._events: list[tuple[float, int, str, int, int]] = []
        self._order = itertools.count()
        self._submitted = self._version = 0
        self._ready: deque[int] = deque()
        self._tokens: dict[int, int] = {}
        self._training = False
        self._train_s = 0.0

    def run(self, steps: int) -> Result:
        """Return the mean over ``steps`` versions after four that fill the queues."""
        self._admit(0.0)
        began = self._until(4)
        ended = self._until(4 + steps)
        start, decode, train = began
        step_s = (ended[0] - start) / steps
        per_engine = (ended[1] - decode) / steps / self._setup.engines
        return _result(self._setup, self._work, step_s, per_engine, (ended[2] - train) / steps)

    def _until(self, version: int) -> tuple[float, float, float]:
        """Return time, decoding and training seconds when a version is there."""
        now = 0.0
        while self._version < version:
            now, _, kind, subject, epoch = heapq.heappop(self._events)
            if kind == "stop" and self._decoders[subject].epoch == epoch:
                self._stop(now, subject)
            elif kind == "scored":
                self._ready.append(subject)
                self._train(now)
            elif kind == "trained":
                self._sync(now)
            elif kind == "synced":
                self._training = False
                self._train(now)
        return now, sum(decoder.busy for decoder in self._decoders), self._train_s

    def _push(self, time: float, kind: str, subject: int = 0, epoch: int = 0) -> None:
        heapq.heappush(self._events, (time, next(self._order), kind, subject, epoch))

    def _stop(self, now: float, i: int) -> None:
        completion = self._decoders[i].stop_next()
        self._loads[i] -= 1
        scored = self._scorer.stopped(completion, now)
        if scored is not None:
            self._push(scored, "scored", completion // self._work.group)
        self._admit(now, {i})

    def _admit(self, now: float, changed: set[int] | None = None) -> None:
        """Start completions on the least loaded engines as far as staleness and slots allow."""
        changed = changed or set()
        allowed = (self._version + 1 + self._setup.staleness) * self._work.rollouts
        while self._submitted < allowed:
            i = int(self._loads.argmin())
            if self._loads[i] >= self._setup.engine.slots:
                break
            self._start(now, i)
            changed.add(i)
        for i in changed:
            self._schedule(i)

    def _start(self, now: float, i: int) -> None:
        completion, work = self._submitted, self._work
        length = int(work.lengths.draw(1, self._random)[0])
        group = completion // work.group
        self._tokens[group] = self._tokens.get(group, 0) + length + work.prompt
        self._decoders[i].run_until(now)
        self._decoders[i].admit(completion, length, self._setup.engine.prompt_s / work.group)
        self._loads[i] += 1
        self._submitted += 1

    def _schedule(self, i: int) -> None:
        decoder = self._decoders[i]
        decoder.epoch += 1
        if decoder.running:
            self._push(decoder.next_stop(), "stop", i, decoder.epoch)

    def _train(self, now: float) -> None:
        groups = self._work.rollouts // self._work.group
        if self._training or len(self._ready) < groups:
            return
        self._training = True
        tokens = sum(self._tokens.pop(self._ready.popleft()) for _ in range(groups))
        seconds = self._setup.trainer.seconds(tokens)
        self._train_s += seconds
        self._push(now + seconds, "trained")

    def _sync(self, now: float) -> None:
        """Hold every engine up; what runs goes on with the new weights."""
        self._version += 1
        for decoder in self._decoders:
            decoder.run_until(now)
            decoder.now = max(decoder.now, now) + self._setup.sync_s
        self._push(now + self._setup.sync_s, "synced")
        self._admit(now, {*range(len(self._decoders))})
