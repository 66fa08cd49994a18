"""Any text environment with ``reset`` and ``step`` seen as one that rollouts can be drawn from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mrgym.components import ABSENT, Component, ComponentSet
from mrgym.env import MultiRewardEnv
from mrgym.errors import RegistryError
from mrgym.sampler import Completion
from mrgym.tasks import Task, TaskSource
from mrgym.text import MultiTurnEnv, Reply, Split, State, TextEnv, TurnOutcome

__all__ = ["as_text_env"]


class _StepwiseEnv(MultiTurnEnv):
    """Drives fresh instances of an environment; a task is a seed of its ``reset``."""

    def __init__(
        self, make: Callable[[], MultiRewardEnv[Any, Any]], train_seeds: int, eval_seeds: int
    ) -> None:
        self._make = make
        self._seeds = {"train": range(train_seeds), "eval": range(-eval_seeds, 0)}
        sample = make()
        self.spec = sample.spec
        self._name = sample.contract_name
        self.components = ComponentSet({n: _of_episode(c) for n, c in sample._declared().items()})
        self.max_turns = 1_000_000

    @property
    def contract_name(self) -> str:
        return self._name

    def task_source(self, split: Split) -> TaskSource:
        if split not in self._sources:
            self._sources[split] = TaskSource(
                (self._task(seed) for seed in self._seeds[split]), name=f"{self._name} [{split}]"
            )
        return self._sources[split]

    def _task(self, seed: int) -> Task:
        # Held-out seeds are negative here and far away there: reset() takes none below 0.
        real_seed = seed if seed >= 0 else 2**31 + seed
        env = self._make()
        observation, _ = env.reset(seed=real_seed)
        env.close()
        self._check_text(observation)
        return Task(observation, None, f"seed-{real_seed}", {"seed": real_seed})

    def start(self, task: Task, rng: np.random.Generator) -> State:
        state = super().start(task, rng)
        state.data["env"] = self._make()
        state.data["env"].reset(seed=task.metadata["seed"])
        return state

    def respond(self, state: State, completion: Completion) -> Reply:
        observation, _, terminated, truncated, info = state.data["env"].step(completion.text)
        present = info["reward_components"]
        state.data["scores"] = {name: present.get(name, ABSENT) for name in self.components}
        state.data["cut"] = truncated and not terminated
        if terminated or truncated:
            state.data["env"].close()
            return None
        self._check_text(observation)
        return str(observation)

    def _advance(self, state: State, completion: Completion) -> TurnOutcome:
        outcome = super()._advance(state, completion)
        if outcome.status == "ok" and state.data["cut"]:
            outcome.terminated, outcome.truncated = False, True
        return outcome

    def scores(self, state: State, completion: Completion) -> dict[str, Any]:
        """Return the scores of the step that was just taken."""
        scores: dict[str, Any] = state.data["scores"]
        return scores

    def _check_text(self, observation: object) -> None:
        if not isinstance(observation, str):
            raise RegistryError(
                f"{self._name}: got an observation of type {type(observation).__name__}, expected "
                "text; language models act on text environments"
            )


def _of_episode(component: Component) -> Component:
    """Return what holds for an episode's score: steps come gated, and sums outgrow a range."""
    if component.reduce == "sum":
        component = dataclasses.replace(component, low=-math.inf, high=math.inf)
    return dataclasses.replace(component, gate=None)


def as_text_env(
    make: Callable[[], MultiRewardEnv[Any, Any]], *, train_seeds: int = 512, eval_seeds: int = 128
) -> TextEnv:
    """Return the environment that ``make`` makes in the form rollouts are drawn from.

    A :class:`~mrgym.text.TextEnv` is returned as it is. For any other, each rollout gets an
    instance of its own, a task is a ``reset`` seed, and components are reduced over the steps of
    an episode by their declared rule.

    Raises:
        RegistryError: If its observations are not text.
    """
    env = make()
    return env if isinstance(env, TextEnv) else _StepwiseEnv(make, train_seeds, eval_seeds)
