r"""OpenEnv: an environment served to its clients, and an OpenEnv server as an environment.

Serving, in a file for uvicorn (or ``mrgym serve math_multi_reward --protocol openenv``)::

    app = mrgym.adapters.openenv.create_app("math_multi_reward")

Any client of OpenEnv finds the components in the metadata::

    with openenv.core.GenericEnvClient("http://localhost:8000").sync() as client:
        client.reset(seed=0)
        result = client.step({"text": "<think>...</think>\n<answer>72</answer>"})
        result.metadata["reward_components"]  # {"correctness": 1.0, "format": 1.0, ...}

And a server as an environment::

    env = mrgym.adapters.openenv.from_openenv("http://localhost:8000", components=...)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gymnasium as gym

from mrgym.adapters._common import need
from mrgym.adapters._openenv_client import DoneMeans, RemoteOpenEnv
from mrgym.adapters._openenv_fields import TEXT, check_space, model
from mrgym.adapters._openenv_server import AnyEnv, Session, TaskSession, factory, refusal
from mrgym.components import Component, ComponentSet
from mrgym.errors import ConfigError, MrgymError
from mrgym.spaces import TextSpace
from mrgym.text import TextEnv

__all__ = ["RemoteOpenEnv", "create_app", "from_openenv", "models"]

_EXTRA = "openenv"


def create_app(
    env_or_factory: AnyEnv | str | Callable[[], AnyEnv],
    *,
    max_concurrent_envs: int = 64,
    session_timeout: float | None = None,
) -> Any:
    """Return an OpenEnv server (a FastAPI application) of an environment.

    Every WebSocket session has an environment of its own. A step's observation carries in
    ``metadata``: ``reward_components``, ``raw_components`` where a gate is declared,
    ``terminated``, ``truncated``, and what else of ``info`` JSON can hold. Its ``reward`` is the
    plain sum. What goes wrong (a score function that fails, a broken contract, an action outside
    the space) is answered as an error, never as a reward.

    Args:
        env_or_factory: An id, an environment (copied for each session), or what makes one.
        max_concurrent_envs: Most sessions at a time.
        session_timeout: Seconds after which OpenEnv ends an idle session; one whose WebSocket is
            open it keeps.

    Raises:
        MissingExtraError: If openenv is not installed.
        SpaceError: If JSON cannot carry actions or observations.
        ConfigError: If no environment was given, or a function gives the same one every time.
    """
    core = need("openenv.core", _EXTRA)
    make_env = factory(env_or_factory)
    sample = make_env()
    for space in (sample.action_space, sample.observation_space):
        check_space(space)
    action, observation = models(sample)
    session = TaskSession if isinstance(sample, TextEnv) else Session
    app = core.create_fastapi_app(
        partial(type("MrgymEnvironment", (session, core.Environment), {}), make_env),
        action,
        observation,
        concurrency_config=core.ConcurrencyConfig(
            max_concurrent_envs=max_concurrent_envs, session_timeout=session_timeout
        ),
        env_name=re.sub(r"[^\w.-]", "-", sample.contract_name),  # a part of its task routes
    )
    sample.close()
    _refuse_one_for_all(make_env, sample)
    for error in (MrgymError, gym.error.ResetNeeded):
        app.add_exception_handler(error, refusal)
    return app


def _refuse_one_for_all(make_env: Callable[[], AnyEnv], sample: AnyEnv) -> None:
    other = make_env()
    other.close()
    if other is sample:
        raise ConfigError(
            f"create_app: got a function that gives the same {sample.contract_name} every time, "
            "expected a new one for each session; give the environment itself, which is copied"
        )


def models(env: AnyEnv) -> tuple[Any, Any]:
    """Return OpenEnv's action and observation classes of an environment, for typed clients.

    Text is the field ``text``; anything else is ``value``, as the space's ``to_jsonable`` has it.
    """
    return (
        model("Action", is_text=isinstance(env.action_space, TEXT)),
        model("Observation", is_text=isinstance(env.observation_space, TEXT)),
    )


def from_openenv(
    url_or_client: Any,
    *,
    components: Mapping[str, Component],
    action_space: gym.Space[Any] | None = None,
    observation_space: gym.Space[Any] | None = None,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
    done_means: DoneMeans | None = None,
    timeout: float = 60.0,
) -> RemoteOpenEnv:
    """Return an OpenEnv server as an environment whose answers are checked like any other's.

    Args:
        url_or_client: The server's address, or a client of OpenEnv (an ``EnvClient``).
        components: What the server's ``metadata["reward_components"]`` must hold.
        action_space: Of its actions; text by default.
        observation_space: Of its observations; text by default.
        encode: ``action -> the client's action``; the fields of :func:`models` by default.
        decode: ``the client's observation -> observation``; likewise.
        done_means: What ``done`` says on a server whose metadata does not tell ``terminated``
            from ``truncated``; without it such an answer is refused.
        timeout: Seconds to wait for an answer, where an address is given.

    Raises:
        MissingExtraError: If openenv is not installed.
        ConfigError: If neither an address nor a client was given.
    """
    core = need("openenv.core", _EXTRA)
    if isinstance(url_or_client, str):
        connect = partial(_connect, url_or_client, timeout)
    elif isinstance(url_or_client, (core.EnvClient, core.SyncEnvClient)):
        connect = partial(_synchronous, url_or_client)
    else:
        raise ConfigError(
            f"from_openenv: got {type(url_or_client).__name__}, expected an address or an "
            "EnvClient; pass openenv.core.GenericEnvClient(base_url=...)"
        )
    return RemoteOpenEnv(
        f"OpenEnv {url_or_client if isinstance(url_or_client, str) else url_or_client.base_url}",
        connect,
        ComponentSet(components),
        action_space or TextSpace(),
        observation_space or TextSpace(),
        encode,
        decode,
        done_means,
    )


def _connect(url: str, timeout: float) -> Any:
    client = need("openenv.core", _EXTRA).GenericEnvClient(url, message_timeout_s=timeout)
    return client.sync().connect()


def _synchronous(client: Any) -> Any:
    core = need("openenv.core", _EXTRA)
    return client if isinstance(client, core.SyncEnvClient) else client.sync()
