"""All sessions of a service: their places, their keys, and their end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from mrgym.env import MultiRewardEnv
from mrgym.server.config import ServerConfig
from mrgym.server.problems import Problem, problem_of
from mrgym.server.session import OnStep, Session

__all__ = ["CLOSING", "Sessions", "log_close"]

AnyEnv = MultiRewardEnv[Any, Any]
CLOSING: Final = 5.0
_LOG = logging.getLogger("mrgym.server")


def log_close(done: asyncio.Future[Any]) -> None:
    """Log what an environment raised when it was closed; nobody else is told."""
    if not done.cancelled() and (error := done.exception()) is not None:
        _LOG.warning("environment: close raised %r", error)


class Sessions:
    """All sessions of a service.

    Args:
        make: Makes the environment of a session.
        config: Capacity and times.
        stepped: Called with the components of every step taken.
    """

    def __init__(self, make: Callable[[], AnyEnv], config: ServerConfig, stepped: OnStep) -> None:
        self._make = make
        self._config = config
        self._stepped = stepped
        self._open: dict[str, Session] = {}
        self._by_key: dict[str, asyncio.Task[Session]] = {}
        self._ending: set[Session] = set()
        self._opening = 0

    @property
    def live(self) -> int:
        """Number of sessions that hold an environment now."""
        return len(self._open) + self._opening + len(self._ending)

    async def open(self, key: str | None) -> Session:
        """Return a new session, or the one that was opened with the same key.

        Raises:
            Problem: 429 where there are as many as allowed.
        """
        if key is None:
            return await self._new(None)
        task = self._by_key.get(key)
        if task is None:
            task = asyncio.ensure_future(self._new(key))
            self._by_key[key] = task
        try:
            return await asyncio.shield(task)
        except Exception:
            if self._by_key.get(key) is task:
                del self._by_key[key]
            raise

    def get(self, session_id: str) -> Session:
        """Return an open session.

        Raises:
            Problem: 404 if there is none.
        """
        session = self._open.get(session_id)
        if session is None:
            raise Problem(
                404,
                "UnknownSession",
                f"session: got id {session_id[:64]!r}, expected an open one (they end after "
                f"{self._config.idle_timeout:g} s without a request); open another",
                subject="session_id",
            )
        session.seen, session.abandoned = time.monotonic(), False
        return session

    async def end(self, *sessions: Session) -> None:
        """End sessions; the place of each is free once its environment is closed."""
        closing = [self._release(session) for session in sessions]
        if closing:
            await asyncio.wait(closing, timeout=min(CLOSING, self._config.request_timeout))

    def _release(self, session: Session) -> asyncio.Future[Any]:
        self._open.pop(session.id, None)
        if session.key is not None:
            self._by_key.pop(session.key, None)
        self._ending.add(session)
        done = session.end()
        done.add_done_callback(lambda _: self._ending.discard(session))
        done.add_done_callback(log_close)
        return done

    async def sweep(self) -> None:
        """End the sessions whose clients are gone."""
        now = time.monotonic()
        await self.end(*(s for s in self._open.values() if self._expired(s, now)))

    async def end_all(self) -> None:
        """End every session."""
        await self.end(*self._open.values())

    async def _new(self, key: str | None) -> Session:
        if self.live >= self._config.max_sessions:
            await self.sweep()
        if self.live >= self._config.max_sessions:
            raise Problem(
                429,
                "AtCapacity",
                f"sessions: got one more than {self._config.max_sessions}, expected at most that "
                "many; close one, wait, or serve with a larger --max-sessions",
                retry_after=1,
            )
        session = Session(self._make, self._config, self._stepped)
        session.key = key
        self._opening += 1
        try:
            await session.open()
        except Exception as error:
            self._release(session)
            raise problem_of(error) from error
        finally:
            self._opening -= 1
        session.seen = time.monotonic()
        self._open[session.id] = session
        return session

    def _expired(self, session: Session, now: float) -> bool:
        limit = self._config.idle_timeout
        if session.abandoned:
            limit = min(limit, self._config.disconnect_grace)
        return not session.busy and now - session.seen > limit
