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

    def test_our_own_names_in_another_order_are_refused(self):
        with pytest.raises(mrgym.RewardDefinitionError, match=r"expected \['speed', 'cost'\]"):
            from_mo_gymnasium(to_mo_gymnasium(Walk()), names=["cost", "speed"])
        renamed = from_mo_gymnasium(to_mo_gymnasium(Walk()), names=["v", "price"])
        assert [*renamed.components] == ["v", "price"]

    def test_raw_components_of_somebody_else_do_not_hide_ours(self):
        class Theirs(gym.Env):
            observation_space = action_space = gym.spaces.Discrete(2)
            reward_space = gym.spaces.Box(-1, 1, (2,), np.float64)

            def step(self, action):
                return 0, np.array([0.2, 0.5]), False, False, {"raw_components": {"x": 1}}

        gated = Component(gate=mrgym.Gate(on="a", at_least=1))
        declared = {"a": Component(), "b": gated}
        env = from_mo_gymnasium(Theirs(), components=declared, names=["a", "b"])
        info = env.step(0)[4]
        assert info["reward_components"] == {"a": 0.2, "b": 0.0}
        assert info["raw_components"] == {"a": 0.2, "b": 0.5}

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

    @pytest.mark.parametrize("change", [{"cost": None}, {"extra": 0.0}])
    def test_a_wrapper_that_drops_or_adds_a_zero_is_named(self, change):
        class Rewrites(gym.Wrapper):
            def step(self, action):
                *step, info = self.env.step(action)
                scores = {**info["reward_components"], **change}
                kept = {n: score for n, score in scores.items() if score is not None}
                return *step, {**info, "reward_components": kept}

        env = to_mo_gymnasium(Rewrites(Walk()))
        env.reset(seed=0)
        with pytest.raises(mrgym.RewardContractError, match=r"expected exactly.*Rewrites"):
            env.step(0)

    @pytest.mark.parametrize("wrap", TRANSFORMS)
    def test_the_vector_view_names_it_at_the_first_step_that_shows_it(self, wrap):
        inner = wrap(Walk())
        env = to_mo_gymnasium(inner)
        env.reset(seed=0)
        with pytest.raises(mrgym.RewardContractError, match=type(inner).__name__):
            play(env)
