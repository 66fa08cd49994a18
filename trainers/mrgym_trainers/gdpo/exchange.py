"""Groups drawn by several ranks: each draws its part, all have the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from mrgym.errors import MrgymError, WireError
from mrgym.rollout import Group, run_groups
from mrgym.sampler import Prompt, Sampler, SamplingParams
from mrgym.tasks import Task
from mrgym.text import TextEnv
from mrgym_trainers.gdpo.ranks import Ranks

__all__ = ["run_groups_on"]


def run_groups_on(
    ranks: Ranks,
    env: TextEnv,
    sampler: Sampler,
    tasks: Sequence[Task],
    n: int,
    params: SamplingParams,
    *,
    first_group: int = 0,
    prompts: Sequence[Prompt] | None = None,
    **options: Any,
) -> list[Group]:
    """Return the groups of all tasks on every rank; each rank samples and scores some of them.

    Tasks are the same on all ranks. Completions depend on the seed and the group's id, so that
    they are those of one rank.

    Args:
        ranks: The ranks.
        env: The environment.
        sampler: Where this rank's completions come from.
        tasks: One group is made of each.
        n: Rollouts a group.
        params: How to sample.
        first_group: Id of the first group.
        prompts: The tasks' prompts, where they are known already.
        **options: Other arguments of :func:`mrgym.rollout.run_groups`.

    Raises:
        MrgymError: On every rank, if it was raised on one.
    """
    if ranks.world == 1:
        return run_groups(
            env, sampler, tasks, n, params, first_group=first_group, prompts=prompts, **options
        )
    own = ranks.part(len(tasks))
    message, failure = b"", None
    try:
        groups = run_groups(
            env,
            sampler,
            [*tasks][own],
            n,
            params,
            first_group=first_group + own.start,
            prompts=None if prompts is None else prompts[own],
            **options,
        )
        message = _encode(groups)
    except MrgymError as error:
        failure = error
    ranks.agree(failure)
    gathered = [group for part in ranks.gather(message) for group in _decode(part)]
    for group, task in zip(gathered, tasks, strict=True):
        for rollout in group.rollouts:
            rollout.answer = task.answer
    return gathered


def _encode(groups: Sequence[Group]) -> bytes:
    """Return groups as bytes, without answers: they may be anything, and every rank has them."""
    bare = [
        msgspec.structs.replace(
            group, rollouts=[msgspec.structs.replace(r, answer=None) for r in group.rollouts]
        )
        for group in groups
    ]
    try:
        return msgspec.msgpack.encode(bare, enc_hook=_plain)
    except (UnicodeEncodeError, TypeError) as error:
        raise WireError(
            f"rollouts for the other ranks: got {error}, expected text that is Unicode and plain "
            "numbers; convert it in the environment"
        ) from error


def _decode(message: bytes) -> list[Group]:
    groups: list[Group] = msgspec.msgpack.decode(message, type=list[Group])
    return groups


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} {value!r}"[:200])
