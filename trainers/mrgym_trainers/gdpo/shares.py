"""Which rollouts of a step a rank learns from, and how ranks keep in step over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import msgspec

from mrgym.rollout import Rollout
from mrgym_trainers.gdpo.batch import MicroBatch
from mrgym_trainers.gdpo.ranks import Ranks

__all__ = ["idle_rollout", "in_step", "own_rows"]


def own_rows(rows: Sequence[int], rollouts: Sequence[Rollout], ranks: Ranks) -> list[int]:
    """Return this rank's part of the rows: about as many tokens as any other's, maybe none.

    It does not matter who sampled them. Rows that stand together stay together, so that a rank has
    most of a group and can read its prompt once.
    """
    ends = [*accumulate(_tokens(rollouts[row]) for row in rows)]
    middles = [end - _tokens(rollouts[row]) / 2 for row, end in zip(rows, ends, strict=True)]
    owners = [int(middle * ranks.world / ends[-1]) for middle in middles]
    return [row for row, owner in zip(rows, owners, strict=True) if owner == ranks.rank]


def in_step(
    batches: list[MicroBatch], idle: Callable[[], MicroBatch], ranks: Ranks
) -> list[MicroBatch]:
    """Return a rank's micro-batches, with idle ones added until every rank has as many.

    Weights are gathered for every pass, which takes all ranks.
    """
    if ranks.world == 1:
        return batches
    missing = int(ranks.most(len(batches))) - len(batches)
    return [*batches, *(idle() for _ in range(missing))]


def idle_rollout(rollout: Rollout) -> Rollout:
    """Return a rollout of two tokens that teach nothing."""
    return msgspec.structs.replace(
        rollout,
        prompt_token_ids=rollout.prompt_token_ids[:1],
        token_ids=rollout.token_ids[:1],
        loss_mask=[False],
        sampler_logprobs=[0.0],
    )


def _tokens(rollout: Rollout) -> int:
    return len(rollout.prompt_token_ids) + len(rollout.token_ids)
