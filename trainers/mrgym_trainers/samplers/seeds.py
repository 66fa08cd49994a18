"""Seeds that differ by step, rank, prompt and completion, and by nothing else."""

from __future__ import annotations

import numpy as np

__all__ = ["completion_seeds", "step_seed"]


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """Return the seed of a step's sampling: the same whatever happened before the step."""
    return _states([seed, step, rank], 1)[0]


def completion_seeds(seed: int, rank: int, prompts: int, n: int) -> list[list[int]]:
    """Return a seed for each of ``n`` completions of every prompt of a call."""
    flat = _states([seed, rank], prompts * n)
    return [flat[i * n : (i + 1) * n] for i in range(prompts)]


def _states(entropy: list[int], count: int) -> list[int]:
    states = np.random.SeedSequence(entropy).generate_state(count, np.uint64)
    return [int(state) for state in states >> 1]  # engines take a signed 64-bit integer
