"""Seeds made of numbers that say what they are for, so that no two things share random numbers."""

from __future__ import annotations

import numpy as np

__all__ = ["mix", "mix_many"]


def mix(*numbers: int) -> int:
    """Return a seed from 0 to 2**63 - 1 that depends on every one of the numbers, from 0 on."""
    return mix_many(1, *numbers)[0]


def mix_many(count: int, *numbers: int) -> list[int]:
    """Return several seeds; a greater count keeps the first ones."""
    states = np.random.SeedSequence(numbers).generate_state(count, np.uint64)
    return [int(state) for state in states >> 1]  # engines take a signed 64-bit integer
