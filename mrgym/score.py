"""Scoring completions that exist already: of another trainer, a file, or a client's request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from mrgym.errors import RolloutError
from mrgym.rollout import (
    OnScoreError,
    Rollout,
    _begin,
    _check_policy,
    _Episode,
    _finish,
    _play,
)
from mrgym.sampler import Completion, ScriptedSampler
from mrgym.scoring import InlineScorer, Scorer
from mrgym.tasks import Task
from mrgym.text import TextEnv, TurnOutcome

__all__ = ["Said", "score_completions"]

Said: TypeAlias = "str | Sequence[str]"
"""What a policy said on one task: one text, or one a turn."""


def score_completions(
    env: TextEnv,
    tasks: Sequence[Task],
    completions: Sequence[Said],
    *,
    scorer: Scorer | None = None,
    on_score_error: OnScoreError = "mask",
    seed: int = 0,
) -> list[Rollout]:
    """Return one scored rollout a completion, in order, each on the task at its position.

    A conversation is given as the list of the policy's turns; one that stops before the
    environment ends the episode counts as truncated. The scores are those that
    :func:`mrgym.run_groups` gives the same texts.

    Args:
        env: The environment.
        tasks: What was asked; the same task may stand here many times.
        completions: What was answered: text, or texts where the environment has several turns.
        scorer: Where score functions run; here by default.
        on_score_error: As in :func:`mrgym.run_groups`.
        seed: Seeds the episodes' own random numbers.

    Raises:
        RolloutError: If there are not as many completions as tasks, one is no text, or turns
            follow after the end of an episode.
        RewardContractError: If a score breaks the contract.
        ScoreError: With ``on_score_error="raise"``, when a score function failed.
    """
    _check_policy(on_score_error)
    if len(tasks) != len(completions):
        raise RolloutError(
            f"score_completions: got {len(completions)} completions for {len(tasks)} tasks, "
            "expected as many; repeat a task for each of its completions"
        )
    said = [_turns(c, task) for c, task in zip(completions, tasks, strict=True)]
    episodes = [
        _begin(env, task, env.prompt_for(task), i, seed, 1)[0] for i, task in enumerate(tasks)
    ]
    scorer = scorer or InlineScorer()
    live = [*range(len(episodes))]
    turn = 0
    while live:
        now = [(episodes[i], said[i][turn]) for i in live]
        _play(env, scorer, now, ScriptedSampler([]), on_score_error)
        turn += 1
        for i in live:
            _end_or_go_on(env, episodes[i], len(said[i]) - turn, on_score_error)
        live = [i for i in live if not episodes[i].over]
    return [episode.rollout for episode in episodes]


def _turns(said: Said, task: Task) -> list[Completion]:
    turns = [said] if isinstance(said, str) else said
    if not isinstance(turns, (list, tuple)) or not turns or not all(_is_text(t) for t in turns):
        raise RolloutError(
            f"task {task.id}: got completion {said!r}"[:200] + ", expected text, or a list of "
            "texts, one a turn of the policy; decode token ids first"
        )
    return [t if isinstance(t, Completion) else Completion(t) for t in turns]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _end_or_go_on(
    env: TextEnv, episode: _Episode, turns_left: int, on_score_error: OnScoreError
) -> None:
    if episode.over and turns_left and episode.rollout.status == "ok":
        raise RolloutError(
            f"task {episode.rollout.task_id}: got {turns_left} turns after the end of the episode, "
            f"expected none; the environment ended it after {len(episode.rollout.turns)}"
        )
    if not episode.over and not turns_left:
        outcome = TurnOutcome([], False, True, vector=env._episode_scores(episode.state))
        episode.over = True
        _finish(env, episode.rollout, outcome, on_score_error)
