"""Importing what only some verbs need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mrgym.errors import MissingExtraError

__all__ = ["trainer_imports"]


@contextmanager
def trainer_imports() -> Iterator[None]:
    """Turn a missing package of the trainer into one line with the install command.

    Raises:
        MissingExtraError: In place of the import's own error.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "a package").partition(".")[0]
        if package.startswith("mrgym"):
            raise
        raise MissingExtraError(package, "train") from error
