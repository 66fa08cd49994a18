"""Sampling from vLLM servers by URL, and syncing weights to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

import torch
from torch import Tensor

from mrgym.errors import ConfigError, SamplerError
from mrgym.sampler import Completion, Prompt, SamplingParams
from mrgym_trainers.samplers.vllm.base import VLLMBase
from mrgym_trainers.samplers.vllm.http import VLLMServer
from mrgym_trainers.samplers.vllm.sender import SharedMemorySender, WeightSender
from mrgym_trainers.samplers.vllm.settings import VLLMConfig

__all__ = ["VLLMServerSampler"]

_REQUESTS_A_SERVER = 64


class VLLMServerSampler(VLLMBase):
    """Samples from servers, which take turns; weights are sent to all of them after every step.

    Args:
        model: What the policy was loaded from; the servers must have been started from the same.
        tokenizer: The policy's tokenizer.
        stop_ids: Every token that ends a completion.
        config: ``servers``, timeouts, and how weights are transferred.
        dtype: What the servers compute in, ``"float32"`` or ``"bfloat16"``.
        seed: Seeds calls that bring no seed of their own.
        sends_weights: Whether weights go to the servers from here, and not from another rank.

    Raises:
        ConfigError: If a server is named twice.
        SamplerError: If a server does not answer, or cannot serve this policy.
    """

    def __init__(
        self,
        model: str,
        tokenizer: Any,
        stop_ids: Iterable[int],
        *,
        config: VLLMConfig,
        dtype: str = "float32",
        seed: int = 0,
        sends_weights: bool = True,
    ) -> None:
        super().__init__(tokenizer, stop_ids, seed=seed)
        self._servers = [VLLMServer(url, config) for url in config.servers]
        urls = [server.url for server in self._servers]
        if len({*urls}) < len(urls):
            raise ConfigError(
                f"vllm.servers: got {urls}, expected every server once; one is named twice"
            )
        lengths = [server.preflight(model, dtype) for server in self._servers]
        self.context_length = min(lengths)
        self._threads = ThreadPoolExecutor(_REQUESTS_A_SERVER * len(self._servers), "vllm-request")
        self._sender: WeightSender | None = None
        if sends_weights:
            self._sender = self._make_sender(config, getattr(torch, dtype))

    def stream(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams
    ) -> Iterator[tuple[int, int, Completion]]:
        """Yield prompt's position, completion's position and completion, a prompt's together.

        Raises:
            SamplerError: If a prompt leaves no room, or a server dies, restarts or refuses.
        """
        ids = self._encode(prompts, params)
        for server in self._servers:
            server.check_version(self._version)
        seeds = self._seeds(prompts, 1, params)
        requests: dict[Future[Any], int] = {}
        for i, prompt_ids in enumerate(ids):
            server = self._servers[i % len(self._servers)]
            body = self._body(prompt_ids, n, params, seeds[i][0])
            requests[self._threads.submit(server.complete, body)] = i
        try:
            for done in as_completed(requests):
                for choice in done.result():
                    yield requests[done], choice["index"], self._of_choice(choice)
        finally:
            for request in requests:
                request.cancel()

    def rest(self) -> None:
        """Nothing to free: the servers' memory is their own."""

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Send weights to all servers, in place; later completions carry ``version``.

        Raises:
            SamplerError: If a server does not take them within ``sync_timeout``.
        """
        if self._sender is None:
            for _ in named_tensors:  # ranks gather each of them together
                pass
        else:
            self._sender.send(named_tensors, version)
            for server in self._servers:
                server.reset_prefix_cache()
        self._version = version

    def close(self) -> None:
        """Close the connections. May be called again."""
        self._threads.shutdown(cancel_futures=True)
        if self._sender is not None:
            self._sender.close()
        for server in self._servers:
            server.close()

    def _body(
        self, prompt_ids: list[int], n: int, params: SamplingParams, seed: int
    ) -> dict[str, Any]:
        return {
            "prompt": prompt_ids,
            "n": n,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "seed": seed if params.temperature > 0 else None,
            "logprobs": 0,
            "return_token_ids": True,
            "stop_token_ids": self._stop_ids,
            "ignore_eos": True,  # the ids above are all that ends a completion
            "skip_special_tokens": True,
        }

    def _of_choice(self, choice: dict[str, Any]) -> Completion:
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        return self._completion(choice["token_ids"], logprobs, choice["finish_reason"])

    def _make_sender(self, config: VLLMConfig, dtype: torch.dtype) -> WeightSender:
        if config.weight_transfer == "nccl":
            from mrgym_trainers.samplers.vllm.cuda_sender import NCCLSender

            return NCCLSender(self._servers, config, dtype)
        if config.weight_transfer == "ipc":
            raise SamplerError(
                "vllm.weight_transfer: got 'ipc' with vllm.servers, expected 'shared_memory' "
                "(same host) or 'nccl'; ipc is for an engine that the trainer starts itself"
            )
        return SharedMemorySender(self._servers, dtype=dtype)
