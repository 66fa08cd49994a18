"""An environment with spaces, stepped in a session of a service."""

from __future__ import annotations

import weakref
from typing import Any

import gymnasium as gym

from mrgym.env import MultiRewardEnv, StepResult
from mrgym.errors import RemoteError, SpaceError, WireError
from mrgym.remote.client import Client
from mrgym.remote.declared import declared_components
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
        super().reset(seed=seed)
        if self._session is None:
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
        if self._session is None:
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
        self._seq = 0
        self._forget = weakref.finalize(self, self._client.end_session, self._session)

    def _drop(self) -> None:
        self._session = None
        if self._forget is not None:
            self._forget()
            self._forget = None

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _seen(self, out: wire.TransitionOut) -> Any:
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
