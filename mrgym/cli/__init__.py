"""The ``mrgym`` command: one file a verb."""

from __future__ import annotations

import os
import sys
import warnings
from typing import NoReturn

import typer

from mrgym.cli.check import check
from mrgym.cli.doctor import doctor
from mrgym.cli.ending import end_process
from mrgym.cli.eval import evaluate
from mrgym.cli.list import list_environments
from mrgym.cli.report import report
from mrgym.cli.serve import serve
from mrgym.cli.train import train
from mrgym.errors import (
    MrgymError,
    RankError,
    RemoteError,
    RewardContractError,
    RolloutError,
    SamplerError,
    ScoreError,
)

__all__ = ["app", "main"]

app = typer.Typer(
    name="mrgym",
    help="Environments with several named rewards: check them, evaluate on them, train on them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("list")(list_environments)
app.command("check")(check)
app.command("eval")(evaluate)
app.command("train")(train)
app.command("report")(report)
app.command("serve")(serve)
app.command("doctor")(doctor)


def _one_line(message: Warning | str, *_: object, **__: object) -> str:
    return f"warning: {message}\n"


# These happen while running; everything else was wrong before anything ran.
_WHILE_RUNNING = (
    RankError,
    RemoteError,
    RewardContractError,
    RolloutError,
    SamplerError,
    ScoreError,
)


def main() -> None:
    """Run the command line; exits 0 (well), 1 (ran, but something failed) or 2 (bad input)."""
    # A class named as "module:Class" is looked for in the working directory too.
    sys.path.insert(0, "")
    warnings.formatwarning = _one_line
    try:
        app(standalone_mode=True)
    except MrgymError as error:
        sys.stderr.write(f"error: {error}\n")
        _exit(1 if isinstance(error, _WHILE_RUNNING) else 2)
    except SystemExit as end:
        _exit(end.code)


def _exit(code: str | int | None) -> NoReturn:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and isinstance(code, int):
        end_process(code)
    sys.exit(code)
