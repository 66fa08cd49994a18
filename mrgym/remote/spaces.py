"""An environment with spaces, stepped in a session of a service."""

from __future__ import annotations

import os
import warnings
import weakref
from typing import Any

import gymnasium as gym

from mrgym.env import MultiRewardEnv, StepResult
from mrgym.errors import RemoteError, SpaceError, WireError
from mrgym.remote.client import Client
from mrgym.remote.declared import declared_components
from mrgym.remote.sendable import check_sendable
from mrgym.server import schemas as wire
from mrgym.server.space_wire import read_space, value_from_wire, value_to_wire

__all__ = ["RemoteEnv"]


class RemoteEnv(MultiRewardEnv[Any, Any]):
    """An environment with spaces, driven through a session of its own.

    The session is opened by the first ``reset`` and closed by ``close``; a copy (also a pickled
    one) opens its own.

    Args:
        client: The connection.
        described: What the service says of its environment.
    """

    def __init__(self, client: Client, described: wire.EnvOut) -> None:
        self.components = declared_components(described, client.url)
        self.action_space = read_space(described.action_space or {})
        self.observation_space = read_space(described.observation_space or {})
        self._client = client
        self._described = described
        self._session: str | None = None
        self._seq = 0
        self._forget: weakref.finalize[..., RemoteEnv] | None = None
        self._pid = 0
        self._told = False

    @property
    def contract_name(self) -> str:
        """The environment's own name and where it runs."""
        return f"{self._described.id} at {self._client.url}"

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode at the service, in a new session if there is none.

        Raises:
            RemoteError: If the service cannot be asked, or has no place for a session.
        """
        check_sendable(options, f"{self.contract_name}, options")
        super().reset(seed=seed)
        if self._session is None or self._pid != os.getpid():
            self._open()
        request = wire.ResetIn(seq=self._next(), seed=seed, options=options)
        out = self._ask("reset", request)
        return self._seen(out), out.info

    def step(self, action: Any) -> StepResult[Any]:
        """Take a step at the service; asked again, it is not taken twice.

        Raises:
            RemoteError: If the service cannot be asked.
            RewardContractError: If the answer breaks the contract.
        """
        if self._session is None or self._pid != os.getpid():  # forked: it is the parent's
            raise gym.error.ResetNeeded(f"{self.contract_name}: call reset() before step()")
        data = value_to_wire(self.action_space, action, binary=self._client.binary)
        out = self._ask("step", wire.StepIn(action=data, seq=self._next()))
        return self._seen(out), out.reward, out.terminated, out.truncated, out.info

    def close(self) -> None:
        """End the session and close the connection."""
        self._drop()
        self._client.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None, "_seq": 0, "_forget": None}

    def _open(self) -> None:
        self._session = self._client.open_session()
        self._seq, self._pid = 0, os.getpid()
        self._forget = weakref.finalize(self, _end, self._client, self._session, self._pid)

    def _drop(self) -> None:
        self._session = None
        if self._forget is not None:
            self._forget()
            self._forget = None

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _seen(self, out: wire.TransitionOut) -> Any:
        if out.left_out and not self._told:
            self._told = True
            warnings.warn(
                f"{self.contract_name}: entries {out.left_out} of info have no form on the wire "
                "and are left out",
                stacklevel=3,
            )
        try:
            return value_from_wire(self.observation_space, out.observation)
        except SpaceError as error:
            raise self._client.nonsense(f"another observation ({error})") from error

    def _ask(self, verb: str, request: wire.ResetIn | wire.StepIn) -> wire.TransitionOut:
        assert self._session is not None
        try:
            out = self._client.transition(self._session, verb, request)
        except RemoteError:
            self._drop()  # where it stands is not known; the next reset opens another
            raise
        except WireError:  # it was not sent
            self._seq -= 1
            raise
        if out.seq != request.seq:
            raise self._client.nonsense(f"the answer to request {out.seq} for {request.seq}")
        return out


def _end(client: Client, session: str, pid: int) -> None:
    if pid == os.getpid():  # in a fork it is still the parent's
        client.end_session(session)
