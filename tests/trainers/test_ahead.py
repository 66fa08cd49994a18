"""One step off: the next step is drawn while this one learns, and no staler than that."""

from __future__ import annotations

import threading

import pytest

from mrgym.errors import RolloutError, SamplerError
from mrgym.rollout import Group, Rollout
from mrgym_trainers.gdpo.ahead import DrawAhead
from mrgym_trainers.gdpo.draw import Draw


class Source:
    """Draws one rollout of the version it is told, when it is let."""

    def __init__(self):
        self.version, self.go, self.steps = 0, threading.Event(), []
        self.go.set()
        self.error = None

    def draw(self, step):
        assert self.go.wait(10)
        if self.error:
            raise self.error
        self.steps.append((step, threading.current_thread().name))
        rollout = Rollout("t", step, 0, policy_version=self.version)
        return Draw([Group(step, "t", [rollout])])


@pytest.fixture
def ahead():
    source = Source()
    made = DrawAhead(source)
    yield made, source
    source.go.set()
    made.close()


def test_the_next_step_is_drawn_in_a_thread_meanwhile(ahead):
    made, source = ahead
    source.go.clear()
    made.start(2)
    assert source.steps == []  # and this thread goes on
    source.go.set()
    assert made.take(2, version=1).groups[0].group == 2
    assert source.steps == [(2, "mrgym-ahead_0")]


def test_a_step_that_was_not_started_is_drawn_at_once(ahead):
    made, _ = ahead
    assert made.take(1, version=0).groups[0].group == 1


def test_completions_may_be_one_version_old_and_no_older(ahead):
    made, source = ahead
    source.version = 3
    assert made.take(4, version=4)
    with pytest.raises(RolloutError, match="weights 2 versions old, expected at most 1"):
        made.take(5, version=5)


def test_what_fails_in_the_thread_fails_the_step_that_needs_it(ahead):
    made, source = ahead
    source.error = SamplerError("engine: got a crash, expected completions; restart it")
    made.start(1)
    made.settle()
    with pytest.raises(SamplerError, match="restart it"):
        made.take(1, version=0)


def test_settling_waits_for_the_thread(ahead):
    made, source = ahead
    source.go.clear()
    made.start(1)
    threading.Timer(0.1, source.go.set).start()
    made.settle()
    assert source.steps
    made.take(1, version=0)
    made.settle()
