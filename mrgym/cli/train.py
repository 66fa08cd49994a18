"""``mrgym train``: run the GDPO trainer."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from mrgym.cli.dry_run import download_nothing, show_plan
from mrgym.cli.extras import trainer_imports
from mrgym.cli.options import (
    EnvArgs,
    EvalTasks,
    Json,
    Tasks,
    env_kwargs,
    means_table,
    out,
)
from mrgym.cli.run_target import run_target
from mrgym.components import REWARD_PREFIX

if TYPE_CHECKING:
    from mrgym_trainers import GDPOTrainer
    from mrgym_trainers.gdpo.stopping import Stopping

__all__ = ["train"]

_SAME_SIGNAL_S = 10.0


def train(
    env: Annotated[
        str | None,
        typer.Argument(help="An environment id, or pkg.module:Class; a recipe's own if left out."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Configuration keys, e.g. steps=50 advantage.weights.format=0.5"),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="The run folder; runs/ENV-TIME by default.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A YAML configuration, or a recipe's name (mrgym list --recipes)."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder, hub id or 'tiny'.")] = None,
    seed: Annotated[int | None, typer.Option(help="The run's seed.")] = None,
    env_args: EnvArgs = None,
    tasks: Tasks = None,
    eval_tasks: EvalTasks = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier run in the folder.")
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on with the run in this folder, or from one of its checkpoints."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="--resume: go on although the run differs.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show batch and memory arithmetic; train nothing.")
    ] = False,
    ranks: Annotated[int, typer.Option(help="--dry-run: reckon for this many ranks.")] = 1,
    gpu_gib: Annotated[float, typer.Option(help="--dry-run: memory of each GPU.")] = 80.0,
    as_json: Json = False,
) -> None:
    """Train a language model on an environment; leaves a run folder with metrics and a report."""
    # Before torch starts its threads: idle ones must not spin against other processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if dry_run:
        download_nothing()
    with trainer_imports():
        from mrgym_trainers.gdpo.config import load_config, load_run_keys
    if resume is not None:
        folder, config = _run_of(resume, folder, config)
    target = run_target(
        env,
        overrides or [],
        env_kwargs(env_args, tasks, eval_tasks),
        load_run_keys(config) if config is not None else {},
    )
    settings = load_config(config, target.overrides, model=model, seed=seed)
    if dry_run:
        show_plan(target, settings, ranks=ranks, gpu_gib=gpu_gib, as_json=as_json)
        return
    with trainer_imports():
        from mrgym_trainers.gdpo.train import GDPOTrainer
        from mrgym_trainers.report import write_report
    started = time.strftime("%Y%m%d-%H%M%S")
    folder = folder or Path("runs", f"{re.sub(r'[^A-Za-z0-9_.-]+', '.', target.env)}-{started}")
    trainer = GDPOTrainer(
        target.env,
        settings,
        out=folder,
        env_kwargs=target.env_kwargs,
        overwrite=overwrite,
        progress=not as_json,
        resume=resume,
        force=force,
    )
    _stop_on_sigterm(trainer.recovery.stopping)
    try:
        summary = trainer.train()
    except KeyboardInterrupt:
        if not trainer.ranks.first:
            raise typer.Exit(1) from None
        write_report(folder)
        Console(stderr=True).print(f"interrupted: checkpoint and summary are in {folder}")
        raise typer.Exit(1) from None
    if trainer.ranks.first:
        write_report(folder)
    if summary["status"] == "stopped":
        raise typer.Exit(_stopped(trainer, summary, folder))
    if trainer.ranks.first:
        _show(summary, folder, as_json)


def _run_of(resume: Path, folder: Path | None, config: Path | None) -> tuple[Path, Path]:
    """Return the folder and the configuration of a run to go on with, unless others are given."""
    with trainer_imports():
        from mrgym_trainers.gdpo.resume import run_folder
    run = run_folder(resume)
    return folder or run, config or run / "config.yaml"


def _stop_on_sigterm(stopping: Stopping) -> None:
    """Let SIGTERM, by which job schedulers ask, end a run after its step; a later one at once.

    One signal may come twice: from the scheduler to every process, and from torchrun to its ranks.
    """
    asked: list[float] = []

    def ask(*_: object) -> None:
        asked.append(time.monotonic())
        if asked[-1] - asked[0] > _SAME_SIGNAL_S:
            raise KeyboardInterrupt
        stopping.request("SIGTERM")

    signal.signal(signal.SIGTERM, ask)


def _stopped(trainer: GDPOTrainer, summary: dict[str, Any], folder: Path) -> int:
    """Say how to go on, and return the exit code of a run that stopped before its end."""
    from mrgym_trainers.gdpo.stopping import STOPPED_EXIT_CODE

    if trainer.ranks.first:
        reason = trainer.recovery.stopping.reason or "asked of another rank"
        Console(stderr=True).print(
            f"stopped ({reason}) after step {summary['steps']}: checkpoint and summary are in "
            f"{folder}; go on with: mrgym train --resume {folder}",
            soft_wrap=True,
            highlight=False,
        )
    return STOPPED_EXIT_CODE


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
