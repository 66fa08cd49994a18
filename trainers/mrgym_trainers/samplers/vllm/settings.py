"""How vLLM is run: an engine of the trainer's own, or servers by URL."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from mrgym_trainers.gdpo.strict import Strict

__all__ = ["VLLMConfig"]


class VLLMConfig(Strict):
    """Settings of the vLLM sampler.

    Attributes:
        servers: Base URLs of vLLM servers, such as ``http://host:8000``; prompts are spread over
            them. Left out, an engine is started beside the trainer.
        weight_transfer: How weights reach the engine: ``shared_memory`` (same host, any device),
            ``ipc`` (same GPU, own engine), ``nccl`` (servers on other GPUs).
        nccl_address: ``host:port`` of the trainer that servers connect to for ``nccl``.
        tensor_parallel_size: GPUs of one engine.
        max_model_len: Most tokens of prompt and completion together; the model's own if left out.
        max_num_seqs: Most completions sampled at a time.
        gpu_memory_utilization: Share of the GPU's memory for the engine.
        kv_cache_gib: GiB for the key/value cache instead of a share (on CPU 1 if left out).
        enforce_eager: Leave CUDA graphs and compilation out; ``null`` means only on CPU.
        enable_prefix_caching: Read a prompt's beginning once; emptied after every sync.
        sleep: Free the engine's GPU memory while the policy learns.
        start_timeout: Seconds a server may take to answer the first time.
        request_timeout: Seconds one completion request may take.
        sync_timeout: Seconds one message of a weight sync may take.
        retries: How often a request that met a broken connection is repeated.
    """

    servers: tuple[str, ...] = ()
    weight_transfer: Literal["shared_memory", "ipc", "nccl"] = "shared_memory"
    nccl_address: str | None = None
    tensor_parallel_size: PositiveInt = 1
    max_model_len: PositiveInt | None = None
    max_num_seqs: PositiveInt = 256
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.5
    kv_cache_gib: PositiveFloat | None = None
    enforce_eager: bool | None = None
    enable_prefix_caching: bool = True
    sleep: bool = True
    start_timeout: PositiveFloat = 60.0
    request_timeout: PositiveFloat = 600.0
    sync_timeout: PositiveFloat = 120.0
    retries: Annotated[int, Field(ge=0)] = 2
