"""``mrgym train --dry-run``: the plan of a run as text or JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from mrgym.cli.extras import trainer_imports
from mrgym.cli.options import out
from mrgym.cli.run_target import RunTarget

if TYPE_CHECKING:
    from mrgym_trainers.gdpo.config import GDPOConfig
    from mrgym_trainers.gdpo.plan import Plan

__all__ = ["download_nothing", "show_plan"]


def download_nothing() -> None:
    """Keep this process from asking a hub; the libraries look when they are imported."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ[name] = "1"


def show_plan(
    target: RunTarget, config: GDPOConfig, *, ranks: int, gpu_gib: float, as_json: bool
) -> None:
    """Print what a run will do and need."""
    with trainer_imports():
        from mrgym_trainers.gdpo.plan import plan_run
    plan = plan_run(
        target.env,
        config,
        env_kwargs=target.env_kwargs,
        ranks=ranks,
        gpu_gib=gpu_gib,
        described=target.model_shape,
    )
    if as_json:
        sys.stdout.write(json.dumps({**plan.to_dict(), "config": _values(config)}) + "\n")
        return
    console = out()
    for title, rows in _sections(plan):
        console.print(_table(title, rows))
    for kind, lines in (("note", plan.notes), ("warning", plan.warnings)):
        for line in lines:
            console.print(f"{kind}: {line}", markup=False, soft_wrap=True)


def _values(config: GDPOConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _sections(plan: Plan) -> Iterator[tuple[str, dict[str, str]]]:
    yield f"dry run of {plan.env}", _what(plan)
    yield "batch (tokens: at most)", _batch(plan)
    if plan.memory is not None:
        memory, where = plan.memory, "GiB, at most"
        where += f", on each of {plan.batch.ranks} GPUs" if plan.gpu_gib else ""
        yield (
            f"memory ({where})",
            {
                **_gib("", memory.kept),
                **_gib("learning: ", memory.learning),
                **_gib("sampling: ", memory.sampling),
                **_peaks(plan),
            },
        )


def _what(plan: Plan) -> dict[str, str]:
    shape = plan.shape
    size = "size not known" if shape is None else f"{shape.parameters:,} parameters"
    weights = ", ".join(f"{name} {weight:g}" for name, weight in plan.weights.items())
    return {
        "model": f"{plan.model} ({size}; from {plan.shape_source})" if shape else plan.model,
        "weights": weights,
        "training tasks": _number(plan.batch.train_tasks),
        "evaluated tasks": _number(plan.batch.eval_tasks),
        "longest prompt": f"{plan.prompts.longest} tokens ({plan.prompts.source})",
    }


def _batch(plan: Plan) -> dict[str, str]:
    b = plan.batch
    epochs = "" if b.epochs is None else f", {b.epochs:.3g} epochs"
    rows = {
        "a step": f"{b.groups} prompts x {b.group_size} = {b.rollouts:,} rollouts",
        "the run": f"{b.steps} steps, {b.optimiser_steps} updates, "
        f"{b.steps * b.rollouts:,} rollouts{epochs}",
        "tokens": f"{b.tokens:,} a step ({b.sequence} a rollout), {b.completion_tokens:,} sampled",
    }
    if b.ranks > 1:
        rows["a rank"] = f"{b.rank_groups} prompts, {b.rank_rollouts} rollouts, "
        rows["a rank"] += f"{b.rank_tokens:,} tokens"
    rows["micro-batches"] = f"{b.micro_batches} of {b.micro_rows} rollouts at full length"
    return rows


def _gib(prefix: str, parts: Mapping[str, int]) -> dict[str, str]:
    return {prefix + name: _size(size) for name, size in parts.items()}


def _peaks(plan: Plan) -> dict[str, str]:
    memory = plan.memory
    if memory is None:
        return {}
    room = "not known" if memory.kv_room is None else _size(memory.kv_room)
    of = f" of {plan.gpu_gib:g}" if plan.gpu_gib else ""
    return {
        "cache for all sequences": f"{_size(memory.kv_needed)} (room: {room})",
        "peak while learning": _size(memory.learning_peak) + of,
        "peak while sampling": _size(memory.sampling_peak) + of,
    }


def _size(size: int) -> str:
    return f"{size / 2**30:.2f}" if size >= 2**30 / 100 else f"{size / 2**30:.2g}"


def _number(count: int | None) -> str:
    return "not counted" if count is None else f"{count:,}"


def _table(title: str, rows: Mapping[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table
