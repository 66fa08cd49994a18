"""One step off: the next batch is sampled and scored while the policy learns from this one."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from mrgym.errors import RolloutError
from mrgym_trainers.gdpo.draw import Draw, GroupSource

__all__ = ["DrawAhead"]


class DrawAhead:
    """Draws the groups of the next step in a thread.

    Its completions are of weights one version older than those the step begins with, which is the
    bound on staleness: :meth:`take` refuses older ones. The loss corrects for the difference by the
    mismatch ratio, which is between the sampler's weights and the step's first ones.

    Args:
        source: Draws the groups.
        staleness: Most versions a completion's weights may be behind.
    """

    def __init__(self, source: GroupSource, *, staleness: int = 1) -> None:
        self._source = source
        self._staleness = staleness
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mrgym-ahead")
        self._drawing: tuple[int, Future[Draw]] | None = None

    def start(self, step: int) -> None:
        """Begin to draw a step's groups; the sampler must not be touched until they are taken."""
        self._drawing = step, self._thread.submit(self._source.draw, step)

    def take(self, step: int, version: int) -> Draw:
        """Return the groups of a step, waiting for them if need be.

        Args:
            step: The step; its drawing must have been started.
            version: The policy's version, which the staleness is counted from.

        Raises:
            RolloutError: If a completion is of weights that are too old.
        """
        if self._drawing is None or self._drawing[0] != step:
            self.start(step)
        assert self._drawing is not None
        drawn = self._drawing[1].result()
        self._drawing = None
        oldest = min(
            (r.policy_version for group in drawn.groups for r in group.rollouts), default=version
        )
        if version - oldest > self._staleness:
            raise RolloutError(
                f"step {step}: got completions of weights {version - oldest} versions old, "
                f"expected at most {self._staleness}; the sampler missed a weight sync"
            )
        return drawn

    def settle(self) -> None:
        """Wait until nothing is being drawn, so that the sampler may be used for something else."""
        if self._drawing is not None:
            self._drawing[1].exception()

    def close(self) -> None:
        """Wait for what is being drawn and end the thread."""
        self._thread.shutdown(cancel_futures=True)
