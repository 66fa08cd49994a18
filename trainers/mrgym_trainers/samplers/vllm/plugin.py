"""What vLLM loads into each of its processes: a weight transfer, and a shield against signals."""

from __future__ import annotations

from mrgym_trainers.samplers.vllm.shield import shield

__all__ = ["BACKEND", "register"]

BACKEND = "shared_memory"


def register() -> None:
    """Add ``"shared_memory"`` to vLLM's weight transfers, and shield a trainer's own engine.

    Called by vLLM in every process, any number of times.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "mrgym_trainers.samplers.vllm.receiver", "SharedMemoryWeights"
        )
    shield()
