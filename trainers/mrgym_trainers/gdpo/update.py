"""One optimiser batch: micro-batched passes over a step's rollouts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from mrgym.errors import ConfigError
from mrgym.rollout import Rollout
from mrgym_trainers.gdpo.batch import MicroBatch, micro_batches
from mrgym_trainers.gdpo.config import GDPOConfig
from mrgym_trainers.gdpo.loss_config import LossConfig
from mrgym_trainers.gdpo.losses import Denominator, mismatch_metrics, policy_loss
from mrgym_trainers.gdpo.policy import Policy, whole
from mrgym_trainers.gdpo.ranks import Ranks
from mrgym_trainers.gdpo.shares import idle_rollout, in_step, own_rows

__all__ = ["learning_rate_factor", "make_optimizer", "set_learning_rate", "update"]

# Below this an advantage moves no weight by more than rounding does.
_NEGLIGIBLE = 1e-6


@dataclass(slots=True)
class _Sums:
    """What micro-batches add up for the step's metrics; tensors, so that no device waits."""

    totals: dict[str, Tensor] = field(default_factory=dict)
    largest: dict[str, Tensor] = field(default_factory=dict)

    def add(self, values: Mapping[str, Tensor], prefix: str = "") -> None:
        for name, value in values.items():
            key = prefix + name
            self.totals[key] = self.totals[key] + value if key in self.totals else value

    def raise_to(self, values: Mapping[str, Tensor], prefix: str = "") -> None:
        for name, value in values.items():
            key = prefix + name
            at_least = self.largest.get(key, value)
            self.largest[key] = torch.maximum(at_least, value)

    def over(self, ranks: Ranks) -> None:
        """Take in what the other ranks counted."""
        if ranks.world > 1:
            self.totals = _reduced(self.totals, ranks, "sum")
            self.largest = _reduced(self.largest, ranks, "max")

    def per_token(self, *names: str) -> float:
        return sum(float(self.totals[name]) for name in names) / float(self.totals["tokens"])


def _reduced(
    values: Mapping[str, Tensor], ranks: Ranks, how: Literal["sum", "max"]
) -> dict[str, Tensor]:
    numbers = ranks.reduce({name: float(value) for name, value in values.items()}, how)
    return {name: torch.tensor(n, dtype=torch.float64) for name, n in numbers.items()}


@dataclass(frozen=True, slots=True)
class _Part:
    """A micro-batch, with what stays fixed over the passes; no old policy means the policy's own.

    The last three are advantages and log-probabilities under the policy that the step began with
    and under the reference policy.
    """

    batch: MicroBatch
    advantages_B: Tensor
    old_policy_logprobs_BT: Tensor | None
    reference_logprobs_BT: Tensor | None


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


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, config: GDPOConfig) -> None:
    """Give the optimiser the learning rate of a step counted from 1."""
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate * learning_rate_factor(step - 1, config)


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    rollouts: Sequence[Rollout],
    advantages_B: Tensor,
    valid_B: Tensor,
    config: GDPOConfig,
    *,
    reference: Policy | None = None,
    loss_config: LossConfig | None = None,
    ranks: Ranks | None = None,
) -> dict[str, float]:
    """Take ``config.updates_per_step`` optimiser steps on a batch of rollouts.

    Rollouts without advantage are left out of the passes and stay in the denominator: they would
    add nothing to the gradient, unless the loss has a KL or entropy term. Where no rollout is left,
    the optimiser takes no step.

    Args:
        policy: The policy.
        optimizer: Its optimiser.
        rollouts: The step's rollouts, in the order of the tensors.
        advantages_B: Their advantages.
        valid_B: Which of them are usable.
        config: The run's configuration.
        reference: The frozen policy of the KL term, on the policy's device.
        loss_config: The loss, with ``mismatch`` resolved; ``config.loss`` for a sampler that is
            the trainer's own model, if left out.
        ranks: Who takes the steps: all have the same rollouts, and each learns from its part.

    Returns:
        ``loss/*`` and ``mismatch/*`` metrics, as far as they are finite; the mismatch compares
        the sampler's log-probabilities with the policy's own before the update.

    Raises:
        ConfigError: If the loss needs a reference policy and there is none.
    """
    ranks = ranks or Ranks()
    loss_config = loss_config or config.loss.resolved(own_sampler=True)
    _check_reference(loss_config, reference)
    lengths = [rollout.completion_length for rollout in rollouts]
    usable = [i for i, ok in enumerate(valid_B.tolist()) if ok and lengths[i] > 0]
    rows = [
        i
        for i in usable
        if loss_config.needs_every_rollout or abs(float(advantages_B[i])) > _NEGLIGIBLE
    ]
    denominator = Denominator(sum(lengths[i] for i in usable), len(usable))
    counts = {
        "loss/tokens": float(denominator.tokens),
        "loss/kept_frac": len(rows) / max(len(rollouts), 1),
        "loss/skipped": float(not rows),
    }
    if not rows:
        return {"loss/policy": 0.0, "loss/non_finite": 0.0, **counts}
    parts = _parts(policy, rollouts, rows, advantages_B, config, loss_config, reference, ranks)
    passes = [
        _pass(policy, optimizer, parts, denominator, config, loss_config, ranks)
        for _ in range(config.updates_per_step)
    ]
    counts["loss/non_finite"] = sum(metrics["loss/non_finite"] for metrics in passes)
    return passes[-1] | counts


def _check_reference(loss_config: LossConfig, reference: Policy | None) -> None:
    if loss_config.kl_coef and reference is None:
        raise ConfigError(
            f"update: kl_coef: got {loss_config.kl_coef} without a reference policy, expected one; "
            "pass reference=, or set kl_coef to 0"
        )


def _parts(
    policy: Policy,
    rollouts: Sequence[Rollout],
    rows: Sequence[int],
    advantages_B: Tensor,
    config: GDPOConfig,
    loss_config: LossConfig,
    reference: Policy | None,
    ranks: Ranks,
) -> list[_Part]:
    # Dropout would move the ratio off 1 before anything was learned; the sampler has none either.
    policy.model.eval()
    batches = micro_batches(
        rollouts,
        own_rows(rows, rollouts, ranks),
        max_tokens=config.micro_batch_tokens,
        share_up_to=policy.shared_length if config.share_prompts else 0.0,
        device=policy.device,
    )
    idle = partial(_idle_batch, rollouts[rows[0]], config.micro_batch_tokens, policy.device)
    batches = in_step(batches, idle, ranks)
    advantages_B = advantages_B.to(policy.device)
    old = policy if config.updates_per_step > 1 else None
    frozen = reference if loss_config.kl_coef else None
    return [
        _Part(
            batch,
            advantages_B[batch.rows],
            _fixed_logprobs(old, batch, config),
            _fixed_logprobs(frozen, batch, config),
        )
        for batch in batches
    ]


def _idle_batch(rollout: Rollout, max_tokens: int, device: torch.device) -> MicroBatch:
    return micro_batches([idle_rollout(rollout)], [0], max_tokens=max_tokens, device=device)[0]


@torch.no_grad()
def _fixed_logprobs(policy: Policy | None, batch: MicroBatch, config: GDPOConfig) -> Tensor | None:
    if policy is None:
        return None
    policy.model.eval()
    logprobs_BT, _ = policy.batch_logprobs(batch, temperature=config.temperature)
    return logprobs_BT


def _pass(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    parts: Sequence[_Part],
    denominator: Denominator,
    config: GDPOConfig,
    loss_config: LossConfig,
    ranks: Ranks,
) -> dict[str, float]:
    sums = _Sums()
    optimizer.zero_grad(set_to_none=True)
    for part in parts:
        _add_gradient(policy, part, denominator, config, loss_config, sums)
    norm = whole(torch.nn.utils.clip_grad_norm_(policy.model.parameters(), config.max_grad_norm))
    non_finite = not bool(torch.isfinite(norm))
    if not non_finite:
        optimizer.step()
    sums.over(ranks)
    metrics = {
        **_loss_metrics(sums, loss_config),
        **_mismatch_metrics(sums, loss_config),
        "loss/grad_norm": float(norm),
        "loss/non_finite": float(non_finite),
    }
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _add_gradient(
    policy: Policy,
    part: _Part,
    denominator: Denominator,
    config: GDPOConfig,
    loss_config: LossConfig,
    sums: _Sums,
) -> None:
    batch = part.batch
    policy_logprobs_BT, entropy_BT = policy.batch_logprobs(
        batch, temperature=config.temperature, entropy_grad=loss_config.entropy_coef > 0
    )
    old_policy_logprobs_BT = part.old_policy_logprobs_BT
    if old_policy_logprobs_BT is None:
        old_policy_logprobs_BT = policy_logprobs_BT.detach()
    loss, counted = policy_loss(
        policy_logprobs_BT,
        old_policy_logprobs_BT,
        part.advantages_B,
        batch.mask_BT,
        denominator,
        loss_config,
        sampler_logprobs_BT=batch.sampler_logprobs_BT,
        reference_logprobs_BT=part.reference_logprobs_BT,
        entropy_BT=entropy_BT,
    )
    loss.backward()  # type: ignore[no-untyped-call]
    sums.add(counted)
    sums.add({"entropy": entropy_BT.detach().masked_fill(~batch.mask_BT, 0.0).sum()})
    mismatch, largest = mismatch_metrics(
        old_policy_logprobs_BT, batch.sampler_logprobs_BT, batch.mask_BT, loss_config
    )
    sums.add(mismatch, "mismatch/")
    sums.raise_to(largest, "mismatch/")


def _loss_metrics(sums: _Sums, loss_config: LossConfig) -> dict[str, float]:
    metrics = {
        "loss/policy": float(sums.totals["policy"]),
        "loss/clip_frac": sums.per_token("clipped_low", "clipped_high"),
        "loss/clip_low_frac": sums.per_token("clipped_low"),
        "loss/clip_high_frac": sums.per_token("clipped_high"),
        "loss/approx_kl": sums.per_token("kl"),
        "loss/entropy": sums.per_token("entropy"),
    }
    if loss_config.dual_clip is not None:
        metrics["loss/dual_clip_frac"] = sums.per_token("dual_clipped")
    if loss_config.kl_coef:
        metrics["loss/kl_reference"] = sums.per_token("kl_reference")
    return metrics


def _mismatch_metrics(sums: _Sums, loss_config: LossConfig) -> dict[str, float]:
    metrics = {
        "mismatch/kl": sums.per_token("mismatch/kl"),
        "mismatch/mean_abs": sums.per_token("mismatch/abs"),
        "mismatch/max_abs": float(sums.largest["mismatch/abs"]),
        "mismatch/ratio_mean": sums.per_token("mismatch/ratio"),
        "mismatch/ratio_max": float(sums.largest["mismatch/ratio"]),
    }
    changed = {"tis": "mismatch/truncated_frac", "mask": "mismatch/masked_frac"}
    if loss_config.mismatch in changed:
        metrics[changed[loss_config.mismatch]] = sums.per_token("mismatch/changed")
    return metrics
