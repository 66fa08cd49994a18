"""math_multi_reward with correctness="equivalent": the grader's verdicts as scores."""

from __future__ import annotations

import pickle

import gymnasium as gym
import numpy as np
import pytest

import mrgym
from mrgym import Completion, ConfigError, ScoreError, Task
from mrgym.scoring import InlineScorer, WorkerScorer
from mrgym_envs.grading import Verdict
from mrgym_envs.math_multi_reward import MathMultiReward, equivalence

HEAVY = Task("double angle?", "\\sin(2x)")
HEAVY_ANSWER = "<answer>2\\sin(x)\\cos(x)</answer>"


def make(**options):
    options = {"correctness": "equivalent", "train_count": 4, "eval_count": 4, **options}
    return mrgym.make("math_multi_reward", **options)


def correctness(completion, gold, **options):
    env = make(**options)
    env.reset(options={"task": Task("?", gold)})
    return env.step(completion)[4]["reward_components"]["correctness"]


def play(env, pairs, scorer=None):
    states = [env.start(Task("?", gold), np.random.default_rng(0)) for gold, _ in pairs]
    return env.play_turn(states, [Completion(text) for _, text in pairs], scorer or InlineScorer())


def scores(outcomes):
    return [o.vector.values["correctness"] if o.vector else o.status for o in outcomes]


class TestVerdicts:
    @pytest.mark.parametrize(
        ("completion", "gold", "wanted"),
        [
            ("<answer>0.5</answer>", "\\frac{1}{2}", 1),
            ("<answer> 1/2 </answer>", "\\frac{1}{2}", 1),
            ("<answer>1/3</answer>", "\\frac{1}{2}", 0),
            ("<answer>33</answer>", "033", 1),
            ("<answer>4.0</answer>", "4", 1),
            ("<answer>(x+1)^2</answer>", "x^2+2x+1", 1),
            ("<answer>\\boxed{4}</answer>", "4", 1),
            ("so it is \\boxed{4}", "4", 1),
            ("<think>\\boxed{5}</think> the answer is 4", "4", 1),
            ("<think>the answer is 4", "4", 0),
            ("The answer is 4", "4", 1),
            ("<answer>5</answer> or \\boxed{4}", "4", 0),
            ("<answer></answer>", "4", 0),
            ("", "4", 0),
            ("<answer>\\frac{1}{</answer>", "\\frac{1}{2}", 0),
            ("<answer>9^{9^{9^{9}}}</answer>", "4", 0),
            ("<answer>" + "(" * 100_000 + "</answer>", "4", 0),
            (HEAVY_ANSWER, HEAVY.answer, 1),
        ],
    )
    def test_of_a_completion(self, completion, gold, wanted):
        assert correctness(completion, gold) == wanted

    def test_required_tags_are_required(self):
        assert correctness("\\boxed{4}", "4", require_tags=True) == 0
        assert correctness("<answer>4.0</answer>", "4", require_tags=True) == 1

    def test_a_turn_that_began_inside_the_think_block_must_leave_it(self):
        assert correctness("the answer is 4", "4", prefill_think=True) == 0
        assert correctness("hm</think> the answer is 4", "4", prefill_think=True) == 1

    def test_exact_is_the_default(self):
        env = mrgym.make("math_multi_reward", train_count=4, eval_count=4)
        env.reset(options={"task": Task("?", "4")})
        assert env.step("<answer>4.0</answer>")[4]["reward_components"]["correctness"] == 0

    def test_the_instruction_asks_for_an_answer_not_a_number(self):
        assert "final answer alone" in make().instruction
        assert "final number alone" in MathMultiReward.instruction

    @pytest.mark.parametrize("option", ["correctness", "golds", "bad_golds"])
    def test_unknown_choices_are_named(self, option):
        with pytest.raises(ConfigError, match=rf"got {option}='equivalnt', expected one of"):
            make(**{option: "equivalnt"})


class TestThousandGolds:
    @pytest.mark.parametrize("rule", ["exact", "equivalent"])
    def test_score_full_marks_and_shuffled_ones_are_wrong(self, rule):
        env = make(correctness=rule, difficulty="hard", train_count=1000)
        tasks = [*env.task_source("train")]
        assert len(tasks) == 1000
        golds = [env.gold_completion(task) for task in tasks]
        right = play(env, [(t.answer, g) for t, g in zip(tasks, golds, strict=True)])
        assert {o.vector.reward for o in right} == {3.0}
        pairs = list(zip(tasks, tasks[1:] + tasks[:1], golds[1:] + golds[:1], strict=True))
        wrong = [(t.answer, gold) for t, other, gold in pairs if t.answer != other.answer]
        assert len(wrong) > 900
        assert set(scores(play(env, wrong))) == {0.0}


class TestFailures:
    @pytest.fixture
    @staticmethod
    def broken(monkeypatch):
        """A grader that fails on one answer."""
        real = equivalence.grade_batch

        def grade_batch(pairs):
            pairs = list(pairs)
            failed = Verdict("error", reason="ValueError: oops")
            verdicts = zip(pairs, real(pairs), strict=True)
            return [failed if answer == "13" else verdict for (_, answer), verdict in verdicts]

        monkeypatch.setattr(equivalence, "grade_batch", grade_batch)

    @pytest.mark.usefixtures("broken")
    def test_an_error_of_the_grader_is_no_score_and_spares_the_others(self):
        pairs = [("4", f"<answer>{n}</answer>") for n in (4, 13, 5)]
        outcomes = play(make(), pairs)
        assert scores(outcomes) == [1.0, "error", 0.0]
        assert "correctness: ScoreError" in outcomes[1].error
        assert "oops" in outcomes[1].error

    @pytest.mark.usefixtures("broken")
    def test_a_step_raises_it(self):
        with pytest.raises(ScoreError, match=r"status 'error' \(ValueError: oops\)"):
            correctness("<answer>13</answer>", "4")

    @pytest.mark.parametrize("gold", ["see figure", "", 4, None, ["4"]], ids=repr)
    def test_a_gold_that_was_not_checked_and_cannot_be_read_is_no_score(self, gold):
        assert scores(play(make(), [(gold, "<answer>4</answer>"), ("4", "4")])) == ["error", 1.0]


class TestWhereItRuns:
    def test_answers_of_a_turn_are_graded_in_one_batch(self, monkeypatch):
        real, batches = equivalence.grade_batch, []
        monkeypatch.setattr(
            equivalence, "grade_batch", lambda pairs: batches.append(pairs) or real(pairs)
        )
        monkeypatch.setattr(equivalence, "grade", None)
        env = make()
        assert scores(play(env, [("4", "4"), ("4", "4.0"), ("4", "4"), ("4", "5")])) == [1, 1, 1, 0]
        assert batches == [[("4", "4"), ("4", "4.0"), ("4", "5")]]
        assert env._equivalence._known == {}

    def test_a_subclass_may_build_on_the_verdict(self):
        class Scaled(MathMultiReward):
            @mrgym.component(low=0)
            def correctness(self, task, completion):
                """Half of it."""
                return 0.5 * super().correctness(task, completion)

        env = Scaled(correctness="equivalent", train_count=4, eval_count=4)
        assert scores(play(env, [("1/2", "0.5"), ("1/2", "0.6")])) == [0.5, 0.0]

    def test_worker_processes_give_the_same(self):
        pairs = [("1/2", "0.5"), ("4", "5"), (HEAVY.answer, HEAVY_ANSWER), ("see figure", "4")]
        env = make()
        with WorkerScorer(deadline=30.0) as workers:
            assert scores(play(env, pairs, workers)) == scores(play(env, pairs))

    def test_a_pickled_one_gives_the_same(self):
        env = make()
        assert scores(play(env, [(HEAVY.answer, HEAVY_ANSWER)])) == [1.0]
        copy = pickle.loads(pickle.dumps(env))
        assert scores(play(copy, [(HEAVY.answer, HEAVY_ANSWER)])) == [1.0]

    @pytest.mark.filterwarnings("ignore:.*are no integers")
    def test_vector_environments_grade_in_processes_of_their_own(self):
        tasks = [Task(f"{n}?", HEAVY.answer) for n in range(20)]
        play(make(), [(HEAVY.answer, HEAVY_ANSWER)])  # workers that a fork must not touch
        vector = gym.vector.AsyncVectorEnv([lambda: make(tasks=tasks)] * 2, shared_memory=False)
        try:
            vector.reset(seed=0)
            infos = vector.step((HEAVY_ANSWER, "<answer>x</answer>"))[4]
        finally:
            vector.close()
        assert infos["reward_components"]["correctness"].tolist() == [1.0, 0.0]
