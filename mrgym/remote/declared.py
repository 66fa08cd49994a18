"""A service's declaration of components, as components."""

from __future__ import annotations

import math
from collections.abc import Iterable

from mrgym.components import Component, ComponentSet, Gate
from mrgym.errors import RemoteError, RewardDefinitionError
from mrgym.server import schemas as wire

__all__ = ["declared_components"]


def declared_components(described: wire.EnvOut, url: str) -> ComponentSet:
    """Return the components that a service declares.

    Raises:
        RemoteError: If they cannot be.
    """
    try:
        return ComponentSet(dict(_components(described.components)))
    except RewardDefinitionError as error:
        raise RemoteError(
            f"{url}: got components that cannot be ({error}), expected a declaration; is it a "
            "mrgym service?"
        ) from error


def _components(described: Iterable[wire.ComponentOut]) -> Iterable[tuple[str, Component]]:
    for c in described:
        gate = None if c.gate is None else Gate(c.gate.on, c.gate.at_least, c.gate.otherwise)
        low = -math.inf if c.low is None else c.low
        high = math.inf if c.high is None else c.high
        yield c.name, Component(low, high, c.weight, c.optional, gate, c.reduce, c.doc)
