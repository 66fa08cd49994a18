"""A worker extension that takes out the refresh of tied output heads (see test_engine)."""

from mrgym_trainers.samplers.vllm import receiver

receiver.refresh_heads = lambda model: None


class Extension:
    """Adds nothing; importing this module is what counts."""
