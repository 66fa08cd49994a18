"""``mrgym report``: the HTML report of a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mrgym.cli.extras import trainer_imports
from mrgym.cli.options import out

__all__ = ["report"]


def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    to: Annotated[Path | None, typer.Option("--to", help="The HTML file to write.")] = None,
) -> None:
    """Write the self-contained HTML report of a run (report.html in its folder by default)."""
    with trainer_imports():
        from mrgym_trainers.report import write_report
    out().print(str(write_report(run, to)), markup=False, soft_wrap=True)
