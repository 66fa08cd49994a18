"""An engine that only its trainer may end.

Job schedulers and terminals send SIGTERM to every process of a job at once. The trainer answers by
finishing its step and writing a checkpoint, for which it still needs the engine.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["shield", "shielded_children"]

_VARIABLE = "MRGYM_SHIELD_ENGINE"
_RELAY = signal.SIGUSR1


@contextmanager
def shielded_children() -> Iterator[None]:
    """Let engine processes that are started inside ``with`` shield themselves."""
    os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        del os.environ[_VARIABLE]


def shield() -> None:
    """Let SIGTERM end this process only where its parent sent it.

    Does nothing in processes that were not started by a trainer, nor a second time.
    """
    in_main = threading.current_thread() is threading.main_thread()
    started = multiprocessing.parent_process() is not None and _VARIABLE in os.environ
    if not in_main or not started or signal.getsignal(signal.SIGTERM) is _leave_it:
        return
    end = signal.getsignal(signal.SIGTERM)
    if not callable(end):
        return
    signal.signal(_RELAY, lambda _, frame: end(signal.SIGTERM, frame))
    # Blocked, so that the thread below gets it with its sender; a handler all the same, because
    # an ignored signal is thrown away.
    signal.signal(signal.SIGTERM, _leave_it)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_relay, name="mrgym-shield", daemon=True).start()


def _leave_it(_: int, __: FrameType | None) -> None:
    return


def _relay() -> None:
    while True:
        sent = signal.sigwaitinfo({signal.SIGTERM})
        if sent.si_pid == os.getppid():
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, _RELAY)
