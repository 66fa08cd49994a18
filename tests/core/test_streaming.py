"""Scoring while the sampler goes on: nothing lost, doubled or reordered, and errors get through."""

import threading
import time

import pytest

import mrgym
from mrgym.errors import RolloutError, SamplerError
from mrgym.rollout import run_groups
from mrgym.sampler import Completion, SamplingParams
from mrgym.streaming import StreamingSampler, ready_completions


class Stream:
    """Hands out ``"<task>/<index>"`` in the order of ``order``; ``fail_after`` breaks it off."""

    codec = None

    def __init__(self, order=None, fail_after=None, wait=None):
        self.order, self.fail_after, self.wait = order, fail_after, wait
        self.threads, self.closed, self.given = set(), 0, 0

    def stream(self, prompts, n, params):
        places = [(i, j) for i in range(len(prompts)) for j in range(n)]
        if self.order:
            places = self.order(places)
        try:
            for k, (i, j) in enumerate(places):
                if k == self.fail_after:
                    raise SamplerError("engine: got a crash, expected completions; restart it")
                if self.wait is not None and k > 0:
                    assert self.wait.wait(10), "nothing was scored while the sampler went on"
                self.threads.add(threading.current_thread().name)
                self.given += 1
                yield i, j, Completion(f"{prompts[i % len(prompts)].task_id}/{j}")
        finally:
            self.closed += 1

    def sample(self, prompts, n, params):
        raise AssertionError("a streaming sampler is asked to stream")


class Echo(mrgym.SingleTurnEnv):
    """Scores every completion by its index, and notes where."""

    def __init__(self):
        super().__init__()
        self.seen, self.threads, self.scored = [], set(), threading.Event()

    def tasks(self, split):
        return [mrgym.Task(prompt=f"{split} {i}", id=f"t{i}") for i in range(4)]

    @mrgym.component(low=0, high=100)
    def index(self, task, completion):
        self.seen.append(str(completion))
        self.threads.add(threading.current_thread().name)
        self.scored.set()
        return int(completion.rpartition("/")[2])


class Together(Echo):
    """A component that looks at many completions at a time."""

    def __init__(self):
        super().__init__()
        self.calls = []

    @mrgym.component(low=0, high=1, batched=True)
    def whole(self, tasks, completions):
        self.calls.append([str(c) for c in completions])
        return [1.0] * len(completions)


def groups_of(env, sampler, n=3):
    tasks = list(env.task_source("train"))
    return run_groups(env, sampler, tasks, n, SamplingParams())


def test_results_are_in_order_whatever_order_completions_arrive_in():
    env = Echo()
    groups = groups_of(env, Stream(order=lambda places: places[::-1]))
    texts = [[r.turns[0].completion for r in g.rollouts] for g in groups]
    assert texts == [[f"t{i}/{j}" for j in range(3)] for i in range(4)]
    assert [[r.components["index"] for r in g.rollouts] for g in groups] == [[0, 1, 2]] * 4
    assert sorted(env.seen) == sorted(text for group in texts for text in group)


def test_scores_are_made_here_while_the_sampler_goes_on_in_its_thread():
    env = Echo()
    sampler = Stream(wait=env.scored)
    groups_of(env, sampler)
    assert env.threads == {threading.current_thread().name}
    assert len(sampler.threads) == 1
    assert not sampler.threads & env.threads


def test_one_thread_serves_every_call():
    sampler = Stream()
    for _ in range(3):
        groups_of(Echo(), sampler)
    assert len(sampler.threads) == 1


def test_a_batched_component_sees_whole_groups():
    env = Together()
    groups_of(env, Stream(order=lambda places: sorted(places, key=lambda place: place[1])))
    for call in env.calls:
        by_task = {
            name: [c for c in call if c.startswith(f"{name}/")] for name in "t0 t1 t2 t3".split()
        }
        assert all(len(members) in (0, 3) for members in by_task.values())
    assert sorted(c for call in env.calls for c in call) == sorted(env.seen)


@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_sampler_that_fails_in_its_thread_fails_the_call(after):
    sampler = Stream(fail_after=after)
    with pytest.raises(SamplerError, match="restart it"):
        groups_of(Echo(), sampler)
    assert sampler.closed == 1


def test_a_score_that_breaks_the_contract_stops_the_sampler():
    class Broken(Echo):
        @mrgym.component(low=0, high=1)
        def index(self, task, completion):
            return 7.0

    sampler = Stream(wait=threading.Event())
    sampler.wait.set()
    sampler.order = lambda places: places * 1
    original = sampler.stream

    def slow(prompts, n, params):
        for item in original(prompts, n, params):
            time.sleep(0.02)
            yield item

    sampler.stream = slow
    with pytest.raises(mrgym.RewardContractError, match="index"):
        groups_of(Broken(), sampler, n=20)
    assert sampler.given < 80


@pytest.mark.parametrize(
    "order",
    [lambda places: places[:-1], lambda places: [*places, places[0]], lambda places: [(9, 9)]],
    ids=["one short", "one twice", "one unasked"],
)
def test_completions_that_do_not_add_up_are_refused(order):
    with pytest.raises(RolloutError, match="sampler: got"):
        groups_of(Echo(), Stream(order=order))


def test_what_cannot_stream_gives_everything_at_once():
    sampler = mrgym.ScriptedSampler(lambda prompt: "x/1")
    assert not isinstance(sampler, StreamingSampler)
    env = Echo()
    prompts = [env.prompt_for(task) for task in env.task_source("train")]
    (ready,) = ready_completions(sampler, prompts, 2, SamplingParams())
    assert [position for position, _ in ready] == [*range(8)]


def test_turns_after_the_first_stream_too():
    class Talk(mrgym.MultiTurnEnv):
        max_turns = 3

        def tasks(self, split):
            return [mrgym.Task(prompt=f"{split} {i}", id=f"t{i}") for i in range(3)]

        def respond(self, state, completion):
            return "go on" if state.turn < 3 else None

        @mrgym.component(low=0, high=9, reduce="sum")
        def spoke(self, state, completion):
            return 1.0

    groups = groups_of(Talk(), Stream(order=lambda places: places[::-1]), n=2)
    assert [[r.components["spoke"] for r in g.rollouts] for g in groups] == [[3.0] * 2] * 3
    for group in groups:
        for rollout in group.rollouts:
            assert {t.completion.partition("/")[0] for t in rollout.turns} == {group.task_id}


def test_an_error_while_scoring_stops_the_sampler_before_it_is_handled():
    class Broken(Echo):
        @mrgym.component(low=0, high=1)
        def wrong(self, task, completion):
            return 2.0

    class Slow(Stream):
        def stream(self, *args):
            for item in super().stream(*args):
                yield item
                time.sleep(0.01)

    sampler = Slow()
    with pytest.raises(mrgym.RewardContractError) as caught:  # holds the frames of the loop
        groups_of(Broken(), sampler, n=75)
    assert sampler.given < 4 * 75
    assert sampler.closed == 1
    assert caught.value.__traceback__ is not None
