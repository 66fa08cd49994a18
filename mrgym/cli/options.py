"""What several verbs share: options, reading ``key=value``, and tables of component means."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mrgym.components import reward_key
from mrgym.errors import ConfigError

__all__ = ["EnvArgs", "EnvName", "EvalTasks", "Json", "Tasks", "env_kwargs", "means_table", "out"]

EnvName = Annotated[str, typer.Argument(help="An environment id, or pkg.module:Class.")]
EnvArgs = Annotated[
    list[str] | None,
    typer.Option("--env-arg", "-e", help="An argument of the environment, as key=value."),
]
Tasks = Annotated[
    str | None, typer.Option("--tasks", help="JSONL file or dataset id to use as tasks.")
]
EvalTasks = Annotated[
    str | None, typer.Option("--eval-tasks", help="Held-out tasks that go with --tasks.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def out() -> Console:
    """Return the console for results."""
    return Console(highlight=False)


def env_kwargs(
    pairs: Sequence[str] | None, tasks: str | None = None, eval_tasks: str | None = None
) -> dict[str, Any]:
    """Return an environment's arguments from ``key=value`` pairs and the task options.

    Raises:
        ConfigError: If a pair has no ``=``.
    """
    kwargs: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"--env-arg: got {pair!r}, expected key=value; write e.g. signed=true"
            )
        kwargs[key] = _value(text)
    if tasks is not None:
        kwargs["tasks"] = Path(tasks) if tasks.endswith((".jsonl", ".json")) else tasks
    if eval_tasks is not None:
        if tasks is None:
            raise ConfigError("--eval-tasks: got no --tasks, expected both; give --tasks as well")
        is_file = eval_tasks.endswith((".jsonl", ".json"))
        kwargs["eval_tasks"] = Path(eval_tasks) if is_file else eval_tasks
    return kwargs


def means_table(
    title: str, columns: Mapping[str, Mapping[str, float]], names: Sequence[str]
) -> Table:
    """Return a table with a row a component and the sum, and a column a set of means."""
    table = Table(title=title, title_justify="left")
    table.add_column("reward")
    for column in columns:
        table.add_column(column, justify="right")
    for label, key in [*((name, reward_key(name)) for name in names), ("sum", "reward")]:
        cells = [means.get(key) for means in columns.values()]
        table.add_row(label, *("-" if cell is None else f"{cell:.3f}" for cell in cells))
    return table


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
