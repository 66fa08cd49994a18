"""math_length: brevity that only a right answer earns."""

from __future__ import annotations

import pytest

import mrgym
from mrgym import Completion, ConfigError, RewardContractError, Task
from mrgym_envs.math_length import MathLength
from mrgym_envs.math_multi_reward import MathMultiReward


def make(**options):
    return mrgym.make("math_length", **{"train_count": 4, "eval_count": 4, **options})


def components(completion, gold="4", **options):
    env = make(**options)
    env.reset(options={"task": Task("2 + 2?", gold)})
    return env.step(completion)[4]["reward_components"]


def right(length):
    """A right completion of so many characters."""
    return "<answer>4</answer>".rjust(length)


def tokens(count, text="<answer>4</answer>"):
    return Completion(text, token_ids=range(count))


class TestLength:
    @pytest.mark.parametrize(
        ("length", "score"),
        [(18, 1.0), (100, 1.0), (101, 0.99), (150, 0.5), (199, 0.01), (200, 0.0), (5000, 0.0)],
    )
    @pytest.mark.parametrize("unit", ["tokens", "characters"])
    def test_is_full_up_to_the_limit_then_falls_to_nothing(self, length, score, unit):
        completion = right(length) if unit == "characters" else tokens(length)
        assert components(completion, limit=100, unit=unit) == {
            "correctness": 1.0,
            "length": pytest.approx(score),
        }

    @pytest.mark.parametrize("completion", ["", "<answer>5</answer>", "?", "I do not know"])
    def test_a_wrong_answer_earns_none(self, completion):
        assert components(completion) == {"correctness": 0.0, "length": 0.0}
        sampled = tokens(3, completion)
        assert components(sampled, unit="tokens") == {"correctness": 0.0, "length": 0.0}

    def test_tokens_are_counted_not_characters(self):
        assert components(tokens(3, right(5000)), unit="tokens", limit=3)["length"] == 1.0

    @pytest.mark.parametrize("completion", ["<answer>4</answer>", Completion("5")])
    def test_text_without_token_ids_is_an_error_in_tokens(self, completion):
        with pytest.raises(RewardContractError, match=r"without token ids.*unit='characters'"):
            components(completion, unit="tokens")

    def test_no_text_has_no_tokens(self):
        assert components("", unit="tokens") == {"correctness": 0.0, "length": 0.0}

    @pytest.mark.parametrize("limit", [0, -1, 1.5, True, "100", None])
    def test_a_limit_that_cannot_work_is_refused(self, limit):
        with pytest.raises(ConfigError, match=r"got limit=.*expected a whole number"):
            make(limit=limit)

    def test_an_unknown_unit_is_named(self):
        with pytest.raises(ConfigError, match=r"got unit='token', .*did you mean 'tokens'"):
            make(unit="token")


class TestCorrectness:
    @pytest.mark.parametrize(
        ("rule", "answer", "wanted"),
        [("equivalent", "0.5", 1.0), ("exact", "0.5", 0.0), ("exact", "1/2", 1.0)],
    )
    def test_is_equivalent_unless_asked_otherwise(self, rule, answer, wanted):
        completion = f"<answer>{answer}</answer>"
        assert components(completion, gold="1/2", correctness=rule)["length"] == wanted

    def test_is_equivalent_by_default(self):
        assert components("so \\boxed{0.5}", gold="1/2") == {"correctness": 1.0, "length": 1.0}


class TestDeclaration:
    def test_there_are_two_components_and_one_is_gated(self):
        declared = make().components
        assert [*declared] == ["correctness", "length"]
        assert declared["length"].gate == mrgym.Gate(on="correctness", at_least=1)

    def test_the_other_environment_keeps_its_own(self):
        assert [*MathMultiReward.components] == ["correctness", "format", "integer"]
        assert issubclass(MathLength, MathMultiReward)

    @pytest.mark.parametrize("difficulty", ["easy", "medium", "hard"])
    def test_golds_of_every_difficulty_are_short_enough(self, difficulty):
        report = mrgym.check_env("math_length", difficulty=difficulty, max_tasks=200)
        assert report.ok, str(report)
