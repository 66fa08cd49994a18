"""``grade``: one answer against one gold."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Final

from mrgym.errors import ConfigError
from mrgym_envs.grading.choices import choice_of, chosen
from mrgym_envs.grading.extract import extract, extract_gold, visible
from mrgym_envs.grading.judge import MAX_LENGTH, Judgement, judge
from mrgym_envs.grading.numbers import plain_number
from mrgym_envs.grading.tree import NeedsWorkerError, TooLargeError
from mrgym_envs.grading.verdict import Options, Percent, Verdict
from mrgym_envs.grading.workers import judge_in_workers

__all__ = ["grade", "grade_batch"]

_DEFAULTS: Final = Options()
_LAST_WORD: Final = re.compile(r"\s?([^{}\s]{1,60})\s?\}[\s.$]{0,9}")
_CAREFUL: Final = re.compile(r"[<#]|your|inal answer")


def grade(
    *,
    gold: str,
    answer: str,
    timeout: float = 1.0,
    percent: Percent = "value",
    ordered: bool = False,
    digits: int = 7,
) -> Verdict:
    r"""Return whether an answer is right. Nothing that stands in the texts makes it raise or hang.

    Numbers, words and expressions that ordinary arithmetic can decide are graded in this process,
    in microseconds; what needs algebra goes to a worker process shared by all graders. It works
    alike in any thread, under asyncio and in subprocesses.

    Args:
        gold: The gold answer: bare, or a solution that holds it in ``\\boxed{}`` or after ``####``.
        answer: The answer: bare, or a response to find it in.
        timeout: Seconds a worker may take; fractions count.
        percent: What a percent sign means, see :class:`Options`.
        ordered: Whether answers listed without brackets must come in the gold's order.
        digits: Significant digits from which on a decimal may stand for what it approximates.

    Raises:
        ConfigError: If an option cannot work.

    Example:
        >>> grade(gold="1/2", answer="so it is \\\\boxed{0.5}").correct
        True
    """
    options = _options(percent, ordered, digits)
    (verdict,) = _grade_all(((gold, answer),), timeout, options)
    return verdict


def grade_batch(
    pairs: Iterable[tuple[str, str]],
    *,
    timeout: float = 1.0,
    percent: Percent = "value",
    ordered: bool = False,
    digits: int = 7,
) -> list[Verdict]:
    """Return the verdicts of many ``(gold, answer)`` pairs, in order, as :func:`grade` gives them.

    The pairs that need a worker are spread over all workers.

    Args:
        pairs: Golds with answers.
        timeout: Seconds a worker may take for one pair.
        percent: What a percent sign means, see :class:`Options`.
        ordered: Whether answers listed without brackets must come in the gold's order.
        digits: Significant digits from which on a decimal may stand for what it approximates.

    Raises:
        ConfigError: If an option cannot work.
    """
    return _grade_all(list(pairs), timeout, _options(percent, ordered, digits))


def _options(percent: Percent, ordered: bool, digits: int) -> Options:
    if percent == "value" and not ordered and digits == 7:
        return _DEFAULTS
    return Options(percent, ordered, digits)


def _grade_all(pairs: Sequence[tuple[str, str]], timeout: float, options: Options) -> list[Verdict]:
    if not 0 < timeout < math.inf:
        raise ConfigError(f"grade: got timeout={timeout}, expected seconds above 0; give some")
    verdicts = [_quickly(gold, answer, options) for gold, answer in pairs]
    heavy = [index for index, verdict in enumerate(verdicts) if verdict.status == "timeout"]
    for index, judgement in zip(heavy, _slowly(verdicts, heavy, timeout, options), strict=True):
        verdict = verdicts[index]
        verdicts[index] = Verdict(judgement[0], verdict.extracted, verdict.gold, judgement[1])
    return verdicts


def _slowly(
    verdicts: Sequence[Verdict], heavy: Sequence[int], timeout: float, options: Options
) -> list[Judgement]:
    """Return the judgements of what was too heavy for this process."""
    if not heavy:
        return []
    cases = [(verdicts[i].gold or "", verdicts[i].extracted or "", options) for i in heavy]
    try:
        return judge_in_workers(cases, timeout)
    except Exception as error:  # a worker that cannot start is no reason to lose a run
        return [("error", f"{type(error).__name__}: {error}")] * len(heavy)


def _at_once(gold: str, answer: str) -> Verdict | None:
    """Return the verdict where both are plain numbers, the answer's the only box of a response."""
    text = answer
    if "boxed" in answer:
        start = answer.rfind("\\boxed{")
        match = _LAST_WORD.fullmatch(answer, start + 7) if start >= 0 else None
        if match is None or answer.find("boxed") != start + 1 or _CAREFUL.search(answer):
            return None
        text = match[1]
    left = plain_number(gold)
    if left is None or (right := plain_number(text)) is None:
        return None
    if left == right:
        return Verdict("correct", text, gold)
    return Verdict("incorrect", text, gold, "not equal")


def _quickly(gold: str, answer: str, options: Options) -> Verdict:
    """Return the verdict of this process; status ``timeout`` means that a worker must decide."""
    extracted: str | None = None
    read = gold
    try:
        if (verdict := _at_once(gold, answer)) is not None:
            return verdict
        read = extract_gold(gold)
        extracted = _extracted(read, answer)
        status, reason = _judged(read, extracted, options)
    except (NeedsWorkerError, RecursionError) as error:
        status, reason = "timeout", str(error)
    except TooLargeError as error:
        status, reason = "too_large", str(error)
    except Exception as error:  # the last resort: a bug of ours is reported, not raised
        status, reason = "error", f"{type(error).__name__}: {error}"
    return Verdict(status, extracted, read, reason)


def _judged(gold: str, answer: str | None, options: Options) -> Judgement:
    if answer is None:
        status, reason = judge(gold, "?", options)
        return (status, reason) if status == "bad_gold" else ("unparsed", "no answer found")
    return judge(gold, answer, options)


def _extracted(gold: str, answer: str) -> str | None:
    found = extract(answer)
    if len(gold) > MAX_LENGTH or choice_of(gold) is None or _is_marked(answer):
        return found
    if found is not None and choice_of(found) is not None:
        return found
    return chosen(visible(answer)) or found


def _is_marked(answer: str) -> bool:
    return "boxed" in answer or "<answer>" in answer or "####" in answer
