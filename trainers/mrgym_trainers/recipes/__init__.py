"""Configurations to start from, by name: ``mrgym train --config laptop``.

A recipe is the YAML of a :class:`~mrgym_trainers.GDPOConfig` that may also say what is trained on:
``env``, ``env_args``, and ``model_shape`` (the model's configuration, for a dry run without it).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mrgym.errors import ConfigError, closest

__all__ = ["RUN_KEYS", "Recipe", "config_path", "list_recipes"]

RUN_KEYS: Final = ("env", "env_args", "model_shape")
"""Top-level keys of a file that are no keys of the configuration."""

_FOLDER: Final = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Recipe:
    """A configuration in the package.

    Attributes:
        name: What ``--config`` takes.
        path: Its file.
        summary: The first line of its header.
    """

    name: str
    path: Path
    summary: str


def list_recipes() -> list[Recipe]:
    """Return the recipes in the package, by name."""
    files = sorted(_FOLDER.glob("*.yaml"))
    return [Recipe(file.stem, file, _first_line(file)) for file in files]


def config_path(name: str | Path) -> Path:
    """Return the file of a recipe, or the file that is named itself.

    A file that is there wins over a recipe of the same name.

    Raises:
        ConfigError: If there is neither.
    """
    path = Path(name)
    if path.is_file():
        return path
    known = {recipe.name: recipe.path for recipe in list_recipes()}
    if str(name) in known:
        return known[str(name)]
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise ConfigError(f"{path}: got no file, expected a YAML configuration; check the path")
    raise ConfigError(
        f"{name}: got no file and no recipe of that name, expected a YAML configuration or one "
        f"of {[*known]}" + (closest(str(name), known) or "; see mrgym list --recipes")
    )


def _first_line(file: Path) -> str:
    with file.open(encoding="utf-8") as lines:
        return next(lines, "").lstrip("# ").strip()
