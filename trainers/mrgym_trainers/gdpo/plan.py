"""What a run will do and need, reckoned before anything is loaded: ``mrgym train --dry-run``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import AutoTokenizer

from mrgym.errors import ConfigError, MrgymError
from mrgym.text import Split, TextEnv
from mrgym_trainers.gdpo.config import TINY, GDPOConfig
from mrgym_trainers.gdpo.memory_plan import GIB, Load, MemoryPlan, plan_memory
from mrgym_trainers.gdpo.model_shape import ModelShape, find_shape
from mrgym_trainers.gdpo.setup import resolve_weights, text_env
from mrgym_trainers.samplers.codec import TokenizerCodec
from mrgym_trainers.tiny_policy import tiny_policy_path

__all__ = ["BatchPlan", "Plan", "Prompts", "plan_batch", "plan_run", "warnings_of"]

_MEASURED = 256  # prompts whose length is measured


@dataclass(frozen=True, slots=True)
class Prompts:
    """How long prompts are, and how that is known.

    Attributes:
        longest: Most tokens of a prompt; 0 where that is not known.
        source: What it was taken from.
    """

    longest: int
    source: str


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A step's arithmetic. Token counts are upper bounds: every completion as long as it may be.

    Attributes:
        ranks: Number of ranks the groups of a step are spread over.
        steps: Number of steps.
        groups: Prompts of a step.
        group_size: Rollouts of a prompt.
        rollouts: Rollouts of a step.
        optimiser_steps: Updates of the whole run.
        sequence: Most tokens of prompt and completion.
        tokens: Most tokens of a step.
        completion_tokens: Most sampled tokens of a step.
        rank_groups: Most groups of one rank.
        rank_rollouts: Most rollouts of one rank.
        rank_tokens: Most tokens of one rank.
        micro_rows: Rollouts of a micro-batch at full length.
        micro_batches: Micro-batches of one rank and pass at full length, no prompt shared.
        train_tasks: Training tasks; None where they were not loaded.
        eval_tasks: Held-out tasks that are evaluated on; None where they were not loaded.
        epochs: How often every training task comes up; None where their number is not known.
    """

    ranks: int
    steps: int
    groups: int
    group_size: int
    rollouts: int
    optimiser_steps: int
    sequence: int
    tokens: int
    completion_tokens: int
    rank_groups: int
    rank_rollouts: int
    rank_tokens: int
    micro_rows: int
    micro_batches: int
    train_tasks: int | None
    eval_tasks: int | None
    epochs: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will do and need.

    Attributes:
        env: The environment.
        weights: Component name to weight.
        model: The model's name.
        shape: Its sizes; None where its configuration is not on this machine.
        shape_source: Where they come from, or why they are not known.
        prompts: How long prompts are.
        batch: The step's arithmetic.
        memory: Bytes on each GPU; None where the shape is not known.
        gpu_gib: Memory of the GPUs it was reckoned for; None for a run on CPU.
        warnings: What will not go well.
        notes: What could not be found out.
    """

    env: str
    weights: dict[str, float]
    model: str
    shape: ModelShape | None
    shape_source: str
    prompts: Prompts
    batch: BatchPlan
    memory: MemoryPlan | None
    gpu_gib: float | None
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


def plan_run(
    env: str,
    config: GDPOConfig,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    ranks: int = 1,
    gpu_gib: float = 80.0,
    described: Mapping[str, Any] | None = None,
) -> Plan:
    """Return what a run will do and need; no weights are loaded, and no GPU is touched.

    Args:
        env: An id, or ``"pkg.module:Class"``.
        config: The run's configuration.
        env_kwargs: Arguments of the environment. Tasks from a hub are not loaded.
        ranks: Number of ranks.
        gpu_gib: Memory of each GPU.
        described: Fields of the model's configuration, for one that is not on this machine.

    Raises:
        ConfigError: If weights name unknown components, or there is no such model folder.
        RegistryError: If there is no such environment.
    """
    if ranks < 1 or gpu_gib <= 0:
        raise ConfigError(
            f"dry run: got ranks={ranks} and gpu_gib={gpu_gib}, expected both above 0; "
            "give --ranks 8 --gpu-gib 80"
        )
    kwargs = dict(env_kwargs or {})
    made = text_env(env, kwargs)
    weights = resolve_weights(config.advantage, made)
    shape, source = find_shape(config.model, described)
    notes = [] if shape else [f"model {config.model}: {source}; memory is not reckoned"]
    counts = {split: _count(made, kwargs, split, notes) for split in ("train", "eval")}
    prompts = _prompts(made, config, shape, loaded=counts["train"] is not None)
    batch = plan_batch(config, prompts, ranks, counts["train"], counts["eval"])
    gpu = None if config.device == "cpu" else gpu_gib
    memory = plan_memory(shape, config, _load(batch, gpu)) if shape else None
    warnings = [*warnings_of(config, batch, shape, memory, gpu)]
    return Plan(env, weights, config.model, shape, source, prompts, batch, memory, gpu,
                warnings, notes)  # fmt: skip


def plan_batch(
    config: GDPOConfig,
    prompts: Prompts,
    ranks: int = 1,
    train_tasks: int | None = None,
    eval_tasks: int | None = None,
) -> BatchPlan:
    """Return the arithmetic of a step."""
    groups, size = config.prompts_per_step, config.group_size
    sequence = prompts.longest + config.max_completion_tokens
    rank_groups = math.ceil(groups / ranks)
    rank_rollouts = rank_groups * size
    micro_rows = min(max(1, config.micro_batch_tokens // sequence), rank_rollouts)
    return BatchPlan(
        ranks=ranks,
        steps=config.steps,
        groups=groups,
        group_size=size,
        rollouts=groups * size,
        optimiser_steps=config.steps * config.updates_per_step,
        sequence=sequence,
        tokens=groups * size * sequence,
        completion_tokens=groups * size * config.max_completion_tokens,
        rank_groups=rank_groups,
        rank_rollouts=rank_rollouts,
        rank_tokens=rank_rollouts * sequence,
        micro_rows=micro_rows,
        micro_batches=math.ceil(rank_rollouts / micro_rows),
        train_tasks=train_tasks,
        eval_tasks=None if eval_tasks is None else min(eval_tasks, config.eval_tasks),
        epochs=None if not train_tasks else config.steps * groups / train_tasks,
    )


def _load(batch: BatchPlan, gpu_gib: float | None) -> Load:
    gpu_bytes = None if gpu_gib is None else int(gpu_gib * GIB)
    return Load(batch.ranks, batch.rank_rollouts, batch.sequence, batch.micro_rows, gpu_bytes)


def _count(env: TextEnv, kwargs: Mapping[str, Any], split: Split, notes: list[str]) -> int | None:
    given = kwargs.get("tasks")
    if isinstance(given, str) and not given.endswith((".jsonl", ".json", ".txt")):
        if split == "train":
            notes.append(f"tasks {given}: a data set of a hub, which a dry run does not load")
        return None
    try:
        return len(env.task_source(split))
    except (MrgymError, OSError) as error:
        notes.append(f"{split} tasks: got {error}")
        return None


def _prompts(
    env: TextEnv, config: GDPOConfig, shape: ModelShape | None, *, loaded: bool
) -> Prompts:
    """Return the longest prompt: as limited, as measured, or as much as the context leaves."""
    if config.max_prompt_tokens is not None:
        return Prompts(config.max_prompt_tokens, "max_prompt_tokens")
    tokenizer = _tokenizer(config.model) if loaded else None
    if tokenizer is not None:
        codec, tasks = TokenizerCodec(tokenizer, []), env.task_source("train")[:_MEASURED]
        longest = max(len(codec.start(env.prompt_for(task))) for task in tasks)
        return Prompts(longest, f"the longest of {len(tasks)} training prompts")
    context = config.vllm.max_model_len if config.sampler == "vllm" else None
    context = context or (shape.context if shape else None)
    if context is not None and context > config.max_completion_tokens:
        return Prompts(context - config.max_completion_tokens, "what the context leaves")
    return Prompts(0, "not known, counted as 0; set max_prompt_tokens")


def _tokenizer(model: str) -> Any:
    source = str(tiny_policy_path()) if model == TINY else model
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError):
        return None


def warnings_of(
    config: GDPOConfig,
    batch: BatchPlan,
    shape: ModelShape | None,
    memory: MemoryPlan | None,
    gpu_gib: float | None,
) -> Iterator[str]:
    """Yield what will not go well, one line each."""
    yield from _schedule_warnings(config, batch)
    yield from _batch_warnings(config, batch)
    if shape is not None:
        yield from _shape_warnings(config, batch, shape)
    if memory is not None:
        yield from _memory_warnings(config, batch, memory, gpu_gib)


def _schedule_warnings(config: GDPOConfig, batch: BatchPlan) -> Iterator[str]:
    if config.warmup_steps >= config.steps:
        yield (
            f"warmup_steps: got {config.warmup_steps} of {config.steps} steps, expected fewer; "
            "the learning rate never reaches its peak before the end"
        )
    if config.checkpoint_every > config.steps:
        yield (
            f"checkpoint_every: got {config.checkpoint_every} of {config.steps} steps, expected "
            "fewer; only the last checkpoint is written"
        )
    if batch.eval_tasks is not None and batch.eval_tasks < config.eval_tasks:
        yield (
            f"eval_tasks: got {config.eval_tasks}, expected at most the {batch.eval_tasks} that "
            "are held out; fewer are evaluated"
        )


def _batch_warnings(config: GDPOConfig, batch: BatchPlan) -> Iterator[str]:
    if batch.groups % batch.ranks:
        idle = batch.rank_groups * batch.ranks - batch.groups
        yield (
            f"prompts_per_step: got {batch.groups} for {batch.ranks} ranks, expected a multiple; "
            f"{idle} of {batch.rank_groups * batch.ranks} places stay idle in every step"
        )
    if config.sampler == "transformers" and batch.rank_rollouts > config.sample_rows:
        rest = config.sample_rows % config.group_size
        if rest:
            yield (
                f"sample_rows: got {config.sample_rows}, which group_size {config.group_size} "
                "does not divide, expected a multiple; groups are sampled in pieces"
            )
    if batch.sequence > config.micro_batch_tokens:
        yield (
            f"micro_batch_tokens: got {config.micro_batch_tokens}, expected at least the "
            f"{batch.sequence} of a full rollout; longer ones go through alone and take more "
            "memory than the key says"
        )


def _shape_warnings(config: GDPOConfig, batch: BatchPlan, shape: ModelShape) -> Iterator[str]:
    limits = {"the model's context": shape.context}
    if config.sampler == "vllm":
        limits["vllm.max_model_len"] = config.vllm.max_model_len
        if shape.heads % config.vllm.tensor_parallel_size:
            yield (
                f"vllm.tensor_parallel_size: got {config.vllm.tensor_parallel_size}, expected a "
                f"divisor of the model's {shape.heads} heads; vLLM will not start"
            )
    for name, limit in limits.items():
        if limit is not None and batch.sequence > limit:
            yield (
                f"{name}: got {limit} tokens, expected at least {batch.sequence} (prompt and "
                "completion); the run stops at the first prompt that leaves no room"
            )


def _memory_warnings(
    config: GDPOConfig, batch: BatchPlan, memory: MemoryPlan, gpu_gib: float | None
) -> Iterator[str]:
    if memory.kv_room is not None and memory.kv_room < memory.kv_needed:
        rows = min(config.vllm.max_num_seqs, batch.rank_rollouts)
        fitting = memory.kv_room // (memory.kv_token * batch.sequence)
        yield (
            f"vllm: got room for {fitting} completions of full length in the key/value cache, "
            f"expected {rows} (max_num_seqs, or a rank's rollouts); the rest wait or are computed "
            "again; raise gpu_memory_utilization or lower max_num_seqs"
        )
    if gpu_gib is None:
        return
    for phase, peak in (("learning", memory.learning_peak), ("sampling", memory.sampling_peak)):
        if peak > gpu_gib * GIB:
            yield (
                f"memory: got {peak / GIB:.1f} GiB while {phase}, expected at most {gpu_gib:g}; "
                "lower micro_batch_tokens or vllm.gpu_memory_utilization, set "
                "gradient_checkpointing=true, or take more ranks"
            )
