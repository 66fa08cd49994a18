"""The application: the routes of our own protocol."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

import mrgym
from mrgym.env import MultiRewardEnv
from mrgym.server import schemas as wire
from mrgym.server.codec import MSGPACK, encode, read, wanted
from mrgym.server.config import ServerConfig
from mrgym.server.describe import describe
from mrgym.server.guard import Guard, Switch
from mrgym.server.lanes import Lanes
from mrgym.server.metrics import METRICS_TYPE, Metrics
from mrgym.server.openapi import body_of, responses_of, use_schemas
from mrgym.server.problems import Problem
from mrgym.server.scoring import Scoring
from mrgym.server.session import Session, Transition
from mrgym.server.sessions import CLOSING, Sessions, log_close
from mrgym.server.space_wire import value_to_wire
from mrgym.text import TextEnv

__all__ = ["make_app"]

AnyEnv = MultiRewardEnv[Any, Any]
T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)

_SWEEP: Final = 1.0
_BODY: Final = "mrgym.body"


def make_app(env: AnyEnv | Callable[[], AnyEnv], config: ServerConfig) -> FastAPI:
    """Return the service of an environment; see :func:`mrgym.server.create_app`."""
    if isinstance(env, MultiRewardEnv):
        sample, make = env, lambda: copy.deepcopy(sample)
    else:
        sample, make = env(), env
    return _App(sample, make, config).app


class _App:
    """The parts of a service, and its routes."""

    def __init__(self, env: AnyEnv, make: Callable[[], AnyEnv], config: ServerConfig) -> None:
        self._env = env
        self._metrics = Metrics()
        self._sessions = Sessions(make, config, self._metrics.stepped)
        self._metrics.watch_sessions(lambda: self._sessions.live)
        self._scoring = Scoring(env, config, self._metrics) if isinstance(env, TextEnv) else None
        counts = self._scoring.items.counts if self._scoring else {}
        self._described = describe(env, config, counts)
        self._idle_timeout = config.idle_timeout
        self.app = self._application(config)

    def _application(self, config: ServerConfig) -> FastAPI:
        app = FastAPI(
            title=f"mrgym: {self._described.id}",
            version=mrgym.__version__,
            description="An environment with several named rewards.",
            lifespan=self._lifespan,
            docs_url=None,
            redoc_url=None,
        )
        switch = Switch()
        app.state.switch = switch
        app.router.redirect_slashes = False  # to wherever the Host header says
        app.add_middleware(Guard, config=config, metrics=self._metrics, switch=switch)
        app.add_exception_handler(HTTPException, _of_framework)
        app.add_exception_handler(RequestValidationError, _of_parameters)
        self._add_routes(app)
        use_schemas(app, config.token is not None)
        return app

    def _add_routes(self, app: FastAPI) -> None:
        # The first are found first.
        errors = (404, 409, 410, 504)
        one = "/sessions/{session_id}"
        if self._scoring is not None:
            _route(app, "POST", "/score", self.score, wire.ScoreOut, wire.ScoreIn, 504)
            _route(app, "POST", "/turns", self.turns, wire.TurnsOut, wire.TurnsIn, 504)
        _route(app, "POST", f"{one}/step", self.step, wire.TransitionOut, wire.StepIn, *errors)
        _route(app, "POST", f"{one}/reset", self.reset, wire.TransitionOut, wire.ResetIn, *errors)
        _route(app, "POST", "/sessions", self.open, wire.SessionOut, wire.SessionIn, 504)
        _route(app, "DELETE", one, self.end, wire.HealthOut, None, 404, 422)
        if self._scoring is not None:
            _route(app, "POST", "/prompts", self.prompts, wire.PromptsOut, wire.PromptsIn, 504)
            paged = (404, 422, 429, 504)
            _route(app, "GET", "/tasks", self.tasks, wire.TasksOut, None, *paged, direct=False)
        _route(app, "GET", "/env", self.env, wire.EnvOut)
        _route(app, "GET", "/health", self.health, wire.HealthOut)
        app.add_api_route(
            "/metrics",
            self.metrics,
            response_class=Response,
            responses={
                **responses_of(None),
                200: {"description": "Prometheus text.", "content": {METRICS_TYPE: {}}},
            },
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            sweeping.cancel()
            await self._sessions.end_all()
            if self._scoring is not None:
                self._scoring.close()
            await self._close()

    async def _close(self) -> None:
        lane = Lanes(1, "mrgym-close")
        done = lane.submit(self._env.close)
        done.add_done_callback(log_close)
        lane.close()
        await asyncio.wait({done}, timeout=CLOSING)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP, self._idle_timeout / 2))
            await self._sessions.sweep()

    async def health(self, request: Request) -> Response:
        """Return that the service is up; needs no token."""
        return _answer(request, wire.HealthOut("ok"))

    async def metrics(self) -> Response:
        """Return counters for Prometheus."""
        return Response(self._metrics.text(), media_type=METRICS_TYPE)

    async def env(self, request: Request) -> Response:
        """Return what the environment is: components, limits, spaces, number of tasks."""
        return _answer(request, self._described)

    async def tasks(
        self,
        request: Request,
        split: Literal["train", "eval"] = "train",
        offset: Annotated[int, Query(ge=0, le=2**53)] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> Response:
        """Return a page of tasks with their prompts."""
        assert self._scoring is not None
        return _answer(request, await self._scoring.page(split, offset, limit))

    async def prompts(self, request: Request) -> Response:
        """Return the prompts of tasks of the client's own."""
        assert self._scoring is not None
        body = await _body(request, wire.PromptsIn)
        return _answer(request, wire.PromptsOut(await self._scoring.prompts(body)))

    async def score(self, request: Request) -> Response:
        """Score completions; one bad item refuses all, and names its position."""
        assert self._scoring is not None
        body = await _body(request, wire.ScoreIn)
        return _answer(request, wire.ScoreOut(await self._scoring.score(body)))

    async def turns(self, request: Request) -> Response:
        """Replay conversations and answer their last turn; nothing is kept between requests."""
        assert self._scoring is not None
        body = await _body(request, wire.TurnsIn)
        return _answer(request, wire.TurnsOut(await self._scoring.turns(body)))

    async def open(self, request: Request) -> Response:
        """Open a session: an environment of one's own."""
        body = await _body(request, wire.SessionIn)
        session = await self._sessions.open(body.key)
        session.abandoned = await request.is_disconnected()
        return _answer(request, wire.SessionOut(session.id, self._idle_timeout))

    async def reset(self, request: Request, session_id: str) -> Response:
        """Start an episode in a session."""
        body = await _body(request, wire.ResetIn)
        session = self._sessions.get(session_id)
        return await self._transition(request, session, session.reset(body, _bytes(request)))

    async def step(self, request: Request, session_id: str) -> Response:
        """Take a step in a session; the same ``seq`` again gives the same answer."""
        body = await _body(request, wire.StepIn)
        session = self._sessions.get(session_id)
        return await self._transition(request, session, session.step(body, _bytes(request)))

    async def end(self, request: Request, session_id: str) -> Response:
        """End a session."""
        await self._sessions.end(self._sessions.get(session_id))
        return _answer(request, wire.HealthOut("ok"))

    async def _transition(
        self, request: Request, session: Session, work: Coroutine[Any, Any, Transition]
    ) -> Response:
        async with session.at_work():
            try:
                transition = await work
            finally:  # it is kept for a client that comes back to ask again, but not for long
                session.abandoned = await request.is_disconnected()
        out = msgspec.structs.replace(transition.out)
        out.observation = value_to_wire(
            self._env.observation_space,
            transition.observation,
            binary=_wanted(request) == MSGPACK,
        )
        return _answer(request, out)


class _DirectRoute(APIRoute):
    """A route that is called as it is: what FastAPI would check has been checked otherwise."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        scope[_BODY] = (await receive())["body"]  # the guard gives it in one piece
        request = Request(scope, receive, send)
        response = await self.endpoint(request, **scope["path_params"])
        await response(scope, receive, send)


def _route(
    app: FastAPI,
    method: str,
    path: str,
    endpoint: Callable[..., Awaitable[Response]],
    answer: type[msgspec.Struct],
    body: type[msgspec.Struct] | None = None,
    *errors: int,
    direct: bool = True,
) -> None:
    if body is not None:
        errors = (*errors, 415, 422, 429)
    app.router.add_api_route(
        path,
        endpoint,
        methods=[method],
        route_class_override=_DirectRoute if direct else None,
        response_class=Response,
        responses=responses_of(answer, *errors),
        openapi_extra=body_of(body) if body is not None else None,
        operation_id=f"{method}{path}".replace("/", "_").replace("{", "").replace("}", "").lower(),
    )


async def _body(request: Request, record: type[R]) -> R:
    return read(_bytes(request), record, request.headers.get("content-type", ""))


def _bytes(request: Request) -> bytes:
    body: bytes = request.scope[_BODY]
    return body


def _wanted(request: Request) -> str:
    headers = request.headers
    return wanted(headers.get("accept", ""), headers.get("content-type", ""))


def _answer(request: Request, record: msgspec.Struct) -> Response:
    media = _wanted(request)
    return Response(encode(record, media), media_type=media)


async def _of_framework(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kinds = {404: "NotFound", 405: "MethodNotAllowed"}
    raise Problem(
        error.status_code,
        kinds.get(error.status_code, "HTTPError"),
        f"{request.method} {request.url.path[:100]}: got {error.detail!r}, expected a path and "
        "method of /openapi.json; look there",
        allow=(error.headers or {}).get("Allow"),
    )


async def _of_parameters(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    raise Problem(
        422, "InvalidRequest", f"{where}: {first['msg']}; see /openapi.json", subject=where
    )
