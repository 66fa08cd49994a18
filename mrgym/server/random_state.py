"""The state of a random generator as text, so that an episode goes on elsewhere with the same."""

from __future__ import annotations

import numpy as np

from mrgym.errors import RolloutError
from mrgym.server.problems import Problem

__all__ = ["read_random", "set_random", "write_random"]


def write_random(rng: np.random.Generator) -> str:
    """Return a generator's state.

    Raises:
        RolloutError: If it is not numpy's default one.
    """
    state = rng.bit_generator.state
    if state["bit_generator"] != "PCG64":
        raise RolloutError(
            f"remote episode: got random numbers of {state['bit_generator']}, expected PCG64; "
            "use np.random.default_rng(seed)"
        )
    inner = state["state"]
    numbers = (inner["state"], inner["inc"], state["has_uint32"], state["uinteger"])
    return "-".join(f"{int(number):x}" for number in numbers)


def read_random(text: str | None, where: str) -> np.random.Generator:
    """Return the generator in that state, or a fresh one seeded with 0.

    Raises:
        Problem: 422 if it is no state.
    """
    rng = np.random.default_rng(0)
    try:
        if text is not None:
            set_random(rng, text)
    except ValueError as error:
        raise Problem(
            422,
            "InvalidRequest",
            f"{where}: got {text!r}, expected the state of a numpy PCG64 generator as "
            "mrgym.make(...) sends it; leave it out",
            subject=where,
        ) from error
    return rng


def set_random(rng: np.random.Generator, text: str) -> None:
    """Put a generator into the state that :func:`write_random` gave.

    Raises:
        ValueError: If it is none.
    """
    state, inc, has_uint32, uinteger = (int(part, 16) for part in text.split("-"))
    # With an even increment the numbers go in small circles, and drawing some never ends.
    if inc % 2 == 0 or has_uint32 > 1 or uinteger >= 2**32:
        raise ValueError(text)
    rng.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": state, "inc": inc},
        "has_uint32": has_uint32,
        "uinteger": uinteger,
    }
