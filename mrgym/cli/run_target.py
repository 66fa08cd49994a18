"""What ``mrgym train`` is to train on: an environment that is named, or the one of a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mrgym.errors import ConfigError
from mrgym.registry import spec

__all__ = ["RunTarget", "run_target"]


@dataclass(frozen=True, slots=True)
class RunTarget:
    """An environment with its arguments, and the overrides of the configuration.

    Attributes:
        env: An id, or ``"pkg.module:Class"``.
        env_kwargs: The environment's arguments.
        overrides: ``key=value`` pairs.
        model_shape: The model's configuration as a recipe describes it.
    """

    env: str
    env_kwargs: dict[str, Any]
    overrides: list[str] = field(default_factory=list)
    model_shape: dict[str, Any] | None = None


def run_target(
    env: str | None,
    overrides: Sequence[str],
    given_kwargs: Mapping[str, Any],
    run_keys: Mapping[str, Any],
) -> RunTarget:
    """Return what to train on; what the command line says wins over the file.

    Args:
        env: The first positional argument, which is an override if it holds ``=``.
        overrides: The other ones.
        given_kwargs: Arguments of the environment on the command line.
        run_keys: ``env``, ``env_args`` and ``model_shape`` of the file. Its arguments are left
            out where another environment than its own was named.

    Raises:
        ConfigError: If no environment was named, here or there.
    """
    pairs = [*overrides]
    if env is not None and "=" in env:
        pairs, env = [env, *pairs], None
    of_file = run_keys.get("env")
    chosen = env or of_file
    if chosen is None:
        raise ConfigError(
            "mrgym train: got no environment, expected one; name it (mrgym train "
            "math_multi_reward), or take a recipe that does (mrgym train --config laptop)"
        )
    same = of_file is None or _same(chosen, of_file)
    from_file = run_keys.get("env_args", {}) if same else {}
    return RunTarget(chosen, {**from_file, **given_kwargs}, pairs, run_keys.get("model_shape"))


def _same(one: str, other: str) -> bool:
    return one == other or spec(one).id == spec(other).id
