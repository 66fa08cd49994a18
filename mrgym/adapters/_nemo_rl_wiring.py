"""What a user puts into NeMo RL's script, data and configuration for an environment."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from mrgym.adapters._common import (
    no_abstention,
    no_prefill,
    text_env,
    warn_one_at_a_time,
    weights_by_name,
)
from mrgym.env import MultiRewardEnv
from mrgym.errors import ConfigError, RewardDefinitionError, TaskError
from mrgym.text import Split, TextEnv

__all__ = ["ACTOR", "PEER", "config", "register", "registration", "rows", "usable"]

PEER = "NeMo RL"
ACTOR = "mrgym.adapters.nemo_rl.MrgymEnvironment"
"""Name under which NeMo RL finds the Ray actor; it is made when it is looked up."""


def rows(
    env: MultiRewardEnv[Any, Any] | str,
    split: Split = "train",
    *,
    kwargs: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, str]]:
    """Yield the rows of a ``ResponseDataset``: ``input`` is the question, ``output`` the task's id.

    NeMo RL's ``math_hf_data_processor`` puts the question into the chat template and hands the
    ``output`` to the environment.

    Args:
        env: The environment, or its id.
        split: Which tasks.
        kwargs: Arguments of the environment, where an id is given.

    Raises:
        RewardDefinitionError: As :class:`NemoRLEnvironment`.
        TaskError: If a prompt is more than one message of the user.
    """
    served = usable(env, "grpo", kwargs or {})
    for task in served.task_source(split):
        messages = served.messages(task)
        if len(messages) != 1 or messages[0]["role"] != "user":
            raise TaskError(
                f"{PEER}, task {task.id}: got roles {[m['role'] for m in messages]}, expected one "
                "message of the user; register a data processor of your own for such prompts"
            )
        yield {"input": messages[0]["content"], "output": f"{split}/{task.id}"}


def config(
    env: str,
    *,
    train: str,
    name: str = "mrgym",
    weights: Mapping[str, float] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the part of NeMo RL's configuration that speaks of an environment, for GDPO.

    Its ``reward_weights`` is a list in alphabetical order of the components, whatever order they
    were declared in.

    Args:
        env: The environment's id, or ``"pkg.module:Class"``.
        train: File that :func:`rows` were written to.
        name: As in :func:`register`.
        weights: Weights by component, over the declared ones.
        kwargs: Arguments of the environment, where an id is given.

    Raises:
        RewardDefinitionError: As :class:`NemoRLEnvironment`; if a weight is of no component, or
            no finite number.
    """
    made = usable(env, "gdpo", kwargs or {})
    merged = weights_by_name(made, weights, PEER)
    estimator = {
        "name": "gdpo",
        "normalize_rewards": True,
        "use_leave_one_out_baseline": False,
        "reward_weights": [merged[name] for name in sorted(merged)],
    }
    source = {"dataset_name": "ResponseDataset", "data_path": train}
    return {
        "grpo": {"adv_estimator": estimator, "max_rollout_turns": made.max_turns},
        "data": {
            "train": {**source, "processor": "math_hf_data_processor", "env_name": name},
        },
        "env": {name: {"env": env, "kwargs": dict(kwargs or {})}},
    }


def registration(name: str = "mrgym") -> str:
    """Return the lines that make an environment known to NeMo RL; :func:`register` runs them."""
    return (
        "from nemo_rl.distributed.ray_actor_environment_registry import"
        " ACTOR_ENVIRONMENT_REGISTRY\n"
        "from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES\n"
        "from nemo_rl.environments.utils import register_env\n\n"
        f'ACTOR_ENVIRONMENT_REGISTRY["{ACTOR}"] = PY_EXECUTABLES.SYSTEM\n'
        f'register_env("{name}", "{ACTOR}")\n'
    )


def register(name: str = "mrgym") -> None:
    """Make ``env.<name>`` of NeMo RL's configuration known; the actor runs in its own Python.

    Raises:
        ConfigError: If NeMo RL is not there.
    """
    try:
        actors = importlib.import_module("nemo_rl.distributed.ray_actor_environment_registry")
        cluster = importlib.import_module("nemo_rl.distributed.virtual_cluster")
        environments = importlib.import_module("nemo_rl.environments.utils")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{PEER}: got no module {error.name!r}, expected to run where NeMo RL is installed; "
            "call register() in the script that starts its run"
        ) from error
    actors.ACTOR_ENVIRONMENT_REGISTRY[ACTOR] = cluster.PY_EXECUTABLES.SYSTEM
    environments.register_env(name, ACTOR)


def usable(
    env: MultiRewardEnv[Any, Any] | str, estimator: str, kwargs: Mapping[str, Any]
) -> TextEnv:
    """Return an environment of which NeMo RL loses nothing.

    Raises:
        RewardDefinitionError: If it would lose or change something.
    """
    made = text_env(env, PEER, **kwargs)
    no_abstention(made, PEER, "it turns a missing component into 0.0")
    no_prefill(made, PEER)
    warn_one_at_a_time(made, f"{PEER} (asynchronous)")
    if estimator == "gdpo" and len(made._declared()) < 2:
        raise RewardDefinitionError(
            f"{PEER}: got the one component {[*made._declared()]} of {made.contract_name}, "
            "expected two or more, because its GDPO stops at one in mid-run; set estimator='grpo'"
        )
    return made
