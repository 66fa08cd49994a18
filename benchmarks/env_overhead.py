"""What the reward contract adds to a step, against the same step in plain Gymnasium.

python benchmarks/env_overhead.py
"""

import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium.spaces import Discrete

import mrgym

STEPS = 20_000
REPEATS = 15
SCORES = {"correct": 1.0, "format": 0.5, "short": 0.25}
DECLARED = mrgym.components(
    correct=mrgym.Component(low=0, high=1),
    format=mrgym.Component(low=0, high=1),
    short=mrgym.Component(low=0, high=1),
)
GATED = mrgym.components(
    correct=mrgym.Component(low=0, high=1),
    format=mrgym.Component(low=0, high=1),
    short=mrgym.Component(low=0, high=1, gate=mrgym.Gate(on="correct", at_least=1)),
)


class Plain(gym.Env[int, int]):
    """Sums three scores and puts them into info, unchecked."""

    observation_space = Discrete(2)
    action_space = Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Return fixed scores."""
        scores = dict(SCORES)
        return 0, math.fsum(scores.values()), False, False, {"reward_components": scores}


class Emitting(mrgym.MultiRewardEnv[int, int]):
    """The same through emit."""

    components = DECLARED
    observation_space = Discrete(2)
    action_space = Discrete(2)
    reset = Plain.reset

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Return fixed scores."""
        return self.emit(0, SCORES)


class ByHand(Plain, mrgym.MultiRewardEnv[int, int]):
    """The plain step, checked by the base class."""

    components = DECLARED


class Gated(Emitting):
    """Through emit, with a gate."""

    components = GATED


def seconds_a_step(env: gym.Env[int, int]) -> float:
    """Return the mean seconds of one step."""
    step: Callable[[int], object] = env.step
    start = time.perf_counter()
    for _ in range(STEPS):
        step(0)
    return (time.perf_counter() - start) / STEPS


def import_seconds(module: str) -> float:
    """Return the seconds a fresh interpreter takes to import a module."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return time.perf_counter() - start


def main() -> None:
    """Print microseconds a step, and what importing costs, as medians of interleaved repeats."""
    envs = {"plain gymnasium": Plain(), "emit": Emitting(), "by hand": ByHand(), "gated": Gated()}
    times: dict[str, list[float]] = {name: [] for name in envs}
    for _ in range(REPEATS):
        for name, env in envs.items():
            times[name].append(seconds_a_step(env))
    print(f"Python {platform.python_version()}, gymnasium {gym.__version__}, {REPEATS} repeats")
    base = times["plain gymnasium"]
    for name, values in times.items():
        added = statistics.median(v - b for v, b in zip(values, base, strict=True))
        print(f"{name:<16} {statistics.median(values) * 1e6:6.2f} us  added {added * 1e6:6.2f} us")
    imports: dict[str, list[float]] = {"gymnasium": [], "mrgym": []}
    for _ in range(7):
        for module, values in imports.items():
            values.append(import_seconds(module))
    added = statistics.median(
        m - g for m, g in zip(imports["mrgym"], imports["gymnasium"], strict=True)
    )
    medians = {module: statistics.median(values) for module, values in imports.items()}
    print(
        f"import gymnasium {medians['gymnasium']:.2f} s, import mrgym {medians['mrgym']:.2f} s, "
        f"added {added:.2f} s"
    )


if __name__ == "__main__":
    main()
