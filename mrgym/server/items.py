"""The tasks that requests speak of: the environment's own by id, or the client's, checked."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from mrgym.errors import TaskError
from mrgym.server.codec import check_plain
from mrgym.server.describe import prompt_out
from mrgym.server.problems import Problem
from mrgym.server.random_state import read_random
from mrgym.server.schemas import PromptOut, ScoreItem, TaskIn, TaskPrompt, TasksOut
from mrgym.tasks import Task, TaskSource
from mrgym.text import Split, TextEnv

__all__ = ["Items", "load_splits"]

_SPLITS: tuple[Split, ...] = ("train", "eval")


class Items:
    """The tasks of an environment, and the checks of what clients send.

    Args:
        env: The environment; its tasks are loaded here.
        max_batch: Most items of a request.

    Raises:
        TaskError: If tasks cannot be loaded; see :func:`load_splits`.
    """

    def __init__(self, env: TextEnv, max_batch: int) -> None:
        self._env = env
        self._max_batch = max_batch
        self._sources = load_splits(env)
        self._tasks = {
            split: {task.id: task for task in self._sources.get(split, ())} for split in _SPLITS
        }

    def tasks(self, items: Sequence[ScoreItem]) -> list[Task]:
        """Return the task of every item.

        Raises:
            Problem: 422 that names the first item that cannot be used.
        """
        self._check_batch(items)
        return [self._task(item, i) for i, item in enumerate(items)]

    def prompts(self, given: Sequence[TaskIn]) -> list[PromptOut]:
        """Return the prompts of tasks of the client's own.

        Raises:
            Problem: 422 that names the first that cannot be used.
        """
        self._check_batch(given)
        return [
            prompt_out(self._env, self._own_task(task, f"tasks[{i}]"))
            for i, task in enumerate(given)
        ]

    def page(self, split: Split, offset: int, limit: int) -> TasksOut:
        """Return a page of a split's tasks.

        Raises:
            Problem: 404 if the environment has none.
        """
        source = self._sources.get(split)
        if source is None:
            raise Problem(404, "TaskError", f"tasks: got split {split!r}, expected one with tasks")
        tasks = [source[i] for i in range(min(offset, len(source)), len(source))[:limit]]
        pairs = [TaskPrompt(task, prompt_out(self._env, task)) for task in tasks]
        return TasksOut(len(source), offset, pairs)

    @property
    def counts(self) -> dict[str, int]:
        """Number of tasks by split."""
        return {split: len(source) for split, source in self._sources.items()}

    def check_starts(self, items: Sequence[ScoreItem], tasks: Sequence[Task]) -> None:
        """Refuse tasks of the client's own that no episode can start on, by their position."""
        if type(self._env).start is TextEnv.start:
            return
        for i, (item, task) in enumerate(zip(items, tasks, strict=True)):
            if item.task is None:
                continue
            try:
                self._env.start(task, read_random(None, ""))
            except Exception as error:
                raise self._unfit(f"items[{i}].task", "start on", error) from error

    def _unfit(self, where: str, verb: str, error: Exception) -> Problem:
        return Problem(
            422,
            "TaskError",
            f"{where}: got a task that {self._env.contract_name} cannot {verb} ({error!r}), "
            "expected one like its own; look at GET /tasks",
            subject=where,
        )

    def _check_batch(self, items: Sequence[Any]) -> None:
        if len(items) > self._max_batch:
            raise Problem(
                422,
                "BatchTooLarge",
                f"items: got {len(items)}, expected at most {self._max_batch}; "
                "send several requests",
                subject="items",
            )

    def _task(self, item: ScoreItem, position: int) -> Task:
        where = f"items[{position}]"
        if (item.task is None) == (item.task_id is None):
            raise Problem(
                422,
                "InvalidRequest",
                f"{where}: got {'neither' if item.task is None else 'both'} of task and task_id, "
                "expected one of them; leave the other out",
                subject=where,
            )
        if len(item.turns) > self._env.max_turns:
            raise Problem(
                422,
                "InvalidRequest",
                f"{where}.completion: got {len(item.turns)} turns, expected at most "
                f"{self._env.max_turns}; send text, or the texts of one conversation",
                subject=f"{where}.completion",
            )
        if item.token_ids and len(item.token_ids) != len(item.turns):
            raise Problem(
                422,
                "InvalidRequest",
                f"{where}.token_ids: got {len(item.token_ids)} lists for {len(item.turns)} turns, "
                "expected one a turn; leave them out where there are none",
                subject=f"{where}.token_ids",
            )
        if item.task is not None:
            return self._own_task(item.task, f"{where}.task")
        return self._known_task(item, where)

    def _known_task(self, item: ScoreItem, where: str) -> Task:
        splits = _SPLITS if item.split is None else (item.split,)
        for split in splits:
            task = self._tasks[split].get(item.task_id or "")
            if task is not None:
                return task
        raise Problem(
            422,
            "UnknownTask",
            f"{where}.task_id: got {item.task_id!r:.100}, expected the id of a task of "
            f"{' or '.join(splits)}; look at GET /tasks",
            subject=f"{where}.task_id",
        )

    def _own_task(self, given: TaskIn, where: str) -> Task:
        check_plain(given.answer, f"{where}.answer")
        check_plain(given.metadata, f"{where}.metadata")
        task = given.task()
        try:
            self._env.prompt_for(task)
        except Exception as error:  # whatever an environment makes of a task it did not choose
            raise self._unfit(where, "ask", error) from error
        return task


def load_splits(env: TextEnv) -> dict[Split, TaskSource]:
    """Return the tasks of every split, loaded; none where an environment defines none.

    One split of an environment's own may be missing, which is said aloud; tasks that were given
    must load whole.

    Raises:
        TaskError: If given tasks are broken, or no split of the environment's own loads.
    """
    if _defines_none(env):
        return {}
    must_load = _were_given(env)
    loaded: dict[Split, TaskSource] = {}
    errors: list[TaskError] = []
    for split in _SPLITS:
        try:
            loaded[split] = env.task_source(split)
        except TaskError as error:
            if must_load:
                raise
            errors.append(error)
    if not loaded:
        raise errors[0]
    for missing in errors:
        warnings.warn(f"{env.contract_name}: a split is not served ({missing})", stacklevel=2)
    return loaded


def _defines_none(env: TextEnv) -> bool:
    own = type(env)
    is_bare = own.tasks is TextEnv.tasks and own.task_source is TextEnv.task_source
    return is_bare and not env._sources and not _were_given(env)


def _were_given(env: TextEnv) -> bool:
    return any(tasks is not None for tasks in env._given.values())
