"""What stands before every application: request id, token, limits, and the last error boundary.

It is plain ASGI and knows no framework, so that it guards other systems' applications as well.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from mrgym.errors import MrgymError
from mrgym.server.auth import authorised
from mrgym.server.codec import encode, wanted
from mrgym.server.config import ServerConfig
from mrgym.server.metrics import METRICS_TYPE, Metrics
from mrgym.server.problems import Problem

__all__ = ["Guard", "Switch", "header"]

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_LOG = logging.getLogger("mrgym.server")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Switch:
    """Whether a service still takes requests, and how many it is at."""

    def __init__(self) -> None:
        self.draining = False
        self.in_flight = 0


def header(scope: Scope, name: bytes) -> str:
    """Return a request header, empty where it is missing."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return ""


class Guard:
    """An application behind the limits of a configuration.

    Args:
        app: The application.
        config: Token and limits.
        metrics: Where requests are counted.
        switch: Shared with the server, which turns it when the service is to end.
        metrics_path: Where metrics are answered here, for applications that do not.
        answer_within: Seconds one may take to answer, likewise.
    """

    def __init__(
        self,
        app: App,
        config: ServerConfig,
        metrics: Metrics,
        switch: Switch,
        metrics_path: str | None = None,
        answer_within: float | None = None,
    ) -> None:
        self._app = app
        self._config = config
        self._metrics = metrics
        self._switch = switch
        self._metrics_path = metrics_path
        self._answer_within = answer_within

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, a WebSocket, or the lifespan."""
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(scope, send)
        start = time.perf_counter()
        self._switch.in_flight += 1
        try:
            await self._pass_on(scope, receive, answer)
        except Problem as problem:
            if problem.status >= 500 and not self._switch.draining:
                cause = problem.__cause__ if problem.type == "EnvironmentError" else None
                _LOG.warning("request %s: %s", answer.request_id, problem, exc_info=cause)
            await answer.problem(problem)
        except asyncio.CancelledError:  # the service ends and waits no longer
            await answer.problem(_draining())
            raise
        except MrgymError as error:  # what the environment says of itself cannot be sent
            _LOG.warning("request %s: %s", answer.request_id, error)
            await answer.problem(Problem(500, type(error).__name__, str(error)))
        except Exception:
            _LOG.exception("request %s: unexpected error", answer.request_id)
            await answer.problem(Problem(500, "InternalError", "service: got an error of its own"))
        finally:
            self._switch.in_flight -= 1
            self._count(scope, answer.status, time.perf_counter() - start)

    async def _pass_on(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        if self._switch.draining:
            raise _draining()
        if not (scope["path"] == "/health" and scope["method"] == "GET"):
            self._check_token(scope)
        body = await self._body(scope, receive)
        answer.keep_connection = True
        if scope["path"] == self._metrics_path and scope["method"] == "GET":
            await answer.text(self._metrics.text())
            return
        await self._answered(scope, _replayed(body, receive), answer)

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._answer_within) as limit:
                await self._app(scope, receive, send)
        except TimeoutError:
            if not limit.expired():  # one of the application's own
                raise
            raise Problem(
                504,
                "EnvironmentTimeout",
                f"environment: got no answer within {self._answer_within:g} s, expected one; ask "
                "for less at a time, or serve with a larger --request-timeout",
            ) from None

    def _check_token(self, scope: Scope) -> None:
        if not authorised(header(scope, b"authorization"), self._config.secret):
            raise Problem(
                401,
                "Unauthorized",
                "token: got none or a wrong one, expected 'Authorization: Bearer TOKEN'; pass "
                "token=... to mrgym.make",
            )

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        length = header(scope, b"content-length")
        if length.isdecimal() and int(length[:20]) > self._config.max_body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._config.body_timeout):
                return await self._read(receive)
        except TimeoutError:
            raise Problem(
                408,
                "RequestTimeout",
                f"request: got no whole body within {self._config.body_timeout:g} s, expected one; "
                "send faster or less at a time",
            ) from None

    async def _read(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Problem(400, "Disconnected", "request: got half a body")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._config.max_body_bytes:
                raise self._too_large()
            if not message.get("more_body"):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def _too_large(self) -> Problem:
        return Problem(
            413,
            "BodyTooLarge",
            f"request: got a longer body, expected at most {self._config.max_body_bytes} bytes; "
            "send several requests",
        )

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", None)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.answered(method, route or "other", status, seconds)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        token_ok = authorised(header(scope, b"authorization"), self._config.secret)
        if self._switch.draining or not token_ok:
            await receive()
            await send({"type": "websocket.close", "code": 1012 if token_ok else 1008})
            return
        self._switch.in_flight += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._switch.in_flight -= 1


class _Answer:
    """The sending side of a request: adds the request id and remembers what was sent."""

    def __init__(self, scope: Scope, send: Send) -> None:
        given = header(scope, b"x-request-id")
        self.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope["mrgym.request_id"] = self.request_id
        self.status = 0
        self.keep_connection = False
        self._scope = scope
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = (b"x-request-id", self.request_id.encode())
            message["headers"] = [*message.get("headers", ()), own]
        await self._send(message)

    async def problem(self, problem: Problem) -> None:
        """Answer with an error, unless an answer was begun."""
        if self.status:
            return
        media = wanted(header(self._scope, b"accept"), header(self._scope, b"content-type"))
        headers = {"content-type": media, **problem.headers()}
        if not self.keep_connection:  # what is left of the body would be read as a request
            headers["connection"] = "close"
        await self._respond(problem.status, headers, encode(problem.answer(self.request_id), media))

    async def text(self, body: bytes) -> None:
        """Answer with metrics."""
        await self._respond(200, {"content-type": METRICS_TYPE}, body)

    async def _respond(self, status: int, headers: dict[str, str], body: bytes) -> None:
        headers["content-length"] = str(len(body))
        pairs = [(k.lower().encode(), v.encode()) for k, v in headers.items()]
        await self({"type": "http.response.start", "status": status, "headers": pairs})
        await self({"type": "http.response.body", "body": body})


def _draining() -> Problem:
    return Problem(503, "Draining", "service: it is about to end; ask another", retry_after=5)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that gives the body at once, and then what comes (a disconnect)."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
