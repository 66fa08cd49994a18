"""``mrgym eval``: component means of any sampler on an environment's tasks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

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
from mrgym.errors import ConfigError
from mrgym.evaluate import evaluate as run_evaluation
from mrgym.registry import make
from mrgym.sampler import OpenAISampler, Sampler, SamplingParams, ScriptedSampler
from mrgym.stepwise import as_text_env
from mrgym.text import TextEnv
from mrgym.wire import write_rollouts

__all__ = ["SamplerKind", "Split", "evaluate"]


class SamplerKind(StrEnum):
    """Where completions come from."""

    SCRIPTED = "scripted"
    TRANSFORMERS = "transformers"
    OPENAI = "openai"


class Split(StrEnum):
    """Which tasks."""

    TRAIN = "train"
    EVAL = "eval"


def evaluate(
    env: EnvName,
    sampler: Annotated[SamplerKind, typer.Option(help="Where completions come from.")] = (
        SamplerKind.TRANSFORMERS
    ),
    completions: Annotated[
        Path | None,
        typer.Option(
            help="scripted: JSONL of strings, or of objects with 'completion' and a 'task_id' or "
            "'prompt'; left out, the environment's own gold completions are replayed."
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="transformers: folder, hub id or 'tiny'; openai: model name.")
    ] = "tiny",
    base_url: Annotated[str | None, typer.Option(help="openai: such as http://host/v1.")] = None,
    split: Annotated[Split, typer.Option(help="Which tasks.")] = Split.EVAL,
    limit: Annotated[int, typer.Option(min=1, help="Most tasks.")] = 128,
    n: Annotated[int, typer.Option("--n", min=1, help="Completions a task.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens a completion.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seeds sampling.")] = 0,
    max_error_rate: Annotated[float, typer.Option(help="Most failed scores, as a share.")] = 0.1,
    save: Annotated[Path | None, typer.Option(help="Write the rollouts here, as JSONL.")] = None,
    env_args: EnvArgs = None,
    tasks: Tasks = None,
    eval_tasks: EvalTasks = None,
    as_json: Json = False,
) -> None:
    """Sample completions of an environment's tasks and report the mean of every component."""
    kwargs = env_kwargs(env_args, tasks, eval_tasks)
    text_env = as_text_env(lambda: make(env, **kwargs))
    source = text_env.task_source(split.value)[:limit]
    if sampler is SamplerKind.SCRIPTED:
        chosen: Sampler = _scripted(completions, text_env, len(source) * n)
    elif sampler is SamplerKind.OPENAI:
        chosen = _openai(base_url, model)
    else:
        chosen = _transformers(model, seed)
    means, rollouts = run_evaluation(
        text_env,
        chosen,
        source,
        SamplingParams(max_tokens, temperature, seed=seed),
        n=n,
        max_error_rate=max_error_rate,
    )
    if save is not None:
        write_rollouts(save, rollouts)
    _show(env, split, means, text_env, as_json)


def _show(
    env: str, split: Split, means: Mapping[str, Any], text_env: TextEnv, as_json: bool
) -> None:
    if as_json:
        sys.stdout.write(json.dumps({"env": env, "split": split.value, **means}) + "\n")
        return
    title = f"{env}, {split.value}: {means['n']} rollouts, {means['failed']} not scored"
    errors = {k.removesuffix("/se"): v for k, v in means.items() if k.endswith("/se")}
    errors["reward"] = means["reward_se"]
    table = means_table(title, {"mean": means, "standard error": errors}, [*text_env.components])
    out().print(table)


def _scripted(path: Path | None, env: TextEnv, wanted: int) -> Sampler:
    if path is None:
        golds = _golds(env)
        if not golds:
            raise ConfigError(
                f"{env.contract_name}: got no gold completions to replay, expected some or a file; "
                "pass --completions FILE or define gold_completion"
            )
        return ScriptedSampler(golds)
    script = _read_script(path)
    if isinstance(script, list) and len(script) != wanted:
        raise ConfigError(
            f"{path}: got {len(script)} completions without a 'task_id', expected {wanted} (one "
            "for every task of the split, times --n); name the task on every line, or change "
            "--split and --limit"
        )
    return ScriptedSampler(script)


def _golds(env: TextEnv) -> dict[str, str]:
    tasks = [*env.task_source("train"), *env.task_source("eval")]
    golds = {task.id: env.gold_completion(task) for task in tasks}
    return {task_id: text for task_id, text in golds.items() if text is not None}


def _read_script(path: Path) -> list[str] | dict[str, list[str]]:
    if not path.is_file():
        raise ConfigError(f"{path}: got no file, expected JSONL of completions; check the path")
    in_order: list[str] = []
    by_key: dict[str, list[str]] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:  # no JSON, or no UTF-8
            row = None
        text = row.get("completion") if isinstance(row, dict) else row
        if not isinstance(text, str):
            shown = line[:80].decode(errors="replace")
            raise ConfigError(
                f"{path}, line {number}: got {shown!r}, expected a JSON string or an object "
                "with a 'completion' string; mend the line"
            )
        key = row.get("task_id", row.get("prompt")) if isinstance(row, dict) else None
        if key is not None:
            by_key.setdefault(str(key), []).append(text)
        else:
            in_order.append(text)
    if by_key and in_order:
        raise ConfigError(
            f"{path}: got lines with and {len(in_order)} lines without 'task_id' or 'prompt', "
            "expected one kind; name the task on every line or on none"
        )
    return by_key or in_order


def _openai(base_url: str | None, model: str) -> Sampler:
    if base_url is None:
        raise ConfigError(
            "--sampler openai: got no --base-url, expected one; pass e.g. http://localhost:8000/v1"
        )
    return OpenAISampler(base_url, model, api_key=os.environ.get("OPENAI_API_KEY"))


def _transformers(model: str, seed: int) -> Sampler:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from mrgym.cli.extras import trainer_imports

    with trainer_imports():
        from mrgym_trainers.gdpo.policy import load_policy
        from mrgym_trainers.samplers.transformers import TransformersSampler
    policy = load_policy(model)
    return TransformersSampler(policy.model, policy.tokenizer, seed=seed)
