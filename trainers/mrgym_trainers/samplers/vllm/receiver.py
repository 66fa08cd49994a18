"""The engine's side of a weight sync: read tensors from shared memory and load them in place."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

__all__ = ["SharedMemoryWeights", "TensorsInfo", "refresh_heads"]


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on beforehand."""


@dataclass
class TensorsInfo(WeightTransferUpdateInfo):
    """Tensors that lie one after another in a file in shared memory.

    Attributes:
        path: The file.
        names: Checkpoint names.
        dtypes: Names of torch dtypes.
        shapes: Full shapes.
        offsets: First byte of each tensor.
    """

    path: str
    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor, copied out.

        vLLM keeps what it was given until a layer is whole, and by then the sender has written the
        next tensors over these.
        """
        parts = zip(self.names, self.dtypes, self.shapes, self.offsets, strict=True)
        with (
            open(self.path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view,
        ):
            for name, dtype, shape, offset in parts:
                kind = getattr(torch, dtype)
                count = int(torch.Size(shape).numel())
                data = bytearray(view[offset : offset + count * kind.itemsize])
                yield name, torch.frombuffer(data, dtype=kind).view(shape)


class SharedMemoryWeights(WeightTransferEngine[InitInfo, TensorsInfo]):
    """Takes weights over from a trainer on the same host, without a checkpoint on disk."""

    init_info_cls = InitInfo
    update_info_cls = TensorsInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._loaded: set[str] = set()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing: every update names its own file."""

    def start_weight_update(self) -> None:
        """Let layers be filled again, as they were from the checkpoint."""
        self._loaded = set()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: TensorsInfo) -> None:
        """Load some of the tensors; vLLM raises for a name it does not know."""
        self._loaded |= self.model.load_weights(update_info.read()) or set()

    def finish_weight_update(self) -> None:
        """Finish layers and make sure that nothing was left out.

        Raises:
            RuntimeError: If a parameter of the model was not sent.
        """
        finalize_layerwise_reload(self.model, self.model_config)
        refresh_heads(self.model)
        missing = {name for name, _ in self.model.named_parameters()} - self._loaded
        if missing:
            raise RuntimeError(
                f"weight update: got no values for {sorted(missing)[:5]} ({len(missing)} in all), "
                "expected every parameter; send the whole policy"
            )

    def shutdown(self) -> None:
        """Nothing is held between updates."""


def refresh_heads(model: nn.Module) -> None:
    """Let output heads rebuild what they derived from their weight.

    With tied embeddings the head's weight is the embedding's and is not loaded on its own, so vLLM
    does not process it again; on CPU its packed copy would silently stay as it was.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and module.weight.device.type == "cpu":
            module.quant_method.process_weights_after_loading(module)
