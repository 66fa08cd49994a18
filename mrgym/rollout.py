"""Rollouts: what happened on a task, with scores, and the loop that makes groups of them."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from mrgym.components import ABSENT, ComponentSet, RewardVector
from mrgym.errors import RolloutError, ScoreError
from mrgym.sampler import Completion, Prompt, Sampler, SamplingParams
from mrgym.scoring import InlineScorer, Scorer, Status
from mrgym.seeding import mix
from mrgym.spaces import Message
from mrgym.streaming import ready_completions
from mrgym.tasks import Task
from mrgym.text import State, TextEnv, TurnOutcome

__all__ = [
    "Group",
    "OnScoreError",
    "Rollout",
    "Turn",
    "check_error_rate",
    "run_group",
    "run_groups",
]

SCHEMA_VERSION = 1
OnScoreError: TypeAlias = Literal["mask", "raise", "floor"]


class Turn(msgspec.Struct):
    """One turn of a rollout.

    Attributes:
        prompt: Text the policy was given for this turn.
        completion: Text it answered.
        stop_reason: ``"stop"`` or ``"length"``.
        scores: Scores of this turn by component, as far as measured.
    """

    prompt: str
    completion: str
    stop_reason: str = "stop"
    scores: dict[str, float] = {}


class Rollout(msgspec.Struct):
    """All turns on one task, with the episode's scores.

    ``token_ids``, ``loss_mask`` and ``sampler_logprobs`` have one entry a token after the first
    prompt; the mask is true exactly where a token was sampled (elsewhere its log-probability
    reads 0). They are empty when the sampler works on text alone.

    Attributes:
        task_id: The task.
        group: Id of the group it belongs to.
        index: Position in the group.
        components: Score by component after gates; empty when the rollout was not scored.
        raw_components: Score by component before gates.
        reward: Plain sum of ``components``.
        status: ``"ok"``, ``"error"`` or ``"timeout"``.
        error: What went wrong.
        terminated: Whether the task ended the episode.
        truncated: Whether a limit ended it.
        turns: The turns, as text.
        answer: The task's gold answer, for reading.
        prompt_token_ids: Tokens of the first prompt.
        token_ids: Tokens after it: completions, and the environment's answers between them.
        loss_mask: Which of ``token_ids`` were sampled.
        sampler_logprobs: The sampler's log-probability of each sampled token.
        policy_version: Version of the weights that sampled it.
        step: Training step it belongs to, if any.
        advantage: Final advantage, once computed.
        component_advantages: Advantage by component, before weights.
        schema: Version of this record's layout.
    """

    task_id: str
    group: int
    index: int
    components: dict[str, float] = {}
    raw_components: dict[str, float] = {}
    reward: float = 0.0
    status: Status = "ok"
    error: str | None = None
    terminated: bool = False
    truncated: bool = False
    turns: list[Turn] = []
    answer: Any = None
    prompt_token_ids: list[int] = []
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    sampler_logprobs: list[float] = []
    policy_version: int = 0
    step: int | None = None
    advantage: float | None = None
    component_advantages: dict[str, float] | None = None
    schema: int = SCHEMA_VERSION

    @property
    def valid(self) -> bool:
        """Whether the rollout has scores that may be learned from."""
        return self.status == "ok" or bool(self.components)

    @property
    def completion_length(self) -> int:
        """Number of sampled tokens."""
        return sum(self.loss_mask)


class Group(msgspec.Struct):
    """Rollouts of one task, drawn together.

    Attributes:
        group: Its id.
        task_id: The task.
        rollouts: The rollouts, in order.
    """

    group: int
    task_id: str
    rollouts: list[Rollout]


@dataclass(slots=True)
class _Episode:
    """A rollout in the making."""

    state: State
    prompt: Prompt
    rollout: Rollout
    said: str
    """What the policy was told since its last turn."""
    over: bool = False


def run_group(
    env: TextEnv, sampler: Sampler, task: Task, n: int, params: SamplingParams, **options: Any
) -> Group:
    """Return ``n`` rollouts of one task; see :func:`run_groups`."""
    return run_groups(env, sampler, [task], n, params, **options)[0]


def run_groups(
    env: TextEnv,
    sampler: Sampler,
    tasks: Sequence[Task],
    n: int,
    params: SamplingParams,
    *,
    scorer: Scorer | None = None,
    first_group: int = 0,
    on_score_error: OnScoreError = "mask",
    seed: int = 0,
    prompts: Sequence[Prompt] | None = None,
) -> list[Group]:
    """Return ``n`` scored rollouts of every task, single-turn and multi-turn alike.

    A sampler that streams goes on sampling while what is ready is scored. With ``params.seed`` a
    group's completions depend on that seed and the group's id alone, not on what else is drawn.

    Args:
        env: The environment.
        sampler: Where completions come from.
        tasks: One group is made of each.
        n: Rollouts a group.
        params: How to sample.
        scorer: Where score functions run; here by default.
        first_group: Id of the first group; the others count on from it.
        on_score_error: What becomes of a rollout whose scoring failed: ``"mask"`` leaves it
            unscored and invalid, ``"floor"`` gives every component its least score, ``"raise"``
            stops.
        seed: Seeds the episodes' own random numbers (the same within a group).
        prompts: The tasks' prompts, where they are known already.

    Raises:
        SamplerError: From the sampler, as it is.
        RewardContractError: If a score breaks the contract.
        ScoreError: With ``"raise"``, when a score function failed.
        RolloutError: With ``"floor"``, if a component has no finite least score; or for an
            unknown ``on_score_error``.
    """
    _check_policy(on_score_error)
    scorer = scorer or InlineScorer()
    prompts = [
        _seeded(_encoded(prompt, sampler), params, first_group + g)
        for g, prompt in enumerate(prompts or [env.prompt_for(task) for task in tasks])
    ]
    live = [
        _begin(env, task, prompt, first_group + g, seed, n)
        for g, (task, prompt) in enumerate(zip(tasks, prompts, strict=True))
    ]
    groups = [
        Group(first_group + g, t.id, [e.rollout for e in live[g]]) for g, t in enumerate(tasks)
    ]
    episodes = [episode for group in live for episode in group]
    width = n
    whole_groups = any(method.batched for method in env.score_methods.values())
    while episodes:
        ready = ready_completions(sampler, prompts, width, params, whole_groups=whole_groups)
        with closing(ready):  # an error here stops the sampler before it is handled
            for part in ready:
                turn = [(episodes[position], completion) for position, completion in part]
                _play(env, scorer, turn, sampler, on_score_error)
        episodes = [episode for episode in episodes if not episode.over]
        prompts, width = [episode.prompt for episode in episodes], 1
        params = _next_turn(params)
    return groups


def _next_turn(params: SamplingParams) -> SamplingParams:
    """Return the same with another seed, for samplers that know no seeds of prompts."""
    if params.seed is None:
        return params
    return msgspec.structs.replace(params, seed=mix(params.seed, 1))


def _check_policy(on_score_error: object) -> None:
    if on_score_error not in ("mask", "raise", "floor"):
        raise RolloutError(
            f"rollouts: got on_score_error={on_score_error!r}, expected 'mask', 'raise' or "
            "'floor'; name one of them"
        )


def check_error_rate(groups: Iterable[Group], ceiling: float) -> float:
    """Return the share of rollouts whose scoring failed.

    Raises:
        ScoreError: If it is above ``ceiling``; names the most frequent causes.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    failed = [r for r in rollouts if r.status != "ok"]
    rate = len(failed) / len(rollouts) if rollouts else 0.0
    if rate > ceiling:
        causes = Counter(r.error for r in failed).most_common(3)
        listed = ", ".join(f"{count} x {cause}" for cause, count in causes)
        raise ScoreError(
            f"scoring: got {len(failed)} failures in {len(rollouts)} rollouts ({listed}), expected "
            f"at most {ceiling:.0%}; mend the score function or raise max_error_rate"
        )
    return rate


def _begin(
    env: TextEnv, task: Task, prompt: Prompt, group: int, seed: int, n: int
) -> list[_Episode]:
    """Return the episodes of a group."""
    episodes = []
    for index in range(n):
        rng = np.random.default_rng([seed, zlib.crc32(task.id.encode())])
        rollout = Rollout(
            task.id, group, index, answer=task.answer, prompt_token_ids=list(prompt.token_ids)
        )
        episodes.append(_Episode(env.start(task, rng), prompt, rollout, prompt.text))
    return episodes


def _play(
    env: TextEnv,
    scorer: Scorer,
    turn: Sequence[tuple[_Episode, Completion]],
    sampler: Sampler,
    on_score_error: OnScoreError,
) -> None:
    """Advance episodes by a turn each."""
    states = [episode.state for episode, _ in turn]
    outcomes = env.play_turn(states, [completion for _, completion in turn], scorer)
    for (episode, completion), outcome in zip(turn, outcomes, strict=True):
        _record_turn(episode, completion)
        episode.over = outcome.over
        if outcome.over:
            _finish(env, episode.rollout, outcome, on_score_error)
        else:
            _continue(episode, completion, outcome.answers, sampler)


def _record_turn(episode: _Episode, completion: Completion) -> None:
    rollout = episode.rollout
    turn_scores = episode.state.turn_scores
    scores = turn_scores[-1] if len(turn_scores) > len(rollout.turns) else {}
    shown = {name: score for name, score in scores.items() if score is not ABSENT}
    turn = Turn(episode.said, completion.text, completion.stop_reason, shown)
    rollout.turns = [*rollout.turns, turn]
    rollout.token_ids = [*rollout.token_ids, *completion.token_ids]
    rollout.loss_mask = [*rollout.loss_mask, *(True for _ in completion.token_ids)]
    rollout.sampler_logprobs = [*rollout.sampler_logprobs, *completion.sampler_logprobs]
    rollout.policy_version = completion.policy_version
    if len(rollout.sampler_logprobs) != len(rollout.token_ids):
        raise RolloutError(
            f"task {rollout.task_id}: got {len(completion.sampler_logprobs)} log-probabilities for "
            f"{len(completion.token_ids)} tokens, expected as many; mend the sampler"
        )


def _continue(
    episode: _Episode, completion: Completion, answers: Sequence[Message], sampler: Sampler
) -> None:
    prompt, rollout = episode.prompt, episode.rollout
    episode.said = "\n".join(m["content"] for m in answers)
    token_ids: list[int] = []
    if sampler.codec is not None:
        reply = sampler.codec.reply(prompt, answers)
        rollout.token_ids = [*rollout.token_ids, *reply]
        rollout.loss_mask = [*rollout.loss_mask, *(False for _ in reply)]
        rollout.sampler_logprobs = [*rollout.sampler_logprobs, *(0.0 for _ in reply)]
        token_ids = [*rollout.prompt_token_ids, *rollout.token_ids]
    episode.prompt = msgspec.structs.replace(
        prompt,
        text=f"{prompt.text}{completion.text}\n{episode.said}\n",
        messages=list(episode.state.messages),
        token_ids=token_ids,
        # No two rollouts or turns share random numbers.
        seed=None if prompt.seed is None else mix(prompt.seed, rollout.index),
    )


def _finish(
    env: TextEnv, rollout: Rollout, outcome: TurnOutcome, on_score_error: OnScoreError
) -> None:
    rollout.terminated, rollout.truncated = outcome.terminated, outcome.truncated
    rollout.status, rollout.error = outcome.status, outcome.error
    if outcome.vector is not None:
        rollout.components = outcome.vector.values
        rollout.raw_components = outcome.vector.raw
        rollout.reward = outcome.vector.reward
    elif on_score_error == "raise":
        raise ScoreError(
            f"{env.contract_name}, task {rollout.task_id}: got {outcome.status} from "
            f"{outcome.error}, expected scores; mend the score function or set "
            "on_score_error='mask'"
        )
    elif on_score_error == "floor":
        floor = _floor(env._declared())
        rollout.components, rollout.raw_components = floor.values, floor.raw
        rollout.reward = floor.reward


def _floor(declared: ComponentSet) -> RewardVector:
    unbounded = [name for name, c in declared.items() if not np.isfinite(c.low)]
    if unbounded:
        raise RolloutError(
            f"on_score_error='floor': got components without a finite low {unbounded}, expected "
            "all to have one; declare low=... or use 'mask'"
        )
    return declared.score({name: component.low for name, component in declared.items()})


def _seeded(prompt: Prompt, params: SamplingParams, group: int) -> Prompt:
    if params.seed is None:
        return prompt
    return msgspec.structs.replace(prompt, seed=mix(params.seed, group))


def _encoded(prompt: Prompt, sampler: Sampler) -> Prompt:
    if sampler.codec is None or prompt.token_ids:
        return prompt
    return msgspec.structs.replace(prompt, token_ids=sampler.codec.start(prompt))
