"""Weights and optimiser state in a checkpoint: a share a rank, for any number of ranks to read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from mrgym.errors import ConfigError
from mrgym_trainers.gdpo.policy import Policy, whole
from mrgym_trainers.gdpo.ranks import Ranks

__all__ = ["copied", "load_tensors", "save_tensors", "trainer_tensors", "whole_weights", "why"]


def whole_weights(policy: Policy, *, keep: bool) -> dict[str, Tensor]:
    """Return the whole model by name on the CPU, gathered a weight at a time.

    Args:
        policy: The policy; every rank must call this.
        keep: Whether this rank wants them.
    """
    weights, named = {}, policy.named_tensors()
    if policy.adapter is not None:  # of which the adapter's alone are written
        learning = policy.model.named_parameters()
        named = ((name, whole(weight)) for name, weight in learning if weight.requires_grad)
    for name, weight in named:
        if keep:
            weights[name] = weight.detach().cpu()
    buffers = {name for name, _ in policy.model.named_buffers()}
    stored = policy.model.state_dict() if keep and buffers else {}
    return weights | {name: stored[name].cpu() for name in buffers & stored.keys()}


def trainer_tensors(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return this rank's share of weights and optimiser state: the tensors themselves."""
    tensors: dict[str, Any] = {"model": _once(model, get_model_state_dict(model))}
    if optimizer.state:  # else asking for it would take a step, which counts
        tensors["optimizer"] = get_optimizer_state_dict(model, optimizer)["state"]
    return tensors


def copied(value: Any) -> Any:
    """Return tensors in nested mappings, copied to the CPU."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def save_tensors(folder: Path, tensors: dict[str, Any], ranks: Ranks) -> None:
    """Write the shares of all ranks; every rank must call it.

    Raises:
        CheckpointException: On all ranks, if one cannot write.
    """
    _quietly_alone()
    writer = FileSystemWriter(folder)
    save(tensors, storage_writer=writer, process_group=ranks.group, no_dist=ranks.world == 1)


def load_tensors(
    folder: Path, policy: Policy, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> None:
    """Load weights and optimiser state in place, each rank its share; every rank must call it.

    Raises:
        ConfigError: If they do not fit the policy.
    """
    reader = FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    wanted: dict[str, Any] = {"model": _once(policy.model, get_model_state_dict(policy.model))}
    if any(name.startswith("optimizer.") for name in saved):
        wanted["optimizer"] = _saved_state(policy.model, optimizer, saved)
    _quietly_alone()
    try:
        load(
            wanted,
            storage_reader=reader,
            process_group=ranks.group,
            no_dist=ranks.world == 1,
        )
    except CheckpointException as error:
        raise ConfigError(
            f"{folder}: got weights that do not fit the model ({why(error)}), expected those "
            "of the same model; resume with the model of the run"
        ) from error


def why(error: BaseException) -> str:
    """Return in a line why something could not be written or read; of several ranks, the first.

    Raises:
        KeyboardInterrupt: If that is what torch wrapped in its own exception.
    """
    if isinstance(error, CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
        for cause in causes:
            if isinstance(cause, KeyboardInterrupt):
                raise cause from error
        error = causes[0] if causes else error
    for link in (error, error.__cause__, error.__context__):  # torch's own words tell less
        if isinstance(link, OSError) and link.strerror:
            return link.strerror
    return " ".join(str(error).split())[:200] or type(error).__name__


def _saved_state(
    model: Any, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the optimiser's own tensors to load into, of those weights that have some saved."""
    state: Any = get_optimizer_state_dict(model, optimizer)["state"]
    for name, weight in model.named_parameters():
        if not any(f"optimizer.{name}.{key}" in saved for key in state.get(name, ())):
            optimizer.state.pop(weight, None)
            state.pop(name, None)
    return dict(state)


def _once(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return tensors without second names of tied weights."""
    own = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    return {name: tensor for name, tensor in tensors.items() if name in own}


def _quietly_alone() -> None:
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
