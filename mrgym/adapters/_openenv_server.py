"""The server's side of OpenEnv: one environment instance behind each session."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, TypeAlias

import gymnasium as gym

from mrgym.adapters._common import need
from mrgym.adapters._openenv_fields import TEXT, decode, encode, info_for_json, model
from mrgym.env import MultiRewardEnv
from mrgym.errors import ConfigError, RewardContractError, ScoreError, TaskError, closest
from mrgym.registry import make
from mrgym.tasks import Task
from mrgym.text import Split, TextEnv

__all__ = ["Session", "TaskSession", "factory", "refusal"]

AnyEnv: TypeAlias = MultiRewardEnv[Any, Any]
_RESET_OPTIONS = ("split", "index", "task_id")


class Session:
    """What OpenEnv's ``Environment`` asks for, answered by an environment of ours."""

    SUPPORTS_CONCURRENT_SESSIONS: ClassVar[bool] = True

    def __init__(self, make_env: Callable[[], AnyEnv]) -> None:
        super().__init__()
        self._env = make_env()
        self._running = False
        self._episode_id: str | None = None
        self._steps = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Any:
        """Start an episode; ``options`` are the environment's."""
        self._running = False
        observation, info = self._env.reset(seed=seed, options=self._options(options))
        observed = self._observed(observation, info)
        self._running, self._steps = True, 0
        self._episode_id = episode_id or str(uuid.uuid4())
        return observed

    def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
        """Take a step; after an error the episode is over, for its scores are unknown."""
        if not self._running:
            raise gym.error.ResetNeeded(
                f"{self._env.contract_name}: got a step outside an episode, expected a reset "
                "first; over HTTP every request is a session of its own, so use /ws"
            )
        space = self._env.action_space
        chosen = action.text if isinstance(space, TEXT) else decode(space, action.value)
        self._running = False
        observation, reward, terminated, truncated, info = self._env.step(chosen)
        info = {**info, "terminated": terminated, "truncated": truncated}
        observed = self._observed(observation, info, reward, terminated or truncated)
        self._running = not observed.done
        self._steps += 1
        return observed

    @property
    def state(self) -> Any:
        """OpenEnv's state: the episode's id, and its steps so far."""
        state = need("openenv.core", "openenv").State
        return state(episode_id=self._episode_id, step_count=self._steps)

    def get_metadata(self) -> Any:
        """OpenEnv's description of the environment."""
        described = (type(self._env).__doc__ or "").strip().partition("\n")[0]
        metadata = need("openenv.core.env_server.types", "openenv").EnvironmentMetadata
        return metadata(name=self._env.contract_name, description=described)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _options(self, options: dict[str, Any]) -> dict[str, Any] | None:
        return options or None

    def _observed(
        self,
        observation: Any,
        info: dict[str, Any],
        reward: float | None = None,
        done: bool = False,
    ) -> Any:
        space = self._env.observation_space
        is_text = isinstance(space, TEXT)
        fields = {"text" if is_text else "value": encode(space, observation)}
        observed = model("Observation", is_text=is_text)
        return observed(**fields, reward=reward, done=done, metadata=info_for_json(info))


class TaskSession(Session):
    """A session of a text environment: OpenEnv's task routes, and resets by them."""

    _env: TextEnv

    def list_splits(self) -> list[str]:
        """Return the splits."""
        return ["train", "eval"]

    def num_tasks(self, split: Split) -> int:
        """Return the number of tasks of a split."""
        return len(self._env.task_source(split))

    def list_tasks(self, split: Split) -> list[dict[str, Any]]:
        """Return all tasks of a split, as :meth:`get_task` has them."""
        return self.get_task_range(split)

    def get_task(self, split: Split, index: int) -> dict[str, Any]:
        """Return id and position of a task (never its answer)."""
        return {"id": self._task(split, index).id, "index": index}

    def get_task_range(
        self, split: Split, start: int | None = None, stop: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the tasks of a slice of a split."""
        indices = range(self.num_tasks(split))[start:stop]
        return [self.get_task(split, index) for index in indices]

    def _task(self, split: Split, index: int) -> Task:
        count = self.num_tasks(split)
        if type(index) is not int or not 0 <= index < count:
            raise IndexError(
                f"{self._env.contract_name}: got index {index!r}, expected 0 to {count - 1}, the "
                f"tasks of {split!r}; choose one"
            )
        return self._env.task_source(split)[index]

    def _options(self, options: dict[str, Any]) -> dict[str, Any] | None:
        unknown = sorted(options.keys() - {*_RESET_OPTIONS})
        if unknown:
            raise TaskError(
                f"{self._env.contract_name}: got reset options {unknown}, expected some of "
                f"{[*_RESET_OPTIONS]}{closest(unknown[0], _RESET_OPTIONS)}; rename or remove them"
            )
        if "index" not in options:
            return options or None
        if "task_id" in options:
            raise TaskError(
                f"{self._env.contract_name}: got reset options {options}, expected 'index' or "
                "'task_id', which may name different tasks; leave one out"
            )
        return {"task": self._task(options.get("split", self._env.split), options["index"])}


def factory(env_or_factory: AnyEnv | str | Callable[[], AnyEnv]) -> Callable[[], AnyEnv]:
    """Return what makes one environment a session.

    An environment that was given, or a text environment that was named, is copied for each
    session; copies share their tasks.

    Raises:
        ConfigError: If it is neither an environment, an id, nor a callable.
    """
    if isinstance(env_or_factory, str):
        env = make(env_or_factory)
        return (
            partial(_copied, _loaded(env))
            if isinstance(env, TextEnv)
            else partial(make, env_or_factory)
        )
    if isinstance(env_or_factory, MultiRewardEnv):
        return partial(_copied, _loaded(env_or_factory))
    if callable(env_or_factory):
        return partial(_checked, env_or_factory)
    raise _no_env(env_or_factory)


def _loaded(env: AnyEnv) -> AnyEnv:
    """Load the tasks once, here, where a broken file is noticed before anybody connects."""
    if isinstance(env, TextEnv):
        env.task_source(env.split)
        with suppress(TaskError):  # an environment may well have no other split
            env.task_source("eval" if env.split == "train" else "train")
    return env


def _copied(env: AnyEnv) -> AnyEnv:
    sources = getattr(env, "_sources", None)
    try:
        copied = copy.deepcopy(env, {id(sources): sources})
        copied._np_random = None  # sessions would draw the same tasks
        return copied
    except Exception as error:  # whatever an attribute that cannot be copied raises
        raise ConfigError(
            f"OpenEnv: got {env.contract_name}, which cannot be copied ({error!r}), expected one "
            "environment a session; give a function that makes one"
        ) from error


def _checked(make_env: Callable[[], Any]) -> AnyEnv:
    made = make_env()
    if not isinstance(made, MultiRewardEnv):
        raise _no_env(made)
    return made


def _no_env(got: object) -> ConfigError:
    return ConfigError(
        f"OpenEnv: got {type(got).__name__}, expected a MultiRewardEnv, an id, or a function that "
        "makes one; give the bare environment"
    )


def refusal(_: Any, error: Exception) -> Any:
    """Return the HTTP answer for an error: the server's own fault, or the request's."""
    status = 500 if isinstance(error, (RewardContractError, ScoreError)) else 400
    response = need("starlette.responses", "openenv").JSONResponse
    return response({"error": {"type": type(error).__name__, "message": str(error)}}, status)
