"""The client's side of OpenEnv: a server's answers, checked like any other environment's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeAlias

import gymnasium as gym

from mrgym.adapters._openenv_fields import TEXT, decode, encode
from mrgym.components import ComponentSet
from mrgym.env import MultiRewardEnv, StepResult
from mrgym.errors import RewardContractError, ScoreError, SpaceError

__all__ = ["DoneMeans", "RemoteOpenEnv"]

DoneMeans: TypeAlias = Literal["terminated", "truncated"]
Encode: TypeAlias = Callable[[Any], Any]
Decode: TypeAlias = Callable[[Any], Any]


class RemoteOpenEnv(MultiRewardEnv[Any, Any]):
    """An OpenEnv server as an environment; made by :func:`mrgym.adapters.openenv.from_openenv`.

    One instance is one session, opened at the first ``reset``. Where it was made of an address it
    can be pickled and copied; the copy opens a session of its own.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Any],
        declared: ComponentSet,
        action_space: gym.Space[Any],
        observation_space: gym.Space[Any],
        encode: Encode | None,
        decode: Decode | None,
        done_means: DoneMeans | None,
    ) -> None:
        self.components = declared
        self.action_space = action_space
        self.observation_space = observation_space
        self._name = name
        self._connect = connect
        self._client: Any = None
        self._encode = encode or partial(_encoded, action_space)
        self._decode = decode or partial(_decoded, observation_space)
        self._done_means = done_means
        # A conversation's components read 0 until its end, whatever their ranges.
        self._range_holds_each_step = not isinstance(action_space, TEXT)  # type: ignore[misc]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    @property
    def contract_name(self) -> str:
        """How this environment is called in error messages."""
        return self._name

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode; ``options`` are parameters of the server's ``reset``."""
        super().reset(seed=seed)
        if self._client is None:
            self._client = self._connect()
        seeded = {} if seed is None else {"seed": seed}
        result = self._ask(self._client.reset, **seeded, **(options or {}))
        if result.done is not False:
            raise RewardContractError(
                f"{self._name}: got done={result.done!r} from reset, expected an episode that "
                "runs; mend the server"
            )
        return self._decode(result.observation), _metadata(result)

    def step(self, action: Any) -> StepResult[Any]:
        """Return the server's answer, checked.

        Raises:
            RewardContractError: If it holds no components or no reward, or does not say how the
                episode ended.
            ScoreError: If the server answers with an error.
        """
        if self._client is None:
            raise gym.error.ResetNeeded(f"{self._name}: call reset() before step()")
        result = self._ask(self._client.step, self._encode(action))
        info = _metadata(result)
        if not isinstance(info.get("reward_components"), dict):
            raise RewardContractError(
                f"{self._name}: got metadata {sorted(info)}, expected 'reward_components' over "
                f"{[*self.components]}; the server drops them, so serve it with create_app"
            )
        terminated, truncated = self._ended(result.done, info)
        return self._decode(result.observation), result.reward, terminated, truncated, info

    def close(self) -> None:
        """End the session."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _ask(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            if not str(error).startswith("Server error:"):  # all that OpenEnv's client tells
                raise
            raise ScoreError(
                f"{self._name}: got {str(error)!r}, expected an answer; mend what it names"
            ) from error

    def _ended(self, done: object, info: dict[str, Any]) -> tuple[bool, bool]:
        said = (info.pop("terminated", None), info.pop("truncated", None))
        if said == (None, None) and self._done_means is not None:
            said = (done, False) if self._done_means == "terminated" else (False, done)
        terminated, truncated = said
        if not isinstance(terminated, bool) or not isinstance(truncated, bool):
            raise RewardContractError(
                f"{self._name}: got metadata with terminated={terminated!r}, "
                f"truncated={truncated!r}, expected true or false; have the server say both, or "
                "say what done means with done_means='terminated'"
            )
        if done is not (terminated or truncated):
            raise RewardContractError(
                f"{self._name}: got done={done!r} with terminated={terminated}, "
                f"truncated={truncated}, expected {terminated or truncated}; mend the server"
            )
        return terminated, truncated


def _metadata(result: Any) -> dict[str, Any]:
    """Return a copy of the metadata, beside the observation or inside it."""
    inside = result.observation
    inside = (
        inside.get("metadata") if isinstance(inside, Mapping) else getattr(inside, "metadata", None)
    )
    return dict(getattr(result, "metadata", None) or inside or {})


def _encoded(space: gym.Space[Any], action: Any) -> dict[str, Any]:
    if not isinstance(space, TEXT):
        return {"value": encode(space, action)}
    if not isinstance(action, str):
        raise SpaceError(f"OpenEnv: got action {action!r}, expected text; decode it first")
    return {"text": str(action)}


def _decoded(space: gym.Space[Any], observation: Any) -> Any:
    field = "text" if isinstance(space, TEXT) else "value"
    if not isinstance(observation, Mapping) or field not in observation:
        raise SpaceError(
            f"OpenEnv: got observation {str(observation)[:80]}, expected a field {field!r}; pass "
            "decode=..., which takes the client's observation"
        )
    return decode(space, observation[field])
