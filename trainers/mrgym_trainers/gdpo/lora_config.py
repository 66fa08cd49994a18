"""The configuration of adapters."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from mrgym_trainers.gdpo.strict import Strict

__all__ = ["LoRAConfig"]


class LoRAConfig(Strict):
    """A low-rank adapter.

    Attributes:
        rank: Rank of the updates.
        alpha: Updates are scaled by ``alpha / rank``; twice the rank if left out.
        target_modules: Names of the layers it is added to; ``all-linear`` means every linear layer
            but the output layer.
        dropout: Must be 0 in effect: the loss runs without dropout, as sampling does.
    """

    rank: PositiveInt = 16
    alpha: PositiveInt | None = None
    target_modules: str | tuple[str, ...] = "all-linear"
    dropout: Annotated[float, Field(ge=0, le=0)] = 0.0
