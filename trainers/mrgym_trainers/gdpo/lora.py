"""Training small adapters instead of all weights (LoRA, arXiv 2106.09685), through peft."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mrgym.errors import ConfigError, MissingExtraError
from mrgym_trainers.gdpo.lora_config import LoRAConfig

__all__ = ["add_adapter", "merged_tensors"]

_BASE = ".base_layer."


def add_adapter(model: Any, config: LoRAConfig) -> Any:
    """Add an adapter to a Transformers model, in place, and return peft's view of the two.

    The model's own weights are frozen; the adapter starts as a change of zero.

    Raises:
        MissingExtraError: If peft is not installed.
        ConfigError: If no layer has one of the names.
    """
    try:
        import peft
    except ModuleNotFoundError as error:
        raise MissingExtraError("peft", "lora") from error
    targets = config.target_modules
    options = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha or 2 * config.rank,
        target_modules=targets if isinstance(targets, str) else [*targets],
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, options)
    except ValueError as error:
        raise ConfigError(
            f"lora.target_modules: got {targets!r} ({_one_line(error)}), expected names of linear "
            "layers such as q_proj, or 'all-linear'; look at the model's modules"
        ) from error


@torch.no_grad()
def merged_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's weights with its adapter added, by their names without one.

    The model is left as it is: sums are made one at a time, so weights do not drift from merging
    and taking apart again.
    """
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
    for name, weight in model.named_parameters():
        if ".lora_" in name:
            continue
        owner, found, rest = name.rpartition(_BASE)
        if not found:
            yield name, weight
        elif rest == "weight":
            layer = layers[owner]
            delta = sum(layer.get_delta_weight(adapter) for adapter in layer.active_adapters)
            yield f"{owner}.{rest}", weight + delta
        else:
            yield f"{owner}.{rest}", weight


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
