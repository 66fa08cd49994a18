"""``mrgym serve``: an environment over HTTP."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pydantic
import typer

from mrgym.cli.ending import end_process
from mrgym.cli.options import EnvArgs, EnvName, EvalTasks, Tasks, env_kwargs
from mrgym.errors import ConfigError, MissingExtraError
from mrgym.registry import make
from mrgym.server.config import ServerConfig

__all__ = ["serve"]

TOKEN_VARIABLE = "MRGYM_TOKEN"


class Protocol(StrEnum):
    """Which interface is spoken."""

    MRGYM = "mrgym"
    NEMO_GYM = "nemo-gym"
    OPENENV = "openenv"


class ScoringKind(StrEnum):
    """Where score functions run."""

    THREADS = "threads"
    WORKERS = "workers"


def serve(
    context: typer.Context,
    env: EnvName,
    host: Annotated[
        str, typer.Option(help="Address; any but a loopback one needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8000,
    protocol: Annotated[Protocol, typer.Option(help="Which interface.")] = Protocol.MRGYM,
    token_file: Annotated[
        Path | None,
        typer.Option(help=f"File with the bearer token; else {TOKEN_VARIABLE} of the environment."),
    ] = None,
    max_sessions: Annotated[int, typer.Option(help="Most sessions at a time.")] = 64,
    idle_timeout: Annotated[float, typer.Option(help="Seconds an unused session lives.")] = 600.0,
    max_body_bytes: Annotated[int, typer.Option(help="Longest request body.")] = 16 << 20,
    max_batch: Annotated[int, typer.Option(help="Most items of a request.")] = 1024,
    body_timeout: Annotated[float, typer.Option(help="Seconds a request may take to come.")] = 10.0,
    request_timeout: Annotated[float, typer.Option(help="Seconds one may take to answer.")] = 60.0,
    scoring: Annotated[
        ScoringKind, typer.Option(help="Where score functions run; workers can be killed.")
    ] = ScoringKind.THREADS,
    score_threads: Annotated[int, typer.Option(help="Scoring requests at a time.")] = 4,
    score_workers: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    score_deadline: Annotated[
        float, typer.Option(help="Seconds a worker may take for a completion.")
    ] = 5.0,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds requests may take to finish when it ends.")
    ] = 30.0,
    env_args: EnvArgs = None,
    tasks: Tasks = None,
    eval_tasks: EvalTasks = None,
) -> None:
    """Serve an environment over HTTP; drive it with mrgym.make("http://host:port")."""
    config = _config(
        context,
        host=host,
        port=port,
        protocol=protocol.value,
        token=_token(token_file),
        max_sessions=max_sessions,
        idle_timeout=idle_timeout,
        max_body_bytes=max_body_bytes,
        max_batch=max_batch,
        body_timeout=body_timeout,
        request_timeout=request_timeout,
        scoring=scoring.value,
        score_threads=score_threads,
        score_workers=score_workers,
        score_deadline=score_deadline,
        drain_timeout=drain_timeout,
    )
    config.check_effects()
    config.check_exposure()
    try:
        from mrgym.server.serve import serve as run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mrgym"):
            raise
        raise MissingExtraError(error.name or "fastapi", "serve") from error
    kwargs = env_kwargs(env_args, tasks, eval_tasks)
    code = run(partial(make, env, **kwargs), config, announce=partial(_announce, env))
    end_process(code)


def _announce(env: str, url: str) -> None:
    sys.stdout.write(f"{env}: serving at {url}\n")
    sys.stdout.flush()


def _token(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--token-file: got {path} ({error}), expected a file with a token; check the path"
        ) from error


def _config(context: typer.Context, **values: Any) -> ServerConfig:
    try:
        return ServerConfig(**{n: v for n, v in values.items() if _is_given(context, n)})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        option = "--" + str(first["loc"][0]).replace("_", "-")
        raise ConfigError(
            f"{option}: got {first['input']!r}, expected otherwise ({first['msg']}); change it"
        ) from error


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is None or source.name != "DEFAULT"  # the token is no parameter
