"""When a run ends before its last step: on request, or before its time is up."""

from __future__ import annotations

import time

__all__ = ["STOPPED_EXIT_CODE", "Stopping"]

STOPPED_EXIT_CODE = 75
"""How ``mrgym train`` exits after a stop it can go on from: EX_TEMPFAIL, "try again later"."""


class Stopping:
    """Says after every step whether to stop.

    Args:
        limit: Minutes from now until the run must have ended, its checkpoint included.

    Attributes:
        reason: Why to stop; None while there is no reason.
    """

    def __init__(self, limit: float | None = None) -> None:
        self.reason: str | None = None
        self._limit = limit
        self._start = self._last = time.monotonic()
        self._longest = 0.0

    def request(self, reason: str) -> None:
        """Ask for a stop at the end of the current step; safe in a signal handler."""
        self.reason = reason

    def begin(self) -> None:
        """Say that the first step begins now; what came before is no measure of a step."""
        self._last = time.monotonic()

    def due(self) -> bool:
        """Return whether to stop; to be asked once before every step.

        Time is left for one more step and for writing a checkpoint, either of which may take as
        long as the longest step (evaluation and checkpoint included) that was seen.
        """
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last)
        self._last = now
        if self._limit is not None and self.reason is None:
            needed = now - self._start + 2 * self._longest
            if needed > 60 * self._limit:
                self.reason = f"time limit of {self._limit:g} min"
        return self.reason is not None
