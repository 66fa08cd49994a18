"""Weights, gradients and optimiser spread over ranks by FSDP2, and gathered where needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from mrgym_trainers.gdpo.policy import Policy

__all__ = ["shard"]


def shard(policy: Policy, world: int, device: str = "cpu") -> Policy:
    """Return the policy with its weights spread over the ranks of the default process group.

    Each decoder layer is a unit that is gathered, used and freed; embeddings, output layer and all
    else are one more. Gradients are added up over ranks, not averaged: a loss is divided by counts
    of the whole step already.

    Args:
        policy: The policy, the same on every rank.
        world: Number of ranks.
        device: Where the parts go, such as ``"cuda:1"``.
    """
    _ = policy.shared_length  # found by running the model, which only the whole one can be
    kind = torch.device(device).type
    mesh = init_device_mesh(kind, (world,))
    root = _Anything(policy.model)
    for layer in _layers(policy.model):
        fully_shard(layer, mesh=mesh)
    fully_shard(root, mesh=mesh)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
            # An expert that sees no token on one rank may see some on another.
            module.set_reduce_scatter_unused_params(True, recurse=False)
    policy.call = _Gathered(root)
    return policy


class _Anything(nn.Module):
    """A module around a model that computes whatever it is given.

    FSDP gathers weights where modules are called. Log-probabilities call the model's body and use
    the weight of its output layer, which only a module around both can gather for them.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[..., Any], *args: Any) -> Any:
        """Return what is computed."""
        return compute(*args)


class _Gathered:
    """Calls a function with the model's weights gathered."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def __call__(self, compute: Callable[..., Any], *args: Any) -> Any:
        result = self._root(compute, *args)
        if not torch.is_grad_enabled():
            # No backward pass will free them; left there, they would outlive an optimiser step.
            self._root.reshard()
        return result


def _layers(model: Any) -> Iterator[Any]:
    """Yield the decoder's layers; none inside another."""
    found: list[str] = []
    for name, module in model.named_modules():
        nested = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, GradientCheckpointingLayer) and not nested:
            found.append(name)
            yield module
