"""Running a service: listening, and ending without losing what was taken."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from importlib import import_module
from types import FrameType
from typing import Any

import uvicorn

from mrgym.env import MultiRewardEnv
from mrgym.errors import ConfigError
from mrgym.scoring import WorkerScorer
from mrgym.server import create_app
from mrgym.server.config import ServerConfig
from mrgym.server.guard import App, Guard, Switch
from mrgym.server.items import load_splits
from mrgym.server.metrics import Metrics
from mrgym.server.patience import patient_protocol
from mrgym.text import TextEnv

__all__ = ["Service", "build_app", "listen", "serve"]

AnyEnv = MultiRewardEnv[Any, Any]


class Service(uvicorn.Server):
    """A uvicorn server that, told to end, first answers what it has taken.

    From the first signal on, new requests get 503; it ends when none is in progress, or after
    ``drain_timeout``. A second signal ends it at once.

    Args:
        app: The application, behind its guard.
        switch: The guard's.
        config: Address and times.
        announce: Called once it listens.
    """

    def __init__(
        self,
        app: App,
        switch: Switch,
        config: ServerConfig,
        announce: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                http=patient_protocol(config.body_timeout),
                ws="auto" if config.protocol == "openenv" else "none",
                ws_max_size=config.max_body_bytes,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=2,
            )
        )
        self._switch = switch
        self._announce = announce
        self._drain_timeout = config.drain_timeout
        self._deadline = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say so: from here on a signal ends it in good order."""
        await super().startup(sockets)
        self._announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end."""
        if self._switch.draining:
            self.should_exit = self.force_exit = True
        self._switch.draining = True
        self._deadline = time.monotonic() + self._drain_timeout

    async def on_tick(self, counter: int) -> bool:
        """Return whether it is time to end."""
        if self._switch.draining and (
            not self._switch.in_flight or time.monotonic() > self._deadline
        ):
            self.should_exit = True
        return await super().on_tick(counter)


def build_app(env: AnyEnv | Callable[[], AnyEnv], config: ServerConfig) -> tuple[App, Switch]:
    """Return the application of a protocol behind the guard, and the switch that drains it."""
    if config.protocol == "mrgym":
        own = create_app(env, config)
        return own, own.state.switch
    switch = Switch()
    app = _adapted(env, config)
    guard = Guard(
        app,
        config,
        Metrics(),
        switch,
        metrics_path="/metrics",
        answer_within=config.request_timeout,
    )
    return guard, switch


def _adapted(env: AnyEnv | Callable[[], AnyEnv], config: ServerConfig) -> App:
    made = env if isinstance(env, MultiRewardEnv) else env()
    if isinstance(made, TextEnv):
        load_splits(made)
    if config.protocol == "nemo-gym":
        nemo_gym: Any = import_module("mrgym.adapters.nemo_gym")
        scorer = None
        if config.scoring == "workers":
            scorer = WorkerScorer(config.score_workers, config.score_deadline)
        return nemo_gym.create_app(made, scorer=scorer)  # type: ignore[no-any-return]
    if isinstance(made, MultiRewardEnv) and made is not env:
        made.close()  # each session makes its own
    adapter: Any = import_module("mrgym.adapters.openenv")
    limits = {"max_concurrent_envs": config.max_sessions, "session_timeout": config.idle_timeout}
    return adapter.create_app(env, **limits)  # type: ignore[no-any-return]


def serve(
    env: AnyEnv | Callable[[], AnyEnv],
    config: ServerConfig | None = None,
    *,
    announce: Callable[[str], None] = lambda url: None,
) -> int:
    """Serve an environment until SIGTERM or Ctrl-C; return the exit code.

    Args:
        env: An environment, or what makes one (each session gets its own).
        config: Address, token and limits.
        announce: Called with the URL once the service listens.

    Raises:
        ConfigError: If the address needs a token, or cannot be listened on, or a setting has no
            effect.
        TaskError: If the environment's tasks cannot be loaded.
        MissingExtraError: If a package that the protocol needs is not installed.
    """
    config = config or ServerConfig()
    config.check_effects()
    config.check_exposure()
    listener = listen(config)
    app, switch = build_app(env, config)
    service = Service(app, switch, config, lambda: announce(_url(config, listener)))
    service.run(sockets=[listener])
    return 0 if service.started else 1


def listen(config: ServerConfig) -> socket.socket:
    """Return a socket that listens on the address of a configuration.

    Raises:
        ConfigError: If it cannot be listened on.
    """
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        listener = socket.create_server(
            (config.host.strip("[]"), config.port), family=family, backlog=1024
        )
    except (OSError, TypeError) as error:
        raise ConfigError(
            f"mrgym serve: got {config.host}:{config.port} ({error}), expected an address that "
            "is free here; choose another --port"
        ) from error
    listener.setblocking(False)
    return listener


def _url(config: ServerConfig, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    host = f"[{config.host.strip('[]')}]" if ":" in config.host else config.host
    return f"http://{host}:{port}"
