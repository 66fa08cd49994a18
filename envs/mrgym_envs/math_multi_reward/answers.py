"""Reading answers: what a completion answers, what a gold answer is, and how they are judged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from mrgym.errors import TaskError
from mrgym_envs.grading.boxes import last_boxed

__all__ = [
    "extract_answer",
    "has_format",
    "is_integer",
    "normalise_gold",
    "read_gold",
    "read_gold_of_row",
]

_TAGS: Final = ("<think>", "</think>", "<answer>", "</answer>")
_UNSIGNED: Final = re.compile(r"[0-9]+")
_SIGNED: Final = re.compile(r"[+-]?[0-9]+")
_GROUPED: Final = re.compile(r"([+-]?)\$?([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(\.[0-9]+)?")


def extract_answer(text: str, *, require_tags: bool = False) -> str | None:
    """Return what stands after the last ``<answer>`` and before the next ``</answer>``, stripped.

    Args:
        text: The completion.
        require_tags: Without it, a completion that lacks the tags answers with its whole text
            (an unclosed tag with all that follows it).

    Returns:
        The answer, or ``None`` where tags are required and missing.
    """
    _, opened, tail = text.rpartition("<answer>")
    inside, closed, _ = tail.partition("</answer>")
    if require_tags and not (opened and closed):
        return None
    return inside.strip()


def has_format(text: str) -> bool:
    """Return whether a text is one think block, a newline and one answer block, nothing else."""
    return (
        text.startswith("<think>")
        and "</think>\n<answer>" in text
        and text.endswith("</answer>")
        and all(text.count(tag) == 1 for tag in _TAGS)
    )


def is_integer(answer: str, *, signed: bool = False) -> bool:
    """Return whether an answer is ASCII digits only (``²`` and ``٤`` are not), sign if allowed."""
    return (_SIGNED if signed else _UNSIGNED).fullmatch(answer) is not None


def read_gold(answer: object) -> str:
    """Return the gold answer of a row: the text after the last ``####``, else all of it.

    Raises:
        TaskError: If nothing is there.
    """
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise TaskError(
            f"gold answer: got {answer!r}, expected text or a number; mend the row's 'answer'"
        )
    gold = str(answer).rpartition("####")[2].strip()
    if not gold:
        raise TaskError(
            f"gold answer: got {str(answer)[:80]!r}, expected an answer (after '####' if used); "
            "mend or remove the row"
        )
    return gold


def read_gold_of_row(row: Mapping[str, Any]) -> str:
    r"""Return the gold of a row: its ``answer``, else what its ``solution`` ends with.

    That is the text after the last ``####``; in it, or without one, the last ``\\boxed{}``
    (with the boxes listed right before it); without a box all of it.

    Raises:
        TaskError: If nothing is there.
    """
    value = row.get("answer")
    gold = read_gold(row.get("solution") if value is None else value)
    box = last_boxed(gold)
    return read_gold(box.content) if box else gold


def normalise_gold(gold: str) -> str:
    """Return a numeric gold without thousands commas, so that it can equal a plain integer.

    ``"1,080"`` becomes ``"1080"``.

    Raises:
        TaskError: If it is not a number.
    """
    match = _GROUPED.fullmatch(gold)
    if match is None:
        raise TaskError(
            f"gold answer: got {gold[:80]!r}, expected a number; mend or remove the row, or take "
            "golds as they are with golds='keep'"
        )
    sign, whole, fraction = match.groups()
    return f"{sign}{whole.replace(',', '')}{fraction or ''}"
