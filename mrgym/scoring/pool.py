"""A pool of worker processes with a deadline for every call.

Each worker is a fresh interpreter owned by one thread of the pool, which starts it, feeds it and,
where a call outlives its deadline, kills and replaces it. No signal handler, timer or fork is
involved, so it works the same from any thread, under asyncio, and in daemonic processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import msgspec

from mrgym.errors import ConfigError, ScoreError
from mrgym.scoring._frames import (
    MAX_REPLY,
    NOTE_SIZE,
    Load,
    Reply,
    decode_reply,
    pack_frame,
    read_frame,
    remember,
)
from mrgym.scoring.inline import Status

__all__ = ["CallResult", "Program", "WorkerPool"]

_BOOT: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from mrgym.scoring._worker import main; main()"
)
_ONE_THREAD: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Every malloc arena reserves address space, which counts against RLIMIT_AS.
    "MALLOC_ARENA_MAX": "2",
}
_GRACE_S: Final = 1.0
_NO_NOTE: Final = b" " * NOTE_SIZE


@dataclass(frozen=True, slots=True)
class CallResult:
    """What became of one call.

    Attributes:
        status: ``"ok"``, ``"error"`` (it raised, or its process died) or ``"timeout"``.
        value: What it returned, as plain values (a tuple comes back as a list).
        error: What went wrong.
        at: The last thing it noted with :func:`mrgym.scoring._worker.note`, if it failed.
    """

    status: Status
    value: Any = None
    error: str | None = None
    at: str = ""


@dataclass(frozen=True, slots=True)
class Program:
    """A callable made ready for shipping; each worker loads it once.

    Attributes:
        name: How error messages call it.
        payload: The pickled callable.
        token: Hash of the payload.
        main: How a worker imports ``__main__``, where the callable needs that.
    """

    name: str
    payload: bytes
    token: str
    main: dict[str, str]

    @classmethod
    def of(cls, function: Callable[..., Any], *, name: str = "") -> Program:
        """Return the program of a callable.

        Raises:
            ScoreError: If it cannot be pickled.
        """
        name = name or getattr(function, "__qualname__", type(function).__name__)
        payload = _pickled(function, name)
        token = hashlib.blake2b(payload, digest_size=16).hexdigest()
        return cls(name, payload, token, _main_module() if b"_main__" in payload else {})


@dataclass(frozen=True, slots=True)
class _Settings:
    workers: int
    deadline: float
    memory_limit: int | None
    start_timeout: float

    def __post_init__(self) -> None:
        if self.workers < 1 or (self.memory_limit is not None and self.memory_limit < 1):
            raise ConfigError(
                f"WorkerPool: got workers={self.workers}, memory_limit={self.memory_limit}, "
                "expected at least 1 of both; memory_limit=None switches the limit off"
            )
        if not all(0 < s < math.inf for s in (self.deadline, self.start_timeout)):
            raise ConfigError(
                f"WorkerPool: got deadline={self.deadline}, start_timeout={self.start_timeout}, "
                "expected seconds above 0; give finite numbers"
            )


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
        self._settings = _Settings(workers, deadline, memory_limit, start_timeout)
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
            _Job(program, _pickled((program.token, tuple(item)), program.name), batch, index)
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


@dataclass(frozen=True, slots=True)
class _Job:
    program: Program
    request: bytes
    batch: _Batch
    index: int


class _Crew:
    """The threads of a pool and their workers.

    It does not know the pool, so a pool that is forgotten is collected and cleaned up.
    """

    def __init__(self, settings: _Settings) -> None:
        self.pid = os.getpid()
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._settings = settings
        # Reentrant: the garbage collector may call shutdown() wherever the lock is held.
        self._lock = threading.RLock()
        self._open = True
        self._unfinished = 0
        self._threads: list[threading.Thread] = []
        self._workers: set[_Worker] = set()

    @property
    def pids(self) -> list[int]:
        with self._lock:
            return sorted(worker.pid for worker in self._workers)

    def submit(self, jobs: Iterable[_Job]) -> None:
        ready = list(jobs)
        with self._lock:
            self.check_open()
            self._unfinished += len(ready)
            while len(self._threads) < min(self._settings.workers, self._unfinished):
                thread = threading.Thread(target=_serve, args=(self,), daemon=True)
                self._threads.append(thread)
                thread.start()
            for job in ready:
                self.jobs.put(job)

    def check_open(self) -> None:
        if not self._open:
            raise ScoreError(
                "WorkerPool: got calls on a closed pool, expected an open one; make a new pool"
            )

    def hire(self) -> _Worker:
        with self._lock:
            self.check_open()
            worker = _Worker(self._settings)
            self._workers.add(worker)
            return worker

    def dismiss(self, worker: _Worker) -> None:
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
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()


def _serve(crew: _Crew) -> None:
    """Work off jobs with one worker at a time, until the crew is shut down.

    The worker is started here because the kernel ends it with the thread that started it.
    """
    worker: _Worker | None = None
    while (job := crew.jobs.get()) is not None:
        try:
            if not job.batch.over:
                worker = _serve_one(crew, worker, job)
        except BaseException as error:  # whoever waits for the batch raises it
            job.batch.fail(error)
        finally:
            crew.finished()
    if worker is not None:
        crew.dismiss(worker)


def _serve_one(crew: _Crew, worker: _Worker | None, job: _Job) -> _Worker:
    if worker is not None and not worker.usable:
        crew.dismiss(worker)
        worker = None
    worker = worker or crew.hire()
    worker.load(job.program)
    result = worker.call(job.request)
    crew.check_open()
    job.batch.settle(job.index, result)
    return worker


class _LostWorkerError(Exception):
    """A worker did not answer."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status: Status = status
        self.reason = reason


class _Worker:
    """A worker process, seen from the pool."""

    def __init__(self, settings: _Settings) -> None:
        self._settings = settings
        self._loaded: dict[str, None] = {}
        self._usable = True
        self._ended = False
        self._channel, theirs = socket.socketpair()
        self._notes = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        try:
            with theirs:
                self._process = _started(theirs.fileno(), self._notes.fileno(), settings)
        except BaseException:
            self._channel.close()
            self._notes.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def usable(self) -> bool:
        return self._usable and self._process.poll() is None

    def load(self, program: Program) -> None:
        """Have the program at hand.

        Raises:
            ScoreError: If the worker cannot load it.
        """
        if program.token in self._loaded:
            return
        path = [entry for entry in sys.path if isinstance(entry, str)]
        request = Load(program.token, program.payload, path, program.main)
        try:
            error = self._exchange(pickle.dumps(request), self._settings.start_timeout).error
            remedy = "define it in a module a fresh interpreter can import"
        except _LostWorkerError as lost:
            error, remedy = lost.reason, "make its import lighter or raise start_timeout"
        if error is not None:
            raise ScoreError(
                f"{program.name}: got {error} while a worker process loaded it, expected it to "
                f"load; {remedy}, or run it in this process (InlineScorer)"
            )
        remember(self._loaded, program.token)

    def call(self, request: bytes) -> CallResult:
        os.pwrite(self._notes.fileno(), _NO_NOTE, 0)
        try:
            reply = self._exchange(request, self._settings.deadline)
        except _LostWorkerError as lost:
            return CallResult(lost.status, None, lost.reason, self._note())
        self._usable = not reply.retire
        if reply.error is not None:
            return CallResult("error", None, reply.error, self._note())
        return CallResult("ok", reply.value)

    def end(self, grace: float) -> int:
        """End the process and those it started; return its exit code.

        Args:
            grace: Seconds it has to end by itself, now that its channel is closed.
        """
        self._usable = False
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace)
        if not self._ended:  # once only: later the id may be somebody else's
            self._ended = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def close(self) -> None:
        """End an idle worker and free what is held for it."""
        self.end(_GRACE_S)
        self._notes.close()

    def interrupt(self) -> None:
        """Make the owner's exchange fail; an idle worker ends by itself."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def _exchange(self, request: bytes, seconds: float) -> Reply:
        try:
            self._channel.settimeout(self._settings.start_timeout)
            self._channel.sendall(pack_frame(request))
            return decode_reply(read_frame(self._receiver(seconds), MAX_REPLY))
        except TimeoutError:
            self.end(0)
            raise _LostWorkerError("timeout", f"no result within {seconds:g} s") from None
        except (EOFError, OSError):
            reason = _exit_reason(self.end(_GRACE_S))
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            self.end(0)
            reason = f"broken reply ({error})"
        raise _LostWorkerError("error", reason)

    def _receiver(self, seconds: float) -> Callable[[int], bytes]:
        deadline = time.monotonic() + seconds

        def receive(size: int) -> bytes:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._channel.settimeout(left)
            return self._channel.recv(size)

        return receive

    def _note(self) -> str:
        return os.pread(self._notes.fileno(), NOTE_SIZE, 0).decode("utf-8", "replace").strip()


def _started(channel: int, notes: int, settings: _Settings) -> subprocess.Popen[bytes]:
    """Start a worker in a session of its own: Ctrl-C is the pool's affair, not the worker's."""
    path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
    numbers = (channel, notes, os.getpid(), settings.memory_limit or 0)
    _check_main_is_guarded()
    return subprocess.Popen(
        [sys.executable, "-c", _BOOT, path, *map(str, numbers)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(channel, notes),
        env={**os.environ, **_ONE_THREAD},
        start_new_session=True,
    )


def _check_main_is_guarded() -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ScoreError(
            "WorkerPool: got a start while a worker imports the main script, expected none; put "
            "what the script does under if __name__ == '__main__':"
        )


def _main_module() -> dict[str, str]:
    """Return how ``multiprocessing.spawn.prepare`` finds this process's main module."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name:
        return {"init_main_from_name": name}
    path = getattr(main, "__file__", None)
    return {"init_main_from_path": os.path.abspath(path)} if path else {}


def _pickled(value: Any, name: str) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # __reduce__ of a user's class may raise anything
        raise ScoreError(
            f"{name}: got something that cannot be pickled ({error!r}), expected what a worker "
            "process can be sent; define functions and classes in a module and keep lambdas, "
            "locks and open files out, or run it in this process (InlineScorer)"
        ) from error


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"worker process ended with exit code {code}"
    try:
        return f"worker process was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"worker process was killed by signal {-code}"
