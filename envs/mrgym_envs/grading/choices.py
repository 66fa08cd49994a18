"""Multiple choice: the letter of a gold, and the letter an answer settles on."""

# ruff: noqa: RUF001 - the characters that look like others are what this is about

from __future__ import annotations

import re
from typing import Final

from mrgym_envs.grading.clean import strip_markup

__all__ = ["choice_of", "chosen"]

_CHOICE: Final = re.compile(
    r"(?!A\s+[a-z])\(?([A-H])\)?(?:[.:)]|(?=\s)|$)\s*([^\W_].*)?", re.DOTALL
)
_LEADING: Final = re.compile(r"\W{0,4}([A-H])(?:[.:)。、]|\s*$|\)?\s+[A-Z][a-z])")
_SETTLED: Final = re.compile(
    r"(?:\b(?:it's|it’s|is|choose|pick|option|choice|answer|select)|[:：是])"
    r"\s{0,5}\W{0,4}([A-H])(?![A-Za-z'])"
)
_MAX_SCANNED: Final = 20_000
_ALONE: Final = re.compile(r"(?<![A-Za-z'])(A(?!\s(?!is\b|or\b|and\b)[a-z])|[B-H])(?![A-Za-z'])")
_PROSE: Final = re.compile(r"[^\W\d_]{2}\s{1,9}[^\W\d_]{2}|[^\x00-\x7f]")
_DENIED: Final = re.compile(r"(?:\bnot|n't|不是)\s{0,3}\W{0,3}\Z", re.IGNORECASE)


def choice_of(text: str) -> tuple[str, str] | None:
    """Return the letter and the words of an option such as ``(C) Cecile``, else ``None``."""
    match = _CHOICE.fullmatch(strip_markup(text.strip().partition("\n")[0]))
    return (match[1], (match[2] or "").strip()) if match else None


def chosen(response: str) -> str | None:
    """Return the letter an unmarked response settles on."""
    text = response.strip()[-_MAX_SCANNED:]
    if leading := _LEADING.match(strip_markup(text[:40])):
        return leading[1]
    if not _PROSE.search(text):
        return None
    for pattern in (_SETTLED, _ALONE):
        found = [match for match in pattern.finditer(text) if not _is_denied(text, match)]
        if found:
            return found[-1][1]
    return None


def _is_denied(text: str, match: re.Match[str]) -> bool:
    return _DENIED.search(text, max(0, match.start(1) - 12), match.start(1)) is not None
