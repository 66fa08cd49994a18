"""The policy: loading a causal language model, and the log-probabilities it gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from mrgym.errors import ConfigError
from mrgym_trainers.gdpo.batch import MicroBatch
from mrgym_trainers.gdpo.config import TINY
from mrgym_trainers.gdpo.logprobs import (
    checkpointed_logprobs,
    rows_per_chunk,
    selected_logprobs,
)
from mrgym_trainers.gdpo.lora import add_adapter, merged_tensors
from mrgym_trainers.gdpo.lora_config import LoRAConfig
from mrgym_trainers.gdpo.output_layer import OutputLayer, vocabulary_rows
from mrgym_trainers.gdpo.shared_prompts import SharedPrompts
from mrgym_trainers.gdpo.token_line import TokenLine
from mrgym_trainers.tiny_policy import tiny_policy_path

__all__ = ["Policy", "load_policy", "whole"]


class Policy:
    """A causal language model being trained.

    Args:
        model: The Transformers model.
        tokenizer: Its tokenizer.
        name: What it was loaded from.
        compute_dtype: What it computes in; the dtype of its weights if left out.
        compile_model: Compile its forward pass with torch.compile.
        adapter: The same model as peft sees it, where only adapters in it learn.

    Attributes:
        model: The Transformers model; may be replaced.
        tokenizer: Its tokenizer.
        name: What it was loaded from.
        compute_dtype: What matrix products are taken in; float32 weights may compute in bfloat16.
        call: Calls a function that uses the weights; gathers them first where they are sharded.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        *,
        compute_dtype: torch.dtype | None = None,
        compile_model: bool = False,
        adapter: Any = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.adapter = adapter
        self.name = name
        self.compute_dtype: torch.dtype = compute_dtype or model.dtype
        self._compile = compile_model
        self.call: Callable[..., Any] = _directly
        self.model = model

    @property
    def model(self) -> Any:
        """The Transformers model."""
        return self._output.model

    @model.setter
    def model(self, model: Any) -> None:
        self._output = OutputLayer(model, self.name)
        body = self._output.body
        self._body = torch.compile(body, dynamic=True) if self._compile else body
        alone = self._compile or self._output.kind == "whole"
        self._shared = None if alone else SharedPrompts(model, body)

    @property
    def output_kind(self) -> str:
        """How logits are made: ``"linear"``, ``"own"`` or ``"whole"`` (see OutputLayer)."""
        return self._output.kind

    @property
    def shared_length(self) -> float:
        """Length up to which rollouts may share their prompts in a forward pass; 0 if never."""
        return 0.0 if self._shared is None else self._shared.longest

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.device
        return device

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights by their names in checkpoints; tied ones once, adapters added in.

        Sharded ones are gathered one at a time, for which all ranks go through them.
        """
        merged = self.adapter is not None
        for name, tensor in merged_tensors(self.model) if merged else self.model.named_parameters():
            yield name, whole(tensor)

    def autocast(self, *, cache: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which the model computes in ``compute_dtype``.

        Args:
            cache: Whether to round each weight once in the context, and not in every call. Take
                no gradient in such a context, and change no weight: it would see the old ones.
        """
        if self.compute_dtype == self.model.dtype:
            return nullcontext()
        return torch.autocast(self.device.type, self.compute_dtype, cache_enabled=cache)

    def logprobs(
        self,
        input_ids_BT: Tensor,
        first: int,
        *,
        temperature: float,
        mask_BT: Tensor | None = None,
        entropy_grad: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of every token from position ``first`` on.

        The output layer sees the wanted positions only, and logits exist for some of them at a
        time (:func:`~mrgym_trainers.gdpo.logprobs.selected_logprobs`).

        Args:
            input_ids_BT: Right-padded sequences. Padding needs no mask: it stands after every
                token that is looked at, and attention is causal.
            first: First position whose token is wanted, at least 1.
            temperature: Logits are divided by it, as in sampling.
            mask_BT: [B, T - first] true where wanted; everywhere if left out.
            entropy_grad: Whether the entropy carries gradient.

        Returns:
            Two tensors [B, T - first], float32, 0 where not wanted: log-probabilities (with
            gradient) and the entropy of the distribution each token was drawn from.
        """
        targets_BT = input_ids_BT[:, first:]
        if mask_BT is None:
            mask_BT = torch.ones_like(targets_BT, dtype=torch.bool)
        return self._logprobs(
            partial(self._rows_inputs, input_ids_BT, first, mask_BT),
            mask_BT,
            targets_BT[mask_BT],
            temperature,
            entropy_grad,
        )

    def batch_logprobs(
        self, batch: MicroBatch, *, temperature: float, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return what :meth:`logprobs` does for a micro-batch's sampled tokens.

        A prompt is read once for all its rollouts, where the micro-batch has a line and the model
        can be run on it.

        Args:
            batch: The micro-batch.
            temperature: Logits are divided by it, as in sampling.
            entropy_grad: Whether the entropy carries gradient.
        """
        inputs = partial(self._rows_inputs, batch.input_ids_BT, batch.first, batch.mask_BT)
        if batch.line is not None and batch.line.shape[1] <= self.shared_length:
            inputs = partial(self._line_inputs, batch.line)
        targets_M = batch.input_ids_BT[:, batch.first :][batch.mask_BT]
        return self._logprobs(inputs, batch.mask_BT, targets_M, temperature, entropy_grad)

    def _logprobs(
        self,
        inputs: Callable[[], Tensor],
        mask_BT: Tensor,
        targets_M: Tensor,
        temperature: float,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs_M, entropy_M = self.call(
            self._selected, inputs, targets_M, temperature, entropy_grad
        )
        zeros_BT = logprobs_M.new_zeros(mask_BT.shape)
        return (
            zeros_BT.masked_scatter(mask_BT, logprobs_M),
            zeros_BT.masked_scatter(mask_BT, entropy_M),
        )

    def _selected(
        self,
        inputs: Callable[[], Tensor],
        targets_M: Tensor,
        temperature: float,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies [M] of the wanted positions alone."""
        logits_of: Callable[[Tensor], Tensor] = self._output.logits
        if self._output.kind == "whole":
            logits_of = _itself
        # Weights rounded without gradient, in a context around this one, would be found again.
        with self.autocast(cache=False):
            inputs_MH = inputs()
            head = self._output.head
            if head is None:
                return checkpointed_logprobs(
                    logits_of,
                    inputs_MH,
                    targets_M,
                    temperature=temperature,
                    chunk=rows_per_chunk(self._output.vocabulary, self.device.type),
                    entropy_grad=entropy_grad,
                )
        return selected_logprobs(
            inputs_MH.to(self.compute_dtype),
            head.weight,
            head.bias,
            targets_M,
            temperature=temperature,
            entropy_grad=entropy_grad,
        )

    def _rows_inputs(self, input_ids_BT: Tensor, first: int, mask_BT: Tensor) -> Tensor:
        """Return the hidden states of the wanted positions, or logits where only those are had."""
        if self._output.kind == "whole":
            return self._whole_logits(input_ids_BT, first)[mask_BT]
        hidden_BTH = self._body(input_ids=input_ids_BT, use_cache=False).last_hidden_state
        inputs_MH: Tensor = hidden_BTH[:, first - 1 : -1][mask_BT]
        return inputs_MH

    def _line_inputs(self, line: TokenLine) -> Tensor:
        assert self._shared is not None
        return self._shared.hidden(line)[line.predicting_M]

    def _whole_logits(self, input_ids_BT: Tensor, first: int) -> Tensor:
        """Return the model's logits of every position whose next token may be wanted."""
        predicting = torch.arange(first - 1, input_ids_BT.shape[1] - 1, device=input_ids_BT.device)
        keep = {}
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            keep = {"logits_to_keep": predicting}
        logits_BTV: Tensor = self._body(input_ids=input_ids_BT, use_cache=False, **keep).logits
        return logits_BTV if keep else logits_BTV[:, predicting]


def load_policy(
    name: str,
    *,
    device: str = "auto",
    dtype: str = "float32",
    master_weights: bool = True,
    gradient_checkpointing: bool = False,
    compile_model: bool = False,
    lora: LoRAConfig | None = None,
) -> Policy:
    """Load a policy.

    Args:
        name: ``"tiny"``, a Hugging Face model folder, or a hub id.
        device: Such as ``"cpu"`` or ``"cuda"``; ``"auto"`` takes CUDA if there is one.
        dtype: ``"float32"`` or ``"bfloat16"``, what the model computes in.
        master_weights: Keep float32 weights whatever it computes in. Without them a bfloat16
            weight stays put where a step changes it by less than 1 part in 256.
        gradient_checkpointing: Compute layers again in the backward pass instead of keeping their
            activations.
        compile_model: Compile the forward pass with torch.compile.
        lora: Freeze the model and add an adapter, which alone learns.

    Raises:
        MissingExtraError: If peft is needed and not installed.
        ConfigError: If it is not a causal language model with a tokenizer that fits it, the device
            is not there, or it has no layers to checkpoint.
    """
    source = str(tiny_policy_path()) if name == TINY else name
    _check_folder(name, source)
    compute_dtype: torch.dtype = getattr(torch, dtype)
    # The run has a progress bar of its own.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32 if master_weights else compute_dtype
        )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model {name!r}: got {type(error).__name__} ({reason}), expected a causal language "
            "model with its tokenizer; give a model folder, a hub id or 'tiny'"
        ) from error
    _check_vocabulary(name, model, tokenizer)
    if gradient_checkpointing:
        _checkpoint_layers(name, model)
    adapter = None if lora is None else add_adapter(model, lora)
    model = _moved(model, device)
    return Policy(
        model,
        tokenizer,
        name,
        compute_dtype=compute_dtype,
        compile_model=compile_model,
        adapter=adapter,
    )


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor gathered from all ranks, or as it is where it is not spread over them."""
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def _directly(compute: Callable[..., Any], *args: Any) -> Any:
    return compute(*args)


def _itself(logits_MV: Tensor) -> Tensor:
    return logits_MV


def _check_vocabulary(name: str, model: Any, tokenizer: Any) -> None:
    rows = vocabulary_rows(model)
    if len(tokenizer) > rows:
        raise ConfigError(
            f"model {name!r}: got a tokenizer of {len(tokenizer)} tokens and {rows} embeddings, "
            "expected an embedding for every token; take the tokenizer that belongs to the model, "
            "or save the model after model.resize_token_embeddings(len(tokenizer))"
        )


def _checkpoint_layers(name: str, model: Any) -> None:
    """Make layers compute again in the backward pass, in evaluation mode too.

    Transformers' own switch works in training mode only, where dropout would be on, and a ratio
    of probabilities would not start at 1.
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"gradient_checkpointing: got {type(model).__name__} (model {name!r}), expected a "
            "model of layers Transformers can checkpoint; leave it off"
        )
    for layer in layers:
        layer.forward = partial(_checkpointed, layer.forward)


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


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
