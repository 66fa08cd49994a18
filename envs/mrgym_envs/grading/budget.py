"""A time budget for pure Python code, without signals; only for worker processes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["OutOfTimeError", "within"]

T = TypeVar("T")


class OutOfTimeError(BaseException):
    """The budget is spent. Not an ``Exception``, so that libraries do not swallow it."""


def within(seconds: float, function: Callable[..., T], *args: object) -> T:
    """Return ``function(*args)``, interrupted where it takes longer.

    Code that stays in C for long is not interrupted.

    Raises:
        OutOfTimeError: If the time is up.
    """
    thread = ctypes.c_ulong(threading.get_ident())
    error = ctypes.py_object(OutOfTimeError)
    interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
    timer = threading.Timer(seconds, interrupt, (thread, error))
    timer.daemon = True
    timer.start()
    try:
        return function(*args)
    finally:
        timer.cancel()
