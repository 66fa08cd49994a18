"""``mrgym check``: everything the contract promises, tried on an environment."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from mrgym.check import check_env
from mrgym.cli.options import EnvArgs, EnvName, EvalTasks, Json, Tasks, env_kwargs, out

__all__ = ["check"]


def check(
    env: EnvName,
    env_args: EnvArgs = None,
    tasks: Tasks = None,
    eval_tasks: EvalTasks = None,
    max_tasks: Annotated[int, typer.Option(help="Most tasks of each split to try.")] = 100,
    as_json: Json = False,
) -> None:
    """Try everything the reward contract promises; exit 1 if something does not hold."""
    report = check_env(env, max_tasks=max_tasks, **env_kwargs(env_args, tasks, eval_tasks))
    if as_json:
        sys.stdout.write(json.dumps({"ok": report.ok, **asdict(report)}) + "\n")
    else:
        out().print(str(report), markup=False)
    if not report.ok:
        raise typer.Exit(1)
