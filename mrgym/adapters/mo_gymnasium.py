"""MO-Gymnasium: an environment seen with a vector reward in a fixed order, and the way back.

    env = mrgym.adapters.mo_gymnasium.to_mo_gymnasium("math_multi_reward")
    env.unwrapped.reward_names            # ("correctness", "format", "integer")
    env = mo_gymnasium.wrappers.LinearReward(env, weight=np.array([1.0, 0.5, 0.1]))

    env = mo_gymnasium.make("deep-sea-treasure-v0")
    env = mrgym.adapters.mo_gymnasium.from_mo_gymnasium(env, names=["treasure", "time"])

Neither direction needs the package itself: what counts is a ``reward_space`` and an array.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

from mrgym.adapters._common import no_abstention, resolve
from mrgym.components import SUM_ABS_TOL, SUM_REL_TOL, Component, ComponentSet
from mrgym.env import MultiRewardEnv, StepResult
from mrgym.errors import RewardContractError, RewardDefinitionError

__all__ = ["VectorRewardEnv", "from_mo_gymnasium", "to_mo_gymnasium"]

_PEER = "mo-gymnasium"


class VectorRewardEnv(gym.Env[Any, Any]):
    """An environment whose ``step`` returns its components as an array.

    Attributes:
        reward_names: Components in the order of the array, which is the declared one.
        reward_space: Their ranges.
        reward_dim: Their number.
        reward_weights: Their declared weights, in the same order.
        env: The environment inside, wrappers included.
    """

    def __init__(self, env: gym.Env[Any, Any], base: MultiRewardEnv[Any, Any], dtype: Any) -> None:
        declared = base._declared()
        self.env = env
        self.reward_names = tuple(declared)
        self.reward_dim = len(self.reward_names)
        self.reward_weights = np.array([*declared.weights.values()])
        self.reward_space = _reward_space(base, dtype)
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self.render_mode = env.render_mode
        self.metadata = {**env.metadata, "reward_names": self.reward_names}
        self._name = base.contract_name

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environment inside."""
        super().reset(seed=seed)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Return the components as a new array; ``info["reward_components"]`` names them.

        Raises:
            RewardContractError: If a wrapper inside hides the components, or changed the reward.
        """
        observation, reward, terminated, truncated, info = self.env.step(action)
        values = info.get("reward_components")
        if not isinstance(values, dict) or values.keys() != {*self.reward_names}:
            raise RewardContractError(
                f"{self._name}: got components {values}, expected exactly "
                f"{[*self.reward_names]}{_wrappers(self.env)}; take away what changes them"
            )
        if not _agrees(reward, values):
            raise RewardContractError(
                f"{self._name}: got reward={reward!r} with components {values}, expected their "
                f"sum{_wrappers(self.env)}; put reward transforms outside the vector view, or make "
                "what they add a component"
            )
        vector = np.array([values[name] for name in self.reward_names], self.reward_space.dtype)
        return observation, vector, terminated, truncated, info

    def render(self) -> Any:
        """Render the environment inside."""
        return self.env.render()

    def close(self) -> None:
        """Close the environment inside."""
        self.env.close()


def to_mo_gymnasium(
    env: gym.Env[Any, Any] | str, *, dtype: Any = np.float64, **kwargs: Any
) -> gym.Env[Any, Any]:
    """Return an environment with a vector reward, in the declared order of its components.

    Args:
        env: A ``MultiRewardEnv`` (Gymnasium wrappers around it are kept), or an id.
        dtype: Of the array; ``np.float32`` rounds each score once, as many of MO-Gymnasium's
            buffers do anyway.
        **kwargs: Arguments of the environment, where an id is given.

    Raises:
        RewardDefinitionError: If it declares no components, or one may abstain.
    """
    made = resolve(env, **kwargs) if isinstance(env, str) else env
    base = made.unwrapped
    if not isinstance(base, MultiRewardEnv):
        raise RewardDefinitionError(
            f"to_mo_gymnasium: got {type(base).__name__}, expected a MultiRewardEnv; "
            "wrap a plain environment with mrgym.from_gymnasium(env)"
        )
    no_abstention(base, _PEER, "an array has an entry for every component at every step")
    return VectorRewardEnv(made, base, dtype)


class _NamedRewardEnv(MultiRewardEnv[Any, Any]):
    """A vector-reward environment whose entries have names."""

    def __init__(self, env: gym.Env[Any, Any], declared: ComponentSet) -> None:
        self.components = declared
        self.env = env
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self.metadata = env.metadata
        self.render_mode = env.render_mode
        self.spec = env.spec

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> StepResult[Any]:
        observation, vector, terminated, truncated, info = self.env.step(action)
        array = np.asarray(vector)
        if array.shape != (len(self.components),):
            raise RewardContractError(
                f"{self.contract_name}: got a reward of shape {array.shape}, expected "
                f"{len(self.components)} entries for {[*self.components]}{_wrappers(self.env)}; "
                "take wrappers that sum or drop entries away"
            )
        scores = dict(zip(self.components, array.tolist(), strict=True))
        result = self.emit(
            observation, scores, terminated=terminated, truncated=truncated, info=info
        )
        if "raw_components" in info and isinstance(self.env.unwrapped, VectorRewardEnv):
            # Of our own environment inside, whose gates came first.
            result[4]["raw_components"] = info["raw_components"]
        return result

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()


def from_mo_gymnasium(
    env: gym.Env[Any, Any],
    *,
    names: Sequence[str] | None = None,
    components: Mapping[str, Component] | None = None,
) -> MultiRewardEnv[Any, Any]:
    """Return a vector-reward environment as one with named components; nothing is rounded.

    Vectorise afterwards: ``SyncVectorEnv([lambda: from_mo_gymnasium(make(...), names=...)] * 8)``.

    Args:
        env: Any environment with a one-dimensional ``reward_space``, wrappers included.
        names: A name for every entry of the reward, in order; may be left out for a view that
            :func:`to_mo_gymnasium` made.
        components: Declarations by name; by default with the range of ``reward_space``, summed
            over the episode.

    Raises:
        RewardDefinitionError: If there is no ``reward_space``, or names and entries do not match.
    """
    space = None if isinstance(env, gym.vector.VectorEnv) else _space_of(env)
    if space is None:
        raise RewardDefinitionError(
            f"from_mo_gymnasium: got {type(env).__name__}, expected an environment (not a vector "
            "of them) with a one-dimensional reward_space; use mrgym.from_gymnasium for a scalar "
            "reward, and vectorise afterwards"
        )
    own = getattr(env.unwrapped, "reward_names", None)
    chosen = list(names if names is not None else own or ())
    if len(chosen) != space.shape[0] or len({*chosen}) != len(chosen):
        raise RewardDefinitionError(
            f"from_mo_gymnasium: got names {chosen}, expected {space.shape[0]} different ones, one "
            "for every entry of the reward; list them in its order"
        )
    if own and sorted(own) == sorted(chosen) and [*own] != chosen:
        raise RewardDefinitionError(
            f"from_mo_gymnasium: got names {chosen}, expected {[*own]}, the order that "
            f"{type(env.unwrapped).__name__} says its entries have; leave names out"
        )
    if components is None:
        view = env.unwrapped
        weights = view.reward_weights if isinstance(view, VectorRewardEnv) else [1.0] * len(chosen)
        components = _declared(chosen, space, weights)
    return _NamedRewardEnv(env, _in_order(chosen, components))


def _declared(names: Sequence[str], space: Box, weights: Any) -> dict[str, Component]:
    entries = zip(names, space.low, space.high, weights, strict=True)
    return {name: _component(low, high, float(w)) for name, low, high, w in entries}


def _in_order(names: Sequence[str], components: Mapping[str, Component]) -> ComponentSet:
    if components.keys() != {*names}:
        raise RewardDefinitionError(
            f"from_mo_gymnasium: got declarations for {[*components]}, expected {[*names]}; "
            "declare every name once"
        )
    return ComponentSet({name: components[name] for name in names})


def _component(low: Any, high: Any, weight: float) -> Component:
    # A float32 bound of 23.7 is neither 23.7 nor what prints so: both kinds of reward must fit.
    lows, highs = (float(low), float(str(low))), (float(high), float(str(high)))
    return Component(min(lows), max(highs), weight, reduce="sum")


def _space_of(env: gym.Env[Any, Any]) -> Box | None:
    space = getattr(env.unwrapped, "reward_space", None)
    return space if isinstance(space, Box) and len(space.shape) == 1 else None


def _reward_space(base: MultiRewardEnv[Any, Any], dtype: Any) -> Box:
    """Return the ranges of a step's scores; before the last turn of an episode they read 0."""
    declared = base._declared().values()
    lows, highs = [c.low for c in declared], [c.high for c in declared]
    if not base._range_holds_each_step and getattr(base, "max_turns", 1) > 1:
        lows, highs = [min(low, 0.0) for low in lows], [max(high, 0.0) for high in highs]
    return Box(np.array(lows, dtype), np.array(highs, dtype), dtype=dtype)


def _agrees(reward: Any, values: dict[str, float]) -> bool:
    total = math.fsum(values.values())
    return math.isclose(reward, total, rel_tol=SUM_REL_TOL, abs_tol=SUM_ABS_TOL)


def _wrappers(env: gym.Env[Any, Any]) -> str:
    names = []
    while isinstance(env, gym.Wrapper):
        names.append(type(env).__name__)
        env = env.env
    return f" (wrapped in {', '.join(names)})" if names else ""
