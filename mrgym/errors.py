"""The error tree of mrgym.

Every error is one line of the form *subject: got X, expected Y; remedy*. Each class also
inherits the standard exception a caller would reach for, so ``except ValueError`` keeps working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ConfigError",
    "MissingExtraError",
    "MrgymError",
    "RankError",
    "RegistryError",
    "RemoteError",
    "RewardContractError",
    "RewardDefinitionError",
    "RolloutError",
    "SamplerError",
    "ScoreError",
    "SpaceError",
    "TaskError",
    "WireError",
    "closest",
]


class MrgymError(Exception):
    """Base of every error mrgym raises on purpose."""


class RewardDefinitionError(MrgymError, ValueError):
    """A component, a gate or a set of components is declared wrongly."""


class RewardContractError(MrgymError, ValueError):
    """A step or a score broke the reward contract (names, types, range, sum)."""


class ScoreError(MrgymError, RuntimeError):
    """Score functions failed: one that must not, or too many of a step."""


class TaskError(MrgymError, ValueError):
    """A task source is empty, broken, or holds a task that cannot be used."""


class SpaceError(MrgymError, ValueError):
    """A text or message does not fit the space that was declared."""


class RegistryError(MrgymError, LookupError):
    """An environment id is unknown, taken, or not an environment."""


class RemoteError(MrgymError, ConnectionError):
    """A remote environment cannot be reached, or does not speak the protocol."""


class SamplerError(MrgymError, RuntimeError):
    """A sampler could not produce completions (never turned into an empty answer)."""


class RolloutError(MrgymError, ValueError):
    """Rollouts do not form a valid group or batch."""


class ConfigError(MrgymError, ValueError):
    """A configuration value is unknown or cannot work."""


class RankError(MrgymError, RuntimeError):
    """A process of a run of several died, hangs, or never came."""


class WireError(MrgymError, ValueError):
    """A record cannot be encoded, or was written by an unknown schema version."""


class MissingExtraError(MrgymError, ImportError):
    """An optional dependency is missing; the message holds the install command."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"{package}: not installed, needed for this feature; pip install 'mrgym[{extra}]'"
        )


def closest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known name, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
