"""Trainers for mrgym environments: GDPO and the advantage estimators it is compared with."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrgym_trainers.gdpo.config import GDPOConfig
    from mrgym_trainers.gdpo.train import GDPOTrainer

__all__ = ["GDPOConfig", "GDPOTrainer"]


def __getattr__(name: str) -> Any:
    # Looked up when asked for: advantages and reports work without loading torch.
    if name == "GDPOConfig":
        from mrgym_trainers.gdpo.config import GDPOConfig

        return GDPOConfig
    if name == "GDPOTrainer":
        from mrgym_trainers.gdpo.train import GDPOTrainer

        return GDPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
