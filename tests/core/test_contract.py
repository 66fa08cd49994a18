"""The reward contract on every step, however the step is written."""

from __future__ import annotations

import functools
import math
from collections import namedtuple
from dataclasses import dataclass
from decimal import Decimal

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import mrgym
from mrgym import ABSENT, Component, Gate, RewardContractError, RewardDefinitionError

UNIT = Component(low=0, high=1)
MAY = Component(low=0, high=1, optional=True)
FIVE = namedtuple("FIVE", "observation reward terminated truncated info")


class Base(mrgym.MultiRewardEnv[int, int]):
    """Everything but ``components`` and ``step``."""

    observation_space = spaces.Discrete(2)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}


class ByHand(Base):
    """Returns whatever it was told to."""

    components = mrgym.components(a=UNIT, b=UNIT)
    result = None

    def step(self, action):
        return self.result


def by_hand(components, reward, **declared):
    """What a step by hand with these components and this reward becomes."""
    cls = type("Env", (ByHand,), {"components": mrgym.components(**declared)}) if declared else None
    env = (cls or ByHand)()
    env.result = (0, reward, True, False, {"reward_components": components})
    return env.step(0)


class Emitting(Base):
    """Emits the scores it was made with."""

    def __init__(self, scores, **declared):
        self.components = mrgym.components(**(declared or {"a": UNIT, "b": UNIT}))
        self.scores = scores

    def step(self, action):
        return self.emit(action, self.scores, truncated=True, info={"seen": 1})


class TestEmit:
    def test_a_step_has_components_and_their_sum(self):
        expected = {"seen": 1, "reward_components": {"a": 1.0, "b": 1.0}}
        assert Emitting({"a": 1, "b": True}).step(1) == (1, 2.0, False, True, expected)

    def test_raw_components_are_shown_where_there_are_gates(self):
        gated = Component(low=0, high=1, gate=Gate("a", 1))
        _, reward, _, _, info = Emitting({"a": 0, "b": 1}, a=UNIT, b=gated).step(0)
        assert reward == 0.0
        assert info["reward_components"] == {"a": 0.0, "b": 0.0}
        assert info["raw_components"] == {"a": 0.0, "b": 1.0}

    def test_an_abstention_has_no_key(self):
        _, reward, _, _, info = Emitting({"a": 1, "b": ABSENT}, a=UNIT, b=MAY).step(0)
        assert (reward, info["reward_components"]) == (1.0, {"a": 1.0})

    def test_the_info_that_was_handed_in_is_not_touched(self):
        info = {"seen": 1}
        Emitting({}).emit(0, {"a": 1, "b": 1}, info=info)
        assert info == {"seen": 1}

    @pytest.mark.parametrize("scores", [{"a": 1}, {"a": 1, "b": 2}, {"a": 1, "b": None}])
    def test_bad_scores_name_the_environment(self, scores):
        with pytest.raises(RewardContractError, match=r"^Emitting: got"):
            Emitting(scores).step(0)


BAD = (0, 0.0, True, False, {"reward_components": {"a": 1.0}})
UNIT_A = {"a": UNIT}


def ways():
    """Classes whose ``step`` is :data:`BAD` in the end."""

    class Mixin:
        def step(self, action):
            return BAD

    class Direct(Base):
        step = Mixin.step
        components = mrgym.components(a=UNIT)

    class FromMixin(Mixin, Base):
        components = mrgym.components(a=UNIT)

    class Inherited(Direct):
        pass

    class Good(Base):
        components = mrgym.components(a=UNIT)

        def step(self, action):
            return self.emit(0, {"a": 1})

    class SpoilsSuper(Good):
        def step(self, action):
            observation, reward, *rest = super().step(action)
            return (observation, reward - 1, *rest)

    class MixinOverGood(Mixin, Good):
        pass

    def spoiling(function):
        @functools.wraps(function)
        def spoilt(self, action):
            observation, reward, *rest = function(self, action)
            return (observation, reward - 1, *rest)

        return spoilt

    class WrapsAGuardedStep(Good):
        step = spoiling(Good.step)

    @dataclass
    class Data(Base):
        size: int = 3
        components = mrgym.components(a=UNIT)

        def step(self, action):
            return BAD

    class OnInstance(Base):
        def __init__(self):
            self.components = mrgym.components(a=UNIT)

        step = Mixin.step

    class Property(Base):
        @property
        def components(self):
            return {"a": UNIT}

        step = Mixin.step

    class PlainDict(Direct):
        components = UNIT_A

    return [c for c in locals().values() if isinstance(c, type) and c not in (Mixin, Good)]


class TestEveryWayToDefineStep:
    """Guarded on every subclass, without ``make``."""

    @pytest.mark.parametrize("way", ways(), ids=lambda way: way.__name__)
    def test_a_wrong_sum_is_found(self, way):
        with pytest.raises(RewardContractError, match=r"got reward=0\.0, expected 1\.0"):
            way().step(0)

    def test_calling_super_is_checked_once_at_the_outermost_step(self):
        class Half(Base):
            components = mrgym.components(a=UNIT, b=UNIT)

            def step(self, action):
                return 0, 1.0, False, False, {"reward_components": {"a": 1.0}}

        class Whole(Half):
            def step(self, action):
                observation, reward, *ends, info = super().step(action)
                info["reward_components"]["b"] = 0.5
                return (observation, reward + 0.5, *ends, info)

        assert Whole().step(0)[1] == 1.5
        with pytest.raises(RewardContractError, match=r"missing \['b'\]"):
            Half().step(0)

    def test_a_step_that_raised_leaves_the_guard_in_place(self):
        class Fragile(ByHand):
            def step(self, action):
                if action:
                    raise OSError("disk")
                return 0, 5.0, False, False, {"reward_components": {"a": 1.0, "b": 1.0}}

        env = Fragile()
        with pytest.raises(OSError, match="disk"):
            env.step(1)
        with pytest.raises(RewardContractError, match=r"got reward=5\.0"):
            env.step(0)

    @pytest.mark.parametrize("components", [None, [], "a", Component()], ids=repr)
    def test_components_must_be_declared(self, components):
        env = type("Env", (ByHand,), {"components": components})()
        env.result = BAD
        with pytest.raises(RewardDefinitionError, match=r"Env: got components=.*mrgym\.components"):
            env.step(0)

    def test_components_left_out_altogether(self):
        class Env(Base):
            def step(self, action):
                return BAD

        with pytest.raises(RewardDefinitionError, match="Env: got components=None"):
            Env().step(0)


class TestShapeOfAStep:
    GOOD = (0, 1.0, False, True, {"reward_components": {"a": 1.0, "b": 0.0}})

    def test_a_namedtuple_is_a_tuple(self):
        env = ByHand()
        env.result = FIVE(*self.GOOD)
        assert env.step(0) == self.GOOD

    @pytest.mark.parametrize(
        ("result", "said"),
        [
            (list(GOOD), "list of 5 items"),
            (GOOD[:4], "tuple of 4 items"),
            ((*GOOD, 1), "tuple of 6 items"),
            ((*GOOD[:4], None), "tuple of 5 items"),
            (None, "NoneType"),
            (1.0, "float"),
        ],
    )
    def test_anything_but_the_five_tuple_is_refused(self, result, said):
        env = ByHand()
        env.result = result
        with pytest.raises(RewardContractError, match=rf"ByHand: step returned {said}.*emit"):
            env.step(0)

    @pytest.mark.parametrize("flag", [1, np.bool_(True), True])
    def test_the_flags_become_bools(self, flag):
        env = ByHand()
        env.result = (*self.GOOD[:2], flag, flag, self.GOOD[4])
        assert env.step(0)[2:4] == (True, True)
        assert type(env.step(0)[2]) is bool

    def test_a_reused_info_dict_is_copied(self):
        """Gymnasium's own checker fails on a reused one; ours must not pass an alias on."""
        env = ByHand()
        env.result = self.GOOD
        first, second = env.step(0)[4], env.step(0)[4]
        first["reward_components"]["a"] = 99.0
        assert second["reward_components"] == {"a": 1.0, "b": 0.0}
        assert self.GOOD[4]["reward_components"] == {"a": 1.0, "b": 0.0}


class TestComponentsByHand:
    @pytest.mark.parametrize(
        "score", [1, True, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0)], ids=repr
    )
    def test_numbers_become_floats_in_info(self, score):
        values = by_hand({"a": score, "b": 0}, 1)[4]["reward_components"]
        assert values == {"a": 1.0, "b": 0.0}
        assert {type(v) for v in values.values()} == {float}

    @pytest.mark.parametrize("score", [None, "1", 1j, Decimal(1), np.ones(1), [1], math.nan, 2])
    def test_a_bad_score_is_named(self, score):
        with pytest.raises(RewardContractError, match="Env: got b="):
            by_hand({"a": 1.0, "b": score}, 2.0, a=UNIT, b=UNIT)

    @pytest.mark.parametrize(
        ("components", "said"),
        [
            ({"a": 1.0}, r"missing \['b'\]"),
            ({"a": 1.0, "b": 0.0, "c": 0.0}, r"unknown \['c'\]"),
            ({"a": 1.0, "b ": 0.0}, "did you mean 'b'"),
        ],
    )
    def test_the_names_must_be_the_declared_ones(self, components, said):
        """NVIDIA-NeMo/RL#2680; NovaSky-AI/SkyRL#2104."""
        with pytest.raises(RewardContractError, match=said):
            by_hand(components, 1.0)

    @pytest.mark.parametrize(
        ("info", "said"),
        [
            ({"reward_components": {}}, r"missing \['a', 'b'\]"),
            ({"reward_components": None}, r"no dict info\['reward_components'\]"),
            ({"reward_components": [1.0, 0.0]}, r"no dict info\['reward_components'\]"),
            ({}, r"no dict info\['reward_components'\]"),
            ({"components": {"a": 1.0, "b": 0.0}}, r"expected one over \['a', 'b'\]"),
        ],
        ids=["empty", "None", "a list", "absent", "another key"],
    )
    def test_empty_none_and_absent_are_all_refused(self, info, said):
        """NVIDIA-NeMo/RL#2680."""
        env = ByHand()
        env.result = (0, 1.0, True, False, info)
        with pytest.raises(RewardContractError, match=said):
            env.step(0)

    @pytest.mark.parametrize("out", [-0.1, 1.1])
    def test_the_range_holds(self, out):
        with pytest.raises(RewardContractError, match=r"within the declared \[0, 1\]"):
            by_hand({"a": out, "b": 0.0}, out)


class TestTheSum:
    @pytest.mark.parametrize("reward", [0.1 + 0.2, 0.3, np.float32(0.3), 0.3 + 5e-7])
    def test_a_close_sum_is_taken_and_made_exact(self, reward):
        """NVIDIA-NeMo/RL#2680 (validate_reward_components_match_scalar)."""
        assert by_hand({"a": 0.1, "b": 0.2}, reward)[1] == math.fsum([0.1, 0.2])

    @pytest.mark.parametrize("reward", [0.31, 0.0, 0.3001, -0.3, math.nan, math.inf])
    def test_another_sum_is_refused_with_both_numbers(self, reward):
        """NVIDIA-NeMo/RL#2680 (validate_reward_components_match_scalar)."""
        with pytest.raises(RewardContractError) as caught:
            by_hand({"a": 0.1, "b": 0.2}, reward)
        assert f"reward={reward!r}" in str(caught.value)
        assert repr(math.fsum([0.1, 0.2])) in str(caught.value)

    @pytest.mark.parametrize("reward", [None, "1.0", np.ones(2), 1j, [1.0]], ids=repr)
    def test_the_scalar_must_be_a_number(self, reward):
        """NVIDIA-NeMo/RL#3450: components without a scalar; a typed error, never a KeyError."""
        with pytest.raises(RewardContractError, match="ByHand: got reward="):
            by_hand({"a": 1.0, "b": 0.0}, reward)

    @pytest.mark.parametrize("reward", [1, np.float32(1), np.array(1.0), True], ids=repr)
    def test_it_comes_out_as_a_float(self, reward):
        got = by_hand({"a": 1.0, "b": 0.0}, reward)[1]
        assert (got, type(got)) == (1.0, float)

    def test_weights_do_not_enter(self):
        """huggingface/trl#5352; huggingface/trl#5353."""
        weighted = Component(low=0, high=1, weight=0.5)
        assert by_hand({"a": 1.0, "b": 1.0}, 2.0, a=weighted, b=UNIT)[1] == 2.0
        with pytest.raises(RewardContractError, match=r"expected 2\.0"):
            by_hand({"a": 1.0, "b": 1.0}, 1.5, a=weighted, b=UNIT)


GATED = {"a": UNIT, "b": Component(low=-1, high=1, gate=Gate("a", 1, otherwise=-1))}


class TestGatesByHand:
    @pytest.mark.parametrize("values", [{"a": 1.0, "b": 0.5}, {"a": 0.0, "b": -1.0}])
    def test_applied_gates_pass(self, values):
        assert by_hand(values, sum(values.values()), **GATED)[4]["reward_components"] == values

    @pytest.mark.parametrize("b", [0.5, 0.0, 1.0])
    def test_a_gate_that_was_not_applied_is_found(self, b):
        with pytest.raises(RewardContractError, match=r"gate on 'a' is shut, expected -1\.0"):
            by_hand({"a": 0.0, "b": b}, b, **GATED)

    def test_a_score_whose_condition_is_unmeasured_is_found(self):
        gated = Component(low=0, high=1, optional=True, gate=Gate("a", 1))
        with pytest.raises(RewardContractError, match="gate on 'a' is unmeasured, expected no sc"):
            by_hand({"b": 1.0}, 1.0, a=MAY, b=gated)


class TestAbstentionByHand:
    @pytest.mark.parametrize("components", [{"a": 1.0}, {"a": 1.0, "b": ABSENT}])
    def test_an_optional_component_may_be_left_out(self, components):
        _, reward, _, _, info = by_hand(components, 1.0, a=UNIT, b=MAY)
        assert (reward, info["reward_components"]) == (1.0, {"a": 1.0})

    def test_others_may_not(self):
        with pytest.raises(RewardContractError, match=r"ABSENT for component 'b'"):
            by_hand({"a": 1.0, "b": ABSENT}, 1.0)


class TestVectorEnvs:
    """One type, float, whichever environment comes first (its type sets Gymnasium's dtype)."""

    class Alternating(ByHand):
        def __init__(self, score, components=None):
            self.components = components or mrgym.components(a=UNIT)
            values = {} if score is None else {"a": score}
            self.result = (0, score or 0, True, False, {"reward_components": values})

    def vector(self, scores, components=None, **options):
        makers = [lambda s=score: self.Alternating(s, components) for score in scores]
        vector = gym.vector.SyncVectorEnv(makers, **options)
        vector.reset(seed=0)
        return vector.step(np.zeros(len(scores), int))

    @pytest.mark.parametrize("scores", [[1, 0.5], [True, 0.5], [np.int8(1), 0.5], [0.5, 1]])
    def test_an_int_first_truncates_nothing(self, scores):
        _, rewards, _, _, infos = self.vector(scores)
        assert infos["reward_components"]["a"].dtype == np.float64
        assert infos["reward_components"]["a"].tolist() == [float(s) for s in scores]
        assert rewards.tolist() == [float(s) for s in scores]

    @pytest.mark.parametrize("scores", [[1, None], [None, 0.5], [None, 1, 0.5]])
    def test_an_abstention_is_masked(self, scores):
        infos = self.vector(scores, mrgym.components(a=MAY))[4]["reward_components"]
        assert infos["_a"].tolist() == [score is not None for score in scores]
        assert infos["a"].tolist() == [float(score or 0) for score in scores]

    def test_terminal_components_stand_under_final_info_with_same_step_autoreset(self):
        mode = gym.vector.AutoresetMode.SAME_STEP
        infos = self.vector([1, 0.5], autoreset_mode=mode)[4]
        assert infos["final_info"]["reward_components"]["a"].tolist() == [1.0, 0.5]
