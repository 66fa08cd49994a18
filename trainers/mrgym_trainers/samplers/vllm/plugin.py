"""What vLLM loads into each of its processes: it makes ``"shared_memory"`` a weight transfer."""

from __future__ import annotations

__all__ = ["BACKEND", "register"]

BACKEND = "shared_memory"


def register() -> None:
    """Add the backend to vLLM's registry; called by vLLM in every process, any number of times."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "mrgym_trainers.samplers.vllm.receiver", "SharedMemoryWeights"
        )
