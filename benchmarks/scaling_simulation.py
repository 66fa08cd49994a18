"""The simulation beside the queueing model: drawn lengths, whole groups, W scoring workers."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from scaling_theory import Engine, Result, Setup, Work, analytic, outcome


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
        """Return when the group is scored, if this was its last one; call in the order of time."""
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
        busy_s, stops = sample_batch(setup, work, lengths)
        makespan_s, ready_s = stops[-1][0], scored_at(stops, work)
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
    return outcome(setup, work, total_s / steps, decode_s / steps, train_s / steps)


def sample_batch(
    setup: Setup, work: Work, lengths: NDArray[np.int64]
) -> tuple[float, list[tuple[float, int]]]:
    """Return busy seconds of all engines, and when which completion stops, in time's order."""
    stops, busy = [], 0.0
    for i in range(setup.engines):
        firsts = range(i * work.group, len(lengths), setup.engines * work.group)
        mine = [c for first in firsts for c in range(first, first + work.group)]
        decoder = _Decoder(setup.engine, work.prompt)
        stops += _decode_all(decoder, mine, lengths, work.group)
        busy += decoder.busy
    return busy, sorted(stops)


def scored_at(stops: Sequence[tuple[float, int]], work: Work) -> float:
    """Return when the last group of a batch is scored."""
    scorer = _Scorer(work)
    return max(scorer.stopped(completion, time) or 0.0 for time, completion in stops)


def workers_needed(setup: Setup, work: Work, *, seed: int = 0) -> int:
    """Return the fewest workers with which a batch waits for scores under 5% of a step longer.

    Longer than with a worker for every completion, that is.
    """
    lengths = work.lengths.draw(work.rollouts, np.random.default_rng(seed))
    _, stops = sample_batch(setup, work, lengths)
    least_s = scored_at(stops, replace(work, workers=work.rollouts))
    allowed_s = least_s + 0.05 * analytic(setup, replace(work, score_s=0.0)).step_s
    low, high = 1, work.rollouts
    while low < high:
        middle = (low + high) // 2
        enough = scored_at(stops, replace(work, workers=middle)) <= allowed_s
        low, high = (low, middle) if enough else (middle + 1, high)
    return low


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
        return outcome(self._setup, self._work, step_s, per_engine, (ended[2] - train) / steps)

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
