"""A watch over an engine's processes: whoever waits for a dead or hung one gets an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["EngineWatch"]

_EVERY = 0.2


class EngineWatch:
    """Wakes up calls that vLLM's client would leave waiting for ever.

    When an engine's process is killed, vLLM 0.32 notices but tells nobody who already waits for an
    answer; nor does it limit how long an engine may take.

    Args:
        core: The engine's client in this process.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._deadline: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vllm-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Let what happens inside ``with`` wait for the engine no longer than this."""
        self._deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = None

    def close(self) -> None:
        """End the watch."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_EVERY):
            deadline = self._deadline
            if self._core.resources.engine_dead:
                self._wake(RuntimeError("a process of the engine ended"))
            elif deadline is not None and time.monotonic() > deadline:
                self._wake(TimeoutError("the engine gave no answer in time"))

    def _wake(self, error: Exception) -> None:
        for waiting in [*self._core.utility_results.values()]:
            if not waiting.done():
                waiting.set_exception(error)
        if self._core.outputs_queue.empty():
            self._core.outputs_queue.put_nowait(error)
