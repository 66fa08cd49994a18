"""``mrgym list``: the environments that can be made by id."""

from __future__ import annotations

import importlib
import inspect
import json
import sys

from rich.table import Table

from mrgym.cli.options import Json, out
from mrgym.registry import EnvSpec, list_envs, spec

__all__ = ["list_environments"]


def list_environments(as_json: Json = False) -> None:
    """List the environments that can be made by id."""
    rows = [(env_id, spec(env_id).location, _summary(spec(env_id))) for env_id in list_envs()]
    if as_json:
        keys = ("id", "location", "summary")
        sys.stdout.write(json.dumps([dict(zip(keys, row, strict=True)) for row in rows]) + "\n")
        return
    table = Table("id", "class", "what it is")
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
