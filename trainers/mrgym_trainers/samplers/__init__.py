"""Samplers that produce token ids: one file an engine."""

from mrgym_trainers.samplers.transformers import TransformersSampler

__all__ = ["TransformersSampler"]
