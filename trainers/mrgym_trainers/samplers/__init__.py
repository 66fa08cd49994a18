"""Samplers that produce token ids: one file an engine."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrgym_trainers.samplers.transformers import TransformersSampler
    from mrgym_trainers.samplers.vllm.engine import VLLMSampler

__all__ = ["TransformersSampler", "VLLMSampler"]


def __getattr__(name: str) -> Any:
    # Looked up when asked for: vLLM loads its plugin from here, and needs neither.
    if name == "TransformersSampler":
        from mrgym_trainers.samplers.transformers import TransformersSampler

        return TransformersSampler
    if name == "VLLMSampler":
        from mrgym_trainers.samplers.vllm.engine import VLLMSampler

        return VLLMSampler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
