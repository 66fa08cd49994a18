"""The policy: loading a causal language model, and the log-probabilities it gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from mrgym.errors import ConfigError
from mrgym_trainers.gdpo.config import TINY
from mrgym_trainers.tiny_policy import tiny_policy_path

__all__ = ["Policy", "load_policy"]


class Policy:
    """A causal language model being trained.

    Attributes:
        model: The Transformers model.
        tokenizer: Its tokenizer.
        name: What it was loaded from.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.device
        return device

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights by name."""
        yield from self.model.named_parameters()

    def logprobs(
        self, input_ids_BT: Tensor, first: int, *, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of every token from position ``first`` on.

        Args:
            input_ids_BT: Right-padded sequences. Padding needs no mask: it stands after every
                token that is looked at, and attention is causal.
            first: First position whose token is wanted, at least 1.
            temperature: Logits are divided by it, as in sampling.

        Returns:
            Two tensors [B, T - first], float32: log-probabilities (with gradient) and the
            entropy of the distribution each token was drawn from (without).
        """
        length = input_ids_BT.shape[1]
        predicting = torch.arange(first - 1, length - 1, device=input_ids_BT.device)
        logits_BTV = self.model(
            input_ids=input_ids_BT, use_cache=False, logits_to_keep=predicting
        ).logits
        logprobs_BTV = (logits_BTV.float() / temperature).log_softmax(-1)
        with torch.no_grad():
            entropy_BT = torch.special.entr(logprobs_BTV.exp()).sum(-1)
        chosen_BT = logprobs_BTV.gather(2, input_ids_BT[:, first:, None]).squeeze(2)
        return chosen_BT, entropy_BT


def load_policy(name: str, *, device: str = "auto", dtype: str = "float32") -> Policy:
    """Load a policy.

    Args:
        name: ``"tiny"``, a Hugging Face model folder, or a hub id.
        device: Such as ``"cpu"`` or ``"cuda"``; ``"auto"`` takes CUDA if there is one.
        dtype: ``"float32"`` or ``"bfloat16"``.

    Raises:
        ConfigError: If it is not a causal language model with a tokenizer, or the device is
            not there.
    """
    source = str(tiny_policy_path()) if name == TINY else name
    _check_folder(name, source)
    # The run has a progress bar of its own.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model {name!r}: got {type(error).__name__} ({reason}), expected a causal language "
            "model with its tokenizer; give a model folder, a hub id or 'tiny'"
        ) from error
    return Policy(_moved(model, device), tokenizer, name)


def _moved(model: Any, device: str) -> Any:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:  # torch has no error class for this
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"device: got {device!r} ({reason}), expected one this machine has; "
            "leave it out, or set device=cpu"
        ) from error


def _check_folder(name: str, source: str) -> None:
    """Tell a wrong path from a hub id before the hub is asked."""
    path = Path(source)
    looks_local = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if path.is_dir():
        if not (path / "config.json").is_file():
            found = sorted(p.name for p in path.iterdir())[:5]
            raise ConfigError(
                f"model {name!r}: got a folder without config.json (it holds {found}), expected a "
                "Hugging Face model folder; give the folder that save_pretrained wrote"
            )
    elif path.exists() or looks_local:
        got = "a file" if path.exists() else "no such folder"
        raise ConfigError(
            f"model {name!r}: got {got}, expected a Hugging Face model folder, a hub id or 'tiny'; "
            "check the path"
        )
