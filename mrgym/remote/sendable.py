"""What may be sent: values that the service sees as they are here."""

from __future__ import annotations

from typing import Any

from mrgym.errors import WireError
from mrgym.server import schemas as wire
from mrgym.server.codec import why_not_plain
from mrgym.tasks import Task

__all__ = ["check_sendable", "same_task", "task_in"]


def check_sendable(value: Any, where: str) -> None:
    """Refuse what would arrive as something else: NaN, tuples, arrays, bytes, keys of numbers.

    Raises:
        WireError: Names the place.
    """
    reason = why_not_plain(value)
    if reason is not None:
        raise WireError(
            f"{where}: got a value that cannot be sent as it is ({reason}), expected plain JSON "
            "values (finite numbers, integers of 64 bits, text, lists, mappings by text); convert "
            "it"
        )


def task_in(task: Task) -> wire.TaskIn:
    """Return a task as it travels.

    Raises:
        WireError: If the service would see another task.
    """
    check_sendable(task.answer, f"task {task.id}, answer")
    check_sendable(task.metadata, f"task {task.id}, metadata")
    if not isinstance(task.prompt, str):
        odd = {key for m in task.prompt for key in m} - {"role", "content"}
        if odd:
            raise WireError(
                f"task {task.id}: got messages with {sorted(map(str, odd))}, expected role and "
                "content alone; put the rest into metadata"
            )
    return wire.TaskIn(prompt=task.prompt, answer=task.answer, id=task.id, metadata=task.metadata)


def same_task(known: Task, task: Task) -> bool:
    """Return whether a task is one that the service has, ``1``, ``1.0`` and ``True`` apart."""
    return known is task or repr(known) == repr(task)
