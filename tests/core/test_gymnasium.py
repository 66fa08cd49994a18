"""Gymnasium's checker, wrappers and registry around our environments, and ours around theirs."""

from __future__ import annotations

import math
import warnings

import gymnasium as gym
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

import mrgym
from mrgym import Component


class Count(mrgym.MultiRewardEnv[int, int]):
    """Never ends by itself; rewards the action and the step."""

    components = mrgym.components(action=Component(low=0, high=1), step=Component(low=0))
    observation_space = spaces.Discrete(100)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return 0, {}

    def step(self, action):
        self.count += 1
        return self.emit(self.count, {"action": action, "step": self.count / 10})


def run(env, actions):
    """All transitions of an episode."""
    env.reset(seed=0)
    return [env.step(action) for action in actions]


@pytest.mark.parametrize("env_id", mrgym.list_envs())
def test_gymnasiums_own_checker_passes_without_a_warning(env_id):
    env = mrgym.make(env_id)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Rendering is not part of a text environment; Gymnasium warns that there are no modes.
        gymnasium_check_env(env, skip_render_check=True)


def test_the_checker_passes_on_an_env_that_emits():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gymnasium_check_env(Count(), skip_render_check=True)


class TestWrappersAroundOurs:
    @pytest.mark.parametrize("limit", [1, 3, 5])
    def test_time_limit_truncates_and_keeps_the_components(self, limit):
        steps = run(gym.wrappers.TimeLimit(Count(), limit), [1] * limit)
        assert [s[3] for s in steps] == [False] * (limit - 1) + [True]
        assert steps[-1][4]["reward_components"] == {"action": 1.0, "step": limit / 10}

    @pytest.mark.parametrize("actions", [[1], [1, 0, 1], [0] * 5])
    def test_statistics_are_the_sum_of_rewards(self, actions):
        env = gym.wrappers.TimeLimit(Count(), len(actions))
        steps = run(gym.wrappers.RecordEpisodeStatistics(env), actions)
        episode = steps[-1][4]["episode"]
        assert episode["r"] == pytest.approx(math.fsum(s[1] for s in steps))
        assert episode["l"] == len(actions)

    def test_order_enforcing_asks_for_reset(self):
        env = gym.wrappers.OrderEnforcing(Count())
        with pytest.raises(gym.error.ResetNeeded):
            env.step(1)

    @pytest.mark.parametrize(
        "wrap",
        [gym.wrappers.OrderEnforcing, gym.wrappers.PassiveEnvChecker, gym.wrappers.Autoreset],
    )
    def test_unwrapped_is_the_declaration(self, wrap):
        env = wrap(gym.wrappers.OrderEnforcing(Count()))
        assert [*env.unwrapped.components] == ["action", "step"]
        assert env.get_wrapper_attr("contract_name") == "Count"

    def test_gymnasium_make_takes_the_class(self):
        env = gym.make(gym.envs.registration.EnvSpec("Count-v0", entry_point=Count))
        assert run(env, [1])[0][4]["reward_components"] == {"action": 1.0, "step": 0.1}

    def test_an_error_names_the_id_gymnasium_gave(self):
        env = gym.make(gym.envs.registration.EnvSpec("Count-v0", entry_point=Count))
        env.unwrapped.components = mrgym.components(action=Component(), other=Component())
        with pytest.raises(mrgym.RewardContractError, match=r"Count-v0: got components"):
            run(env, [1])


def cart_pole(**options):
    return gym.make("CartPole-v1", **options)


def limited():
    return gym.wrappers.TimeLimit(cart_pole(), 7)


def recorded():
    return gym.wrappers.RecordEpisodeStatistics(limited())


class TestOursAroundTheirs:
    @pytest.mark.parametrize("make", [cart_pole, limited, recorded])
    def test_every_transition_is_the_same_with_components(self, make):
        theirs, ours = make(), mrgym.from_gymnasium(make())
        for their, our in zip(run(theirs, [0, 1] * 3), run(ours, [0, 1] * 3), strict=True):
            assert (their[0] == our[0]).all()
            assert their[1:4] == our[1:4]
            assert our[4]["reward_components"] == {"reward": their[1]}
            assert type(our[1]) is float

    def test_a_time_limit_inside_truncates(self):
        steps = run(mrgym.from_gymnasium(limited()), [0, 1] * 3 + [0])
        assert [s[3] for s in steps] == [False] * 6 + [True]

    def test_statistics_inside_and_outside_agree(self):
        env = gym.wrappers.RecordEpisodeStatistics(mrgym.from_gymnasium(limited()))
        assert run(env, [0, 1] * 3 + [0])[-1][4]["episode"]["r"] == 7.0
        inside = run(mrgym.from_gymnasium(recorded()), [0, 1] * 3 + [0])
        assert inside[-1][4]["episode"]["r"] == 7.0

    @pytest.mark.parametrize("low", [0, 2])
    def test_name_and_declaration_can_be_given(self, low):
        env = mrgym.from_gymnasium(cart_pole(), name="upright", component=Component(low=low))
        env.reset(seed=0)
        if low > 1:
            with pytest.raises(mrgym.RewardContractError, match=r"CartPole-v1: got upright=1\.0"):
                env.step(0)
        else:
            assert env.step(0)[4]["reward_components"] == {"upright": 1.0}

    def test_the_component_is_unbounded_and_summed_by_default(self):
        assert mrgym.from_gymnasium(cart_pole()).components["reward"] == Component(reduce="sum")

    @pytest.mark.parametrize("wrap", [lambda env: env, gym.wrappers.OrderEnforcing])
    def test_ours_is_not_wrapped_again(self, wrap):
        with pytest.raises(
            mrgym.RewardDefinitionError, match=r"'Count', which declares components"
        ):
            mrgym.from_gymnasium(wrap(Count()))

    def test_rendering_and_closing_reach_the_inner_env(self):
        env = mrgym.from_gymnasium(gym.make("CliffWalking-v1", render_mode="ansi"))
        env.reset(seed=0)
        assert env.render_mode == "ansi"
        assert "x" in env.render()
        env.close()

    def test_spaces_seeds_and_options_are_the_inner_ones(self):
        inner = cart_pole()
        env = mrgym.from_gymnasium(inner)
        assert env.observation_space is inner.observation_space
        first = env.reset(seed=5, options={"low": -0.01, "high": 0.01})[0]
        assert (abs(first) <= 0.01).all()
        assert (env.reset(seed=5, options={"low": -0.01, "high": 0.01})[0] == first).all()

    def test_vector_envs_carry_the_component(self):
        vector = gym.vector.SyncVectorEnv([lambda: mrgym.from_gymnasium(cart_pole())] * 2)
        vector.reset(seed=0)
        infos = vector.step(vector.action_space.sample())[4]
        assert infos["reward_components"]["reward"].tolist() == [1.0, 1.0]
