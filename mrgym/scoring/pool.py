"""A pool of worker processes with a deadline for every call.

Each worker is a fresh interpreter owned by one thread of the pool, which starts it, feeds it and,
where a call outlives its deadline, kills and replaces it. No signal handler, timer or fork is
involved, so it works the same from any thread, under asyncio, and in daemonic processes.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import msgspec

from mrgym.errors import ScoreError
from mrgym.scoring._process import CallResult, Program, Settings, Worker, pickled

__all__ = ["CallResult", "Program", "WorkerPool"]


class WorkerPool:
    """Runs callables in worker processes, each call with a deadline.

    Workers start when they are first needed and serve many calls. One that hangs is killed, with
    the processes it started, and replaced; so is one that died. They end with :meth:`close`, with
    the interpreter, and when this process is killed. POSIX only. It contains accidents; it is not
    a sandbox for hostile code.

    Args:
        workers: Most processes at a time, one computing thread each.
        deadline: Wall-clock seconds of one call, counted from when a worker gets it: waiting for a
            worker, starting it and importing the callable's module do not count.
        memory_limit: Bytes one call may allocate on top of what its worker holds after loading
            (address space, Linux only); ``None`` is off.
        start_timeout: Seconds a worker may take to start and load a callable.

    Raises:
        ConfigError: If a number cannot work.

    Example:
        >>> with WorkerPool(2, deadline=5.0) as pool:
        ...     [r.value for r in pool.map(math.sqrt, [(4.0,), (9.0,)])]
        [2.0, 3.0]
    """

    def __init__(
        self,
        workers: int = 1,
        *,
        deadline: float,
        memory_limit: int | None = 1 << 30,
        start_timeout: float = 60.0,
    ) -> None:
        self._settings = Settings(workers, deadline, memory_limit, start_timeout)
        self._hire()

    def _hire(self) -> None:
        self._crew = _Crew(self._settings)
        self._finalizer = weakref.finalize(self, self._crew.shutdown)

    def map(
        self, function: Callable[..., Any] | Program, items: Sequence[tuple[Any, ...]]
    ) -> list[CallResult]:
        """Return the results of ``function(*item)`` for all items, in order.

        May be called from several threads at a time.

        Args:
            function: A picklable callable from an importable module. What all calls share goes
                into a ``functools.partial``: it is shipped once a worker.
            items: Picklable arguments of each call.

        Raises:
            ScoreError: If something cannot be pickled, a worker cannot start or load the callable,
                or the pool is closed.
        """
        program = function if isinstance(function, Program) else Program.of(function)
        if os.getpid() != self._crew.pid:  # forked: the crew's threads stayed behind
            self._hire()
        batch = _Batch(len(items))
        self._crew.submit(
            _Job(program, pickled((program.token, tuple(item)), program.name), batch, index)
            for index, item in enumerate(items)
        )
        return batch.wait()

    @property
    def pids(self) -> list[int]:
        """Ids of the worker processes that run now."""
        return self._crew.pids

    def close(self) -> None:
        """End all workers; calls in progress fail. May be called again."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Batch:
    """The results of one ``map``, as they come in."""

    def __init__(self, size: int) -> None:
        self._results: list[CallResult | None] = [None] * size
        self._left = size
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        if not size:
            self._done.set()

    @property
    def over(self) -> bool:
        return self._done.is_set()

    def settle(self, index: int, result: CallResult) -> None:
        with self._lock:
            self._results[index] = result
            self._left -= 1
            if not self._left:
                self._done.set()

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
            self._done.set()

    def wait(self) -> list[CallResult]:
        try:
            self._done.wait()
        except BaseException as error:  # Ctrl-C: what is still queued is not run
            self.fail(error)
            raise
        if self._failure is not None:
            raise self._failure
        return [result for result in self._results if result is not None]


class _Job(msgspec.Struct, frozen=True):
    program: Program
    request: bytes
    batch: _Batch
    index: int


class _Crew:
    """The threads of a pool and their workers.

    It does not know the pool, so a pool that is forgotten is collected and cleaned up.
    """

    def __init__(self, settings: Settings) -> None:
        self.pid = os.getpid()
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._settings = settings
        # Reentrant: the garbage collector may call shutdown() wherever the lock is held.
        self._lock = threading.RLock()
        self._open = True
        self._unfinished = 0
        self._threads: list[threading.Thread] = []
        self._workers: set[Worker] = set()

    @property
    def pids(self) -> list[int]:
        with self._lock:
            return sorted(worker.pid for worker in self._workers if worker.alive)

    def submit(self, jobs: Iterable[_Job]) -> None:
        ready = list(jobs)
        with self._lock:
            self.check_open()
            self._unfinished += len(ready)
            while len(self._threads) < min(self._settings.workers, self._unfinished):
                thread = threading.Thread(
                    target=_serve, args=(self,), name="mrgym-worker", daemon=True
                )
                self._threads.append(thread)
                thread.start()
            for job in ready:
                self.jobs.put(job)

    def check_open(self) -> None:
        if not self._open:
            raise ScoreError(
                "WorkerPool: got calls on a closed pool, expected an open one; make a new pool"
            )

    def fit(self, worker: Worker | None) -> Worker:
        """Return the worker, or a new one in place of one that cannot go on."""
        if worker is not None:
            if worker.usable:
                return worker
            self.dismiss(worker)
        with self._lock:
            self.check_open()
            worker = Worker(self._settings)
            self._workers.add(worker)
            return worker

    def dismiss(self, worker: Worker) -> None:
        worker.close()
        with self._lock:
            self._workers.discard(worker)

    def finished(self) -> None:
        with self._lock:
            self._unfinished -= 1

    def shutdown(self) -> None:
        if os.getpid() != self.pid:  # a forked copy: the workers belong to the original
            return
        with self._lock:
            self._open = False
            threads, workers = [*self._threads], [*self._workers]
            for _ in threads:
                self.jobs.put(None)
        for worker in workers:
            worker.interrupt()
        if threading.current_thread() in threads:  # collected here; the others may wait for us
            return
        for thread in threads:
            thread.join()


def _serve(crew: _Crew) -> None:
    """Work off jobs with one worker at a time, until the crew is shut down.

    The worker is started here because the kernel ends it with the thread that started it.
    """
    worker: Worker | None = None
    while (job := crew.jobs.get()) is not None:
        try:
            if not job.batch.over:
                worker = crew.fit(worker)
                worker.load(job.program)
                result = worker.call(job.request)
                crew.check_open()
                job.batch.settle(job.index, result)
        except BaseException as error:  # whoever waits for the batch raises it
            job.batch.fail(error)
        finally:
            crew.finished()
    if worker is not None:
        crew.dismiss(worker)
