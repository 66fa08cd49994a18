"""The base of the trainer's configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from mrgym_trainers.advantage_config import config_error

__all__ = ["Strict"]


class Strict(BaseModel):
    """Frozen, without unknown keys; what cannot work raises a :class:`ConfigError` of one line."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    if not TYPE_CHECKING:  # type checkers keep the signature made from the fields

        def __init__(self, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise config_error(type(self), error) from None
