"""Weight transfers between GPUs, by vLLM's own engines: CUDA IPC on one, NCCL between several.

Written against vLLM 0.32 and 0.33; not run on a GPU yet.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from mrgym.errors import ConfigError
from mrgym_trainers.samplers.vllm.http import VLLMServer
from mrgym_trainers.samplers.vllm.settings import VLLMConfig

__all__ = ["IPCSender", "NCCLSender", "PolicyWeights"]


class PolicyWeights:
    """The tensors of one sync, in the type they are sent in; looks like a module to vLLM.

    Args:
        dtype: That type.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._tensors: list[tuple[str, Tensor]] = []

    def take(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Make these the tensors to send."""
        self._tensors = [*named_tensors]

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield them; each is converted only when its turn has come."""
        for name, tensor in self._tensors:
            yield name, tensor.detach().to(self._dtype)


class IPCSender:
    """Sends through CUDA IPC to an engine on the same GPU; a buffer at a time.

    Args:
        client: The engine's weight verbs.
        dtype: What the engine computes in.
    """

    def __init__(self, client: Any, dtype: torch.dtype) -> None:
        # vLLM passes the handles, which come from this process, as pickles to its own ones.
        os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        self._weights = PolicyWeights(dtype)
        info = IPCTrainerInitInfo(rank=0, packed=True)
        self._engine = WeightTransferTrainerFactory.trainer_init(
            info, client=client, source=ModuleSource(self._weights)
        )

    def send(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Send all tensors and return when the engine samples with them."""
        self._weights.take(named_tensors)
        self._engine.send_weights()

    def close(self) -> None:
        """Nothing is held between syncs."""


class NCCLSender:
    """Sends over NCCL to servers on other GPUs; every server is a group of its own.

    Args:
        servers: The servers.
        config: ``nccl_address`` and ``tensor_parallel_size``.
        dtype: What the servers compute in.

    Raises:
        ConfigError: If the address is missing or is none.
    """

    def __init__(
        self, servers: Sequence[VLLMServer], config: VLLMConfig, dtype: torch.dtype
    ) -> None:
        host, _, port = (config.nccl_address or "").rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(
                f"vllm.nccl_address: got {config.nccl_address!r}, expected host:port of this "
                "machine that the servers can reach; weight_transfer='nccl' needs it"
            )
        self._servers = servers
        self._weights = PolicyWeights(dtype)
        self._engines = [
            WeightTransferTrainerFactory.trainer_init(
                NCCLTrainerInitInfo(
                    master_address=host,
                    master_port=int(port) + i,
                    world_size=1 + config.tensor_parallel_size,
                    rank=0,
                ),
                client=server,
                source=ModuleSource(self._weights),
            )
            for i, server in enumerate(servers)
        ]

    def send(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Send all tensors and return when every server samples with them."""
        self._weights.take(named_tensors)
        for server, engine in zip(self._servers, self._engines, strict=True):
            engine.send_weights()
            server.set_version(version)

    def close(self) -> None:
        """Nothing is held between syncs."""
