"""Tasks and where they come from: lists, JSONL files, Hugging Face datasets, generators.

A source is an ordered, finite sequence of tasks with unique ids. Train and eval parts are made
by a stable hash of a task's content, so the same content never stands in both.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import msgspec

from mrgym.errors import MissingExtraError, TaskError, closest
from mrgym.spaces import Message, is_messages

__all__ = [
    "Task",
    "TaskSource",
    "check_disjoint",
    "generated_tasks",
    "huggingface_tasks",
    "jsonl_tasks",
    "row_id",
    "task_from_row",
]

RowParser = Callable[[Mapping[str, Any]], "Task"]

_PROMPT_FIELDS = ("prompt", "question", "problem")
_ANSWER_FIELDS = ("answer", "solution")
_SHOWN = 120


class Task(msgspec.Struct, frozen=True):
    """One row to be solved.

    Attributes:
        prompt: Text, or a list of chat messages.
        answer: What scoring compares with; any JSON value, ``None`` if there is nothing to compare.
        id: Unique name in its source; a hash of prompt and answer if left out.
        metadata: Anything else scoring or reporting needs.
    """

    prompt: str | list[Message]
    answer: Any = None
    id: str = ""
    metadata: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str) and not (self.prompt and is_messages(self.prompt)):
            raise TaskError(
                f"Task: got prompt {_shown(self.prompt)}, expected text or a list of "
                "{'role': ..., 'content': ...} messages; convert it"
            )
        if not self.id:
            msgspec.structs.force_setattr(self, "id", content_hash(self.prompt, self.answer)[:16])


class TaskSource(Sequence[Task]):
    """An ordered sequence of tasks with unique ids.

    Args:
        tasks: The tasks; at least one. Rows with equal content and no id of their own get
            ``#2``, ``#3``... appended to the id.
        name: How error messages call the source.

    Raises:
        TaskError: If there is no task, an item is not a task, or an explicit id occurs twice.
    """

    def __init__(self, tasks: Iterable[Task], *, name: str = "tasks") -> None:
        self.name = name
        self._tasks = tuple(_with_unique_ids(tasks, name))
        if not self._tasks:
            raise TaskError(f"{name}: got no tasks, expected at least one; check the source")
        self._index = {task.id: i for i, task in enumerate(self._tasks)}

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> TaskSource: ...
    def __getitem__(self, index: int | slice) -> Task | TaskSource:
        if isinstance(index, slice):
            return TaskSource(self._tasks[index], name=self.name)
        return self._tasks[index]

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    def __repr__(self) -> str:
        return f"TaskSource({self.name!r}, {len(self)} tasks)"

    def by_id(self, task_id: str) -> Task:
        """Return the task with that id.

        Raises:
            TaskError: If there is none.
        """
        if task_id not in self._index:
            raise TaskError(
                f"{self.name}: got task id {task_id!r}, expected one of {len(self)} ids"
                f"{closest(str(task_id), self._index)}; look at [task.id for task in source]"
            )
        return self._tasks[self._index[task_id]]

    def shuffled(self, seed: int) -> TaskSource:
        """Return the same tasks in an order that depends on ``seed`` alone."""
        order = list(self._tasks)
        random.Random(seed).shuffle(order)
        return TaskSource(order, name=self.name)

    def split(self, eval_fraction: float = 0.2) -> tuple[TaskSource, TaskSource]:
        """Return disjoint (train, eval) parts, decided by a stable hash of each prompt.

        A task stays on its side when others are added or removed; only where a side would be
        empty (a handful of tasks), the nearest prompt is moved over.

        Raises:
            TaskError: If there are not two different prompts, or the fraction leaves a side empty.
        """
        if not 0 < eval_fraction < 1:
            raise TaskError(
                f"{self.name}: got eval_fraction={eval_fraction}, expected between 0 and 1 so that "
                "both sides hold tasks; change it"
            )
        position = {task.id: _position(task) for task in self._tasks}
        lowest, highest = min(position.values()), max(position.values())
        if lowest == highest:
            raise TaskError(
                f"{self.name}: got {len(self)} tasks with one prompt, expected two different ones "
                "to hold one out; give more tasks, or eval_tasks of their own"
            )
        # The lowest position is always held out and the highest never.
        bound = min(max(eval_fraction, math.nextafter(lowest, 1.0)), highest)
        parts: tuple[list[Task], list[Task]] = ([], [])
        for task in self._tasks:
            parts[position[task.id] < bound].append(task)
        return (
            TaskSource(parts[0], name=f"{self.name} (train)"),
            TaskSource(parts[1], name=f"{self.name} (eval)"),
        )


def task_from_row(row: Mapping[str, Any]) -> Task:
    """Return the task of a row of a JSONL file or dataset.

    The prompt is read from ``prompt``, ``question`` or ``problem``, the answer from ``answer`` or
    ``solution``. ``id`` and ``metadata`` are taken as they are, further fields go to ``metadata``.

    Raises:
        TaskError: If no prompt field is there.
    """
    prompt_field = next((f for f in _PROMPT_FIELDS if f in row), None)
    if prompt_field is None:
        raise TaskError(
            f"row: got fields {[*row]}, expected one of {[*_PROMPT_FIELDS]}; "
            "rename the field or pass parse=..."
        )
    answer_field = next((f for f in _ANSWER_FIELDS if f in row), "answer")
    known = {prompt_field, answer_field, "id", "metadata"}
    further = {k: v for k, v in row.items() if k not in known}
    metadata = {**(row.get("metadata") or {}), **further}
    return Task(row[prompt_field], row.get(answer_field), row_id(row), metadata)


def row_id(row: Mapping[str, Any]) -> str:
    """Return the id of a row as text, empty where it has none (a dataset's null included)."""
    return "" if row.get("id") is None else str(row["id"])


def jsonl_tasks(path: str | Path, *, parse: RowParser = task_from_row) -> TaskSource:
    """Return the tasks of a JSON-lines file, one object a line; empty lines are skipped.

    Args:
        path: The file.
        parse: Makes a task of a row; what it raises is reported with file and line.

    Raises:
        TaskError: If the file is missing or empty, or a line is broken; names file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise TaskError(f"{path}: got no file, expected a JSONL file of tasks; check the path")
    with path.open("rb") as lines:
        rows = (
            (f"{path}, line {number}", _json_object(line, path, number))
            for number, line in enumerate(lines, 1)
            if line.strip()
        )
        return TaskSource(_parsed(rows, parse), name=str(path))


def huggingface_tasks(
    dataset: Any,
    *,
    config: str | None = None,
    split: str = "train",
    parse: RowParser = task_from_row,
) -> TaskSource:
    """Return the tasks of a Hugging Face dataset.

    Args:
        dataset: Hub id or local folder for ``datasets.load_dataset``, or a loaded
            ``datasets.Dataset`` (any iterable of rows will do).
        config: Configuration name, such as ``"main"`` of ``openai/gsm8k``.
        split: Split to load when ``dataset`` is a name.
        parse: Makes a task of a row.

    Raises:
        MissingExtraError: If ``dataset`` is a name and ``datasets`` is not installed.
        TaskError: If the dataset cannot be loaded, or a row cannot be used; names the row.
    """
    name = dataset if isinstance(dataset, str) else type(dataset).__name__
    if isinstance(dataset, str):
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise MissingExtraError("datasets", "data") from error
        try:
            dataset = load_dataset(dataset, config, split=split)
        except Exception as error:  # whatever the library, the network or the files raise
            raise TaskError(
                f"{name} [{split}]: got {type(error).__name__} ({error}), expected a dataset; "
                "check its name, configuration and split, and the network"
            ) from error
    rows = ((f"{name} [{split}], row {i}", row) for i, row in enumerate(dataset))
    return TaskSource(_parsed(rows, parse), name=f"{name} [{split}]")


def generated_tasks(make: Callable[[int], Task], count: int, *, name: str = "") -> TaskSource:
    """Return the tasks ``make(0)``, ``make(1)``... up to ``count``; ``make`` is deterministic."""
    label = name or getattr(make, "__name__", type(make).__name__)
    return TaskSource((make(i) for i in range(count)), name=label)


def check_disjoint(train: TaskSource, held_out: TaskSource) -> None:
    """Raise unless no prompt of ``held_out`` stands in ``train`` too.

    Raises:
        TaskError: With the number of shared prompts and one of them.
    """
    seen = {content_hash(task.prompt, None) for task in train}
    shared = [task for task in held_out if content_hash(task.prompt, None) in seen]
    if shared:
        raise TaskError(
            f"{held_out.name}: got {len(shared)} eval tasks that stand in {train.name} too "
            f"(e.g. {_shown(shared[0].prompt)}), expected none; remove them or use .split()"
        )


def content_hash(prompt: str | Sequence[Message], answer: Any) -> str:
    """Return a hexadecimal hash of prompt and answer that is stable across processes."""
    data = json.dumps([prompt, answer], sort_keys=True, default=repr)
    return hashlib.blake2b(data.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _position(task: Task) -> float:
    """Return where in [0, 1) a task's prompt falls, by its hash alone."""
    return int(content_hash(task.prompt, None)[:8], 16) / 0x1_0000_0000


def _with_unique_ids(tasks: Iterable[Task], name: str) -> Iterator[Task]:
    seen: dict[str, int] = {}
    for i, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise TaskError(
                f"{name}: got {_shown(task)} at position {i}, expected a mrgym.Task; "
                "write mrgym.Task(prompt=..., answer=...)"
            )
        seen[task.id] = seen.get(task.id, 0) + 1
        if seen[task.id] == 1:
            yield task
        elif task.id == content_hash(task.prompt, task.answer)[:16]:
            yield msgspec.structs.replace(task, id=f"{task.id}#{seen[task.id]}")
        else:
            raise TaskError(
                f"{name}: got task id {task.id!r} twice (again at position {i}), expected unique "
                "ids; leave ids out to have them made"
            )


def _json_object(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:  # bad JSON, or bytes that are not UTF-8
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg} at column {error.colno}"
        raise TaskError(
            f"{path}, line {number}: got {_shown(line.strip().decode(errors='replace'))}, expected "
            f"one JSON object ({reason}); mend or remove the line"
        ) from error
    if not isinstance(row, dict):
        raise TaskError(
            f"{path}, line {number}: got {_shown(row)}, expected a JSON object; "
            "mend or remove the line"
        )
    return row


def _parsed(rows: Iterable[tuple[str, Mapping[str, Any]]], parse: RowParser) -> Iterator[Task]:
    for where, row in rows:
        try:
            yield parse(row)
        except Exception as error:  # a user's parser may raise anything
            reason = str(error) if isinstance(error, TaskError) else repr(error)
            raise TaskError(f"{where}: {reason}") from error


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
