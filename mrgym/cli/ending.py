"""Ending a process that must not wait for its threads, nor be aborted by them."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

__all__ = ["end_process"]


def end_process(code: int) -> NoReturn:
    """End the process at once, what was printed included; nothing else is waited for.

    For an environment that hangs in a thread, and for one of many ranks: a thread of a collective
    that lets go of a tensor while Python ends aborts the process, and its exit code is lost.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
