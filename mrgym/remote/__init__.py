"""Environments that run elsewhere: ``mrgym.make("http://host:port")``.

A remote environment is a :class:`~mrgym.env.MultiRewardEnv` like any other, and what its service
answers is checked like any other's scores: names, ranges, gates and sums.

Text environments keep nothing at the service: completions are scored in batches by ``POST
/score``; where an episode is a conversation, ``POST /turns`` replays the turns so far, which the
contract allows because an episode depends on its seed and actions alone (a replay that differs is
an error). So a request can always be asked again, episodes need no place among the service's
sessions, and several services may share the work. Other environments have a session each.
"""

from __future__ import annotations

from mrgym.errors import RemoteError
from mrgym.remote.client import Client
from mrgym.remote.spaces import RemoteEnv
from mrgym.remote.text import RemoteTextEnv
from mrgym.text import Tasks

__all__ = ["RemoteEnv", "RemoteTextEnv", "connect"]


def connect(
    url: str,
    *,
    token: str | None = None,
    timeout: float = 120.0,
    retries: int = 3,
    format: str = "msgpack",
    tasks: Tasks | None = None,
    eval_tasks: Tasks | None = None,
) -> RemoteTextEnv | RemoteEnv:
    """Return the environment of a service.

    Args:
        url: Its address, such as ``"http://127.0.0.1:8000"``.
        token: Bearer token; the environment variable ``MRGYM_TOKEN`` by default.
        timeout: Seconds one request may take.
        retries: How often a request is sent again when the service is not reached, or is busy.
        format: ``"msgpack"`` or ``"json"``.
        tasks: Instead of the service's own, as for any text environment.
        eval_tasks: Held-out tasks that go with ``tasks``.

    Raises:
        RemoteError: If nothing answers there, the token is wrong, or it is no mrgym service.
    """
    client = Client(url, token=token, timeout=timeout, retries=retries, format=format)
    described = client.describe()
    if described.kind == "text":
        return RemoteTextEnv(client, described, tasks=tasks, eval_tasks=eval_tasks)
    if tasks is not None or eval_tasks is not None:
        raise RemoteError(
            f"{url}: got tasks for {described.id!r}, which is no text environment, expected none; "
            "leave them out"
        )
    return RemoteEnv(client, described)
