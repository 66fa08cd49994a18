"""Sampling from a vLLM engine that runs beside the trainer, on CPU or CUDA."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mrgym.errors import ConfigError, MissingExtraError, SamplerError
from mrgym.sampler import Completion, Prompt, SamplingParams
from mrgym_trainers.samplers.vllm.base import VLLMBase, brief
from mrgym_trainers.samplers.vllm.plugin import register
from mrgym_trainers.samplers.vllm.sender import SharedMemorySender, WeightSender
from mrgym_trainers.samplers.vllm.settings import VLLMConfig
from mrgym_trainers.samplers.vllm.shield import shielded_children
from mrgym_trainers.samplers.vllm.watch import EngineWatch

__all__ = ["VLLMSampler"]

_CPU_CACHE_GIB = 1.0
_LOWER = "lower vllm.kv_cache_gib, vllm.gpu_memory_utilization, vllm.max_model_len or max_num_seqs"


class VLLMSampler(VLLMBase):
    """Samples with vLLM in processes of its own; weights are sent in place after every step.

    Token ids go in and come out verbatim. Each completion has a seed of its own, made of its
    prompt's (or the call's) and its position.

    Args:
        model: Folder or hub id the engine is started from.
        tokenizer: The policy's tokenizer.
        stop_ids: Every token that ends a completion.
        config: Settings of the engine.
        dtype: What the engine computes in, ``"float32"`` or ``"bfloat16"``.
        seed: Seeds calls that bring no seed of their own.

    Raises:
        MissingExtraError: If vLLM is not installed.
        ConfigError: If the engine cannot be started with these settings.
    """

    def __init__(
        self,
        model: str,
        tokenizer: Any,
        stop_ids: Iterable[int],
        *,
        config: VLLMConfig | None = None,
        dtype: str = "float32",
        seed: int = 0,
    ) -> None:
        super().__init__(tokenizer, stop_ids, seed=seed)
        self._config = config or VLLMConfig()
        self._asleep = False
        self._requests = itertools.count()
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._llm = _start(model, self._config, dtype, seed)
        self.context_length = self._llm.model_config.max_model_len
        self._watch = EngineWatch(self._llm.llm_engine.engine_core)
        self._sender = self._make_sender()

    def stream(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams
    ) -> Iterator[tuple[int, int, Completion]]:
        """Yield prompt's position, completion's position and completion, as each is ready.

        Raises:
            SamplerError: If a prompt leaves no room for a completion, or the engine fails.
        """
        if self._asleep:
            raise SamplerError(
                "VLLMSampler: got a call while asleep, expected new weights first; "
                "call update_weights after rest()"
            )
        pending = self._submit(
            self._encode(prompts, params), self._seeds(prompts, n, params), params
        )
        try:
            while pending:
                for output in self._step():
                    if output.finished:
                        i, j = pending.pop(output.request_id)
                        done = output.outputs[0]
                        logprobs = done.logprobs.logprobs
                        yield i, j, self._completion(done.token_ids, logprobs, done.finish_reason)
        finally:
            if pending:  # whoever read the stream stopped early
                self._llm.llm_engine.abort_request([*pending])

    def rest(self) -> None:
        """Free the engine's GPU memory until the next :meth:`update_weights`."""
        if self._config.sleep and self._device() == "cuda":
            # Level 2 keeps no copy of the weights: the ones it has are out of date anyway.
            self._llm.sleep(level=2)
            self._asleep = True

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Send weights to the engine, in place; later completions carry ``version``.

        Raises:
            SamplerError: If the engine does not take them.
        """
        try:
            with self._watch.limit(self._config.sync_timeout):
                self._take(named_tensors, version)
        except SamplerError:
            raise
        except Exception as error:  # vLLM raises many kinds, also those of its own processes
            raise SamplerError(
                f"VLLMSampler: weight sync {version}: got {brief(error)}, expected the engine to "
                "take over every tensor; its log above says more"
            ) from error
        self._version = version

    def _take(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self._asleep:
            self._llm.wake_up(tags=["weights"])
        self._sender.send(named_tensors, version)
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        self._llm.reset_prefix_cache()

    def close(self) -> None:
        """End the engine's processes. May be called again."""
        if self._llm is not None:
            self._watch.close()
            self._sender.close()
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None

    def _submit(
        self, ids: Sequence[list[int]], seeds: Sequence[list[int]], params: SamplingParams
    ) -> dict[str, tuple[int, int]]:
        """Ask for a completion a seed and return their places by request."""
        pending: dict[str, tuple[int, int]] = {}
        for i, prompt_ids in enumerate(ids):
            for j, seed in enumerate(seeds[i]):
                key, prompt = str(next(self._requests)), {"prompt_token_ids": prompt_ids}
                wanted = self._engine_params(params, seed)
                self._llm.llm_engine.add_request(key, prompt, wanted)
                pending[key] = (i, j)
        return pending

    def _step(self) -> list[Any]:
        try:
            with self._watch.limit(self._config.request_timeout):
                outputs: list[Any] = self._llm.llm_engine.step()
        except Exception as error:  # the engine's processes died, or refused
            raise SamplerError(
                f"VLLMSampler: got {brief(error)} while sampling, expected completions; its log "
                f"above says why. If memory ran out, {_LOWER}"
            ) from error
        return outputs

    def _engine_params(self, params: SamplingParams, seed: int) -> Any:
        from vllm import SamplingParams as EngineParams
        from vllm.sampling_params import RequestOutputKind

        return EngineParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=seed if params.temperature > 0 else None,
            logprobs=0,
            flat_logprobs=True,
            stop_token_ids=self._stop_ids,
            ignore_eos=True,  # the ids above are all that ends a completion
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _device(self) -> str:
        from vllm.platforms import current_platform

        return "cuda" if current_platform.is_cuda() else "cpu"

    def _make_sender(self) -> WeightSender:
        client = _InProcess(self._llm)
        if self._config.weight_transfer == "ipc":
            from mrgym_trainers.samplers.vllm.cuda_sender import IPCSender

            return IPCSender(client, self._dtype)
        return SharedMemorySender([client], dtype=self._dtype)


class _InProcess:
    """The engine's weight verbs, called through its own queue."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)


def _start(model: str, config: VLLMConfig, dtype: str, seed: int) -> Any:
    """Return a started engine."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for results
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # torch has threads by now
    try:
        from vllm import LLM
        from vllm.platforms import current_platform
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "vllm", "vllm") from error
    register()
    on_cpu = current_platform.is_cpu()
    cache_gib = config.kv_cache_gib or (_CPU_CACHE_GIB if on_cpu else None)
    try:
        with shielded_children():
            return LLM(
                model,
                dtype=dtype,
                seed=seed,
                tensor_parallel_size=config.tensor_parallel_size,
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                enforce_eager=on_cpu if config.enforce_eager is None else config.enforce_eager,
                enable_prefix_caching=config.enable_prefix_caching,
                enable_sleep_mode=config.sleep and not on_cpu,
                logprobs_mode="processed_logprobs",
                weight_transfer_config={"backend": config.weight_transfer},
                skip_tokenizer_init=True,
                **_device_options(config, cache_gib, on_cpu),
            )
    except Exception as error:  # vLLM raises many kinds, also those of its own processes
        raise ConfigError(
            f"vllm: got {brief(error)} while starting an engine for {model!r}, expected it to "
            f"start; its log above says why. If memory ran out, {_LOWER}"
        ) from error


def _device_options(config: VLLMConfig, cache_gib: float | None, on_cpu: bool) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if on_cpu:
        # A prompt read in pieces makes vLLM rewind its seed's generator, which CPU ones cannot.
        options["enable_chunked_prefill"] = False
    else:
        options["gpu_memory_utilization"] = config.gpu_memory_utilization
    if cache_gib is not None:
        options["kv_cache_memory_bytes"] = int(cache_gib * 2**30)
    return options
