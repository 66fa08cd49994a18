r"""Finding ``\\boxed{...}`` in a text, with balanced braces and in linear time."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

__all__ = ["Box", "find_boxes", "last_boxed", "without_echoes"]

_BRACE: Final = re.compile(r"\\\\|\\[{}]|[{}]")
_OPENING: Final = re.compile(r"(?:boxed|fbox)\s{0,9}\{")
_MARKUP: Final = re.compile(r"\\(?:quad|qquad|text(?:bf|rm|it)?|mathrm|[,;:! ])|[$\\()\[\]{}*]")
_JOINED: Final = re.compile(r"(?:[^.!?\n]*(?:\s|^))?(?:and|or|und|et|y|和|或|&)|[,;&]?")
_ECHO: Final = re.compile(
    r"\b(?:put|write|give|enclose|express|provide|state|place|present|return|report|box)\b"
    r"[^.\n]{0,40}\byour\b[^.\n]{0,80}\\?\Z",
    re.IGNORECASE,
)
_MAX_CONNECTOR: Final = 80
_MAX_WORDS: Final = 6


class Box(NamedTuple):
    """A box: where it begins and ends in the text, and what it holds."""

    start: int
    end: int
    content: str


def find_boxes(text: str) -> list[Box]:
    """Return the outermost closed boxes in order."""
    if "boxed" not in text and "fbox" not in text:
        return []
    closing = _pairs(text)
    boxes: list[Box] = []
    for match in _OPENING.finditer(text):
        end = closing.get(match.end() - 1)
        nested = boxes and match.start() < boxes[-1].end
        if end is None or nested:
            continue
        boxes.append(Box(match.start(), end + 1, _unwrapped(text, match.end(), end, closing)))
    return boxes


def without_echoes(text: str) -> str:
    """Return a text without the boxes of repeated instructions (``put your answer in ...``)."""
    if "your" not in text.casefold():
        return text
    kept, position = [], 0
    for box in find_boxes(text):
        if _ECHO.search(text, max(0, box.start - 160), box.start):
            kept.append(text[position : box.start])
            position = box.end
    return "".join((*kept, text[position:]))


def last_boxed(text: str) -> Box | None:
    r"""Return the last box, merged with those it lists: ``\boxed{1}, \boxed{2}`` is one answer."""
    boxes = find_boxes(text)
    if not boxes:
        return None
    first = len(boxes) - 1
    while first and _is_connector(text[boxes[first - 1].end : boxes[first].start]):
        first -= 1
    contents = list(dict.fromkeys(box.content.strip() for box in boxes[first:]))
    return Box(boxes[first].start, boxes[-1].end, ", ".join(contents))


def _pairs(text: str) -> dict[int, int]:
    """Return for each opening brace where it is closed."""
    stack: list[int] = []
    closing: dict[int, int] = {}
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            stack.append(match.start())
        elif match[0] == "}" and stack:
            closing[stack.pop()] = match.start()
    return closing


def _unwrapped(text: str, start: int, end: int, closing: dict[int, int]) -> str:
    """Return a content, for a box that holds nothing but a box the inner one's."""
    while match := re.compile(r"\s*\\(?:boxed|fbox)\s{0,9}\{").match(text, start, end):
        inner_end = closing.get(match.end() - 1)
        if inner_end is None or text[inner_end + 1 : end].strip():
            break
        start, end = match.end(), inner_end
    return text[start:end]


def _is_connector(between: str) -> bool:
    """Whether boxes with this between them form one list."""
    if len(between) > _MAX_CONNECTOR:
        return False
    words = _MARKUP.sub(" ", between).strip(" \t")
    if "\n" in words.strip() or (not words.strip() and "\n" in between.strip(" $")):
        return False
    words = words.strip()
    return len(words.split()) <= _MAX_WORDS and _JOINED.fullmatch(words) is not None
