"""check_env: a good environment passes; each broken promise is caught and named."""

from __future__ import annotations

import math
import random
import threading
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import mrgym
from mrgym import Component, Task

UNIT = Component(low=0, high=1)

DECLARED = "components are declared"
GYMNASIUM = "Gymnasium's own checker passes"
CONTRACT = "every step keeps the contract"
DETERMINISTIC = "the same seed and actions give the same rewards"
PICKLE = "it survives pickling"
VECTOR = "vector envs carry reward_components"
SPLITS = "train and eval tasks load and share nothing"
GOLD = "gold completions score full marks"
JUNK = "junk and other tasks' golds score less"


class Coin(mrgym.MultiRewardEnv[int, int]):
    """A good environment."""

    components = mrgym.components(a=UNIT, b=Component(low=0, high=1, optional=True))
    observation_space = spaces.Discrete(2)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return int(self.np_random.integers(2)), {}

    def step(self, action):
        return self.emit(int(action), {"a": action, "b": mrgym.ABSENT}, terminated=True)


class Sums(mrgym.SingleTurnEnv):
    """A good text environment."""

    def tasks(self, split):
        start = 0 if split == "train" else 50
        return [Task(f"{i} + 1?", str(i + 1)) for i in range(start, start + 20)]

    def gold_completion(self, task):
        return task.answer

    @mrgym.component(low=0, high=1)
    def right(self, task, completion):
        return completion == task.answer

    @mrgym.component(low=0, high=1)
    def short(self, task, completion):
        return 0 < len(completion) < 9


class Talk(mrgym.MultiTurnEnv):
    """A good multi-turn environment without golds."""

    max_turns = 3

    def tasks(self):
        return [Task(f"{i}?") for i in range(40)]

    def respond(self, state, completion):
        return "go on"

    @mrgym.component(low=0, high=1)
    def polite(self, state, completion):
        return "e" in completion


def titles(report):
    return [failure.split(":")[0] for failure in report.failures]


class TestGood:
    @pytest.mark.parametrize("cls", [Coin, Sums, Talk])
    def test_a_good_environment_is_ok(self, cls):
        report = mrgym.check_env(cls())
        assert report.ok, str(report)
        wanted = {DECLARED, GYMNASIUM, CONTRACT, DETERMINISTIC, PICKLE, VECTOR}
        assert {*report.passed} >= wanted | ({SPLITS} if cls is not Coin else set())

    def test_golds_and_junk_were_tried(self):
        assert {GOLD, JUNK} <= {*mrgym.check_env(Sums()).passed}

    def test_what_could_not_be_tried_is_noted(self):
        report = mrgym.check_env(Talk())
        assert GOLD not in report.passed
        assert any("no gold_completion" in note for note in report.notes)

    def test_by_id_and_with_arguments(self):
        report = mrgym.check_env("math_multi_reward", max_tasks=5, difficulty="hard")
        assert report.ok, str(report)
        assert report.env == "math_multi_reward-v1"

    def test_a_plain_env_is_sent_to_from_gymnasium(self):
        with pytest.raises(mrgym.RegistryError, match=r"CartPoleEnv.*from_gymnasium"):
            mrgym.check_env(gym.make("CartPole-v1"))
        assert mrgym.check_env(mrgym.from_gymnasium(gym.make("CartPole-v1"))).ok

    @pytest.mark.parametrize("ok", [True, False])
    def test_the_report_can_be_read(self, ok):
        text = str(mrgym.check_env(Coin() if ok else Shaky()))
        assert text.startswith(f"{'Coin: ok' if ok else 'Shaky: FAILED'}\n")
        assert ("failed  " in text) is not ok


class Undeclared(Coin):
    components = None


class Shaky(Coin):
    def step(self, action):
        return self.emit(int(action), {"a": random.random(), "b": 0}, terminated=True)


class Locked(Coin):
    def __init__(self):
        self.lock = threading.RLock()

    def __deepcopy__(self, memo):
        return Locked()


class Drifting(Coin):
    """Adds a bonus nobody declared, by hand."""

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return (observation, reward + 0.25, *rest)


class Forgetful(Coin):
    def step(self, action):
        return int(action), 0.0, True, False, {"reward_components": {"b": 0.0}}


class Outside(Coin):
    def step(self, action):
        return self.emit(7, {"a": 0, "b": 0}, terminated=True)


class NotANumber(Coin):
    def step(self, action):
        return self.emit(int(action), {"a": math.nan, "b": 0}, terminated=True)


class Crashing(Coin):
    def step(self, action):
        raise OSError("simulator gone")


class TestEveryEnvironment:
    @pytest.mark.parametrize(
        ("cls", "title", "said"),
        [
            (Undeclared, DECLARED, "got components=None"),
            (Shaky, DETERMINISTIC, "expected the same"),
            (Locked, PICKLE, "RLock"),
            (Drifting, CONTRACT, "expected"),
            (Forgetful, CONTRACT, "missing ['a']"),
            (Outside, CONTRACT, "got observation 7, expected Discrete(2)"),
            (NotANumber, CONTRACT, "expected a finite number"),
            (Crashing, CONTRACT, "simulator gone"),
        ],
    )
    def test_a_broken_promise_is_named(self, cls, title, said):
        report = mrgym.check_env(cls())
        assert not report.ok
        assert said in {f.split(":")[0]: f for f in report.failures}[title]
        assert title not in report.passed

    @pytest.mark.parametrize(
        ("cls", "failed"),
        [
            (Shaky, [GYMNASIUM, DETERMINISTIC]),
            (Locked, [PICKLE]),
            (Outside, [CONTRACT]),
            (Undeclared, [DECLARED, GYMNASIUM, CONTRACT, DETERMINISTIC, PICKLE, VECTOR]),
        ],
    )
    def test_and_no_other(self, cls, failed):
        assert titles(mrgym.check_env(cls())) == failed


class Hider(gym.Wrapper):
    def step(self, action):
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return observation, reward, terminated, truncated, {}


class TestWrappers:
    @pytest.mark.parametrize("function", [lambda r: r + 1, lambda r: 2 * r + 1, np.tanh])
    @pytest.mark.parametrize("outer", [False, True])
    def test_one_that_changes_the_reward_is_named(self, function, outer):
        env = gym.wrappers.TransformReward(Constant(), function)
        env = gym.wrappers.TimeLimit(env, 9) if outer else env
        (failure,) = mrgym.check_env(env).failures
        assert failure.startswith(CONTRACT)
        assert "TransformReward" in failure
        assert "expected 1.0" in failure

    def test_one_that_drops_the_components_is_named(self):
        report = mrgym.check_env(Hider(Constant()))
        assert titles(report) == [CONTRACT, VECTOR]
        assert "Hider" in report.failures[0]

    @pytest.mark.parametrize(
        "wrap",
        [
            lambda env: gym.wrappers.TimeLimit(env, 3),
            gym.wrappers.OrderEnforcing,
            gym.wrappers.RecordEpisodeStatistics,
            lambda env: gym.wrappers.TransformReward(env, lambda reward: reward),
        ],
    )
    def test_one_that_changes_nothing_is_fine(self, wrap):
        report = mrgym.check_env(wrap(Constant()))
        assert report.ok, str(report)


class Constant(Coin):
    def step(self, action):
        return self.emit(int(action), {"a": 1, "b": 0}, terminated=True)


class Overlapping(Sums):
    def tasks(self, split):
        return [Task(f"{i} + 1?", str(i + 1)) for i in range(20)]


class Empty(Sums):
    def tasks(self, split):
        return []


class WrongGold(Sums):
    def gold_completion(self, task):
        return f"It is {task.answer}."


class HalfGold(Sums):
    def gold_completion(self, task):
        return task.answer if task.answer < "5" else "?"


class JunkIsFull(Sums):
    def right(self, task, completion):
        return completion != "no"

    def short(self, task, completion):
        return 1


class AnyNumberIsRight(Sums):
    def right(self, task, completion):
        return completion.isdigit()


class JunkRaises(Sums):
    def right(self, task, completion):
        return int(completion) == int(task.answer)


class JunkIsUnscored(Sums):
    def right(self, task, completion):
        return completion == task.answer if completion else None


class Warns(Sums):
    def gold_completion(self, task):
        warnings.warn("golds are guessed", stacklevel=1)
        return task.answer


class TestTextEnvironments:
    @pytest.mark.parametrize(
        ("cls", "title", "said"),
        [
            (Overlapping, SPLITS, "20 eval tasks that stand in"),
            (Empty, SPLITS, "got no tasks"),
            (WrongGold, GOLD, "'right': 0.0"),
            (HalfGold, GOLD, "for the gold of task"),
            (JunkIsFull, JUNK, "got 2.0 for junk"),
            (AnyNumberIsRight, JUNK, "another task's gold"),
            (JunkRaises, JUNK, "ValueError"),
            (JunkIsUnscored, JUNK, "got right=None"),
        ],
    )
    def test_a_broken_promise_is_named(self, cls, title, said):
        report = mrgym.check_env(cls())
        assert said in {f.split(":")[0]: f for f in report.failures}[title]
        assert not report.ok

    @pytest.mark.parametrize(
        ("cls", "title"),
        [(Overlapping, SPLITS), (JunkIsFull, JUNK), (AnyNumberIsRight, JUNK)],
    )
    def test_and_no_other(self, cls, title):
        assert titles(mrgym.check_env(cls())) == [title]

    def test_a_warning_becomes_a_note(self):
        report = mrgym.check_env(Warns(), max_tasks=1)
        assert any("golds are guessed" in note for note in report.notes)
        assert report.ok
