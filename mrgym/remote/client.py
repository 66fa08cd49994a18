"""The client's side of the wire: one connection pool, finite times, one clear error."""

from __future__ import annotations

import os
import random
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import gymnasium as gym
import httpx
import msgspec

from mrgym import errors
from mrgym.errors import ConfigError, MrgymError, RemoteError, WireError
from mrgym.remote.address import checked_url, is_local
from mrgym.server import schemas as wire
from mrgym.server.codec import JSON, MSGPACK, decode, encode, media_type
from mrgym.text import Split

__all__ = ["Client"]

_LARGEST: Final = 1 << 30
_LONGEST_WAIT: Final = 8.0
_GOODBYE: Final = 5.0
_KNOWN_ERRORS: Final = (
    "RewardContractError",
    "RolloutError",
    "ScoreError",
    "SpaceError",
    "TaskError",
)
R = TypeVar("R")


class _Version(msgspec.Struct):
    protocol: int = 0


class Client:
    """A service as seen from here; safe to use from several threads, pickles without connections.

    Args:
        url: Its address.
        token: Bearer token; ``MRGYM_TOKEN`` of the environment by default.
        timeout: Seconds one request may take.
        retries: How often one is sent again when the service is not reached, or is busy. Every
            request of the protocol may be sent twice without being done twice.
        format: ``"msgpack"`` or ``"json"``.

    Raises:
        ConfigError: If an argument cannot work.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float = 120.0,
        retries: int = 3,
        format: str = "msgpack",
    ) -> None:
        self.url = checked_url(url)
        if format not in ("msgpack", "json") or not 0 < timeout < float("inf") or retries < 0:
            raise ConfigError(
                f"{url}: got format={format!r}, timeout={timeout}, retries={retries}, expected "
                "'msgpack' or 'json', seconds above 0, and 0 or more; change them"
            )
        self._token = token if token is not None else os.environ.get("MRGYM_TOKEN")
        self._timeout = timeout
        self._retries = retries
        self._media = MSGPACK if format == "msgpack" else JSON
        self._http: httpx.Client | None = None
        self._closing: weakref.finalize[..., Client] | None = None
        self._pid = 0

    @property
    def binary(self) -> bool:
        """Whether bytes can be sent."""
        return self._media == MSGPACK

    def describe(self) -> wire.EnvOut:
        """Return what the service says of its environment, its version checked.

        Raises:
            RemoteError: If it speaks another version.
        """
        data, media = self._send("GET", "/env", None)
        version = self._decoded(data, _Version, media).protocol
        if version != wire.PROTOCOL_VERSION:
            raise RemoteError(
                f"{self.url}: got protocol version {version}, expected {wire.PROTOCOL_VERSION}; "
                "use the same mrgym release on both sides"
            )
        return self._decoded(data, wire.EnvOut, media)

    def tasks(self, split: Split, offset: int, limit: int) -> wire.TasksOut:
        """Return a page of tasks."""
        path = f"/tasks?split={split}&offset={offset}&limit={limit}"
        return self._ask("GET", path, None, wire.TasksOut)

    def prompts(self, tasks: Sequence[wire.TaskIn]) -> list[wire.PromptOut]:
        """Return the prompts of tasks."""
        body = wire.PromptsIn(tasks=[*tasks])
        out = self._ask("POST", "/prompts", body, wire.PromptsOut).prompts
        return self._as_many(out, tasks)

    def score(
        self, items: Sequence[wire.ScoreItem], limits: wire.LimitsOut
    ) -> list[wire.ScoreResult]:
        """Return a result an item, in requests within the service's limits."""
        return self._in_parts("/score", items, limits, wire.ScoreIn, wire.ScoreOut)

    def turns(
        self, items: Sequence[wire.TurnItem], limits: wire.LimitsOut
    ) -> list[wire.TurnResult]:
        """Return what each conversation's last turn led to, in requests within the limits."""
        return self._in_parts("/turns", items, limits, wire.TurnsIn, wire.TurnsOut)

    def open_session(self) -> str:
        """Return the id of a new session."""
        body = wire.SessionIn(key=uuid.uuid4().hex)
        return self._ask("POST", "/sessions", body, wire.SessionOut).id

    def transition(
        self, session: str, verb: str, request: wire.ResetIn | wire.StepIn
    ) -> wire.TransitionOut:
        """Return the answer to a ``reset`` or ``step``."""
        return self._ask("POST", f"/sessions/{session}/{verb}", request, wire.TransitionOut)

    def end_session(self, session: str) -> None:
        """End a session; one that cannot be ended expires by itself."""
        try:
            self._attempt("DELETE", f"/sessions/{session}", None, min(self._timeout, _GOODBYE))
        except (httpx.HTTPError, RuntimeError, MrgymError):
            return

    def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        if self._closing is not None and self._pid == os.getpid():
            self._closing()
        self._http = self._closing = None

    def nonsense(self, what: str) -> RemoteError:
        """Return the error of an answer that cannot be one."""
        return RemoteError(
            f"{self.url}: got {what}, expected an answer to what was asked; is it a mrgym service?"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_http": None, "_closing": None}

    def _ask(self, method: str, path: str, body: Any, answer: type[R]) -> R:
        content = None if body is None else encode(body, self._media)
        data, media = self._send(method, path, content)
        return self._decoded(data, answer, media)

    def _in_parts(
        self,
        path: str,
        items: Sequence[Any],
        limits: wire.LimitsOut,
        asked: Callable[..., Any],
        answer: type[Any],
    ) -> list[Any]:
        """Return the answers to items, in as many requests as number and length need."""
        if len(items) > limits.max_batch:
            half = limits.max_batch
        else:
            content = encode(asked(items=[*items]), self._media)
            if len(content) <= limits.max_body_bytes or len(items) < 2:
                data, media = self._send("POST", path, content)
                return self._as_many(self._decoded(data, answer, media).results, items)
            half = len(items) // 2
        first = self._in_parts(path, items[:half], limits, asked, answer)
        return first + self._in_parts(path, items[half:], limits, asked, answer)

    def _decoded(self, data: bytes, record: type[R], media: str) -> R:
        try:
            return decode(data, record, media)
        except WireError as error:
            raise RemoteError(f"{self.url}: {error}") from error

    def _as_many(self, got: list[R], asked: Sequence[Any]) -> list[R]:
        if len(got) != len(asked):
            raise self.nonsense(f"{len(got)} results for {len(asked)} items")
        return got

    def _send(self, method: str, path: str, content: bytes | None) -> tuple[bytes, str]:
        """Return the bytes and format of an answer, asking again where that may help."""
        problem = ""
        wait = 0.0
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(wait or min(0.1 * 2**attempt, _LONGEST_WAIT) * random.uniform(0.5, 1))
            try:
                response, data = self._attempt(method, path, content, self._timeout)
            except httpx.TransportError as error:
                problem, wait = f"{type(error).__name__} ({error})", 0.0
                continue
            if response.status_code in (429, 502, 503):
                problem, wait = _reason(response, data), _wait(response)
                continue
            return self._checked(response, data)
        raise RemoteError(
            f"{self.url}: got {problem} on {method} {path.partition('?')[0]} in "
            f"{self._retries + 1} attempts, expected an answer within {self._timeout:g} s; is the "
            "service running, and large enough?"
        )

    def _attempt(
        self, method: str, path: str, content: bytes | None, seconds: float
    ) -> tuple[httpx.Response, bytes]:
        headers = {"Content-Type": self._media} if content is not None else {}
        deadline = time.monotonic() + seconds
        request = self._pool().build_request(
            method, path, content=content, headers=headers, timeout=seconds
        )
        response = self._pool().send(request, stream=True)
        try:
            data = bytearray()
            for chunk in response.iter_raw():
                data += chunk
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout(f"no whole answer within {seconds:g} s")
                if len(data) > _LARGEST:
                    raise self.nonsense(f"more than {_LARGEST} bytes")
            return response, bytes(data)
        finally:
            response.close()

    def _pool(self) -> httpx.Client:
        if self._http is None or self._pid != os.getpid():  # forked: sockets are the parent's
            headers = {"Accept": self._media, "Accept-Encoding": "identity"}
            if self._token is not None:
                headers["Authorization"] = f"Bearer {self._token}"
            self._http = httpx.Client(
                base_url=self.url,
                headers=headers,
                timeout=self._timeout,
                trust_env=not is_local(self.url),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            )
            self._pid = os.getpid()
            self._closing = weakref.finalize(self, self._http.close)
        return self._http

    def _checked(self, response: httpx.Response, data: bytes) -> tuple[bytes, str]:
        media = media_type(response.headers.get("content-type", ""))
        if response.status_code != 200:
            raise self._failure(response, data)
        if media is None:
            found = response.headers.get("content-type", "nothing")
            raise self.nonsense(f"{found[:60]} ({data[:60]!r})")
        return data, media

    def _failure(self, response: httpx.Response, data: bytes) -> Exception:
        detail = _detail(response, data)
        if response.status_code == 401:
            return RemoteError(
                f"{self.url}: got no access with {'the token' if self._token else 'no token'}, "
                "expected the service's own; pass token=... or set MRGYM_TOKEN"
            )
        if detail is None:
            return self.nonsense(_reason(response, data))
        if detail.type in _KNOWN_ERRORS:
            known: type[Exception] = getattr(errors, detail.type)
            return known(f"{self.url}: {detail.message}")
        if detail.type == "ResetNeeded":
            return gym.error.ResetNeeded(f"{self.url}: {detail.message}")
        return RemoteError(
            f"{self.url}: {detail.message} (HTTP {response.status_code} {detail.type}, request "
            f"{detail.request_id})"
        )


def _detail(response: httpx.Response, data: bytes) -> wire.ErrorDetail | None:
    media = media_type(response.headers.get("content-type", ""))
    try:
        return None if media is None else decode(data, wire.ErrorOut, media).error
    except WireError:
        return None


def _reason(response: httpx.Response, data: bytes) -> str:
    detail = _detail(response, data)
    said = detail.message if detail is not None else repr(data[:60])
    return f"HTTP {response.status_code} ({said})"


def _wait(response: httpx.Response) -> float:
    after = response.headers.get("retry-after", "")
    return min(float(after), _LONGEST_WAIT) if after.isdecimal() else 0.0
