"""Components, gates, abstention: the rules for one set of scores."""

from __future__ import annotations

import math
import pickle
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mrgym
from mrgym import ABSENT, Component, Gate, RewardContractError, RewardDefinitionError
from mrgym.components import ComponentSet

UNIT = Component(low=0, high=1)
PAIR = mrgym.components(correct=UNIT, format=UNIT)
GATED = mrgym.components(correct=UNIT, short=Component(low=-1, high=1, gate=Gate("correct", 1)))


class TestKeys:
    @pytest.mark.parametrize("name", ["correctness", "format", "reward1", "a.b-c", "reward"])
    def test_one_helper_makes_every_batch_key(self, name):
        """NVIDIA-NeMo/RL#2680; NVIDIA-NeMo/RL#2681."""
        assert mrgym.reward_key(name) == f"reward/{name}"
        assert mrgym.present_key(name) == f"present/{name}"

    @pytest.mark.parametrize(
        ("declared", "weights"),
        [
            (("format", "correct"), {"format": 1.0, "correct": 2.0}),
            (("correct", "format"), {"correct": 2.0, "format": 1.0}),
            (("extra", "format", "correct"), {"extra": 1.0, "format": 1.0, "correct": 2.0}),
        ],
        ids=["declared order", "other order", "one inserted"],
    )
    def test_weights_go_by_name_and_do_not_shift(self, declared, weights):
        """NVIDIA-NeMo/RL#2680 (ordering thread)."""
        parts = {"correct": Component(weight=2)}
        got = ComponentSet({name: parts.get(name, Component()) for name in declared}).weights
        assert got == weights
        assert [*got] == [*declared]

    def test_weights_leave_the_reward_a_plain_sum(self):
        """huggingface/trl#5352; huggingface/trl#5353."""
        declared = mrgym.components(a=Component(weight=0.7), b=Component(weight=0.3))
        assert declared.score({"a": 1, "b": 0}).reward == 1.0


class TestDeclaration:
    @pytest.mark.parametrize(
        "bad",
        [
            {"low": 1, "high": 0},
            {"low": math.nan},
            {"high": math.nan},
            {"low": "0"},
            {"low": None},
            {"weight": math.nan},
            {"weight": math.inf},
            {"weight": "2"},
            {"reduce": "first"},
        ],
        ids=str,
    )
    def test_values_that_cannot_work_are_refused(self, bad):
        with pytest.raises(RewardDefinitionError, match=f"got .*{[*bad][-1]}.*expected"):
            Component(**bad)

    @pytest.mark.parametrize("name", ["_a", "__", "1a", "", "a b", "a/b", "é", None, 3])
    def test_names_that_clash_with_masks_or_keys_are_refused(self, name):
        with pytest.raises(RewardDefinitionError, match="expected a letter followed by"):
            ComponentSet({name: UNIT})

    @pytest.mark.parametrize("declaration", [None, 1.0, {"low": 0}, Component])
    def test_only_components_are_declared(self, declaration):
        with pytest.raises(RewardDefinitionError, match=r"write a=mrgym\.Component"):
            ComponentSet({"a": declaration})

    def test_an_empty_set_is_refused(self):
        with pytest.raises(RewardDefinitionError, match="at least one"):
            mrgym.components()

    def test_a_set_is_an_immutable_ordered_mapping(self):
        assert [*PAIR] == ["correct", "format"]
        assert PAIR["format"] is UNIT
        assert repr(PAIR) == "components(correct, format)"
        with pytest.raises(TypeError):
            PAIR["format"] = UNIT

    def test_a_set_survives_pickling(self):
        copy = pickle.loads(pickle.dumps(GATED))
        assert dict(copy) == dict(GATED)
        assert copy.score({"correct": 0, "short": 1}).values == {"correct": 0.0, "short": 0.0}

    def test_absent_is_one_object_in_every_process(self):
        assert pickle.loads(pickle.dumps(ABSENT)) is ABSENT
        assert repr(ABSENT) == "mrgym.ABSENT"


class TestNumbers:
    @pytest.mark.parametrize(
        "value",
        [
            *(1, True, 1.0, Fraction(1), np.float32(1), np.float64(1), np.int8(1), np.bool_(True)),
            *(np.array(1.0), np.array(1), np.array(True)),
        ],
        ids=repr,
    )
    def test_every_real_number_becomes_a_float(self, value):
        values = PAIR.score({"correct": value, "format": 0}).values
        assert values == {"correct": 1.0, "format": 0.0}
        assert {type(v) for v in values.values()} == {float}

    @pytest.mark.parametrize(
        "value",
        [
            *(None, "1", b"1", 1 + 0j, Decimal(1), [1.0], (1,), {}, float),
            *(np.array([1.0]), np.array(["1"]), np.array(1 + 0j), np.array("1")),
        ],
        ids=repr,
    )
    def test_anything_else_is_refused_by_name(self, value):
        with pytest.raises(RewardContractError, match=r"got correct=.*expected one real number"):
            PAIR.score({"correct": value, "format": 0})

    @pytest.mark.parametrize(
        "value", [math.nan, math.inf, -math.inf, np.float32("nan"), np.array(math.nan), 10**400]
    )
    @pytest.mark.parametrize("component", [UNIT, Component()], ids=["bounded", "unbounded"])
    def test_only_finite_numbers_count(self, value, component):
        with pytest.raises(RewardContractError, match=r"got a=.*expected a finite number"):
            mrgym.components(a=component).score({"a": value})

    @pytest.mark.parametrize("value", [-1e-9, 1.0000001, 2, -1, np.float32(1.1)])
    def test_the_declared_range_is_a_promise(self, value):
        with pytest.raises(RewardContractError, match=r"within the declared \[0, 1\]"):
            PAIR.score({"correct": 0, "format": value})

    @given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=8))
    def test_the_sum_is_exact_whatever_the_order(self, scores):
        declared = ComponentSet({f"c{i}": Component() for i in range(len(scores))})
        vector = declared.score({f"c{i}": s for i, s in reversed([*enumerate(scores)])})
        assert vector.reward == math.fsum(scores)
        assert [*vector.values] == [*declared]


class TestNames:
    @pytest.mark.parametrize(
        ("scores", "said"),
        [
            ({"correct": 1}, r"missing \['format'\]"),
            ({}, r"missing \['correct', 'format'\]"),
            ({"correct": 1, "format": 1, "length": 1}, r"unknown \['length'\]"),
            ({"correct": 1, "fromat": 1}, "did you mean 'format'"),
            ({"correct": 1, "format": 1, "formats": 1}, "did you mean 'format'"),
            ({"correct": 1, "format": 1, 0: 1}, r"unknown \[0\]"),
        ],
        ids=["missing", "all missing", "unknown", "misspelt", "nearly twice", "an index"],
    )
    def test_exactly_the_declared_names(self, scores, said):
        """NVIDIA-NeMo/RL#2680; NovaSky-AI/SkyRL#2104."""
        with pytest.raises(RewardContractError, match=said):
            PAIR.score(scores)

    def test_a_missing_component_is_never_filled_with_zero(self):
        """NVIDIA-NeMo/RL#2680; NovaSky-AI/SkyRL#2104: sample 1 lacks what sample 0 has."""
        PAIR.score({"correct": 1, "format": 0})
        with pytest.raises(RewardContractError, match="task 7: got components"):
            PAIR.score({"correct": 1}, subject="task 7")


class TestAbstention:
    SET = mrgym.components(correct=UNIT, judged=Component(low=0, high=1, optional=True))

    @pytest.mark.parametrize("judged", [0, 1])
    def test_an_optional_component_may_still_score(self, judged):
        vector = self.SET.score({"correct": 1, "judged": judged})
        assert vector.values == {"correct": 1.0, "judged": float(judged)}

    def test_an_abstention_has_no_key_and_no_part_in_the_sum(self):
        vector = self.SET.score({"correct": 1, "judged": ABSENT})
        assert vector.values == vector.raw == {"correct": 1.0}
        assert vector.reward == 1.0

    def test_only_optional_components_abstain(self):
        with pytest.raises(RewardContractError, match=r"ABSENT for component 'correct'.*optional"):
            self.SET.score({"correct": ABSENT, "judged": 0})

    def test_leaving_the_name_out_is_no_abstention(self):
        with pytest.raises(RewardContractError, match=r"missing \['judged'\].*mrgym\.ABSENT"):
            self.SET.score({"correct": 1})

    def test_all_may_abstain(self):
        vector = mrgym.components(a=Component(optional=True)).score({"a": ABSENT})
        assert (vector.values, vector.reward) == ({}, 0.0)


class TestGates:
    @pytest.mark.parametrize(
        ("correct", "short", "after"), [(1, 0.5, 0.5), (0, 0.5, 0.0), (0.99, -1, 0.0), (1, -1, -1)]
    )
    def test_a_shut_gate_replaces_the_score_before_the_sum(self, correct, short, after):
        vector = GATED.score({"correct": correct, "short": short})
        assert vector.values == {"correct": correct, "short": after}
        assert vector.raw == {"correct": correct, "short": short}
        assert vector.reward == correct + after

    def test_the_replacement_can_be_chosen(self):
        gate = Gate(on="a", at_least=1, otherwise=-1)
        declared = mrgym.components(b=Component(low=-1, high=1, gate=gate), a=UNIT)
        assert declared.score({"a": 0, "b": 1}).values == {"b": -1.0, "a": 0.0}

    @pytest.mark.parametrize(
        ("a", "after"), [(1, {"c": 1.0, "b": 1.0, "a": 1.0}), (0, {"c": 0.0, "b": 0.0, "a": 0.0})]
    )
    def test_gates_cascade_in_any_order_of_declaration(self, a, after):
        declared = mrgym.components(
            c=Component(low=0, high=1, gate=Gate("b", 1)),
            b=Component(low=0, high=1, gate=Gate("a", 1)),
            a=UNIT,
        )
        assert declared.score({"a": a, "b": 1, "c": 1}).values == after

    @pytest.mark.parametrize("length", [1, 2, 3])
    def test_gates_in_a_circle_are_refused(self, length):
        ring = {f"c{i}": Component(gate=Gate(f"c{(i + 1) % length}", 1)) for i in range(length)}
        with pytest.raises(RewardDefinitionError, match="in a circle"):
            ComponentSet(ring | {"free": UNIT})

    def test_a_gate_on_an_unknown_component_suggests_the_known_one(self):
        with pytest.raises(RewardDefinitionError, match="did you mean 'correct'"):
            mrgym.components(correct=UNIT, b=Component(gate=Gate("corect", 1)))

    @pytest.mark.parametrize("otherwise", [-0.5, 2])
    def test_the_replacement_must_lie_in_the_range(self, otherwise):
        gated = Component(low=0, high=1, gate=Gate("a", 1, otherwise=otherwise))
        with pytest.raises(RewardDefinitionError, match="expected 'otherwise' in"):
            mrgym.components(a=UNIT, b=gated)

    @pytest.mark.parametrize(
        ("at_least", "otherwise"),
        [(math.nan, 0), (1, math.nan), (1, math.inf), ("1", 0), (1, None)],
    )
    def test_a_gate_is_made_of_numbers(self, at_least, otherwise):
        with pytest.raises(RewardDefinitionError, match="Gate: got"):
            Gate("a", at_least, otherwise)

    def test_an_unmeasured_condition_makes_the_gated_one_abstain(self):
        may = Component(low=0, high=1, optional=True)
        gated = Component(low=0, high=1, optional=True, gate=Gate("a", 1))
        declared = mrgym.components(a=may, b=gated)
        assert declared.score({"a": ABSENT, "b": 1}).values == {}
        assert declared.score({"a": ABSENT, "b": 1}).raw == {"b": 1.0}

    def test_a_required_component_cannot_hang_on_an_optional_one(self):
        with pytest.raises(RewardDefinitionError, match="expected 'b' to be optional too"):
            mrgym.components(a=Component(optional=True), b=Component(gate=Gate("a", 1)))
