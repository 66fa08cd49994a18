"""What grading one answer gives, and how it may be tuned."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from mrgym.errors import ConfigError

__all__ = ["Options", "Status", "Verdict"]

Status: TypeAlias = Literal[
    "correct", "incorrect", "unparsed", "timeout", "too_large", "bad_gold", "error"
]
Percent: TypeAlias = Literal["value", "strict", "ignore"]


class Verdict(msgspec.Struct, frozen=True):
    """What became of one answer.

    Attributes:
        status: ``"correct"`` or ``"incorrect"`` where both sides were read and compared;
            ``"unparsed"`` where the answer, ``"bad_gold"`` where the gold could not be read;
            ``"timeout"`` and ``"too_large"`` where comparing them would cost too much;
            ``"error"`` where the grader itself failed.
        extracted: The text that was taken as the answer.
        gold: The text that was taken as the gold answer.
        reason: A few words on how the status came about.
    """

    status: Status
    extracted: str | None = None
    gold: str | None = None
    reason: str = ""

    @property
    def correct(self) -> bool:
        """Whether the answer is right; every other status is ``False``."""
        return self.status == "correct"


class Options(msgspec.Struct, frozen=True):
    """Policies a caller may choose.

    Attributes:
        percent: ``"value"``: 5% is 0.05, and a gold's percent sign may be left out; ``"strict"``:
            5% is 0.05 only; ``"ignore"``: percent signs are dropped.
        ordered: Whether answers listed without brackets must come in the gold's order.
        digits: Significant digits from which on a decimal may stand for a number it only
            approximates.

    Raises:
        ConfigError: If a value cannot work.
    """

    percent: Percent = "value"
    ordered: bool = False
    digits: int = 7

    def __post_init__(self) -> None:
        if self.percent not in ("value", "strict", "ignore") or self.digits < 1:
            raise ConfigError(
                f"grade: got percent={self.percent!r}, digits={self.digits!r}, expected percent "
                "to be 'value', 'strict' or 'ignore' and digits to be at least 1"
            )
