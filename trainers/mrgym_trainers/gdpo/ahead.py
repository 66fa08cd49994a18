"""When groups are drawn and weights synced: in turn with learning, or one step ahead of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from mrgym.errors import RolloutError
from mrgym_trainers.gdpo.draw import Draw, GroupSource
from mrgym_trainers.gdpo.timing import Stopwatch

__all__ = ["DrawAhead", "DrawInTurn"]

Sync = Callable[[int], dict[str, float]]
"""Gives the sampler the policy's weights under a version, and returns metrics."""


class DrawInTurn:
    """Draws a step's groups when they are asked for; the sampler has the weights they begin with.

    Args:
        source: Draws the groups.
        sync: Gives the sampler the policy's weights.
        rest: Lets the sampler free memory until the next sync.
        watch: Is told how long drawing took, as ``draw``.
    """

    def __init__(
        self,
        source: GroupSource,
        sync: Sync,
        rest: Callable[[], None],
        watch: Stopwatch | None = None,
    ) -> None:
        self._source, self._sync, self._rest = source, sync, rest
        self._watch = watch or Stopwatch()

    def begin(self, step: int) -> None:
        """Give the sampler the weights that the run begins with."""
        self._sync(step)

    def take(self, step: int) -> tuple[Draw, dict[str, float]]:
        """Return the groups of a step, and metrics of a sync if there was one."""
        with self._watch("draw"):
            drawn = self._source.draw(step)
            self._rest()
        return drawn, {}

    def learned(self, step: int) -> dict[str, float]:
        """Say that the policy has taken a step, and return metrics of the sync."""
        return self._sync(step)

    def settle(self, step: int) -> None:
        """Make the sampler ready for something else, with the weights after a step."""

    def state(self) -> dict[str, int]:
        """Return where the drawing stands."""
        return self._source.state()

    def load_state(self, state: Mapping[str, int]) -> None:
        """Go on from there."""
        self._source.load_state(state)

    def close(self) -> None:
        """Nothing is being drawn."""


class DrawAhead:
    """Draws the next step's groups in a thread while the policy learns from this one's.

    Its completions are of weights one version older than those the step begins with, which bounds
    their staleness: :meth:`take` refuses older ones. The loss corrects for it by the mismatch
    ratio, which is between the sampler's weights and the step's first ones.

    Args:
        source: Draws the groups.
        sync: Gives the sampler the policy's weights.
        last: The last step; none is drawn after it.
        staleness: Most versions a completion's weights may be behind.
        watch: Is told how long the policy waited for groups, as ``draw``.
    """

    def __init__(
        self,
        source: GroupSource,
        sync: Sync,
        *,
        last: int,
        staleness: int = 1,
        watch: Stopwatch | None = None,
    ) -> None:
        self._source, self._sync, self._last, self._staleness = source, sync, last, staleness
        self._watch = watch or Stopwatch()
        self._synced_metrics: dict[str, float] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mrgym-ahead")
        self._drawing: Future[Draw] | None = None
        self._state: dict[str, int] = source.state()
        self._synced: int | None = None

    def begin(self, step: int) -> None:
        """Give the sampler the weights that the run begins with."""
        self._fresh(step)

    def take(self, step: int) -> tuple[Draw, dict[str, float]]:
        """Return the groups of a step and metrics of the sync, and begin to draw the next ones.

        Raises:
            RolloutError: If a completion is of weights that are too old.
        """
        with self._watch("draw"):
            drawn = self._source.draw(step) if self._drawing is None else self._drawing.result()
        self._drawing = None
        self._check_age(drawn, step)
        self._fresh(step - 1)
        self._state = self._source.state()
        if step < self._last:
            self._drawing = self._thread.submit(self._source.prepared(step + 1))
        metrics, self._synced_metrics = self._synced_metrics, {}
        return drawn, metrics

    def learned(self, step: int) -> dict[str, float]:
        """Say that the policy has taken a step; its weights are synced when the next is taken."""
        return {}

    def settle(self, step: int) -> None:
        """Wait until nothing is being drawn and give the sampler the weights after a step."""
        if self._drawing is not None:
            self._drawing.exception()
        with self._watch.aside():  # between steps
            self._fresh(step)

    def state(self) -> dict[str, int]:
        """Return where the drawing stood before what is being drawn now.

        A run that is resumed draws that step anew, with newer weights: no task is lost.
        """
        return self._state

    def load_state(self, state: Mapping[str, int]) -> None:
        """Go on from there."""
        self._source.load_state(state)
        self._state = self._source.state()

    def close(self) -> None:
        """Wait for what is being drawn and end the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _fresh(self, version: int) -> None:
        if self._synced != version:
            self._synced = version
            self._synced_metrics = self._sync(version)

    def _check_age(self, drawn: Draw, step: int) -> None:
        versions = [r.policy_version for group in drawn.groups for r in group.rollouts]
        behind = step - 1 - min(versions, default=step - 1)
        if behind > self._staleness:
            raise RolloutError(
                f"step {step}: got completions of weights {behind} versions old, expected at most "
                f"{self._staleness}; the sampler missed a weight sync"
            )
