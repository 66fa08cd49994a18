"""``mrgym list``: the environments that can be made by id, and the recipes."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from mrgym.cli.options import Json, out
from mrgym.registry import EnvSpec, list_envs, spec

__all__ = ["list_environments"]


def list_environments(
    recipes: Annotated[
        bool, typer.Option("--recipes", help="List the recipes of mrgym train --config instead.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the environments that can be made by id."""
    if recipes:
        _show(("name", "what it is"), ("name", "summary"), _recipes(), as_json)
        return
    rows = [(env_id, spec(env_id).location, _summary(spec(env_id))) for env_id in list_envs()]
    _show(("id", "class", "what it is"), ("id", "location", "summary"), rows, as_json)


def _recipes() -> list[tuple[str, ...]]:
    from mrgym_trainers.recipes import list_recipes

    return [(recipe.name, recipe.summary) for recipe in list_recipes()]


def _show(
    titles: Sequence[str], keys: Sequence[str], rows: Sequence[Sequence[str]], as_json: bool
) -> None:
    if as_json:
        sys.stdout.write(json.dumps([dict(zip(keys, row, strict=True)) for row in rows]) + "\n")
        return
    table = Table(*titles)
    for row in rows:
        table.add_row(*row)
    out().print(table)


def _summary(env_spec: EnvSpec) -> str:
    module, _, name = env_spec.location.partition(":")
    try:
        target = getattr(importlib.import_module(module), name)
    except Exception as error:  # one broken plugin must not hide the others
        return f"cannot be imported: {error}"
    return next(iter((inspect.getdoc(target) or "").splitlines()), "")
