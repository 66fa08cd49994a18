"""The way back: tasksets of verifiers as mrgym environments."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import pytest

pytest.importorskip("verifiers.v1", reason="needs verifiers (make test-peers)")

import verifiers.v1 as vf

import mrgym
from mrgym.adapters.verifiers import from_verifiers
from mrgym.errors import RewardContractError, RewardDefinitionError, TaskError


def components_of(env, *completions):
    task = env.task_source("train")[0]
    tasks = [task] * len(completions)
    return mrgym.score_completions(env, tasks, list(completions))


class Row(vf.TaskData):
    answer: str = ""


class Plain(vf.Task[Row, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def cut(self, trace: vf.Trace) -> float:
        return float(trace.is_truncated)


class Rows(vf.Taskset[Plain, vf.TasksetConfig]):
    kind: ClassVar[type] = Plain

    def load(self):
        for i in range(10):
            row = Row(prompt=f"Say {i}", answer=str(i), system_prompt="Be brief.", id=f"r{i}")
            yield self.kind(row, self.config.task)


class Bare(vf.Task[Row, vf.State, vf.TaskConfig]):
    pass


def rows_of(**methods):
    """Return a taskset whose tasks have these rewards (or other members) instead."""
    kind = type("Other", (Bare,), methods)
    return type("Others", (Rows,), {"kind": kind})(vf.TasksetConfig())


async def one(self, trace):
    return 1.0


def test_rewards_become_components_and_weights_their_defaults():
    env = from_verifiers(Rows(vf.TasksetConfig()))
    assert env._declared().weights == {"right": 2.0, "cut": 1.0}
    assert len(env.task_source("train")) + len(env.task_source("eval")) == 10
    task = env.task_source("train")[0]
    assert task.prompt[0] == {"role": "system", "content": "Be brief."}
    right, wrong = components_of(env, task.answer, "nothing")
    assert (right.components, wrong.components) == (
        {"right": 1.0, "cut": 0.0},
        {"right": 0.0, "cut": 0.0},
    )
    (cut,) = components_of(env, mrgym.Completion("", stop_reason="length"))
    assert cut.components == {"right": 0.0, "cut": 1.0}
    report = mrgym.check_env(env)
    assert report.ok, report.failures


PACKAGE = """
import verifiers.v1 as vf


class NumberTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def short(self, trace):
        return float(len(trace.last_reply) < 3)


class NumbersConfig(vf.TasksetConfig):
    count: int = 4


class Numbers(vf.Taskset[NumberTask, NumbersConfig]):
    def load(self):
        for i in range(self.config.count):
            yield NumberTask(vf.TaskData(prompt=f"Say {i}"), self.config.task)


__all__ = ["Numbers"]
"""


def test_a_single_agent_env_and_an_installed_id_are_taken(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "numbers_v1.py").write_text(PACKAGE)
    env = from_verifiers("numbers-v1", count=6)
    assert len(env.task_source("train")) + len(env.task_source("eval")) == 6
    assert [r.components for r in components_of(env, "7", "seven")] == [
        {"short": 1.0},
        {"short": 0.0},
    ]
    config = vf.SingleAgentEnvConfig(taskset={"id": "numbers-v1"})
    env = from_verifiers(vf.SingleAgentEnv(config))
    assert len(env.task_source("train")) + len(env.task_source("eval")) == 4
    assert {*env._declared()} == {"short"}


def test_a_mapping_needs_declarations_and_an_absent_key_is_an_abstention():
    async def several(self, trace):
        return {"a": 0.5} if trace.last_reply == "x" else {"a": 0.5, "b": 1.0}

    source = rows_of(several=vf.reward(several))
    declared = {"a": mrgym.Component(), "b": mrgym.Component(optional=True)}
    absent, both = components_of(from_verifiers(source, components=declared), "x", "y")
    assert (absent.components, both.components) == ({"a": 0.5}, {"a": 0.5, "b": 1.0})
    with pytest.raises(RewardContractError, match=r"unknown \['a'\]"):
        components_of(from_verifiers(source), "x")
    declared["b"] = mrgym.Component()
    with pytest.raises(RewardContractError, match=r"missing \['b'\]"):
        components_of(from_verifiers(source, components=declared), "x")


async def raising(self, trace):
    raise ValueError("cannot be read")


async def none(self, trace):
    return None


def synchronous(self, trace):
    return 1.0


async def slow(self, trace):
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("broken", "error"),
    [(raising, "cannot be read"), (none, "TypeError"), (synchronous, "TypeError")],
)
def test_what_verifiers_leaves_unscored_is_an_error_and_no_zero(broken, error):
    broken.__name__ = "broken"
    (rollout,) = components_of(
        from_verifiers(rows_of(one=vf.reward(one), broken=vf.reward(broken))), "x"
    )
    assert rollout.status == "error"
    assert error in rollout.error
    assert rollout.components == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_verifiers_writes_as_null_breaks_the_contract(value):
    async def odd(self, trace):
        return value

    with pytest.raises(RewardContractError, match=r"odd=.*expected a finite number"):
        components_of(from_verifiers(rows_of(odd=vf.reward(odd))), "x")


def test_a_component_scored_twice_is_an_error():
    async def twice(self, trace):
        return {"one": 0.5}

    declared = {"one": mrgym.Component()}
    source = rows_of(one=vf.reward(one), twice=vf.reward(twice))
    (rollout,) = components_of(from_verifiers(source, components=declared), "x")
    assert rollout.status == "error"
    assert "got reward 'one' from two functions" in rollout.error


def test_a_deadline_of_the_task_is_a_timeout():
    class Hurried(Rows):
        kind = type("Slow", (Bare,), {"slow": vf.reward(slow)})

        def load(self):
            for task in super().load():
                yield task.with_data(timeout=vf.TaskTimeout(scoring=0.05))

    (rollout,) = components_of(from_verifiers(Hurried(vf.TasksetConfig())), "x")
    assert rollout.status == "timeout"


def test_scored_inside_a_running_loop_and_on_one_loop_for_ever():
    loops = set()

    async def noting(self, trace):
        await asyncio.sleep(0)
        loops.add(asyncio.get_running_loop())
        return 1.0

    env = from_verifiers(rows_of(noting=vf.reward(noting)))

    async def inside():
        return components_of(env, "x", "y")

    rollouts = [*asyncio.run(inside()), *asyncio.run(inside()), *components_of(env, "z")]
    assert [r.components for r in rollouts] == [{"noting": 1.0}] * 5
    assert len(loops) == 1


async def boxed(self, trace, runtime):
    return 1.0


async def hook(self, trace, runtime):
    return None


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"boxed": vf.reward(boxed)}, "reward 'boxed' needs a runtime"),
        ({"one": vf.reward(one), "NEEDS_CONTAINER": True}, "needs a container"),
        ({"one": vf.reward(one), "setup": hook}, r"has setup\(\)"),
        ({"one": vf.reward(one), "finalize": hook}, r"has finalize\(\)"),
        ({"one": vf.reward(one), "toolsets": classmethod(lambda cls, config: [1])}, "has tools"),
        ({"one": vf.reward(one), "rewrite": vf.intercept(hook)}, r"hook\(\) intercepts"),
        ({}, "without rewards"),
    ],
)
def test_rewards_of_more_than_the_reply_are_refused(members, why):
    with pytest.raises(RewardDefinitionError, match=why):
        from_verifiers(rows_of(**members))


def test_other_sources_are_refused():
    class Endless(Rows):
        INFINITE = True

    class Judging(vf.SingleAgentEnv):
        async def finalize(self, task, episode):
            episode.traces[0].record_reward("judged", 1.0)

    class Open(Rows):
        def load(self):
            yield Plain(Row(id="a"), self.config.task)

    config = vf.TasksetConfig()
    with pytest.raises(TaskError, match=r"Endless, which never ends.*limit"):
        from_verifiers(Endless(config))
    assert len(from_verifiers(Endless(config), limit=5).task_source("train")) <= 5
    with pytest.raises(TaskError, match="without a prompt in text"):
        from_verifiers(Open(config))
    with pytest.raises(RewardDefinitionError, match=r"got int, expected a vf\.Taskset"):
        from_verifiers(3)
    judging = object.__new__(Judging)
    with pytest.raises(RewardDefinitionError, match="Judging, which judges conversations"):
        from_verifiers(judging)


def test_a_task_of_somebody_else_is_an_error():
    env = from_verifiers(Rows(vf.TasksetConfig()))
    (rollout,) = mrgym.score_completions(env, [mrgym.Task("Say 1", "1")], ["1"])
    assert rollout.status == "error"
    assert "expected one of its own" in rollout.error


def test_a_task_of_another_kind_further_back_is_refused_too():
    class Prepared(Plain):
        async def setup(self, trace, runtime):
            """Would not run here."""

    class Mixed(Rows):
        def load(self):
            yield from super().load()
            yield Prepared(Row(prompt="last"), self.config.task)

    with pytest.raises(RewardDefinitionError, match=r"got Prepared, where the task has setup\(\)"):
        from_verifiers(Mixed(vf.TasksetConfig()))
