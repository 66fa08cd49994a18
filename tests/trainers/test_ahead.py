"""One step off: the next step is drawn while this one learns, and no staler than that."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest

from mrgym.errors import ConfigError, RolloutError, SamplerError
from mrgym.rollout import Group, Rollout
from mrgym_trainers.gdpo.ahead import DrawAhead, DrawInTurn
from mrgym_trainers.gdpo.config import GDPOConfig
from mrgym_trainers.gdpo.draw import Draw
from mrgym_trainers.gdpo.timing import Stopwatch


class Source:
    """Draws one rollout of the weights it was last given, when it is let."""

    def __init__(self):
        self.version, self.go, self.steps, self.syncs = None, threading.Event(), [], []
        self.go.set()
        self.error = None

    def draw(self, step):
        assert self.go.wait(10)
        if self.error:
            raise self.error
        self.steps.append((step, threading.current_thread().name.partition("_")[0]))
        rollout = Rollout("t", step, 0, policy_version=self.version)
        return Draw([Group(step, "t", [rollout])])

    def prepared(self, step):
        return lambda: self.draw(step)

    def sync(self, version):
        self.version = version
        self.syncs.append(version)
        return {"probe/gap_max": 0.0}

    def state(self):
        return {"position": len(self.steps)}

    def load_state(self, state):
        self.steps = [None] * state["position"]


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def ahead(source):
    made = DrawAhead(source, source.sync, last=5)
    made.begin(0)
    yield made
    source.go.set()
    made.close()


def versions(drawn):
    return {r.policy_version for group in drawn.groups for r in group.rollouts}


def test_every_step_but_the_first_is_drawn_with_weights_one_version_old(ahead, source):
    ages = []
    for step in range(1, 6):
        drawn, _ = ahead.take(step)
        ages.append(step - 1 - min(versions(drawn)))
        ahead.learned(step)
    assert ages == [0, 1, 1, 1, 1]
    assert [step for step, _ in source.steps] == [1, 2, 3, 4, 5]  # and nothing after the last
    assert source.syncs == [0, 1, 2, 3, 4]


def test_the_next_step_is_drawn_while_this_thread_goes_on(ahead, source):
    ahead.take(1)
    source.go.clear()
    ahead.take(2)
    assert (3, "mrgym-ahead") not in source.steps
    source.go.set()
    ahead.take(3)
    assert (3, "mrgym-ahead") in source.steps


def test_before_an_evaluation_nothing_is_drawn_and_weights_are_current(ahead, source):
    ahead.take(1)
    ahead.settle(1)
    assert source.version == 1
    assert [step for step, _ in source.steps] == [1, 2]
    drawn, _ = ahead.take(2)
    assert versions(drawn) == {0}
    assert source.syncs == [0, 1]  # not twice


def test_completions_that_are_older_are_refused(ahead, source):
    ahead.take(1)
    ahead.take(2)
    ahead.settle(1)  # an engine that went on with these would be two behind at step 5
    with pytest.raises(RolloutError, match="weights 3 versions old, expected at most 1"):
        ahead.take(5)


def test_what_fails_in_the_thread_fails_the_step_that_needs_it(ahead, source):
    source.error = None
    ahead.take(1)
    ahead.settle(1)
    source.error = SamplerError("engine: got a crash, expected completions; restart it")
    ahead.take(2)
    with pytest.raises(SamplerError, match="restart it"):
        ahead.take(3)


def test_a_resumed_run_draws_what_was_under_way_again(ahead, source):
    ahead.take(1)
    assert ahead.state() == {"position": 1}
    ahead.settle(1)
    assert len(source.steps) == 2
    assert ahead.state() == {"position": 1}


def test_in_turn_weights_are_synced_after_every_step(source):
    rests = []
    draws = DrawInTurn(source, source.sync, lambda: rests.append(1))
    draws.begin(0)
    for step in (1, 2):
        drawn, metrics = draws.take(step)
        assert versions(drawn) == {step - 1}
        assert metrics == {}
        assert draws.learned(step) == {"probe/gap_max": 0.0}
        draws.settle(step)
    assert source.syncs == [0, 1, 2]
    assert len(rests) == 2


def test_it_needs_an_engine_beside_the_policy():
    with pytest.raises(ConfigError, match="one_step_off: got sampler='transformers'"):
        GDPOConfig(one_step_off=True)


def test_metrics_of_a_sync_before_an_evaluation_are_of_the_next_step(ahead, source):
    ahead.take(1)
    ahead.learned(1)
    ahead.settle(1)  # synced here, so taking the next step syncs no more
    _, metrics = ahead.take(2)
    assert metrics == {"probe/gap_max": 0.0}
    assert source.syncs == [0, 1]


class OpenWatch(Stopwatch):
    """Knows which phases are being measured."""

    def __init__(self):
        super().__init__()
        self.open = []

    @contextmanager
    def __call__(self, name):
        self.open.append(name)
        with super().__call__(name):
            yield
        self.open.remove(name)


def test_a_sync_is_no_part_of_the_wait_for_groups(source):
    watch, during = OpenWatch(), []

    def sync(version):
        during.append([*watch.open])
        with watch("sync"):
            return source.sync(version)

    made = DrawAhead(source, sync, last=3, watch=watch)
    made.begin(0)
    for step in (1, 2):
        made.take(step)
        made.learned(step)
    assert during == [[], []]
    assert watch.seconds.keys() == {"draw", "sync"}
    spent = watch.seconds["sync"]
    made.settle(2)  # between steps: of no step
    assert len(during) == 3
    assert watch.seconds["sync"] == spent
    made.close()
