"""Threads that run blocking code for an event loop, and never keep the process from ending.

The standard executor joins its threads when the interpreter exits, so one environment that hangs
would keep a service from stopping; these are daemons.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Lanes"]

T = TypeVar("T")


def _nothing() -> None:
    return None


class _Job:
    """One call, and where its result goes."""

    __slots__ = ("call", "error", "future", "result")

    def __init__(self, call: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self.call = call
        self.future = future
        self.result: Any = None
        self.error: Exception | None = None

    def forget(self, _: asyncio.Future[Any]) -> None:
        """Drop the call, which may hold a long body, also while it waits behind one that hangs."""
        self.call = _nothing

    def run(self) -> None:
        try:
            self.result = self.call()
        except Exception as raised:  # handed to whoever awaits
            self.error = raised
        except BaseException as raised:  # whatever it is, the thread must go on
            self.error = RuntimeError(repr(raised))

    def settle(self) -> None:
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.error)


class Lanes:
    """A few threads with one queue; with one thread, all calls run on that thread, in order.

    Args:
        count: Most threads; they start when they are needed.
        name: Prefix of their names.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: collections.deque[_Job] = collections.deque()
        self._waking = False
        self._threads: list[threading.Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.pending = 0

    def submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Run a call on a thread; from the event loop only."""
        self._loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = self._loop.create_future()
        job = _Job(call, future)
        future.add_done_callback(job.forget)
        future.add_done_callback(self._finished)
        self.pending += 1
        if len(self._threads) < min(self._count, self.pending):
            self._start()
        self._jobs.put(job)
        return future

    def close(self) -> None:
        """Let the threads end once what is queued is done."""
        for _ in self._threads:
            self._jobs.put(None)

    def _finished(self, future: asyncio.Future[Any]) -> None:
        self.pending -= 1
        if not future.cancelled():
            future.exception()  # looked at here, so that none is reported as forgotten

    def _start(self) -> None:
        name = f"{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            self._done.append(job)
            self._wake()

    def _wake(self) -> None:
        """Tell the event loop, once for all results it has not looked at yet."""
        if self._waking:
            return
        self._waking = True
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody awaits any more
            self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        self._waking = False  # before looking: what comes from now on wakes again
        while self._done:
            self._done.popleft().settle()
