"""The shape of a causal language model from its configuration alone: no weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from mrgym.errors import ConfigError
from mrgym_trainers.gdpo.config import TINY
from mrgym_trainers.tiny_policy import tiny_policy_path

__all__ = ["ModelShape", "find_shape"]

# Decoders of equal layers with a gated MLP, whose parameters are counted by formula.
_DENSE: Final = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a causal language model.

    Attributes:
        model_type: Its architecture in Transformers.
        hidden: Width of the residual stream.
        intermediate: Width of the MLP.
        layers: Number of layers.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        head_dim: Width of a head.
        vocabulary: Number of embeddings.
        context: Most tokens of prompt and completion together; None if it sets no limit.
        parameters: Number of trainable values, tied ones once.
        layer_parameters: Those of one layer, the largest.
    """

    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int | None
    parameters: int
    layer_parameters: int

    @property
    def output_parameters(self) -> int:
        """The values of the output layer, which may be those of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def kv_values(self) -> int:
        """Values that the key/value cache holds for a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @classmethod
    def of(cls, config: Any) -> Self:
        """Return the shape that a Transformers configuration describes."""
        text = config.get_text_config()
        heads = text.num_attention_heads
        sizes = {
            "hidden": text.hidden_size,
            "intermediate": getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            "layers": text.num_hidden_layers,
            "heads": heads,
            "kv_heads": getattr(text, "num_key_value_heads", None) or heads,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
            "vocabulary": text.vocab_size,
        }
        dense = text.model_type in _DENSE
        total, layer = _formula(text, sizes) if dense else _counted(config)
        context = getattr(text, "max_position_embeddings", None)
        return cls(text.model_type, **sizes, context=context, parameters=total,
                   layer_parameters=layer)  # fmt: skip


def _formula(config: Any, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return all parameters, and those of a layer, of a dense decoder."""
    hidden, mlp = sizes["hidden"], sizes["intermediate"]
    queries, keys = (sizes[name] * sizes["head_dim"] for name in ("heads", "kv_heads"))
    layer = 2 * hidden * (queries + keys) + 3 * hidden * mlp + 2 * hidden
    own_bias = bool(getattr(config, "attention_bias", False))
    if own_bias or config.model_type == "qwen2":
        layer += queries + 2 * keys
    if own_bias and config.model_type != "qwen2":
        layer += hidden
    if getattr(config, "mlp_bias", False):
        layer += 2 * mlp + hidden
    if config.model_type == "qwen3":
        layer += 2 * sizes["head_dim"]
    embeddings = 1 if config.tie_word_embeddings else 2
    total = embeddings * sizes["vocabulary"] * hidden + sizes["layers"] * layer + hidden
    return total, layer


def _counted(config: Any) -> tuple[int, int]:
    """Return the same for any architecture, from a model whose weights have no memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    return _values(model), max(map(_values, layers), default=0)


def _values(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def find_shape(
    model: str, described: Mapping[str, Any] | None = None
) -> tuple[ModelShape | None, str]:
    """Return a model's shape and where it was found; nothing is downloaded.

    Args:
        model: ``"tiny"``, a folder, or a hub id, of which the cached configuration is read.
        described: Fields of a Transformers configuration to go by where there is none, such as
            a recipe's ``model_shape``.

    Returns:
        None, and why, where the shape is not known.

    Raises:
        ConfigError: If a folder holds no model, or ``described`` is no configuration.
    """
    source = str(tiny_policy_path()) if model == TINY else model
    try:
        return ModelShape.of(AutoConfig.from_pretrained(source, local_files_only=True)), "config"
    except (OSError, ValueError, KeyError, AttributeError) as error:
        if Path(source).exists() or source.startswith((".", "/", "~")) or source.count("/") > 1:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"model {model!r}: got {type(error).__name__} ({reason}), expected a Hugging Face "
                "model folder; give the folder that save_pretrained wrote"
            ) from error
    if described is None:
        return None, "not in the Hugging Face cache, and a dry run downloads nothing"
    return ModelShape.of(_described(described)), "recipe"


def _described(fields: Mapping[str, Any]) -> Any:
    rest = dict(fields)
    try:
        return AutoConfig.for_model(str(rest.pop("model_type", "")), **rest)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"model_shape: got {dict(fields)!r}, expected model_type and fields of its "
            "configuration in Transformers; copy them from the model's config.json"
        ) from error
