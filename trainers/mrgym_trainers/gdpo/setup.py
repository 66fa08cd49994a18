"""What a run needs before its first step: environment, weights by name, scorer, task order."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

from mrgym.env import MultiRewardEnv
from mrgym.errors import ConfigError, closest
from mrgym.registry import make
from mrgym.scoring import InlineScorer, Scorer, WorkerScorer
from mrgym.stepwise import as_text_env
from mrgym.tasks import Task, TaskSource
from mrgym.text import TextEnv
from mrgym_trainers.advantages import AdvantageConfig
from mrgym_trainers.gdpo.config import GDPOConfig

__all__ = ["make_scorer", "resolve_weights", "task_order", "text_env"]


def text_env(env: str | MultiRewardEnv[Any, Any], kwargs: dict[str, Any]) -> TextEnv:
    """Return an environment, given by id or as it is, in the form rollouts are drawn from.

    Raises:
        ConfigError: If it is no environment with components.
    """
    if isinstance(env, str):
        return as_text_env(partial(make, env, **kwargs))
    if isinstance(env, TextEnv):
        return env
    if not isinstance(env, MultiRewardEnv):
        raise ConfigError(
            f"GDPOTrainer: got {type(env).__name__}, expected an env id or a MultiRewardEnv; "
            "unwrap it (env.unwrapped), or use mrgym.from_gymnasium"
        )
    return as_text_env(partial(copy.deepcopy, env))


def resolve_weights(config: AdvantageConfig, env: TextEnv) -> dict[str, float]:
    """Return a weight for every component: the environment's own, overridden by name.

    Raises:
        ConfigError: If a name is not a component's; suggests the nearest.
    """
    given = config.weights or {}
    unknown = [name for name in given if name not in env.components]
    if unknown:
        raise ConfigError(
            f"weights: got {[*given]}, expected names among {[*env.components]} of "
            f"{env.contract_name}{closest(unknown[0], env.components)}; unknown: {unknown}"
        )
    return {**env.components.weights, **given}


def make_scorer(config: GDPOConfig) -> Scorer:
    """Return the scorer that the configuration asks for."""
    if config.scoring == "workers":
        return WorkerScorer(workers=config.score_workers, deadline=config.score_timeout)
    return InlineScorer(timeout=config.score_timeout)


def task_order(tasks: TaskSource, seed: int) -> Iterator[Task]:
    """Yield training tasks for ever, in a new order every time round."""
    epoch = 0
    while True:
        yield from tasks.shuffled(seed * 1_000_003 + epoch)
        epoch += 1
