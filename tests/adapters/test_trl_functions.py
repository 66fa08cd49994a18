"""What TRL is given, and how it may call it; TRL itself is not needed for that."""

from __future__ import annotations

import asyncio
import logging
import pickle
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import mrgym
from mrgym.adapters import trl as mrgym_trl
from mrgym.errors import (
    ConfigError,
    MissingExtraError,
    RewardDefinitionError,
    RolloutError,
    ScoreError,
    TaskError,
)


class Counting(mrgym.SingleTurnEnv):
    """Counts how often it is asked; abstains on answers without digits and fails on "boom"."""

    def __init__(self, **options):
        super().__init__(**options)
        self.calls = 0

    def tasks(self, split):
        first = 0 if split == "train" else 10
        return [mrgym.Task(f"{split} {i}?", str(i), id=f"t{i}") for i in range(first, first + 10)]

    @mrgym.component(low=0, high=1, weight=2.0)
    def right(self, task, completion):
        self.calls += 1
        if completion == "boom":
            raise ValueError("boom")
        return completion == task.answer

    @mrgym.component(low=0, high=100)
    def length(self, task, completion):
        return len(completion.token_ids) + (50 if completion.truncated else 0)

    @mrgym.component(low=0, high=9, optional=True)
    def digit(self, task, completion):
        return int(completion[0]) if completion[:1].isdigit() else mrgym.ABSENT


class Awaiting(Counting):
    """The same with a score function that must be awaited."""

    @mrgym.component(low=0, high=1)
    async def late(self, task, completion):
        self.calls += 1
        await asyncio.sleep(0)
        return 0.25


class Talk(mrgym.MultiTurnEnv):
    """Up to three turns."""

    max_turns = 3

    def tasks(self, split):
        return [mrgym.Task(f"{split} {i}?", "x", id=f"{split}{i}") for i in range(3)]

    def respond(self, state, completion):
        return "again"

    @mrgym.component(low=0, high=1)
    def right(self, state, completion):
        return 1


class Gridworld(mrgym.MultiRewardEnv):
    """No text."""

    components = mrgym.components(goal=mrgym.Component(low=0, high=1))


def call(functions, *args, **columns):
    return {f.__name__: f(prompts=None, **columns) for f in functions}


def test_identical_components_for_the_sample(sample):
    functions = mrgym_trl.reward_functions(sample.env)
    assert [f.__name__ for f in functions] == ["correctness", "format", "integer"]
    ids = [task.id for task in sample.tasks]
    for completions in (
        sample.completions,
        [[{"role": "assistant", "content": text}] for text in sample.completions],
    ):
        columns = call(functions, completions=completions, task_id=ids)
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        assert rows == sample.components


def test_each_completion_is_scored_once_in_any_order_and_again_for_another_batch():
    env = Counting()
    functions = mrgym_trl.reward_functions(env)
    batch = {"completions": ["1", "x", "2"], "completion_ids": [[1], [2, 3], [4]]}
    columns = {"task_id": ["t1", "t1", "t11"]}
    got = call(reversed(functions), **batch, **columns)
    assert got == {"digit": [1.0, None, 2.0], "length": [1.0, 2.0, 1.0], "right": [1.0, 0.0, 0.0]}
    assert call(functions, **batch, **columns) == got
    assert env.calls == 3
    fresh = {key: list(value) for key, value in batch.items()}  # equal, but another step's
    assert call(functions, **fresh, **columns) == got
    assert env.calls == 6
    assert call(functions, **batch, **columns) == got
    assert env.calls == 6


def test_what_is_remembered_is_this_batch_and_no_other():
    functions = mrgym_trl.reward_functions(Counting())
    ids = [[1], [2]]
    right = functions[0]
    assert right(completions=["1", "x"], completion_ids=ids, task_id=["t1", "t1"]) == [1.0, 0.0]
    assert right(completions=["x", "1"], completion_ids=ids, task_id=["t1", "t1"]) == [0.0, 1.0]
    assert right(completions=["1", "x"], completion_ids=ids, task_id=["t2", "t2"]) == [0.0, 0.0]
    for n in range(200):  # lists that come and go, at addresses used again
        got = right(completions=[str(n % 2)], completion_ids=[[n]], task_id=["t1"])
        assert got == [float(n % 2)]


def test_without_completion_ids_the_completions_tell_batches_apart():
    env = Counting()
    functions = mrgym_trl.reward_functions(env)
    completions = ["1", "x"]
    got = call(functions, completions=completions, task_id=["t1", "t1"])
    assert got["right"] == [1.0, 0.0]
    assert got["length"] == [0.0, 0.0]
    assert env.calls == 2


@pytest.mark.parametrize("make", [Counting, Awaiting])
def test_called_from_threads_and_from_a_running_loop(make):
    env = make()
    functions = mrgym_trl.reward_functions(env)
    batches = [
        {
            "completions": [str(i), "x"],
            "completion_ids": [[i], [i]],
            "task_id": [f"t{i}", f"t{i}"],
        }
        for i in range(4)
    ]
    jobs = [(function, batch) for batch in batches for function in functions] * 3
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda job: (job[0].__name__, job[0](**job[1])), jobs))
    for name, scores in got:
        if name == "right":
            assert scores == [1.0, 0.0]
    per_completion = 1 if make is Counting else 2
    assert env.calls == 8 * per_completion

    async def inside():
        return call(functions, **batches[0]), call(
            functions, **{**batches[0], "completions": ["0"] * 2}
        )

    first, second = asyncio.run(inside())
    assert first["right"] == [1.0, 0.0]
    assert second["right"] == [1.0, 1.0]


def test_failed_scores_are_none_and_loud(caplog):
    env = Counting()
    functions = mrgym_trl.reward_functions(env, max_error_rate=0.5)
    metrics = []
    with caplog.at_level(logging.WARNING, "mrgym"):
        got = call(
            functions,
            completions=["boom", "1"],
            completion_ids=[[1], [1]],
            task_id=["t1", "t1"],
            log_metric=lambda name, value: metrics.append((name, value)),
        )
    assert got == {"right": [None, 1.0], "length": [None, 1.0], "digit": [None, 1.0]}
    assert "50.0% of 2 completions" in caplog.text
    assert "right: ValueError('boom')" in caplog.text
    assert metrics == [("mrgym/frac_failed", 0.5), ("present/digit", 0.5)]


def test_too_many_failures_stop_the_run():
    function = mrgym_trl.reward_functions(Counting())[0]
    with pytest.raises(ScoreError, match=r"got 1 failures in 2 rollouts .*raise max_error_rate"):
        function(completions=["boom", "1"], task_id=["t1", "t1"])


class Letters:
    """A tokenizer of letters; 0 ends."""

    eos_token_id, pad_token_id = 0, 9

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return "".join(str(i) for i in ids if i != 0)


def test_truncation_and_text_are_read_from_the_tokens():
    functions = mrgym_trl.reward_functions(Counting(), tokenizer=Letters(), max_completion_length=3)
    parsed = [[{"role": "assistant", "content": "", "reasoning_content": "1"}]] * 3
    got = call(
        functions,
        completions=parsed,
        completion_ids=[[1, 2, 3], [1, 2, 0], [1, 0]],
        task_id=["t1"] * 3,
    )
    assert got == {"right": [0.0, 0.0, 1.0], "length": [53.0, 3.0, 2.0], "digit": [1.0, 1.0, 1.0]}


@pytest.mark.parametrize(
    "completion",
    [
        [{"role": "assistant", "content": "7", "reasoning_content": "so"}],
        [{"role": "assistant", "content": "7", "tool_calls": [{"name": "f"}]}],
        [{"role": "assistant", "content": "7"}, {"role": "tool", "content": "8"}],
        [{"role": "assistant"}],
        [],
        7,
    ],
)
def test_text_that_was_taken_apart_is_refused(completion):
    function = mrgym_trl.reward_functions(Counting())[0]
    with pytest.raises(RolloutError, match=r"trl: got completion .* pass tokenizer=\.\.\."):
        function(completions=[completion], task_id=["t1"])


def test_a_task_is_found_by_its_id_or_refused():
    function = mrgym_trl.reward_functions(Counting())[0]
    assert function(completions=["11"], task_id=["t11"]) == [1.0]
    assert function(completions=["11"], task_id=["t11"], split=["eval"]) == [1.0]
    with pytest.raises(TaskError, match=r"trl: got columns \['answer'\], expected 'task_id'"):
        function(completions=["1"], answer=["1"], trainer_state=object())
    with pytest.raises(TaskError, match=r"got task id 't99', expected one of 10 ids"):
        function(completions=["1"], task_id=["t99"])
    with pytest.raises(TaskError, match=r"got task id 't1', expected one of"):
        function(completions=["1"], task_id=["t1"], split=["eval"])


def test_an_id_in_both_splits_needs_the_split():
    def task(prompt, answer):
        return mrgym.Task(prompt, answer, id="1")

    env = Counting(tasks=[task("a", "A")], eval_tasks=[task("b", "B")])
    function = mrgym_trl.reward_functions(env)[0]
    with pytest.raises(TaskError, match="'1', which stands in train and in eval"):
        function(completions=["B"], task_id=["1"])
    assert function(completions=["B"] * 2, task_id=["1"] * 2, split=["train", "eval"]) == [0, 1]


def test_several_turns_and_tool_environments_are_refused():
    talking = mrgym_trl.reward_functions(Talk())[0]
    with pytest.raises(RolloutError, match=r"up to 3, expected whole rollouts; pass rollout_func="):
        talking(completions=["x"], task_id=["train0"])
    function = mrgym_trl.reward_functions(Counting())[0]
    with pytest.raises(RolloutError, match="got environments of an environment_factory"):
        function(completions=["1"], task_id=["t1"], environments=[object()])


def test_only_text_environments():
    with pytest.raises(RewardDefinitionError, match="trl: got Gridworld, expected a text"):
        mrgym_trl.reward_functions(Gridworld())


def test_weights_by_name():
    assert mrgym_trl.reward_weights(Counting()) == [2.0, 1.0, 1.0]
    assert mrgym_trl.reward_weights(Counting(), {"digit": 0.5}) == [2.0, 1.0, 0.5]
    with pytest.raises(RewardDefinitionError, match=r"'lenght'.*did you mean 'length'\?"):
        mrgym_trl.reward_weights(Counting(), {"lenght": 1.0})
    with pytest.raises(RewardDefinitionError, match=r"trl: got weights {'digit': nan}"):
        mrgym_trl.reward_weights(Counting(), {"digit": float("nan")})


@pytest.mark.parametrize("name", sorted(mrgym_trl.TAKEN))
def test_names_of_columns_are_refused(name):
    class Named(Counting):
        @mrgym.component(name=name)
        def further(self, task, completion):
            return 1

    with pytest.raises(RewardDefinitionError, match=name):
        mrgym_trl.reward_functions(Named())


def test_a_token_limit_without_a_tokenizer_is_refused():
    with pytest.raises(ConfigError, match="max_completion_length=3 without a tokenizer"):
        mrgym_trl.reward_functions(Counting(), max_completion_length=3)


def test_functions_survive_pickling():
    functions = pickle.loads(pickle.dumps(mrgym_trl.reward_functions(mrgym.make("math_length"))))
    assert [f.__name__ for f in functions] == ["correctness", "length"]
    task = mrgym.make("math_length").task_source("train")[0]
    right = functions[0](completions=[f"<answer>{task.answer}</answer>"], task_id=[task.id])
    assert right == [1.0]


def test_the_same_prompt_for_two_tasks_cannot_be_played():
    env = Talk(
        tasks=[mrgym.Task("same", "1", id="a"), mrgym.Task("same", "2", id="b")],
        eval_tasks=[mrgym.Task("other", "2")],
    )
    with pytest.raises(TaskError, match="got tasks a and b with the same prompt"):
        mrgym_trl.rollout_function(env)


def test_rollouts_on_several_processes_or_for_other_prompts_are_refused():
    play = mrgym_trl.rollout_function(Talk())
    with pytest.raises(RolloutError, match="got 2 processes, expected one"):
        play(["train 0?"], SimpleNamespace(accelerator=SimpleNamespace(num_processes=2)))
    with pytest.raises(TaskError, match=r"got prompt 'other\?', expected one of"):
        play(["other?"], SimpleNamespace(accelerator=SimpleNamespace(num_processes=1)))


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"datasets: not installed.*mrgym\[trl\]"):
        mrgym_trl.dataset(Counting())
