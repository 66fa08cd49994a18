"""MO-Gymnasium: its wrappers and vector envs around ours, and its environments as ours."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import pytest

import mrgym
from mrgym import Component
from mrgym.adapters.mo_gymnasium import from_mo_gymnasium, to_mo_gymnasium

pytest.importorskip("mo_gymnasium", reason="needs mo-gymnasium (make test-peers)")

import mo_gymnasium as mo
from mo_gymnasium.wrappers import (
    LinearReward,
    MOClipReward,
    MONormalizeReward,
    MORecordEpisodeStatistics,
)
from mo_gymnasium.wrappers import vector as mo_vector

# Every environment of the package that needs no further package, with its number of objectives.
THEIRS = {
    "deep-sea-treasure-v0": 2,
    "fishwood-v0": 2,
    "four-room-v0": 3,
    "fruit-tree-v0": 6,
    "minecart-v0": 3,
    "minecart-deterministic-v0": 3,
    "mo-mountaincar-v0": 3,
    "mo-mountaincar-3d-v0": 3,
    "mo-mountaincar-timemove-v0": 2,
    "mo-mountaincar-timespeed-v0": 2,
    "mo-mountaincarcontinuous-v0": 2,
    "resource-gathering-v0": 3,
    "water-reservoir-v0": 2,
}


def names_of(env_id):
    return [f"objective_{i}" for i in range(THEIRS[env_id])]


def wrapped(env_id, **options):
    return from_mo_gymnasium(mo.make(env_id), names=names_of(env_id), **options)


def play(env, steps=60, seed=0):
    """Transitions under random actions, over as many episodes as it takes."""
    env.action_space.seed(seed)
    env.reset(seed=seed)
    out = []
    for _ in range(steps):
        out.append(env.step(env.action_space.sample()))
        if out[-1][2] or out[-1][3]:
            env.reset()
    return out


class Walk(mrgym.MultiRewardEnv[int, int]):
    """Scores that float32 cannot hold, in an order that is not the alphabet's."""

    components = mrgym.components(
        speed=Component(low=0, high=1),
        cost=Component(low=-0.3, high=0),
        bonus=Component(low=0, high=2, gate=mrgym.Gate(on="speed", at_least=0.5)),
    )
    observation_space = gym.spaces.Discrete(100)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return 0, {}

    def step(self, action):
        self.steps += 1
        scores = {"bonus": 1 / 3, "speed": action * 0.4, "cost": -0.1 * action}
        return self.emit(self.steps, scores, terminated=self.steps == 5)


class TestVectorView:
    def test_components_of_the_sample_are_the_same(self, sample):
        env = to_mo_gymnasium(sample.env)
        assert env.unwrapped.reward_names == ("correctness", "format", "integer")
        for task, text, expected in zip(
            sample.tasks, sample.completions, sample.components, strict=True
        ):
            env.reset(options={"task": task})
            _, vector, terminated, truncated, info = env.step(text)
            assert dict(zip(env.unwrapped.reward_names, vector, strict=True)) == expected
            assert info["reward_components"] == expected
            assert vector in env.unwrapped.reward_space
            assert (terminated, truncated) == (True, False)

    def test_order_range_and_values_are_the_declared_ones(self):
        env = to_mo_gymnasium(Walk())
        assert env.metadata["reward_names"] == ("speed", "cost", "bonus")
        assert env.reward_dim == 3
        assert env.reward_space.dtype == np.float64
        assert env.reward_space.low.tolist() == [0, -0.3, 0]
        assert env.reward_space.high.tolist() == [1, 0, 2]
        env.reset(seed=0)
        assert env.step(1)[1].tolist() == [0.4, -0.1, 0.0]
        assert env.step(2)[1].tolist() == [0.8, -0.2, 1 / 3]
        assert env.step(2)[4]["raw_components"]["bonus"] == 1 / 3

    def test_float32_is_rounded_once_and_stays_in_its_space(self):
        env = to_mo_gymnasium(Walk(), dtype=np.float32)
        env.reset(seed=0)
        for action in (0, 1, 2):
            vector = env.step(action)[1]
            exact = [action * 0.4, -0.1 * action, 1 / 3 if action == 2 else 0]
            assert vector.dtype == np.float32
            assert vector.tolist() == np.array(exact, np.float32).tolist()
            assert vector in env.reward_space

    def test_a_range_without_zero_holds_it_where_turns_go_on(self):
        class Talk(mrgym.MultiTurnEnv):
            max_turns = 2

            def tasks(self):
                return [mrgym.Task(prompt=p) for p in "ab"]

            def respond(self, state, completion):
                return "go on"

            @mrgym.component(low=1, high=2)
            def warm(self, task, completion):
                return 2

        env = to_mo_gymnasium(Talk())
        assert (env.reward_space.low, env.reward_space.high) == ([0], [2])
        env.reset(seed=0)
        vectors = [env.step("x")[1] for _ in range(2)]
        assert [v.tolist() for v in vectors] == [[0.0], [2.0]]
        assert all(v in env.reward_space for v in vectors)

    def test_an_id_with_arguments(self):
        env = to_mo_gymnasium("math_multi_reward", difficulty="hard", train_count=5)
        assert env.reset(seed=0)[1]["task_id"]

    def test_wrappers_inside_are_kept(self):
        env = to_mo_gymnasium(gym.wrappers.TimeLimit(Walk(), 2))
        env.reset(seed=0)
        assert [env.step(0)[3] for _ in range(2)] == [False, True]


class TestTheirWrappers:
    def test_linear_reward_is_the_weighted_sum(self):
        env = LinearReward(to_mo_gymnasium(Walk()), weight=np.array([1.0, 0.5, 0.25]))
        env.reset(seed=0)
        _, reward, *_, info = env.step(2)
        assert reward == pytest.approx(0.8 - 0.1 + 1 / 12, abs=1e-15)
        assert info["vector_reward"].tolist() == [0.8, -0.2, 1 / 3]

    def test_equal_weights_give_the_sum_of_mrgym(self, sample):
        env = LinearReward(to_mo_gymnasium(sample.env))
        for task, text, expected in zip(
            sample.tasks[:30], sample.completions, sample.components, strict=False
        ):
            env.reset(options={"task": task})
            assert env.step(text)[1] == math.fsum(expected.values())

    @pytest.mark.parametrize(
        "wrap", [lambda env: MONormalizeReward(env, idx=2), lambda env: MOClipReward(env, 2, 0, 0)]
    )
    def test_wrappers_that_change_the_array_in_place_leave_the_components(self, wrap):
        env = wrap(to_mo_gymnasium(Walk()))
        env.reset(seed=0)
        _, vector, *_, info = env.step(2)
        assert vector[2] != 1 / 3
        assert vector[:2].tolist() == [0.8, -0.2]
        assert info["reward_components"] == {"speed": 0.8, "cost": -0.2, "bonus": 1 / 3}

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_episode_statistics_are_sums_by_component(self, dtype):
        env = MORecordEpisodeStatistics(to_mo_gymnasium(Walk(), dtype=dtype))
        env.reset(seed=0)
        for _ in range(5):
            info = env.step(2)[4]
        assert info["episode"]["r"] == pytest.approx([4.0, -1.0, 5 / 3], rel=1e-6)
        assert info["episode"]["l"] == 5

    @pytest.mark.parametrize("make", [Walk, lambda: mrgym.make("math_multi_reward")])
    def test_the_vector_env_has_a_row_an_environment(self, make):
        count = 3
        vector = mo_vector.MOSyncVectorEnv([lambda: to_mo_gymnasium(make())] * count)
        vector.reset(seed=0)
        actions = [make().action_space.sample() for _ in range(count)]
        _, rewards, *_, infos = vector.step(actions)
        names = vector.envs[0].unwrapped.reward_names
        columns = [infos["reward_components"][name] for name in names]
        assert rewards.dtype == np.float32
        assert rewards.tolist() == np.stack(columns, axis=1).astype(np.float32).tolist()

    def test_statistics_of_the_vector_env(self):
        vector = mo_vector.MOSyncVectorEnv([lambda: to_mo_gymnasium(Walk())] * 2)
        vector = mo_vector.MORecordEpisodeStatistics(vector)
        vector.reset(seed=0)
        for _ in range(5):
            infos = vector.step(np.array([0, 2]))[4]
        assert infos["episode"]["r"][0] == pytest.approx([0, 0, 0])
        assert infos["episode"]["r"][1] == pytest.approx([4.0, -1.0, 5 / 3], rel=1e-6)


class TestFromTheirs:
    @pytest.mark.parametrize("env_id", THEIRS)
    def test_every_transition_is_the_same_with_names(self, env_id):
        theirs, ours = play(mo.make(env_id)), play(wrapped(env_id))
        for their, our in zip(theirs, ours, strict=True):
            assert np.array_equal(their[0], our[0])
            values = our[4]["reward_components"]
            assert [*values] == names_of(env_id)
            assert [*values.values()] == np.asarray(their[1]).tolist()
            assert our[1] == math.fsum(np.asarray(their[1], np.float64))
            assert our[2:4] == their[2:4]

    @pytest.mark.parametrize("env_id", THEIRS)
    def test_the_round_trip_is_exact(self, env_id):
        dtype = mo.make(env_id).unwrapped.reward_space.dtype
        there = to_mo_gymnasium(wrapped(env_id), dtype=dtype)
        for their, our in zip(play(mo.make(env_id)), play(there), strict=True):
            assert their[1].tolist() == our[1].tolist()

    @pytest.mark.parametrize("env_id", ["deep-sea-treasure-v0", "resource-gathering-v0"])
    def test_it_passes_the_check(self, env_id):
        report = mrgym.check_env(wrapped(env_id))
        assert report.ok, str(report)

    def test_our_own_view_comes_back_by_itself(self):
        back = from_mo_gymnasium(to_mo_gymnasium(Walk()), components=Walk.components)
        assert [*back.components] == ["speed", "cost", "bonus"]
        for their, our in zip(play(Walk()), play(back), strict=True):
            assert their[1:4] == our[1:4]
            assert their[4] == our[4]

    def test_declared_weights_come_back_with_our_own_view(self):
        class Weighed(Walk):
            components = mrgym.components(
                speed=Component(weight=2.0), cost=Component(weight=-1.0), bonus=Component()
            )

        back = from_mo_gymnasium(to_mo_gymnasium(Weighed()))
        assert back.components.weights == {"speed": 2.0, "cost": -1.0, "bonus": 1.0}

    def test_vector_envs_carry_the_components(self):
        env_id = "resource-gathering-v0"
        vector = gym.vector.SyncVectorEnv([lambda: wrapped(env_id)] * 3)
        vector.reset(seed=0)
        vector.action_space.seed(0)
        for _ in range(20):
            _, rewards, *_, infos = vector.step(vector.action_space.sample())
            columns = [infos["reward_components"][n] for n in names_of(env_id)]
            assert np.stack(columns).sum(axis=0).tolist() == rewards.tolist()

    def test_ranges_are_the_reward_space_and_episodes_are_summed(self):
        declared = wrapped("deep-sea-treasure-v0").components
        assert declared["objective_1"] == Component(low=-1, high=-1, reduce="sum")
        assert declared["objective_0"].low == 0
        assert float(np.float32(23.7)) <= declared["objective_0"].high < 23.70001

    def test_declarations_can_be_given(self):
        names = ["treasure", "time"]
        given = {"time": Component(low=-1, high=0, weight=0.1), "treasure": Component(low=0)}
        env = from_mo_gymnasium(mo.make("deep-sea-treasure-v0"), names=names, components=given)
        assert [*env.components] == names
        assert env.components.weights == {"treasure": 1.0, "time": 0.1}

    @pytest.mark.parametrize(
        ("names", "components"),
        [
            (None, None),
            ([], None),
            (["a"], None),
            (["a", "b", "c"], None),
            (["a", "a"], None),
            (["a", "_b"], None),
            (["a", "b"], {"a": Component()}),
            (["a", "b"], {"a": Component(), "c": Component()}),
        ],
    )
    def test_names_that_do_not_fit_are_refused(self, names, components):
        with pytest.raises(mrgym.RewardDefinitionError):
            from_mo_gymnasium(mo.make("deep-sea-treasure-v0"), names=names, components=components)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: gym.make("CartPole-v1"),
            lambda: mo_vector.MOSyncVectorEnv([lambda: mo.make("fishwood-v0")] * 2),
        ],
    )
    def test_what_has_no_vector_reward_is_refused(self, make):
        with pytest.raises(mrgym.RewardDefinitionError, match="one-dimensional reward_space"):
            from_mo_gymnasium(make(), names=["a", "b"])

    def test_a_wrapper_that_sums_inside_is_refused_by_name(self):
        env = from_mo_gymnasium(LinearReward(mo.make("fishwood-v0")), names=["fish", "wood"])
        env.reset(seed=0)
        with pytest.raises(mrgym.RewardContractError, match=r"shape \(\).*LinearReward"):
            env.step(0)
