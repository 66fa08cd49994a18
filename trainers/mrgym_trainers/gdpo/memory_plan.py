"""What a run keeps in the memory of each GPU, by formula; docs/recipes.md states them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mrgym_trainers.gdpo.config import GDPOConfig
from mrgym_trainers.gdpo.logprobs import rows_per_chunk
from mrgym_trainers.gdpo.model_shape import ModelShape

__all__ = ["GIB", "Load", "MemoryPlan", "activation_bytes", "plan_memory"]

GIB: Final = 2**30
# vLLM's share beside weights and cache: its activations and CUDA graphs. Reckoned, not measured.
_ENGINE_OVERHEAD: Final = int(1.5 * GIB)
_WIDE: Final = 4  # bytes of a float32


@dataclass(frozen=True, slots=True)
class Load:
    """What a rank works on.

    Attributes:
        ranks: Number of ranks; policy, gradients and optimiser are sharded over them.
        rollouts: Most rollouts of a rank in a step.
        sequence: Most tokens of prompt and completion.
        micro_rows: Most rollouts of a micro-batch.
        gpu_bytes: Memory of a GPU; None where the run uses none.
    """

    ranks: int
    rollouts: int
    sequence: int
    micro_rows: int
    gpu_bytes: int | None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on each GPU.

    Attributes:
        kept: What stays between steps, by name.
        learning: What the update needs besides, by name.
        sampling: What sampling needs besides, by name.
        kv_token: Bytes of the key/value cache for a token.
        kv_needed: Those for all completions that are sampled at a time, at full length.
        kv_room: Those that vLLM's share leaves for its cache; None where that is not known.
        learning_peak: Most bytes in use while the policy learns.
        sampling_peak: Most bytes in use while completions are sampled.
    """

    kept: dict[str, int]
    learning: dict[str, int]
    sampling: dict[str, int]
    kv_token: int
    kv_needed: int
    kv_room: int | None
    learning_peak: int
    sampling_peak: int


def plan_memory(shape: ModelShape, config: GDPOConfig, load: Load) -> MemoryPlan:
    """Return an upper estimate of what a run keeps in memory, at the longest completions."""
    kept, learning = _kept(shape, config, load), _learning(shape, config, load)
    kv_token = shape.kv_values * _compute(config)
    sampling, needed, room = _sampling(shape, config, load, kv_token)
    persistent = sum(kept.values())
    # The optimiser steps when activations are gone already.
    passing = sum(learning.values()) - learning["optimiser's temporaries"]
    beside = 0 if config.vllm.sleep else sampling.get("vLLM's share", 0)
    return MemoryPlan(
        kept,
        learning,
        sampling,
        kv_token,
        needed,
        room,
        persistent + max(passing, learning["optimiser's temporaries"]) + beside,
        persistent + sum(sampling.values()),
    )


def activation_bytes(shape: ModelShape, config: GDPOConfig) -> int:
    """Return what a layer keeps of each token for the backward pass.

    With h, i the widths of residual stream and MLP, a = heads x head_dim and k = kv_heads x
    head_dim, in values: norms 4h (in float32), inputs of the matrices 2h, queries and attention's
    answer 2a, keys and values 2k, MLP 4i, and heads + 2 statistics in float32. Autocast keeps the
    inputs once for every matrix (5h), and bfloat16 weights keep half of the norms in bfloat16.
    """
    h, c = shape.hidden, _compute(config)
    inner = 2 * (shape.heads + shape.kv_heads) * shape.head_dim + 4 * shape.intermediate
    statistics = _WIDE * (shape.heads + 2)
    if c == _WIDE:
        return statistics + c * (6 * h + inner)
    if config.master_weights:
        return statistics + _WIDE * 4 * h + c * (5 * h + inner)
    return statistics + _WIDE * 2 * h + c * (4 * h + inner)


def _compute(config: GDPOConfig) -> int:
    return _WIDE if config.dtype == "float32" else 2


def _stored(config: GDPOConfig) -> int:
    return _WIDE if config.master_weights else _compute(config)


def _kept(shape: ModelShape, config: GDPOConfig, load: Load) -> dict[str, int]:
    policy = shape.parameters * _stored(config) // load.ranks
    master = _stored(config) > _compute(config)
    reference = shape.parameters * _compute(config) // load.ranks if config.loss.kl_coef else 0
    # A model gathered for every sampled token would be slow: ranks sample from a whole copy.
    own = config.sampler == "transformers" and load.ranks > 1
    return {
        "weights (float32 master)" if master else "weights": policy,
        "gradients": policy,
        "Adam's two moments": 2 * policy,
        **({"reference policy": reference} if reference else {}),
        **({"whole copy to sample from": shape.parameters * _stored(config)} if own else {}),
    }


def _learning(shape: ModelShape, config: GDPOConfig, load: Load) -> dict[str, int]:
    tokens = load.micro_rows * load.sequence
    copied = _stored(config) > _compute(config)
    # Autocast keeps a rounded copy of every weight it multiplied with.
    layer = tokens * activation_bytes(shape, config)
    layer += shape.layer_parameters * _compute(config) * copied
    stream = tokens * shape.hidden * _stored(config)
    activations = layer * shape.layers
    if config.gradient_checkpointing:
        activations = layer + stream * shape.layers
    parts = {"activations": activations, "output layer": _output_layer(shape, config, load)}
    if load.ranks > 1:
        rest = shape.parameters - shape.layers * shape.layer_parameters
        # Weights of two layers and of all that is no layer, and the gradients of one and of that.
        gathered = 3 * shape.layer_parameters + 2 * rest
        parts["gathered layers"] = gathered * _stored(config)
    parts["optimiser's temporaries"] = shape.parameters * _stored(config) // load.ranks
    return parts


def _output_layer(shape: ModelShape, config: GDPOConfig, load: Load) -> int:
    """Return the bytes of a chunk of logits, the weight's copy, and the sum of its gradient."""
    kind = "cpu" if load.gpu_bytes is None else "cuda"
    rows = min(rows_per_chunk(shape.vocabulary, kind), load.micro_rows * load.sequence)
    each = _WIDE if _compute(config) == _WIDE else _WIDE + _compute(config)
    copied = _stored(config) > _compute(config)
    weight = shape.output_parameters * (_WIDE + _compute(config) * copied)
    return rows * shape.vocabulary * each + weight


def _sampling(
    shape: ModelShape, config: GDPOConfig, load: Load, kv_token: int
) -> tuple[dict[str, int], int, int | None]:
    """Return what sampling takes, the cache it could use, and the cache it has."""
    if config.sampler == "transformers":
        rows = min(config.sample_rows, load.rollouts)
        cache = rows * load.sequence * kv_token
        copy = shape.parameters * _compute(config) * (_stored(config) > _compute(config))
        logits = rows * shape.vocabulary * _WIDE
        parts = {"key/value cache": cache, "rounded weights": copy, "logits": logits}
        return {name: size for name, size in parts.items() if size}, cache, None
    needed = min(config.vllm.max_num_seqs, load.rollouts) * load.sequence * kv_token
    if config.vllm.servers:
        return {}, needed, None
    weights = shape.parameters * _compute(config) // config.vllm.tensor_parallel_size
    if config.vllm.kv_cache_gib is not None:
        room = int(config.vllm.kv_cache_gib * GIB)
        return {"vLLM's share": weights + room + _ENGINE_OVERHEAD}, needed, room
    if load.gpu_bytes is None:  # vLLM on CPU takes 1 GiB of cache if it is told nothing
        return {"vLLM's share": weights + GIB}, needed, GIB
    share = int(config.vllm.gpu_memory_utilization * load.gpu_bytes)
    return {"vLLM's share": share}, needed, max(0, share - weights - _ENGINE_OVERHEAD)
