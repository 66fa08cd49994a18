"""What TRL's reward functions read: the scores of a batch, made once for all of them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from mrgym.components import present_key
from mrgym.errors import RolloutError, TaskError
from mrgym.rollout import Group, Rollout, check_error_rate
from mrgym.sampler import Completion
from mrgym.score import score_completions
from mrgym.scoring import Scorer
from mrgym.tasks import Task
from mrgym.text import Split, TextEnv

__all__ = ["SCORED", "BatchScores", "RewardFunction", "Scores", "handed_on", "tasks_of"]

Scores = list[dict[str, float] | None]

SCORED = "mrgym_components"  # the column in which rollout_function hands scores on
_REMEMBERED = 8
_log = logging.getLogger(__name__)


class RewardFunction:
    """The scores of one component, as TRL asks for them; may be pickled.

    Args:
        name: The component.
        scores: Where the scores of all components are made.
    """

    def __init__(self, name: str, scores: BatchScores) -> None:
        self.__name__ = name
        self._scores = scores

    def __call__(
        self,
        prompts: object = None,
        completions: Sequence[Any] = (),
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return one score a completion, ``None`` where there is none.

        Raises:
            TaskError: If the column ``task_id`` is missing, or names no task.
            RolloutError: If a completion is not the text of one turn.
            ScoreError: If too many completions could not be scored.
        """
        rows = self._scores.of(completions, completion_ids, columns)
        return [None if row is None else row.get(self.__name__) for row in rows]


class BatchScores:
    """All components of a batch, made by whichever reward function is called first."""

    def __init__(
        self,
        env: TextEnv,
        tokenizer: Any,
        max_completion_length: int | None,
        max_error_rate: float,
        scorer: Scorer | None,
    ) -> None:
        self._env = env
        self._tokenizer = tokenizer
        self._max_completion_length = max_completion_length
        self._max_error_rate = max_error_rate
        self._scorer = scorer
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        # Batches are told apart by identity, which holds only while the object is kept alive.
        self._recent: deque[tuple[object, list[Task], list[Completion], Scores]] = deque(
            maxlen=_REMEMBERED
        )

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_recent")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def of(
        self,
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None,
        columns: Mapping[str, Any],
    ) -> Scores:
        """Return the components of every completion, made once for the same batch."""
        if SCORED in columns:
            return list(columns[SCORED])
        self._check_turns(columns)
        tasks = tasks_of(self._env, columns)
        said = self._said(completions, completion_ids)
        batch = completions if completion_ids is None else completion_ids
        with self._lock:
            for seen, seen_tasks, seen_said, scores in self._recent:
                if seen is batch and seen_tasks == tasks and seen_said == said:
                    return scores
            rollouts = score_completions(self._env, tasks, said, scorer=self._scorer)
            scores = handed_on(self._env, rollouts, self._max_error_rate, columns.get("log_metric"))
            self._recent.append((batch, tasks, said, scores))
        return scores

    def _check_turns(self, columns: Mapping[str, Any]) -> None:
        if columns.get("environments") is not None:
            raise RolloutError(
                "trl: got environments of an environment_factory, whose completions are calls of "
                f"tools, expected the completions {self._env.contract_name} is made for; pass "
                "rollout_func=mrgym.adapters.trl.rollout_function(env) instead"
            )
        if self._env.max_turns > 1:
            raise RolloutError(
                f"trl: got completions of one turn for {self._env.contract_name} with up to "
                f"{self._env.max_turns}, expected whole rollouts; pass "
                "rollout_func=mrgym.adapters.trl.rollout_function(env) to GRPOTrainer"
            )

    def _said(
        self, completions: Sequence[Any], completion_ids: Sequence[Sequence[int]] | None
    ) -> list[Completion]:
        if completion_ids is None:
            return [Completion(_text_of(completion)) for completion in completions]
        pairs = zip(completions, completion_ids, strict=True)
        return [self._completion(completion, list(ids)) for completion, ids in pairs]

    def _completion(self, completion: Any, ids: list[int]) -> Completion:
        if self._tokenizer is None:
            text = _text_of(completion)
        else:
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
        limit = self._max_completion_length
        cut = limit is not None and len(ids) >= limit and ids[-1] not in self._ends()
        return Completion(
            text,
            token_ids=ids,
            sampler_logprobs=[0.0] * len(ids),  # as many as tokens; these rollouts train nothing
            stop_reason="length" if cut else "stop",
        )

    def _ends(self) -> set[int | None]:
        tokenizer = self._tokenizer
        return set() if tokenizer is None else {tokenizer.eos_token_id, tokenizer.pad_token_id}


def handed_on(
    env: TextEnv, rollouts: list[Rollout], max_error_rate: float, log_metric: Any
) -> Scores:
    """Return the components of rollouts, ``None`` for failed ones, which are logged.

    Raises:
        ScoreError: If more than ``max_error_rate`` of them failed.
    """
    rate = check_error_rate([Group(0, "", rollouts)], max_error_rate)
    if rate:
        first = next(rollout for rollout in rollouts if rollout.status != "ok")
        _log.warning(
            "%s: %.1f%% of %d completions could not be scored and have no reward (task %s: %s)",
            *(env.contract_name, 100 * rate, len(rollouts), first.task_id, first.error),
        )
    scores: Scores = [r.components if r.status == "ok" else None for r in rollouts]
    if log_metric is not None and scores:
        log_metric("mrgym/frac_failed", rate)
        for name, component in env._declared().items():
            if component.optional:
                present = sum(row is not None and name in row for row in scores)
                log_metric(present_key(name), present / len(scores))
    return scores


def tasks_of(env: TextEnv, columns: Mapping[str, Any]) -> list[Task]:
    """Return the tasks that the columns ``task_id`` and, if there, ``split`` name.

    Raises:
        TaskError: If the column is missing, an id is unknown, or it stands for two tasks.
    """
    if "task_id" not in columns:
        found = sorted(name for name, values in columns.items() if isinstance(values, list))
        raise TaskError(
            f"trl: got columns {found}, expected 'task_id' among them; make the dataset with "
            "mrgym.adapters.trl.dataset(env) and keep remove_unused_columns=False"
        )
    ids = columns["task_id"]
    splits = columns.get("split") or [None] * len(ids)
    return [_task(env, task_id, split) for task_id, split in zip(ids, splits, strict=True)]


def _task(env: TextEnv, task_id: str, split: Split | None) -> Task:
    if split is not None:
        return env.task_source(split).by_id(task_id)
    train = env.task_source("train")
    held_out = env.task_source("eval")
    if task_id not in held_out._index:
        return train.by_id(task_id)
    if task_id in train._index:
        raise TaskError(
            f"trl: got task id {task_id!r}, which stands in train and in eval, expected one task; "
            "add a column 'split', as mrgym.adapters.trl.dataset(env, split) does"
        )
    return held_out.by_id(task_id)


def _text_of(completion: object) -> str:
    """Return what was said, plain or as the one message of a conversation."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence) and len(completion) == 1:
        message = completion[0]
        further = {k for k, v in message.items() if v} - {"role", "content"}
        if isinstance(message.get("content"), str) and not further:
            return str(message["content"])
    raise RolloutError(
        f"trl: got completion {completion!r}"[:300] + ", expected text or one message with nothing "
        "but its content; pass tokenizer=... to reward_functions where TRL takes thinking out of "
        "the text, and no tools"
    )
