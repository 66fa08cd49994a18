"""The verdict on an extracted answer: words, choices, times, numbers, mathematics."""

# ruff: noqa: RUF001 - the characters that look like others are what this is about

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

from mrgym_envs.grading.choices import choice_of
from mrgym_envs.grading.clean import clean, strip_markup, words_of
from mrgym_envs.grading.compare import Comparison
from mrgym_envs.grading.exact import is_defined
from mrgym_envs.grading.floats import NoValueError
from mrgym_envs.grading.numbers import plain_number
from mrgym_envs.grading.parse import parse
from mrgym_envs.grading.tree import Node, TooLargeError, UnreadableError
from mrgym_envs.grading.units import same_units
from mrgym_envs.grading.verdict import Options, Status

__all__ = ["MAX_LENGTH", "Judgement", "judge"]

_INLINE: Final = (40, 6_000)
_IN_WORKER: Final = (4_000, 60_000)
MAX_LENGTH: Final = 50_000
_REMEMBERED: Final = 200

Judgement: TypeAlias = tuple[Status, str]

_CORRECT: Final[Judgement] = ("correct", "")
_UNEQUAL: Final[Judgement] = ("incorrect", "not equal")
_NOTHING: Final = frozenset(
    ["", "n/a", "na", "none given", "unknown", "tbd", "-", "?", "??", "???"]
)
_POINTER: Final = re.compile(
    r"(?:see|refer to|cf|as|shown)\b.*\b(?:figure|diagram|graph|picture|solution|proof|above|below"
    r"|explanation|text|image|table|answer)\b.*|(?:the\s+)?(?:figure|diagram|graph|picture|image|"
    r"proof|solution)(?:\s+(?:shown|omitted|follows|above|below))?|omitted|no answer",
    re.IGNORECASE,
)
_WORDS: Final = re.compile(r"(?=.*[^\W\d_]{3})[^\W\d_]+(?:[\s,.'’/-]+[^\W\d_]+)*", re.DOTALL)
_TIME: Final = re.compile(r"(\d{1,2})(?::(\d{2}))?\s*(?:([ap])\.?\s?m\.?)?", re.IGNORECASE)
_COMMA: Final = re.compile(r"([+-]?\d+),(\d{1,2}|\d{4,})")
_MATH_WORDS: Final = frozenset(
    ["infinity", "pi", "infty", "inf", "theta", "alpha", "beta", "all real numbers", "real numbers"]
)
_NUMBER_WORDS: Final = {
    word: str(value)
    for value, word in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve".split()
    )
}
_DEGREES: Final = re.compile(r"\s?(?:\^\s?\{?\s?\\circ\s?\}?|\\degree|degrees?|°)(?![a-zA-Z])")


class _Reading(NamedTuple):
    """A text, read as mathematics, or why that failed."""

    node: Node | None
    why: str


def judge(gold: str, answer: str, options: Options, *, in_worker: bool = False) -> Judgement:
    """Return the status of an answer and a few words on it.

    Args:
        gold: The gold answer, extracted.
        answer: The answer, extracted.
        options: The caller's policies.
        in_worker: Whether this process may run sympy and nest deeply.

    Raises:
        NeedsWorkerError: If a worker process must do it.
    """
    if max(len(gold), len(answer)) > MAX_LENGTH:
        return "too_large", "text too long"
    left = plain_number(gold)
    if left is not None and (right := plain_number(answer)) is not None:
        return _CORRECT if left == right else _UNEQUAL
    if strip_markup(gold).casefold() in _NOTHING:
        return "bad_gold", "empty"
    choice = choice_of(gold)
    if choice is not None:
        verdict = _judge_choice(choice, gold, answer)
        if verdict is not None:
            return verdict
    return _judge_text(gold, answer, options, in_worker)


def _judge_choice(choice: tuple[str, str], gold: str, answer: str) -> Judgement | None:
    """Compare letters where the answer is one, and the option's words where it gives those."""
    letter, words = choice
    other = choice_of(answer)
    if other is not None:
        return _CORRECT if other[0] == letter else ("incorrect", "another choice")
    if not words and len(strip_markup(gold)) > 1:
        return "incorrect", "not a choice"
    if words and words_of(words) == words_of(answer):
        return _CORRECT
    return ("incorrect", "another choice") if words and _is_words(words) else None


def _is_words(text: str) -> bool:
    words = strip_markup(text)
    return _WORDS.fullmatch(words) is not None and words.casefold() not in _MATH_WORDS


def _judge_text(gold: str, answer: str, options: Options, in_worker: bool) -> Judgement:
    """Compare words and times of day, then what is left as mathematics."""
    gold, answer = _spelled_out(gold), _spelled_out(answer)
    if _is_words(gold):
        if len(gold) < 200 and _POINTER.fullmatch(strip_markup(gold)):
            return "bad_gold", "no answer, but a pointer to one"
        if _says(words_of(gold), words_of(answer)):
            return _CORRECT
        if len(strip_markup(gold)) > 3:
            return "incorrect", "other words"
    times = _time(gold), _time(answer)
    if None not in times:
        return _CORRECT if times[0] == times[1] else ("incorrect", "another time")
    return _judge_math(gold, answer, options, in_worker)


def _says(gold: str, answer: str) -> bool:
    """Whether an answer is the words of the gold, or a sentence that comes down to them."""
    if gold == answer:
        return True
    if gold in ("yes", "no", "true", "false"):
        return re.match(rf"{gold}\b[,.:;]", answer) is not None
    ending = rf".*\b(?:is|are|was|be)\s(?:an?\s|the\s)?{re.escape(gold)}"
    return len(answer) < 200 and re.fullmatch(ending, answer) is not None


def _spelled_out(text: str) -> str:
    """Return the digits of a number in words."""
    return _NUMBER_WORDS.get(strip_markup(text).casefold(), text) if len(text) < 40 else text


def _time(text: str) -> int | None:
    """Return minutes after midnight of a clock time."""
    match = _TIME.fullmatch(strip_markup(text)) if ":" in text or "m" in text.lower() else None
    if match is None or (match[2] is None and match[3] is None):
        return None
    hours, minutes = int(match[1]), int(match[2] or 0)
    if hours > 24 or minutes > 59:
        return None
    if match[3]:
        hours = hours % 12 + (12 if match[3].lower() == "p" else 0)
    return 60 * hours + minutes


def _judge_math(gold: str, answer: str, options: Options, in_worker: bool) -> Judgement:
    limits = _IN_WORKER if in_worker else _INLINE
    try:
        gold_reading, reading = _read(gold, limits), _read(answer, limits)
        if gold_reading.node is None:
            return "bad_gold", gold_reading.why
        if reading.node is None:
            return ("incorrect", "words") if _is_words(answer) else ("unparsed", reading.why)
        if not is_defined(gold_reading.node):
            return "bad_gold", "no value"
        return _compared(gold, gold_reading.node, answer, reading.node, options, in_worker)
    except TooLargeError as error:
        return "too_large", str(error)
    except (NoValueError, UnreadableError) as error:
        return "incorrect", f"cannot be evaluated: {error}"


def _compared(
    gold: str, gold_node: Node, answer: str, node: Node, options: Options, in_worker: bool
) -> Judgement:
    comparison = Comparison(options, may_prove=in_worker)
    if comparison.same(gold_node, node):
        return _CORRECT if same_units(gold, answer) else ("incorrect", "another unit")
    for left, right, why in (*_with_decimal_commas(gold, answer), *_in_radians(gold, answer)):
        other_gold, other = _read(left, _INLINE).node, _read(right, _INLINE).node
        if other_gold and other and comparison.same(other_gold, other):
            return "correct", why
    return _UNEQUAL


def _with_decimal_commas(gold: str, answer: str) -> list[tuple[str, str, str]]:
    """Return other readings of ``1,22``: a decimal, in a gold only if two digits follow."""
    pairs = []
    gold_match, match = _COMMA.fullmatch(strip_markup(gold)), _COMMA.fullmatch(strip_markup(answer))
    if match and not gold_match:
        pairs.append((gold, f"{match[1]}.{match[2]}", "decimal comma"))
    if gold_match and not match and len(gold_match[2]) > 1:
        pairs.append((f"{gold_match[1]}.{gold_match[2]}", answer, "decimal comma"))
    return pairs


def _in_radians(gold: str, answer: str) -> list[tuple[str, str, str]]:
    """Return another reading of degrees where the other side speaks of pi."""
    sides = [_DEGREES.sub(r" \\cdot\\frac{\\pi}{180} ", side) for side in (gold, answer)]
    degrees = [side != old for side, old in zip(sides, (gold, answer), strict=True)]
    if sum(degrees) != 1 or not re.search(r"\\pi|π|\bpi\b", answer if degrees[0] else gold):
        return []
    return [(sides[0], sides[1], "radians")]


def _read(text: str, limits: tuple[int, int]) -> _Reading:
    """Return a text as mathematics; short ones are remembered, as golds come again and again."""
    return _read_short(text, limits) if len(text) < _REMEMBERED else _read_anew(text, limits)


@lru_cache(maxsize=1024)
def _read_short(text: str, limits: tuple[int, int]) -> _Reading:
    return _read_anew(text, limits)


def _read_anew(text: str, limits: tuple[int, int]) -> _Reading:
    try:
        return _Reading(parse(clean(text), max_depth=limits[0], max_tokens=limits[1]), "")
    except UnreadableError as error:
        return _Reading(None, str(error))
