"""Correctness by the math grader: verdicts as scores, and golds it cannot read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from mrgym.errors import ScoreError
from mrgym_envs.grading import Verdict, grade, grade_batch

__all__ = ["Equivalence", "unreadable_golds"]


class Equivalence:
    """Scores answers by the grader; answers that are announced are graded together."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Verdict] = {}

    @contextmanager
    def announced(self, pairs: Iterable[tuple[str, str]]) -> Iterator[None]:
        """Grade ``(gold, answer)`` pairs in one batch; their verdicts are kept within the block.

        Another thread may be in a block of its own: a verdict it takes along is made again.
        """
        distinct = list(dict.fromkeys(pairs))
        self._known.update(zip(distinct, grade_batch(distinct), strict=True))
        try:
            yield
        finally:
            for pair in distinct:
                self._known.pop(pair, None)

    def holds(self, gold: str, answer: str) -> bool:
        """Return whether an answer is right. One that could not be read or decided is not.

        Raises:
            ScoreError: If the grader failed or cannot read the gold, which says nothing about the
                answer.
        """
        verdict = self._known.get((gold, answer)) or grade(gold=gold, answer=answer)
        if verdict.status in ("error", "bad_gold"):
            raise ScoreError(
                f"grade: got status {verdict.status!r} ({verdict.reason}) for the gold "
                f"{gold!r:.80} and the answer {answer[-80:]!r}, expected a verdict; "
                + ("mend the gold" if verdict.status == "bad_gold" else "report it as a bug")
            )
        return verdict.correct


def unreadable_golds(golds: Sequence[str]) -> dict[int, str]:
    """Return the positions of golds the grader does not accept as answers to themselves, and why.

    A gold that is merely slow to compare is not among them.
    """
    verdicts = grade_batch((gold, gold) for gold in golds)
    return {
        i: verdict.reason or verdict.status
        for i, verdict in enumerate(verdicts)
        if verdict.status not in ("correct", "timeout")
    }
