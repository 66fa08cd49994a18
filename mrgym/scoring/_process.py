"""A worker process as its pool sees it: started, fed, and ended when it does not answer."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, Final

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

__all__ = ["CallResult", "Program", "Settings", "Worker", "pickled"]

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


class CallResult(msgspec.Struct, frozen=True):
    """What became of one call.

    Attributes:
        status: ``"ok"``, ``"error"`` (it raised, or its process died) or ``"timeout"``.
        value: What it returned, as plain values (a tuple comes back as a list).
        error: What went wrong.
        at: What a failed call was at, if it told :func:`mrgym.scoring._worker.note`.
    """

    status: Status
    value: Any = None
    error: str | None = None
    at: str = ""


class Program(msgspec.Struct, frozen=True):
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
        payload = pickled(function, name)
        token = hashlib.blake2b(payload, digest_size=16).hexdigest()
        return cls(name, payload, token, _main_module() if b"_main__" in payload else {})


class Settings(msgspec.Struct, frozen=True):
    """The arguments of a pool, checked."""

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


class _LostWorkerError(Exception):
    """A worker did not answer."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status: Status = status
        self.reason = reason


class Worker:
    """A worker process, seen from the pool."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loaded: dict[str, None] = {}
        self._usable = True
        self._ended = False
        self._interrupted = False
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
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def usable(self) -> bool:
        return self._usable and self.alive

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
        """Return what became of a pickled ``(token, arguments)``, whatever happens."""
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
        self._interrupted = True
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
            reason = _exit_reason(self.end(0 if self._interrupted else _GRACE_S))
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


def _started(channel: int, notes: int, settings: Settings) -> subprocess.Popen[bytes]:
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


def pickled(value: Any, name: str) -> bytes:
    """Return ``value`` as a pickle.

    Raises:
        ScoreError: If it cannot be pickled; the message begins with ``name``.
    """
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
