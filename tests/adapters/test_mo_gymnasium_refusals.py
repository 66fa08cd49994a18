"""The vector view and the way back, as far as they need no MO-Gymnasium."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import pytest

import mrgym
from mrgym import Component
from mrgym.adapters.mo_gymnasium import from_mo_gymnasium, to_mo_gymnasium


class Walk(mrgym.MultiRewardEnv[int, int]):
    """Scores that stay what they are until somebody transforms their sum."""

    components = mrgym.components(speed=Component(low=0, high=1), cost=Component(low=-1, high=0))
    observation_space = gym.spaces.Discrete(100)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return 0, {}

    def step(self, action):
        self.steps += 1
        scores = {"speed": action * 0.4, "cost": -0.1 * action}
        return self.emit(self.steps, scores, terminated=self.steps == 5)


def play(env):
    """Every transition of an episode."""
    env.reset(seed=0)
    return [env.step(2) for _ in range(5)]


class TestRefusals:
    def test_components_that_may_abstain_are_refused(self):
        class Shy(Walk):
            components = mrgym.components(a=Component(optional=True), b=Component())

        with pytest.raises(mrgym.RewardDefinitionError, match=r"optional components \['a'\]"):
            to_mo_gymnasium(Shy())

    def test_what_declares_no_components_is_refused(self):
        with pytest.raises(mrgym.RewardDefinitionError, match="got CartPoleEnv"):
            to_mo_gymnasium(gym.make("CartPole-v1"))

    @pytest.mark.parametrize(
        ("vector", "message"),
        [
            ([math.nan, 0], "expected a finite number"),
            ([math.inf, 0], "expected a finite number"),
            ([0, 7], "expected within"),
            ([0, 0, 0], r"got a reward of shape \(3,\)"),
            (0.0, r"got a reward of shape \(\)"),
        ],
    )
    def test_rewards_that_break_the_contract_are_refused(self, vector, message):
        class Bad(gym.Env):
            observation_space = gym.spaces.Discrete(2)
            action_space = gym.spaces.Discrete(2)
            reward_space = gym.spaces.Box(-1, 1, (2,), np.float64)

            def reset(self, *, seed=None, options=None):
                return 0, {}

            def step(self, action):
                return 0, np.array(vector, dtype=np.float64), False, False, {}

        env = from_mo_gymnasium(Bad(), names=["a", "b"])
        env.reset()
        with pytest.raises(mrgym.RewardContractError, match=message):
            env.step(0)


class TestRewardTransforms:
    """Gymnasium's own reward wrappers break the sum; both our checks say which one did."""

    TRANSFORMS = (
        gym.wrappers.NormalizeReward,
        lambda env: gym.wrappers.TransformReward(env, lambda reward: reward / 2),
        lambda env: gym.wrappers.ClipReward(env, 0, 0.1),
    )

    @pytest.mark.parametrize("wrap", TRANSFORMS)
    def test_check_env_names_the_wrapper(self, wrap):
        env = wrap(Walk())
        report = mrgym.check_env(gym.wrappers.TimeLimit(env, 4))
        assert not report.ok
        assert any(type(env).__name__ in failure for failure in report.failures)

    @pytest.mark.parametrize("wrap", TRANSFORMS)
    def test_the_vector_view_names_it_at_the_first_step_that_shows_it(self, wrap):
        inner = wrap(Walk())
        env = to_mo_gymnasium(inner)
        env.reset(seed=0)
        with pytest.raises(mrgym.RewardContractError, match=type(inner).__name__):
            play(env)
