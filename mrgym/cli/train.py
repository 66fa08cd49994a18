"""``mrgym train``: run the GDPO trainer."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from mrgym.cli.extras import trainer_imports
from mrgym.cli.options import (
    EnvArgs,
    EnvName,
    EvalTasks,
    Json,
    Tasks,
    env_kwargs,
    means_table,
    out,
)
from mrgym.components import REWARD_PREFIX

__all__ = ["train"]


def train(
    env: EnvName,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Configuration keys, e.g. steps=50 advantage.weights.format=0.5"),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="The run folder; runs/ENV-TIME by default.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML configuration.")] = None,
    model: Annotated[str | None, typer.Option(help="Folder, hub id or 'tiny'.")] = None,
    seed: Annotated[int | None, typer.Option(help="The run's seed.")] = None,
    env_args: EnvArgs = None,
    tasks: Tasks = None,
    eval_tasks: EvalTasks = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier run in the folder.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a language model on an environment; leaves a run folder with metrics and a report."""
    # Before torch starts its threads: idle ones must not spin against other processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with trainer_imports():
        from mrgym_trainers.gdpo.config import load_config
        from mrgym_trainers.gdpo.train import GDPOTrainer
        from mrgym_trainers.report import write_report
    folder = folder or Path("runs", f"{env.replace(':', '.')}-{time.strftime('%Y%m%d-%H%M%S')}")
    trainer = GDPOTrainer(
        env,
        load_config(config, overrides or [], model=model, seed=seed),
        out=folder,
        env_kwargs=env_kwargs(env_args, tasks, eval_tasks),
        overwrite=overwrite,
        progress=not as_json,
    )
    # Job schedulers ask with SIGTERM; it ends a run as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        summary = trainer.train()
    except KeyboardInterrupt:
        write_report(folder)
        Console(stderr=True).print(f"interrupted: checkpoint and summary are in {folder}")
        raise typer.Exit(1) from None
    write_report(folder)
    _show(summary, folder, as_json)


def _show(summary: dict[str, Any], folder: Path, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(summary) + "\n")
        return
    sampled, greedy = summary["eval"], summary["eval_greedy"]
    names = [k.removeprefix(REWARD_PREFIX) for k in sampled["end"] if k.startswith(REWARD_PREFIX)]
    columns = {
        "start": sampled["start"],
        "end": sampled["end"],
        "greedy start": greedy["start"],
        "greedy end": greedy["end"],
    }
    console = out()
    title = f"{summary['env']}, held-out tasks, {summary['steps']} steps"
    console.print(means_table(title, columns, names))
    rate = summary["completions"] / summary["wall_s"]
    console.print(f"{summary['completions']} completions, {summary['wall_s']:.0f} s ({rate:.3g}/s)")
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True)
