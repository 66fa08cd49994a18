"""Text environments: how score methods are declared, run and failed; reset and step."""

from __future__ import annotations

import asyncio
import functools
import math
import pickle

import gymnasium as gym
import numpy as np
import pytest

import mrgym
from mrgym import ABSENT, Component, Gate, RewardContractError, RewardDefinitionError, Task
from mrgym.sampler import Completion
from mrgym.scoring import InlineScorer

TASKS = [Task(f"{i} + 1?", str(i + 1), id=f"t{i}") for i in range(20)]


class Sums(mrgym.SingleTurnEnv):
    """One task per number; a completion is right or wrong."""

    def tasks(self, split):
        return TASKS[:15] if split == "train" else TASKS[15:]

    @mrgym.component(low=0, high=1)
    def right(self, task, completion):
        """1 if the sum is right."""
        return completion == task.answer


def play(env, *completions, task=TASKS[0]):
    """Reset to a task, step through the completions, and return the last transition."""
    env.reset(seed=0, options={"task": task})
    for completion in completions:
        transition = env.step(completion)
    return transition


def scores_of(env, *completions):
    return play(env, *completions)[4]["reward_components"]


def outcomes(env, *completions, timeout=60.0):
    """What the scorer says of completions of the first task."""
    states = [env.start(TASKS[0], np.random.default_rng(0)) for _ in completions]
    return InlineScorer(timeout).score(env, states, [Completion(c) for c in completions])


def single(**methods):
    """A single-turn environment class with these members."""
    return type("Env", (mrgym.SingleTurnEnv,), methods)


def named(function):
    """An environment with the one component ``bad``."""
    return single(bad=mrgym.component(name="bad")(function))()


def shouting(function):
    @functools.wraps(function)
    def wrapped(*args):
        return 2 * function(*args)

    return wrapped


class Variants(mrgym.SingleTurnEnv):
    """Every way to write a score method."""

    @mrgym.component
    def bare(self, task, completion):
        """Length of the text.

        Not part of the doc.
        """
        return len(completion)

    @mrgym.component()
    def empty_parentheses(self, task, completion):
        return len(completion)

    @mrgym.component(name="renamed.v2", doc="by hand")
    def another_name(self, task, completion):
        """Not used as doc."""
        return len(completion)

    @mrgym.component
    async def awaited(self, task, completion):
        await asyncio.sleep(0)
        return len(completion)

    @staticmethod
    @mrgym.component
    def static(task, completion):
        return len(completion) if isinstance(task, Task) else -1

    @staticmethod
    @mrgym.component
    def static_state(state, completion):
        return len(state.task.answer) + 1

    @classmethod
    @mrgym.component
    def of_class(cls, task, completion):
        return len(completion) if isinstance(task, Task) else -1

    @mrgym.component
    def with_state(self, state, completion):
        return len(state.messages)

    @mrgym.component
    @shouting
    def wrapped_inside(self, task, completion):
        return len(completion) / 2

    @shouting
    @mrgym.component
    def wrapped_outside(self, state, completion):
        return state.turn

    @mrgym.component(batched=True)
    def batch(self, tasks, completions):
        return [len(c) for c in completions]

    @mrgym.component(batched=True)
    def batch_of_states(self, states, completions):
        return np.array([len(s.messages) for s in states])

    @mrgym.component(batched=True)
    async def awaited_batch(self, tasks, completions):
        await asyncio.sleep(0)
        return tuple(len(c) for c in completions)

    lambda_ = mrgym.component(name="lambda")(lambda self, task, completion: len(completion))


VARIANTS = [*Variants.components]


class TestDeclaring:
    @pytest.mark.parametrize("name", VARIANTS)
    def test_every_variant_scores(self, name):
        assert scores_of(Variants(), "ab")[name] == 2.0

    @pytest.mark.parametrize("name", VARIANTS)
    def test_every_variant_scores_inside_a_running_event_loop(self, name):
        async def inside():
            return scores_of(Variants(), "ab")[name]

        assert asyncio.run(inside()) == 2.0

    def test_components_stand_in_the_order_of_the_methods(self):
        assert VARIANTS[:4] == ["bare", "empty_parentheses", "renamed.v2", "awaited"]
        assert len(VARIANTS) == 14

    @pytest.mark.parametrize(
        ("name", "doc"), [("bare", "Length of the text."), ("renamed.v2", "by hand"), ("batch", "")]
    )
    def test_the_doc_is_the_first_line_unless_given(self, name, doc):
        assert Variants.components[name].doc == doc

    def test_the_declaration_is_kept_whole(self):
        given = {"low": -1, "high": 2, "weight": 0.5, "optional": True, "reduce": "max"}
        gate = Gate("bare", 1)
        scored = mrgym.component(name="scored", gate=gate, doc="text", **given)(
            lambda self, t, c: 1
        )
        env = single(bare=Variants.bare, scored=scored)
        assert env.components["scored"] == Component(gate=gate, doc="text", **given)

    @pytest.mark.parametrize("name", ["_hidden", "two words", "<lambda>"])
    def test_unusable_names_are_refused(self, name):
        with pytest.raises(RewardDefinitionError, match=r"expected a letter followed by"):
            single(scored=mrgym.component(name=name)(lambda self, task, completion: 1))

    def test_two_methods_of_one_name_are_refused(self):
        """huggingface/trl#6313; huggingface/open-r1#230: duplicates end at the definition."""
        one = mrgym.component(name="same")(lambda self, task, completion: 1)
        two = mrgym.component(name="same")(lambda self, task, completion: 0)
        with pytest.raises(RewardDefinitionError, match=r"component 'same' from 'a' and 'b'"):
            single(a=one, b=two)

    def test_marks_and_a_declaration_are_one_too_many(self):
        declared = mrgym.components(right=Component())
        with pytest.raises(RewardDefinitionError, match=r"expected one of the two"):
            type("Env", (mrgym.SingleTurnEnv,), {"right": Sums.right, "components": declared})

    def test_no_component_at_all(self):
        with pytest.raises(RewardDefinitionError, match=r"Env: got components=None"):
            play(single()(), "x")


class TestInheritance:
    def test_an_override_without_a_mark_keeps_the_declaration(self):
        class Lenient(Sums):
            def right(self, task, completion):
                return task.answer in completion

        assert Lenient.components == Sums.components
        assert scores_of(Lenient(), "it is 1.") == {"right": 1.0}
        assert scores_of(Sums(), "it is 1.") == {"right": 0.0}

    def test_an_override_with_a_mark_has_its_own(self):
        class Graded(Sums):
            @mrgym.component(low=0, high=2)
            def right(self, task, completion):
                return 2

        assert Graded.components["right"].high == 2
        assert Sums.components["right"].high == 1

    def test_none_removes_a_component(self):
        class Longer(Sums):
            right = None

            @mrgym.component
            def length(self, task, completion):
                return len(completion)

        class Longest(Longer):
            pass

        assert [*Longest.components] == ["length"]
        assert scores_of(Longest(), "abc") == {"length": 3.0}

    def test_removing_the_last_component_is_refused(self):
        with pytest.raises(RewardDefinitionError, match=r"expected at least one"):
            type("Empty", (Sums,), {"right": None})

    def test_a_subclass_adds_after_its_base(self):
        class More(Sums):
            @mrgym.component
            def length(self, task, completion):
                return len(completion)

        assert [*More.components] == ["right", "length"]
        assert [*Sums.components] == ["right"]

    def test_mixins_bring_components(self):
        class Short:
            @mrgym.component
            def short(self, task, completion):
                return -len(completion)

        assert {*type("Both", (Short, Sums), {}).components} == {"right", "short"}


class TestScoresMapping:
    def env(self, result, *, asynchronous=False):
        def scores(self, task, completion):
            return result

        async def later(self, task, completion):
            return result

        declared = mrgym.components(a=Component(low=0, high=1), b=Component(optional=True))
        return single(components=declared, scores=later if asynchronous else scores)()

    @pytest.mark.parametrize("asynchronous", [False, True])
    @pytest.mark.parametrize("result", [{"a": 1, "b": 2}, {"a": 1, "b": ABSENT}])
    def test_one_method_scores_everything(self, result, asynchronous):
        wanted = {k: float(v) for k, v in result.items() if v is not ABSENT}
        assert scores_of(self.env(result, asynchronous=asynchronous), "x") == wanted

    @pytest.mark.parametrize(
        ("result", "said"),
        [
            ({"a": 1}, r"missing \['b'\]"),
            ({"a": 1, "b": 1, "c": 1}, r"unknown \['c'\]"),
            ({}, r"missing \['a', 'b'\]"),
            (1.0, r"got 1\.0, expected a mapping"),
            (None, r"got None, expected a mapping"),
        ],
    )
    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_it_must_score_exactly_what_is_declared(self, result, said, asynchronous):
        """NVIDIA-NeMo/RL#2680; NovaSky-AI/SkyRL#2104."""
        with pytest.raises(RewardContractError, match=said):
            play(self.env(result, asynchronous=asynchronous), "x")

    def test_it_may_take_the_state(self):
        declared = mrgym.components(a=Component())
        env = single(components=declared, scores=lambda self, state, completion: {"a": state.turn})
        assert scores_of(env(), "x") == {"a": 1.0}


class TestBatched:
    """huggingface/trl#6534: one value for four completions is an error, never broadcast."""

    def env(self, result, *, asynchronous=False):
        def four(self, tasks, completions):
            return result

        async def later(self, tasks, completions):
            return result

        later.__name__ = "four"
        return single(four=mrgym.component(batched=True)(later if asynchronous else four))()

    @pytest.mark.parametrize("asynchronous", [False, True])
    @pytest.mark.parametrize(
        ("result", "said"),
        [
            (1.0, "one value"),
            (None, "one value"),
            (np.array(1.0), "one value"),
            ([1.0], "1 values"),
            (np.ones(3), "3 values"),
            ((1.0,) * 5, "5 values"),
            ([], "0 values"),
        ],
        ids=repr,
    )
    def test_another_count_names_the_function_and_both_counts(self, result, said, asynchronous):
        with pytest.raises(RewardContractError, match=rf"four: got {said} for 4 completions"):
            outcomes(self.env(result, asynchronous=asynchronous), *"abcd")

    @pytest.mark.parametrize("result", [[0, 1, 2, 3], np.arange(4), (0, 1, 2, 3)], ids=repr)
    def test_values_go_to_their_completions_in_order(self, result):
        got = outcomes(self.env(result), *"abcd")
        assert [o.scores["four"] for o in got] == [0, 1, 2, 3]

    def test_a_batch_that_raises_fails_all_of_it(self):
        def four(self, tasks, completions):
            raise KeyError("gone")

        got = outcomes(single(four=mrgym.component(batched=True)(four))(), *"ab")
        assert [(o.status, o.error) for o in got] == [("error", "four: KeyError('gone')")] * 2

    def test_a_batch_that_hangs_times_out(self):
        async def four(self, tasks, completions):
            await asyncio.Event().wait()

        env = single(four=mrgym.component(batched=True)(four))()
        got = outcomes(env, *"ab", timeout=0.01)
        assert [o.status for o in got] == ["timeout"] * 2
        assert got[0].error == "four: no score within 0.01 s"

    def test_a_batched_function_is_not_called_for_nobody(self):
        assert outcomes(self.env(None)) == []


def raising(error, asynchronous):
    def bad(self, task, completion):
        raise error

    async def later(self, task, completion):
        await asyncio.sleep(0)
        raise error

    later.__name__ = "bad"
    return later if asynchronous else bad


class TestFailures:
    """NVIDIA-NeMo/RL#2207: a verifier that fails gives a status, not a 0."""

    @pytest.mark.parametrize("asynchronous", [False, True])
    @pytest.mark.parametrize(
        "error", [ValueError("no"), ZeroDivisionError(), RecursionError(), MemoryError()], ids=repr
    )
    def test_raising_is_an_error_with_the_name(self, error, asynchronous):
        (got,) = outcomes(named(raising(error, asynchronous)), "x")
        assert (got.status, got.error) == ("error", f"bad: {error!r}")

    @pytest.mark.parametrize("timeout", [0.01, 0.5, None])
    def test_a_timeout_raised_by_the_function_itself_counts_as_one(self, timeout):
        env = named(raising(TimeoutError("upstream"), True))
        (got,) = outcomes(env, "x", timeout=timeout)
        assert got.status == "timeout"

    @pytest.mark.parametrize("timeout", [0.01, 0.02])
    def test_hanging_is_a_timeout_with_the_name_and_others_still_score(self, timeout):
        async def bad(self, task, completion):
            if completion == "hang":
                await asyncio.Event().wait()
            return 1

        got = outcomes(named(bad), "hang", "fine", timeout=timeout)
        assert [o.status for o in got] == ["timeout", "ok"]
        assert got[0].error == f"bad: no score within {timeout} s"
        assert got[1].scores == {"bad": 1}

    def test_step_says_so(self):
        env = named(raising(ValueError("no"), False))
        with pytest.raises(mrgym.ScoreError, match=r"Env: bad: ValueError\('no'\)"):
            play(env, "x")

    def test_after_a_failure_the_episode_is_over(self):
        env = named(raising(ValueError("no"), False))
        env.reset(options={"task": TASKS[0]})
        with pytest.raises(mrgym.ScoreError):
            env.step("x")
        with pytest.raises(gym.error.ResetNeeded):
            env.step("x")

    @pytest.mark.parametrize("score", [math.nan, math.inf, None, "1", [1.0], np.ones(1), 1j])
    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_a_score_that_is_no_number_breaks_the_contract(self, score, asynchronous):
        async def later(self, task, completion):
            return score

        bad = later if asynchronous else lambda self, task, completion: score
        env = named(bad)
        with pytest.raises(RewardContractError, match=r"Env, task t0: got bad="):
            play(env, "x")

    def test_only_an_optional_component_abstains(self):
        def absent(self, task, completion):
            return ABSENT

        with pytest.raises(RewardContractError, match=r"ABSENT for component 'absent'"):
            play(single(absent=mrgym.component(absent))(), "x")
        assert scores_of(single(absent=mrgym.component(optional=True)(absent))(), "x") == {}


class TestStep:
    def test_step_needs_an_episode(self):
        env = Sums()
        with pytest.raises(gym.error.ResetNeeded):
            env.step("x")
        play(env, "x")
        with pytest.raises(gym.error.ResetNeeded):
            env.step("x")

    @pytest.mark.parametrize("action", [None, 3, b"x", ["x"]], ids=repr)
    def test_an_action_is_text(self, action):
        with pytest.raises(mrgym.MrgymError, match=r"got .*expected text"):
            play(Sums(), action)


class TestReset:
    def ids(self, env, seeds):
        return [env.reset(seed=seed)[1]["task_id"] for seed in seeds]

    def test_the_seed_chooses_the_task(self):
        seeds = range(40)
        assert self.ids(Sums(), seeds) == self.ids(Sums(), seeds)
        assert len({*self.ids(Sums(), seeds)}) > 8

    def test_without_a_seed_the_stream_goes_on(self):
        one, two = Sums(), Sums()
        runs = [self.ids(env, [7, *[None] * 10]) for env in (one, two)]
        assert runs[0] == runs[1]
        assert len({*runs[0]}) > 3

    def test_it_returns_the_prompt_in_both_forms(self):
        env = Sums()
        env.instruction = "Add."
        observation, info = env.reset(options={"task_id": "t3"})
        assert observation == "3 + 1?"
        assert info["messages"] == [{"role": "user", "content": "Add.\n\n3 + 1?"}]
        assert observation in env.observation_space

    def test_message_prompts_are_taken_as_they_are(self):
        messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1?"}]
        observation, info = Sums().reset(options={"task": Task(messages, "2")})
        assert observation == "system: Add.\nuser: 1 + 1?\n"
        assert info["messages"] == messages

    @pytest.mark.parametrize("split", ["train", "eval"])
    @pytest.mark.parametrize("how", ["option", "argument"])
    def test_the_split_can_be_chosen(self, split, how):
        env = Sums(split=split) if how == "argument" else Sums()
        options = {"split": split} if how == "option" else {}
        drawn = {env.reset(seed=s, options=options)[1]["task_id"] for s in range(30)}
        assert drawn <= {task.id for task in env.task_source(split)}

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"task_id": "t99"}, r"task id 't99', expected one of 15 ids; did you mean"),
            ({"task_id": 3}, r"task id 3, expected one of 15 ids"),
            ({"split": "test"}, r"split 'test', expected 'train' or 'eval'"),
            ({"task": "2 + 2?"}, r"got task '2 \+ 2\?', expected a mrgym\.Task"),
        ],
    )
    def test_bad_options_are_named(self, options, said):
        with pytest.raises(mrgym.TaskError, match=said):
            Sums().reset(options=options)

    def test_an_environment_without_tasks_says_so(self):
        with pytest.raises(mrgym.TaskError, match=r"define tasks\(self, split\)"):
            Variants().reset()

    def test_an_init_that_forgets_super_still_works(self):
        class Own(Sums):
            def __init__(self, bonus):
                self.bonus = bonus

        assert play(Own(1), "1")[1] == 1.0
        assert pickle.loads(pickle.dumps(Sums(split="eval"))).split == "eval"
