"""What a run knows besides weights: where it stands, and every random number generator."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import torch

from mrgym.errors import ConfigError

__all__ = [
    "Best",
    "RankState",
    "RunState",
    "rank_state",
    "restore_env",
    "restore_random",
    "seed_random",
]


class Best(msgspec.Struct, frozen=True):
    """The best evaluation so far."""

    metric: str
    value: float
    step: int


class RunState(msgspec.Struct, frozen=True):
    """Where a run stands; the same on every rank.

    Attributes:
        step: Steps done.
        evaluated: Whether the evaluation due after that step is done.
        completions: Completions sampled for training.
        wall_s: Seconds the run took, over all its parts.
        metrics_bytes: Length of ``metrics.jsonl``.
        tasks: The state of the task order.
        estimator: What the estimator carries from batch to batch.
        best: The best evaluation, where one is kept.
    """

    step: int = 0
    evaluated: bool = False
    completions: int = 0
    wall_s: float = 0.0
    metrics_bytes: int = 0
    tasks: dict[str, int] = {}
    estimator: dict[str, float] = {}
    best: Best | None = None


class RankState(msgspec.Struct, frozen=True):
    """Random number generators and environment of one rank.

    Attributes:
        python: State of :mod:`random`.
        numpy: State of numpy's global generator, its words as little-endian bytes.
        torch: State of torch's CPU generator.
        cuda: States of the CUDA generators.
        control: State of the generator of ``shuffle_rewards``.
        env: What the environment's ``get_state`` returned.
    """

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, bytes, int, int, float]
    torch: bytes
    cuda: list[bytes]
    control: bytes
    env: Any = None


def seed_random(seed: int) -> None:
    """Seed the generators that environments and libraries may draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rank_state(control: torch.Generator, env: Any) -> RankState:
    """Return the state of this rank.

    Args:
        control: The generator of ``shuffle_rewards``.
        env: The environment; asked for ``get_state()`` where it has one.

    Raises:
        ConfigError: If the environment's state has no JSON form.
    """
    name, words, *rest = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return RankState(
        python=random.getstate(),
        numpy=(str(name), np.asarray(words, "<u4").tobytes(), *rest),
        torch=_bytes(torch.get_rng_state()),
        cuda=[_bytes(state) for state in cuda],
        control=_bytes(control.get_state()),
        env=_env_state(env),
    )


def restore_random(state: RankState, control: torch.Generator) -> None:
    """Bring this rank's random number generators to a state."""
    random.setstate(state.python)
    name, words, *rest = state.numpy
    np.random.set_state((name, np.frombuffer(words, "<u4"), *rest))  # type: ignore[arg-type]
    torch.set_rng_state(_tensor(state.torch))
    if len(state.cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_tensor(one) for one in state.cuda])
    control.set_state(_tensor(state.control))


def restore_env(state: RankState, env: Any) -> None:
    """Give the environment the state it had.

    Raises:
        ConfigError: If it kept one and takes none.
    """
    if state.env is None:
        return
    if not hasattr(env, "set_state"):
        raise ConfigError(
            f"{env.contract_name}: got no set_state, expected one for the state its get_state "
            "gave; define it"
        )
    env.set_state(state.env)


def _env_state(env: Any) -> Any:
    if not hasattr(env, "get_state"):
        return None
    state = env.get_state()
    try:
        return msgspec.json.decode(msgspec.json.encode(state))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{env.contract_name}: get_state: got a value without a JSON form ({error}), expected "
            "numbers, text, lists and mappings; convert it"
        ) from error


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
