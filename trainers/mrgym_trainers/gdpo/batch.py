"""From rollouts to the batch a step learns from: scores by name, and padded tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mrgym.components import ComponentSet, present_key, reward_key
from mrgym.errors import RolloutError
from mrgym.rollout import Group, Rollout
from mrgym_trainers.gdpo.token_line import TokenLine

__all__ = ["MicroBatch", "build_batch", "micro_batches"]

# Sharing prompts pays where it leaves no more than this part of the positions: spreading them over
# rows for attention costs up to a twentieth of the time.
_WORTHWHILE = 0.9
# What attention to a position costs beside all else, from 0.1 (short rows) to 0.7 (long ones,
# small models); it is paid for padded rows.
_ATTENTION = 0.25


def build_batch(
    groups: Sequence[Group], declared: ComponentSet, *, mask_truncated: bool = False
) -> dict[str, Tensor]:
    """Return the scores of a step's rollouts; every path from environment to loss goes through it.

    Args:
        groups: The step's groups.
        declared: The environment's components.
        mask_truncated: Whether rollouts whose last completion the token limit cut are unusable.

    Returns:
        ``reward/<name>`` float64 [N] and ``present/<name>`` bool [N] for every declared component
        (0 and False where it is absent), ``group_ids`` int64 [N], ``valid`` bool [N],
        ``completion_lengths`` int64 [N].

    Raises:
        RolloutError: If a scored rollout lacks a component that may not abstain, or carries one
            that is not declared.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout in rollouts:
        _check_components(rollout, declared)
    batch: dict[str, Tensor] = {
        "group_ids": torch.tensor([r.group for r in rollouts], dtype=torch.int64),
        "valid": torch.tensor([r.valid and not (mask_truncated and _is_cut(r)) for r in rollouts]),
        "completion_lengths": torch.tensor([r.completion_length for r in rollouts]),
    }
    for name in declared:
        scores = [r.components.get(name) for r in rollouts]
        values = [0.0 if score is None else score for score in scores]
        batch[reward_key(name)] = torch.tensor(values, dtype=torch.float64)
        batch[present_key(name)] = torch.tensor([score is not None for score in scores])
    return batch


def _is_cut(rollout: Rollout) -> bool:
    return bool(rollout.turns) and rollout.turns[-1].stop_reason == "length"


def _check_components(rollout: Rollout, declared: ComponentSet) -> None:
    if not rollout.valid:
        return
    required = {name for name, c in declared.items() if not c.optional}
    got = rollout.components.keys()
    if required - got or got - declared.keys():
        raise RolloutError(
            f"rollout {rollout.index} of task {rollout.task_id!r}: got components {sorted(got)}, "
            f"expected {[*declared]}; a missing score is not a zero"
        )


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rollouts that go through the model together, right-padded.

    Attributes:
        rows: [B] positions of the rollouts in the step's batch.
        input_ids_BT: Prompt and completion tokens.
        first: First position any rollout sampled; what follows is cut to [B, T - first].
        mask_BT: [B, T - first] true where a token was sampled.
        sampler_logprobs_BT: [B, T - first] the sampler's log-probabilities there.
        line: The same rollouts with every prompt once, where that saves enough.
    """

    rows: Tensor
    input_ids_BT: Tensor
    first: int
    mask_BT: Tensor
    sampler_logprobs_BT: Tensor
    line: TokenLine | None = None


def micro_batches(
    rollouts: Sequence[Rollout],
    rows: Sequence[int],
    *,
    max_tokens: int,
    share_up_to: float = 0.0,
    device: Any = "cpu",
) -> list[MicroBatch]:
    """Return the chosen rollouts in micro-batches of at most ``max_tokens`` padded tokens.

    Rollouts of similar length go together or, where that computes less, rollouts of one prompt.
    A single longer one makes a micro-batch of its own.

    Args:
        rollouts: All rollouts of the step.
        rows: Positions of those wanted.
        max_tokens: Most tokens of a micro-batch, padding included.
        share_up_to: Longest rollouts that may share prompts (``Policy.shared_length``).
        device: Where the tensors go.
    """
    by_length = sorted(rows, key=lambda row: _length(rollouts[row]))
    orders = [by_length]
    if share_up_to:
        orders.append(_together(rollouts, by_length))
    choices = [_cut(rollouts, order, max_tokens) for order in orders]
    parts = min(choices, key=lambda parts: sum(_cost(rollouts, p, share_up_to) for p in parts))
    return [_micro_batch(rollouts, part, share_up_to, device) for part in parts]


def _together(rollouts: Sequence[Rollout], by_length: Sequence[int]) -> list[int]:
    """Return rows with those of one prompt together, prompts of shorter rollouts first."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in by_length:
        groups.setdefault(tuple(rollouts[row].prompt_token_ids), []).append(row)
    ordered = sorted(groups.values(), key=lambda group: _length(rollouts[group[-1]]))
    return [row for group in ordered for row in group]


def _cut(rollouts: Sequence[Rollout], order: Sequence[int], max_tokens: int) -> list[list[int]]:
    parts: list[list[int]] = []
    longest = 0
    for row in order:
        longest = max(longest, _length(rollouts[row]))
        if parts and (len(parts[-1]) + 1) * longest <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
            longest = _length(rollouts[row])
    return parts


def _length(rollout: Rollout) -> int:
    return len(rollout.prompt_token_ids) + len(rollout.token_ids)


def _padded(rollouts: Sequence[Rollout], rows: Sequence[int]) -> tuple[int, int]:
    """Return number and length of padded rows."""
    return len(rows), max(_length(rollouts[row]) for row in rows)


def _positions(rollouts: Sequence[Rollout], rows: Sequence[int], share_up_to: float) -> int:
    """Return how many positions go through the model's layers."""
    count, longest = _padded(rollouts, rows)
    prompts = {tuple(rollouts[row].prompt_token_ids) for row in rows}
    alone = sum(map(len, prompts)) + sum(len(rollouts[row].token_ids) for row in rows)
    worthwhile = longest <= share_up_to and alone <= _WORTHWHILE * count * longest
    return alone if worthwhile else count * longest


def _cost(rollouts: Sequence[Rollout], rows: Sequence[int], share_up_to: float) -> float:
    count, longest = _padded(rollouts, rows)
    return _positions(rollouts, rows, share_up_to) + _ATTENTION * count * longest


def _micro_batch(
    rollouts: Sequence[Rollout], rows: list[int], share_up_to: float, device: Any
) -> MicroBatch:
    batch = _pad(rollouts, rows, device)
    if _positions(rollouts, rows, share_up_to) == batch.input_ids_BT.numel():
        return batch
    chosen = [rollouts[row] for row in rows]
    line = TokenLine.of(
        [r.prompt_token_ids for r in chosen],
        [r.token_ids for r in chosen],
        [r.loss_mask for r in chosen],
        device=device,
    )
    return replace(batch, line=line)


def _pad(rollouts: Sequence[Rollout], rows: list[int], device: Any) -> MicroBatch:
    longest = max(_length(rollouts[row]) for row in rows)
    first = min(len(rollouts[row].prompt_token_ids) for row in rows)
    ids, mask, logprobs = [], [], []
    for row in rows:
        r = rollouts[row]
        lead, tail = len(r.prompt_token_ids) - first, longest - _length(r)
        ids.append([*r.prompt_token_ids, *r.token_ids, *[0] * tail])
        mask.append([*[False] * lead, *r.loss_mask, *[False] * tail])
        logprobs.append([*[0.0] * lead, *r.sampler_logprobs, *[0.0] * tail])
    return MicroBatch(
        torch.tensor(rows, device=device),
        torch.tensor(ids, device=device),
        first,
        torch.tensor(mask, dtype=torch.bool, device=device),
        torch.tensor(logprobs, dtype=torch.float32, device=device),
    )
