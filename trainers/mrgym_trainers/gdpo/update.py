"""One optimiser batch: micro-batched passes over a step's rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mrgym.rollout import Rollout
from mrgym_trainers.gdpo.batch import MicroBatch, micro_batches
from mrgym_trainers.gdpo.config import GDPOConfig
from mrgym_trainers.gdpo.loss import Denominator, clipped_loss
from mrgym_trainers.gdpo.policy import Policy

__all__ = ["learning_rate_factor", "make_optimizer", "update"]

# Below this an advantage moves no weight by more than rounding does.
_NEGLIGIBLE = 1e-6


@dataclass(slots=True)
class _Sums:
    """What micro-batches add up for the step's metrics."""

    totals: dict[str, float] = field(default_factory=dict)
    mismatch_max: float = 0.0

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.totals[name] = self.totals.get(name, 0.0) + value

    def per_token(self, name: str) -> float:
        return self.totals.get(name, 0.0) / max(self.totals.get("tokens", 0.0), 1.0)


def make_optimizer(policy: Policy, config: GDPOConfig) -> torch.optim.AdamW:
    """Return AdamW over the policy's weights."""
    return torch.optim.AdamW(
        policy.model.parameters(),
        lr=config.learning_rate,
        betas=config.adam_betas,
        weight_decay=config.weight_decay,
    )


def learning_rate_factor(step: int, config: GDPOConfig) -> float:
    """Return the share of the peak learning rate at a step counted from 0."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return 1.0
    progress = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    if config.lr_schedule == "linear":
        share = 1.0 - progress
    else:
        share = 0.5 * (1.0 + float(torch.cos(torch.tensor(torch.pi * progress))))
    return config.lr_end + (1.0 - config.lr_end) * share


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    rollouts: Sequence[Rollout],
    advantages_B: Tensor,
    valid_B: Tensor,
    config: GDPOConfig,
) -> dict[str, float]:
    """Take ``config.updates_per_step`` optimiser steps on a batch of rollouts.

    Rollouts without advantage are left out of the passes (they would add nothing to the
    gradient) and stay in the denominator. Where none has any, the optimiser takes no step.

    Args:
        policy: The policy.
        optimizer: Its optimiser.
        rollouts: The step's rollouts, in the order of the tensors.
        advantages_B: Their advantages.
        valid_B: Which of them are usable.
        config: The run's configuration.

    Returns:
        ``loss/*`` and ``mismatch/*`` metrics, as far as they are finite; the mismatch compares
        the sampler's log-probabilities with the policy's own before the update.
    """
    lengths = [rollout.completion_length for rollout in rollouts]
    usable = [i for i, ok in enumerate(valid_B.tolist()) if ok and lengths[i] > 0]
    rows = [i for i in usable if abs(float(advantages_B[i])) > _NEGLIGIBLE]
    denominator = Denominator(sum(lengths[i] for i in usable), len(usable))
    if not rows:
        return {"loss/policy": 0.0, "loss/skipped": 1.0, "loss/kept_frac": 0.0}
    parts = micro_batches(
        rollouts, rows, max_tokens=config.micro_batch_tokens, device=policy.device
    )
    advantages_B = advantages_B.to(policy.device)
    # Dropout would move the ratio off 1 before anything was learned; the sampler has none either.
    policy.model.eval()
    old = _old_policy_logprobs(policy, parts, config) if config.updates_per_step > 1 else None
    first: dict[str, float] = {}
    for _ in range(config.updates_per_step):
        metrics = _pass(policy, optimizer, parts, old, advantages_B, denominator, config)
        first = first or metrics
    kept = {"loss/kept_frac": len(rows) / max(len(rollouts), 1), "loss/skipped": 0.0}
    mismatch = {k: v for k, v in first.items() if k.startswith("mismatch/")}
    return metrics | mismatch | kept


def _pass(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    parts: Sequence[MicroBatch],
    old: Sequence[Tensor] | None,
    advantages_B: Tensor,
    denominator: Denominator,
    config: GDPOConfig,
) -> dict[str, float]:
    sums = _Sums()
    optimizer.zero_grad(set_to_none=True)
    for i, part in enumerate(parts):
        logprobs_BT, entropy_BT = policy.logprobs(
            part.input_ids_BT, part.first, temperature=config.temperature
        )
        old_BT = logprobs_BT.detach() if old is None else old[i]
        loss, counted = clipped_loss(
            logprobs_BT, old_BT, advantages_B[part.rows], part.mask_BT, denominator, config.loss
        )
        loss.backward()  # type: ignore[no-untyped-call]
        sums.add(loss=float(loss.detach()), **counted)
        sums.add(entropy=float((entropy_BT * part.mask_BT).sum()))
        _add_mismatch(sums, logprobs_BT.detach(), part)
    norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), config.max_grad_norm)
    skipped = not bool(torch.isfinite(norm))
    if not skipped:
        optimizer.step()
    metrics = {
        "loss/policy": sums.totals["loss"],
        "loss/clip_frac": sums.per_token("clipped"),
        "loss/approx_kl": sums.per_token("kl"),
        "loss/entropy": sums.per_token("entropy"),
        "loss/grad_norm": float(norm),
        "loss/non_finite": float(skipped),
        "mismatch/kl": sums.per_token("mismatch"),
        "mismatch/max_abs": sums.mismatch_max,
    }
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _add_mismatch(sums: _Sums, old_policy_logprobs_BT: Tensor, part: MicroBatch) -> None:
    """Add how far the sampler's log-probabilities are from the policy's (k3 estimate)."""
    delta_BT = (old_policy_logprobs_BT - part.sampler_logprobs_BT).masked_fill(~part.mask_BT, 0.0)
    sums.add(mismatch=float((delta_BT.exp() - 1 - delta_BT).sum()))
    sums.mismatch_max = max(sums.mismatch_max, float(delta_BT.abs().max()))


@torch.no_grad()
def _old_policy_logprobs(
    policy: Policy, parts: Sequence[MicroBatch], config: GDPOConfig
) -> list[Tensor]:
    return [
        policy.logprobs(part.input_ids_BT, part.first, temperature=config.temperature)[0]
        for part in parts
    ]
