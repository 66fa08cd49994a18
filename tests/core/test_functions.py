"""Environments made of plain functions."""

from __future__ import annotations

import asyncio
import functools
import pickle

import pytest

import mrgym
from mrgym import Component, RewardContractError, RewardDefinitionError, Task

TASKS = [Task(f"{i} + 1?", str(i + 1), id=f"t{i}") for i in range(20)]


def play(env, *completions, task=TASKS[0]):
    """Reset to a task, step through the completions, and return the last transition."""
    env.reset(seed=0, options={"task": task})
    for completion in completions:
        transition = env.step(completion)
    return transition


def scores_of(env, *completions):
    return play(env, *completions)[4]["reward_components"]


def right(task, completion):
    return completion == task.answer


def short(task, completion, limit):
    return len(completion) <= limit


async def slow(task, completion):
    await asyncio.sleep(0)
    return 1


class LengthPenalty:
    def __call__(self, task, completion):
        return -len(completion)


class TestFromFunctions:
    """huggingface/trl#6313; huggingface/open-r1#230: names are derived or asked for."""

    @pytest.mark.parametrize(
        ("function", "name", "value"),
        [
            (right, "right", 1.0),
            (slow, "slow", 1.0),
            (functools.partial(short, limit=3), "short", 1.0),
            (functools.partial(functools.partial(short), limit=0), "short", 0.0),
            (LengthPenalty(), "length_penalty", -1.0),
        ],
        ids=["function", "async", "partial", "partial of partial", "object"],
    )
    def test_a_name_is_derived(self, function, name, value):
        env = mrgym.from_functions(TASKS, [function])
        assert scores_of(env, "1") == {name: value}

    @pytest.mark.parametrize(
        ("functions", "said"),
        [
            ([lambda t, c: 1, lambda t, c: 0], r"lambda without a name.*mapping"),
            ([functools.partial(lambda t, c: 1)], r"lambda without a name"),
            ([right, right], r"two functions named 'right'"),
            ([functools.partial(short, limit=1), functools.partial(short, limit=2)], r"'short'"),
            ([LengthPenalty(), LengthPenalty()], r"two functions named 'length_penalty'"),
            ([], r"expected at least one"),
            ({"_a": right}, r"expected a letter followed by"),
        ],
    )
    def test_no_name_or_one_name_twice_is_refused_at_once(self, functions, said):
        with pytest.raises(RewardDefinitionError, match=said):
            mrgym.from_functions(TASKS, functions)

    def test_a_mapping_names_anything(self):
        functions = {
            "long": lambda task, completion: len(completion) > 1,
            "short": lambda task, completion: len(completion) <= 1,
        }
        assert scores_of(mrgym.from_functions(TASKS, functions), "1") == {"long": 0.0, "short": 1.0}

    def test_declarations_go_by_name(self):
        components = {"right": Component(low=0, high=1, weight=2)}
        env = mrgym.from_functions(TASKS, [right, LengthPenalty()], components=components)
        assert env.components["right"].weight == 2
        assert env.components["length_penalty"] == Component()

    def test_a_declaration_for_no_function_is_refused(self):
        with pytest.raises(RewardDefinitionError, match=r"\['write'\], expected names among"):
            mrgym.from_functions(TASKS, [right], components={"write": Component()})

    def test_environments_do_not_share_functions(self):
        one = mrgym.from_functions(TASKS, {"a": lambda t, c: 1})
        two = mrgym.from_functions(TASKS, {"a": lambda t, c: 2})
        assert (scores_of(one, "x"), scores_of(two, "x")) == ({"a": 1.0}, {"a": 2.0})

    def test_it_survives_pickling_with_importable_functions(self):
        env = pickle.loads(pickle.dumps(mrgym.from_functions(TASKS, [right])))
        assert scores_of(env, "1") == {"right": 1.0}

    def test_eval_tasks_are_held_out(self):
        env = mrgym.from_functions(TASKS[:4], [right], eval_tasks=TASKS[4:6])
        assert [len(env.task_source(split)) for split in ("train", "eval")] == [4, 2]
        with pytest.raises(mrgym.TaskError, match=r"1 eval tasks that stand in"):
            mrgym.from_functions(TASKS[:4], [right], eval_tasks=TASKS[3:6]).task_source("eval")


class TestFromVerifier:
    def test_a_single_number_is_the_component_reward(self):
        assert scores_of(mrgym.from_verifier(TASKS, right), "1") == {"reward": 1.0}

    @pytest.mark.parametrize("partial", [False, True])
    def test_a_mapping_is_checked_against_the_declaration(self, partial):
        def judge(task, completion, factor=1):
            return {"a": 1 * factor, "b": 0.5}

        verifier = functools.partial(judge, factor=2) if partial else judge
        components = {"a": Component(), "b": Component()}
        env = mrgym.from_verifier(TASKS, verifier, components=components)
        assert scores_of(env, "x") == {"a": 2.0 if partial else 1.0, "b": 0.5}

    @pytest.mark.parametrize("result", [{"a": 1}, {"a": 1, "b": 1, "c": 1}, 1.0])
    def test_another_mapping_is_refused(self, result):
        components = mrgym.components(a=Component(), b=Component())
        env = mrgym.from_verifier(TASKS, lambda t, c: result, components=components)
        with pytest.raises(RewardContractError, match=r"expected"):
            play(env, "x")

    def test_a_mapping_without_a_declaration_is_refused(self):
        env = mrgym.from_verifier(TASKS, lambda t, c: {"a": 1})
        with pytest.raises(RewardContractError, match=r"got reward=.*expected one real number"):
            play(env, "x")
