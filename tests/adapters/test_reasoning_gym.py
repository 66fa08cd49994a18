"""reasoning-gym: all of its datasets as environments."""

from __future__ import annotations

import math
import os
import pickle
import random

import numpy as np
import pytest

import mrgym
from mrgym.adapters.reasoning_gym import (
    EVALUATES,
    dataset_names,
    from_reasoning_gym,
    tagged_answer,
)
from mrgym.scoring import WorkerScorer

pytest.importorskip("reasoning_gym", reason="needs reasoning-gym (make test-peers)")

import reasoning_gym
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.utils import extract_answer

NO_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
RAISE = {"boxnet", "prime_factorization"}
HOLD_LAMBDAS = ["arc_1d", "string_manipulation"]
JUNK = ("", "xyzzy", "<answer>xyzzy</answer>", "<answer>0</answer>", "<answer>1 2\n3</answer>")
QUICK = ["chain_sum", "coin_flip", "list_functions", "string_manipulation", "rubiks_cube"]
EVERY = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in dataset_names()],
)


def made(name, size=4, **config):
    if name == "knight_swap":
        size = 2  # it takes up to a second a task
    if name == "composite":
        parts = [DatasetSpec("chain_sum", 1, {}), DatasetSpec("lcm", 1, {})]
        config = {"datasets": parts, **config}
    return from_reasoning_gym(name, size=size, seed=3, evaluate_answers=True, **config)


def all_tasks(env):
    return [*env.task_source("train"), *env.task_source("eval")]


def scored(env, tasks, text, **options):
    texts = [text(task) if callable(text) else text for task in tasks]
    return mrgym.score_completions(env, tasks, texts, **options)


def entry_of(task):
    return {"question": task.prompt, "answer": task.answer, "metadata": task.metadata}


def theirs(name, env):
    """The dataset as its own package makes it."""
    return reasoning_gym.create_dataset(name, **env._dataset.config)


def test_every_dataset_is_known():
    assert len(dataset_names()) == 106


@EVERY
class TestEveryDataset:
    def test_gold_answers_score_full_marks(self, name):
        env = made(name)
        tasks = [task for task in all_tasks(env) if task.answer is not None]
        assert (not tasks) == (name in NO_ANSWER)
        for rollout in scored(env, tasks, env.gold_completion):
            assert rollout.components == {"correctness": 1.0, "format": 1.0}

    def test_scores_are_those_of_the_dataset_itself(self, name):
        env = made(name)
        dataset = theirs(name, env)
        for task in all_tasks(env):
            for text in JUNK:
                (rollout,) = scored(env, [task], text)
                try:
                    expected = dataset.score_answer(extract_answer(text), entry_of(task))
                except Exception:  # their scorers raise anything
                    expected = None
                if expected is None:
                    assert name in RAISE
                    assert (rollout.status, rollout.components) == ("error", {})
                else:
                    assert rollout.components == {"correctness": float(expected), "format": 0.0}

    def test_no_answer_scores_less_than_the_gold(self, name):
        env = made(name)
        for rollout in scored(env, all_tasks(env), "I do not know"):
            assert rollout.components["correctness"] <= 0.05

    def test_tasks_are_the_same_again_also_after_pickling(self, name):
        env = made(name)
        tasks = all_tasks(env)
        assert all_tasks(made(name)) == tasks
        copied = pickle.loads(pickle.dumps(env))
        assert all_tasks(copied) == tasks
        text = "<answer>1</answer>"
        got = [r.components for r in scored(copied, tasks, text, on_score_error="mask")]
        assert got == [r.components for r in scored(env, tasks, text, on_score_error="mask")]

    def test_the_state_of_global_generators_is_left_alone(self, name):
        random.seed(5)
        np.random.seed(5)
        before = random.getstate(), np.random.get_state()[1].tolist()
        all_tasks(made(name))
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before

    def test_scorers_that_run_answers_as_code_are_the_ones_refused(self, name, monkeypatch):
        env = made(name, size=2)
        monkeypatch.delenv("MRGYM_RAN", raising=False)
        set_it = "__import__('os').environ.__setitem__('MRGYM_RAN', '1')"
        for attack in (set_it, f"[{set_it}]"):
            scored(env, all_tasks(env), f"<answer>{attack}</answer>", on_score_error="mask")
        ran = os.environ.pop("MRGYM_RAN", None) is not None
        assert ran == (name in EVALUATES)


class TestTasks:
    @pytest.mark.parametrize("name", ["chain_sum", "coin_flip", "tower_of_hanoi"])
    def test_train_and_eval_share_no_prompt(self, name):
        env = made(name, size=200)
        train, held_out = env.task_source("train"), env.task_source("eval")
        assert len(train) + len(held_out) == 200
        assert len(held_out) >= 10
        assert not {t.prompt for t in train} & {t.prompt for t in held_out}

    def test_configuration_reaches_the_dataset(self):
        env = made("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
        assert all(len(t.metadata["expression"]) == len("1 + 1") for t in all_tasks(env))

    def test_other_seeds_give_other_tasks(self):
        one, two = (from_reasoning_gym("chain_sum", size=20, seed=s) for s in (1, 1000))
        assert not {t.prompt for t in all_tasks(one)} & {t.prompt for t in all_tasks(two)}

    def test_make_takes_the_function(self):
        path = "mrgym.adapters.reasoning_gym:from_reasoning_gym"
        env = mrgym.make(path, name="lcm", size=9)
        assert len(all_tasks(env)) == 9

    @pytest.mark.parametrize("name", ["chain_sum", "lcm", "string_manipulation", "rush_hour"])
    def test_it_passes_the_check(self, name):
        report = mrgym.check_env(made(name, size=40))
        assert report.ok, str(report)


class TestScoring:
    def test_the_answer_is_stripped(self):
        env = made("lcm")
        (task,) = all_tasks(env)[:1]
        assert env._dataset.score(f" {task.answer}", entry_of(task)) < 1
        (rollout,) = scored(env, [task], f"<answer>\n {task.answer} </answer>")
        assert rollout.components["correctness"] == 1.0

    def test_a_scorer_that_raises_is_an_error_or_the_score_that_was_chosen(self):
        text = "<answer>two times three</answer>"
        env = made("prime_factorization")
        (rollout,) = scored(env, all_tasks(env)[:1], text)
        assert (rollout.status, rollout.components) == ("error", {})
        assert "ValueError" in rollout.error
        with pytest.raises(mrgym.ScoreError):
            scored(env, all_tasks(env)[:1], text, on_score_error="raise")
        chosen = made("prime_factorization", unreadable=0.0)
        (rollout,) = scored(chosen, all_tasks(chosen)[:1], text)
        assert rollout.components == {"correctness": 0.0, "format": 0.0}

    @pytest.mark.parametrize("score", [1.01, -0.5, math.nan, None, "1"])
    def test_a_score_out_of_range_breaks_the_contract(self, monkeypatch, score):
        env = made("chain_sum")
        monkeypatch.setattr(env._dataset._made, "score_answer", lambda answer, entry: score)
        with pytest.raises(mrgym.RewardContractError, match="correctness="):
            scored(env, all_tasks(env)[:1], "x")

    def test_reading_and_format_can_be_given(self):
        env = made("lcm", extract=str, has_format=str.isdigit)
        (task,) = all_tasks(env)[:1]
        (rollout,) = scored(env, [task], task.answer)
        assert rollout.components == {"correctness": 1.0, "format": 1.0}

    @pytest.mark.parametrize("text", JUNK)
    def test_answers_are_found_as_the_package_finds_them(self, text):
        assert tagged_answer(text) == extract_answer(text)

    def test_workers_score_the_same_and_outlive_a_scorer_that_hangs(self):
        with WorkerScorer(deadline=2) as workers:
            for name in HOLD_LAMBDAS:
                env = made(name)
                tasks = all_tasks(env)
                for rollout in scored(env, tasks, env.gold_completion, scorer=workers):
                    assert rollout.components == {"correctness": 1.0, "format": 1.0}
            env = made("n_queens")
            forever = "<answer>sum(0 for _ in iter(int, 1))</answer>"
            (rollout,) = scored(env, all_tasks(env)[:1], forever, scorer=workers)
            assert (rollout.status, rollout.components) == ("timeout", {})


class TestRefusals:
    @pytest.mark.parametrize("name", sorted(EVALUATES))
    def test_a_scorer_that_runs_answers_as_code(self, name):
        with pytest.raises(mrgym.ConfigError, match=f"'{name}'.*evaluate_answers=True"):
            from_reasoning_gym(name)

    def test_one_inside_a_composite_too(self):
        parts = [DatasetSpec("chain_sum", 1, {}), DatasetSpec("countdown", 1, {})]
        with pytest.raises(mrgym.ConfigError, match="countdown"):
            from_reasoning_gym("composite", datasets=parts)

    def test_an_unknown_dataset(self):
        with pytest.raises(mrgym.RegistryError, match="did you mean 'chain_sum'"):
            from_reasoning_gym("chain_sums")

    def test_an_unknown_option(self):
        with pytest.raises(mrgym.ConfigError, match="did you mean 'max_terms'"):
            from_reasoning_gym("chain_sum", max_term=3)

    @pytest.mark.parametrize(
        "config",
        [
            {"size": 0},
            {"min_terms": 5, "max_terms": 2},
            {"min_terms": "x"},
            {"seed": None},
            {"unreadable": -1},
        ],
    )
    def test_a_configuration_that_cannot_work(self, config):
        with pytest.raises(mrgym.ConfigError, match="reasoning_gym chain_sum: got"):
            from_reasoning_gym("chain_sum", **config)

    def test_a_composite_of_nothing(self):
        with pytest.raises(mrgym.ConfigError, match="at least one dataset"):
            from_reasoning_gym("composite")
