"""The environment service: any environment over HTTP, in JSON and msgpack.

``mrgym serve ENV`` runs it, ``mrgym.make("http://host:port")`` drives it. Importing this package
needs none of the extra ``serve``; making an application does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mrgym.env import MultiRewardEnv
from mrgym.errors import MissingExtraError
from mrgym.server.config import ServerConfig

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["ServerConfig", "create_app"]


def create_app(
    env: MultiRewardEnv[Any, Any] | Callable[[], MultiRewardEnv[Any, Any]],
    config: ServerConfig | None = None,
) -> FastAPI:
    """Return the service of an environment, as an application any ASGI server can run.

    Args:
        env: What makes an environment; every session gets one of its own. An environment that
            exists already is copied for each session.
        config: Limits, token, and where score functions run.

    Raises:
        MissingExtraError: If FastAPI or prometheus-client is not installed.
    """
    try:
        from mrgym.server.app import make_app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mrgym"):
            raise
        raise MissingExtraError(error.name or "fastapi", "serve") from error
    return make_app(env, config or ServerConfig())
