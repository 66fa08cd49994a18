"""The worker process of :class:`mrgym.scoring.WorkerPool`: reads calls, runs them, answers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mrgym.scoring._frames import (
    NOTE_SIZE,
    Load,
    Reply,
    encode_reply,
    pack_frame,
    read_frame,
    remember,
    to_wire,
)

__all__ = ["main", "note"]

_PR_SET_PDEATHSIG = 1
_ERROR_SHOWN = 2000
_FULL = 0.75

_note_fd: int | None = None


def note(text: str) -> None:
    """Say what the running call is at; reported if it hangs or takes its process down.

    Outside a worker process nothing happens.
    """
    if _note_fd is not None:
        os.pwrite(_note_fd, text.encode("utf-8", "replace")[:NOTE_SIZE].ljust(NOTE_SIZE), 0)


def main() -> None:
    """Serve until the pool closes its end: ``CHANNEL_FD NOTE_FD PARENT_PID MEMORY_LIMIT``."""
    global _note_fd
    channel_fd, _note_fd, parent, memory_limit = map(int, sys.argv[1:5])
    _die_with(parent)
    # What a score function starts must not hold these open, nor see our arguments.
    os.set_inheritable(channel_fd, False)
    os.set_inheritable(_note_fd, False)
    sys.argv[:] = [""]
    with contextlib.suppress(OSError):
        os.dup2(2, 1)  # prints go to the pool's stderr
    _set_limit("RLIMIT_CORE", 0)
    server = _Server(memory_limit)
    with socket.socket(fileno=channel_fd) as channel, contextlib.suppress(EOFError, OSError):
        while True:
            request = read_frame(channel.recv)
            channel.sendall(pack_frame(server.answer(request)))


class _Server:
    """Answers requests, one at a time.

    Args:
        memory_limit: Bytes a call may map on top of what is mapped after loading; 0 is off.
    """

    def __init__(self, memory_limit: int) -> None:
        self._memory_limit = memory_limit
        self._loaded_bytes = 0
        self._programs: dict[str, Callable[..., Any]] = {}

    def answer(self, request: bytes) -> bytes:
        """Return the encoded reply to an encoded request, whatever it raises."""
        try:
            value = to_wire(self._perform(pickle.loads(request)))
            return encode_reply(Reply(value, retire=self._is_full()))
        except BaseException as error:  # SystemExit is a user's failure here, not an order
            return encode_reply(Reply(error=_described(error), retire=self._is_full()))

    def _perform(self, request: Load | tuple[str, tuple[Any, ...]]) -> Any:
        if isinstance(request, Load):
            return self._load(request)
        token, arguments = request
        return self._programs[token](*arguments)

    def _load(self, request: Load) -> None:
        _set_limit("RLIMIT_AS", None)
        sys.path[:] = request.path
        if request.main:
            _import_main(request.main)
        remember(self._programs, request.token, pickle.loads(request.payload))
        self._loaded_bytes = _mapped_bytes()
        if self._memory_limit and self._loaded_bytes:
            _set_limit("RLIMIT_AS", self._loaded_bytes + self._memory_limit)

    def _is_full(self) -> bool:
        """Whether what earlier calls left behind may make the next one fail."""
        if not self._memory_limit or not self._loaded_bytes:
            return False
        return _mapped_bytes() - self._loaded_bytes > _FULL * self._memory_limit


def _die_with(parent: int) -> None:
    """Have the kernel end this process with the thread that started it, busy or not."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it died before that
        os._exit(1)


def _import_main(main: dict[str, str]) -> None:
    """Import the pool's main script, once, the way ``multiprocessing`` does."""
    import multiprocessing.spawn

    process: Any = multiprocessing.current_process()
    process._inheriting = True  # an unguarded script is told so instead of starting workers
    try:
        multiprocessing.spawn.prepare(dict(main))
    finally:
        del process._inheriting


def _set_limit(name: str, value: int | None) -> None:
    """Set a soft resource limit; ``None`` lifts it as far as allowed."""
    import resource

    kind = getattr(resource, name)
    _, hard = resource.getrlimit(kind)
    if value is None or (hard != resource.RLIM_INFINITY and value > hard):
        value = hard
    resource.setrlimit(kind, (value, hard))


def _mapped_bytes() -> int:
    """Return the size of the address space, 0 where it cannot be read."""
    try:
        pages = Path("/proc/self/statm").read_bytes().split()[0]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _described(error: BaseException) -> str:
    try:
        text = repr(error)
    except Exception:  # a user's exception may be broken too
        text = type(error).__name__
    return text[:_ERROR_SHOWN].encode("utf-8", "backslashreplace").decode()
