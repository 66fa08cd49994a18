"""Which groups a step learns from: task order, prompts that fit, groups drawn again."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

import mrgym
from mrgym.errors import ConfigError, ScoreError, TaskError
from mrgym.sampler import Completion
from mrgym.scoring import InlineScorer
from mrgym_trainers.gdpo.config import GDPOConfig
from mrgym_trainers.gdpo.draw import GroupSource, PromptFilter, TaskOrder

LONG = "x" * 50


class Bytes:
    """Encodes a prompt as its bytes."""

    def start(self, prompt):
        return [*prompt.text.encode()]

    def reply(self, prompt, answers):
        raise AssertionError("one turn only")


class Counting:
    """Answers ``"<task> <index>"``; knows what it was asked."""

    codec = Bytes()
    context_length = 40

    def __init__(self):
        self.calls = []

    def sample(self, prompts, n, params):
        self.calls.append(SimpleNamespace(prompts=prompts, n=n, params=params))
        return [[self._answer(prompt, j) for j in range(n)] for prompt in prompts]

    def _answer(self, prompt, index):
        return Completion(f"{prompt.text} {index}", token_ids=[1], sampler_logprobs=[-1.0])


class Numbered(mrgym.SingleTurnEnv):
    """Tasks 0 to 9; only those with an even number tell their completions apart."""

    dull = "13579"

    def tasks(self, split):
        return [mrgym.Task(prompt=f"{split} {i}", id=f"{i}") for i in range(10)]

    @mrgym.component(low=0, high=9)
    def index(self, task, completion):
        return 1.0 if task.id in self.dull else float(completion.split()[-1])

    @mrgym.component(low=0, high=9, weight=0.0)
    def unweighted(self, task, completion):
        return float(completion.split()[-1])


def signal(groups):
    return [len({r.components["index"] for r in group.rollouts}) > 1 for group in groups]


@pytest.fixture
def source():
    def make(env=None, sampler=None, **keys):
        config = GDPOConfig(
            **{"prompts_per_step": 4, "group_size": 2, "max_completion_tokens": 8, **keys}
        )
        env, sampler = env or Numbered(), sampler or Counting()
        order = TaskOrder(env.task_source("train"), config.seed)
        made = GroupSource(env, sampler, InlineScorer(), order, config, lambda: signal)
        return SimpleNamespace(source=made, sampler=sampler, order=order)

    return make


def ids(groups):
    return [group.task_id for group in groups]


def test_the_order_visits_every_task_once_a_round_and_goes_on_from_a_position():
    tasks = Numbered().task_source("train")
    order = TaskOrder(tasks, seed=3)
    rounds = [[order.next().id for _ in range(10)] for _ in range(3)]
    assert all(sorted(r) == sorted(t.id for t in tasks) for r in rounds)
    assert len({tuple(r) for r in rounds}) == 3
    again = TaskOrder(tasks, seed=3)
    again.position = 13
    assert [again.next().id for _ in range(7)] == rounds[1][3:]


def test_without_dynamic_sampling_every_group_is_kept(source):
    made = source()
    drawn = made.source.draw(1)
    assert len(drawn.groups) == 4
    assert drawn.completions == 8
    assert drawn.counts == {
        "groups/drawn": 4, "groups/dropped": 0, "groups/refills": 0, "prompts/dropped": 0,
    }  # fmt: skip


def test_groups_without_signal_are_replaced(source):
    made = source(dynamic_sampling=True, max_refills=9)
    drawn = made.source.draw(1)
    assert len(drawn.groups) == 4
    assert all(int(name) % 2 == 0 for name in ids(drawn.groups))
    assert drawn.counts["groups/drawn"] == 4 + drawn.counts["groups/dropped"]
    assert drawn.counts["groups/refills"] == len(made.sampler.calls) - 1 > 0
    assert drawn.completions == 2 * drawn.counts["groups/drawn"]
    assert len({group.group for group in drawn.groups}) == 4


def test_refills_end(source):
    class Dull(Numbered):
        dull = "0123456789"

    made = source(env=Dull(), dynamic_sampling=True, max_refills=3)
    drawn = made.source.draw(1)
    assert len(made.sampler.calls) == 4
    assert len(drawn.groups) == 4  # something to report on; the update will skip it


def test_fewer_groups_than_asked_for_are_what_there_is(source):
    class Rare(Numbered):
        dull = "123456789"

    drawn = source(env=Rare(), dynamic_sampling=True, max_refills=2).source.draw(1)
    assert set(ids(drawn.groups)) <= {"0"} or len(drawn.groups) == 4


def test_group_ids_and_seeds_never_repeat(source):
    made = source(dynamic_sampling=True, max_refills=9)
    groups = [group.group for step in (1, 2, 3) for group in made.source.draw(step).groups]
    assert len({*groups}) == len(groups)
    seeds = [call.params.seed for call in made.sampler.calls]
    assert len({*seeds}) == len(seeds)


def test_a_step_samples_the_same_whatever_came_before(source):
    one, other = source(), source()
    one.source.draw(1)
    for made in (one, other):
        made.source.draw(2)
    seeds = [made.sampler.calls[-1].params.seed for made in (one, other)]
    assert seeds[0] == seeds[1]


# --- prompts that are too long ---------------------------------------------------------------


class WithLong(Numbered):
    def tasks(self, split):
        long = [mrgym.Task(prompt=f"{split} {LONG} {i}", id=f"long {i}") for i in range(5)]
        return [*super().tasks(split), *long]


def test_a_long_prompt_stops_the_run_and_is_named(source):
    made = source(env=WithLong(), prompts_per_step=15)
    message = r"task 'long \d': got a prompt of 58 tokens, expected at most 32"
    with pytest.raises(TaskError, match=message):
        made.source.draw(1)


def test_long_prompts_may_be_dropped_and_are_counted(source):
    made = source(env=WithLong(), long_prompts="drop", prompts_per_step=10)
    drawn = made.source.draw(1)
    assert not any("long" in name for name in ids(drawn.groups))
    assert drawn.counts["prompts/dropped"] == made.order.position - 10
    more = sum(made.source.draw(step).counts["prompts/dropped"] for step in (2, 3))
    assert drawn.counts["prompts/dropped"] + more == made.order.position - 30


def test_nothing_but_long_prompts_is_an_error_and_no_endless_search(source):
    made = source(long_prompts="drop", max_prompt_tokens=3)
    with pytest.raises(TaskError, match="10 prompts that are all too long"):
        made.source.draw(1)


def test_held_out_tasks_are_filtered_alike():
    config = GDPOConfig(max_completion_tokens=8, long_prompts="drop")
    env = WithLong()
    fitting = PromptFilter(env, Counting(), config).fitting(env.task_source("eval"))
    assert len(fitting) == 10
    few = GDPOConfig(max_completion_tokens=8, long_prompts="drop", max_prompt_tokens=2)
    with pytest.raises(TaskError, match="expected some"):
        PromptFilter(env, Counting(), few).fitting(env.task_source("eval"))


def test_failures_are_counted_over_all_that_was_drawn(source):
    class Failing(Numbered):
        @mrgym.component(low=0, high=9)
        def index(self, task, completion):
            raise ValueError("boom")

    with pytest.raises(ScoreError, match="8 failures in 8"):
        source(env=Failing(), dynamic_sampling=True).source.draw(1)


def test_what_carries_signal_is_judged_as_it_stood_when_drawing_began(source):
    made = source(dynamic_sampling=True, max_refills=1)
    informative = [1]
    made.source._signal = lambda: partial(first_of, informative[0])
    draw = made.source.prepared(1)
    informative[0] = 3
    assert draw().counts["groups/dropped"] == 5
    assert made.source.draw(2).counts["groups/dropped"] == 1


def first_of(count, groups):
    return [i < count for i in range(len(groups))]


def test_a_context_that_leaves_no_room_for_a_prompt_is_refused(source):
    sampler = Counting()
    sampler.context_length = 512
    with pytest.raises(ConfigError, match=r"max_completion_tokens: got 5000, .* 512 tokens"):
        source(sampler=sampler, max_completion_tokens=5000)
