"""What a local text environment gives, the remote one gives too, or it says that it cannot."""

from __future__ import annotations

import numpy as np
import pytest

import mrgym
from mrgym.errors import TaskError, WireError
from mrgym.spaces import TextSpace

FORMATS = pytest.mark.parametrize("format", ["msgpack", "json"])


class Measured(mrgym.SingleTurnEnv):
    """Scores tokens; one score function fails on demand, after others have measured."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.action_space = TextSpace(500)
        self.observation_space = TextSpace(300)

    def tasks(self, split):
        return [mrgym.Task(f"{split} {i}", i, metadata={"k": i}) for i in range(5)]

    @mrgym.component(low=0, high=99)
    def tokens(self, task, completion):
        return len(completion.token_ids)

    @mrgym.component(low=0, high=1)
    def sound(self, task, completion):
        if completion == "fail":
            raise ValueError("no")
        if completion == "logprobs":
            return sum(completion.sampler_logprobs)
        return 1

    def gold_completion(self, task):
        return f"gold {task.metadata['k']}"


class Dice(mrgym.MultiTurnEnv):
    """Draws random numbers when it starts and on every turn."""

    max_turns = 3
    components = mrgym.components(
        seen=mrgym.Component(low=0, high=1, reduce="mean"), tokens=mrgym.Component(reduce="sum")
    )

    def tasks(self, split):
        return [mrgym.Task(f"{split} {i}") for i in range(50)]

    def start(self, task, rng):
        state = super().start(task, rng)
        state.data["drawn"] = rng.random()
        return state

    def respond(self, state, completion):
        return None if completion == "end" else f"{state.rng.random()}"

    def scores(self, state, completion):
        return {"seen": state.data["drawn"], "tokens": len(completion.token_ids)}


def said(text, n):
    return mrgym.Completion(text, token_ids=range(n), sampler_logprobs=[-0.5] * n)


@FORMATS
def test_score_functions_see_the_tokens(serving, format):
    env, remote = Measured(), mrgym.make(serving(Measured).url, format=format)
    task = env.task_source("train")[0]
    completions = [said("a", 3), said("b", 0), "c"]
    scored = [mrgym.score_completions(e, [task] * 3, completions) for e in (env, remote)]
    assert scored[0] == scored[1]
    assert [r.components["tokens"] for r in scored[1]] == [3, 0, 0]
    with pytest.raises(mrgym.RewardContractError, match="sound=nan"):  # they are not sent
        mrgym.score_completions(remote, [task], [said("logprobs", 2)])


def test_score_functions_of_conversations_see_the_tokens_of_every_turn(serving):
    env, remote = Dice(), mrgym.make(serving(Dice).url)
    tasks = [*env.task_source("train")][:2]
    talk = [[said("a", 2), said("b", 4), said("end", 1)], [said("a", 0), said("end", 5)]]
    scored = [mrgym.score_completions(e, tasks, talk) for e in (env, remote)]
    assert scored[0] == scored[1]
    assert [r.components["tokens"] for r in scored[1]] == [7, 5]


@pytest.mark.parametrize("token_ids", [[[1], [2]], [[-1]], [1], [["a"]]])
def test_tokens_that_fit_no_turn_are_refused(serving, token_ids):
    item = {"completion": "a", "task": {"prompt": "p"}, "token_ids": token_ids}
    response = serving(Measured).http.post("/score", json={"items": [item]})
    assert response.status_code == 422
    assert response.json()["error"]["subject"].startswith("items[0].token_ids")


def test_what_was_measured_before_a_failure_is_kept(serving):
    env, remote = Measured(), mrgym.make(serving(Measured).url)
    task = env.task_source("train")[0]
    ours, theirs = (mrgym.score_completions(e, [task], [said("fail", 2)]) for e in (env, remote))
    assert ours == theirs
    assert theirs[0].turns[0].scores == {"tokens": 2.0}


def test_spaces_and_split_are_the_environments_own(serving):
    remote = mrgym.make(serving(lambda: Measured(split="eval")).url)
    assert (remote.action_space, remote.observation_space) == (TextSpace(500), TextSpace(300))
    assert remote.split == "eval"
    assert remote.reset(seed=1) == Measured(split="eval").reset(seed=1)


def test_an_episode_after_another_draws_the_same_numbers(serving):
    played = []
    for env in (Dice(), mrgym.make(serving(Dice).url)):
        seen = [env.reset(seed=3)]
        for _ in range(3):
            seen += [env.step("a"), env.step("end"), env.reset()]
        played.append(seen)
    assert played[0] == played[1]


@FORMATS
@pytest.mark.parametrize(
    "answer",
    [float("nan"), (1, 2), {1, 2}, {1: 2}, b"x", 2**70, np.arange(2), [np.int64(3)], object()],
)
def test_a_task_that_would_arrive_as_another_is_refused(serving, format, answer):
    remote = mrgym.make(serving(Measured).url, format=format)
    for task in (mrgym.Task("p", answer, "t"), mrgym.Task("p", 1, "t", {"k": answer})):
        with pytest.raises(WireError, match=r"task t, .*cannot be sent as it is"):
            mrgym.score_completions(remote, [task], ["a"])


def test_messages_with_more_than_role_and_content_are_refused(serving):
    task = mrgym.Task([{"role": "user", "content": "c", "name": "n"}], 1, "t")
    with pytest.raises(WireError, match=r"task t: got messages with \['name'\]"):
        mrgym.make(serving(Measured).url).prompt_for(task)


def test_a_known_id_with_another_type_of_answer_is_another_task(serving):
    class Typed(Measured):
        @mrgym.component
        def kind(self, task, completion):
            return ["int", "float", "bool"].index(type(task.answer).__name__)

    remote = mrgym.make(serving(Typed).url)
    known = remote.task_source("train")[1]
    tasks = [mrgym.Task(known.prompt, a, known.id, known.metadata) for a in (1, 1.0, True)]
    scored = mrgym.score_completions(remote, tasks, ["a"] * 3)
    assert [r.components["kind"] for r in scored] == [0, 1, 2]


def test_an_environment_without_tasks_says_so_in_the_same_way(serving):
    class Bare(mrgym.SingleTurnEnv):
        @mrgym.component(low=0, high=1)
        def fine(self, task, completion):
            return 1

    remote = mrgym.make(serving(Bare).url)
    for env in (Bare(), remote):
        with pytest.raises(TaskError, match="tasks"):
            env.task_source("train")
        task = mrgym.Task("p")
        assert mrgym.score_completions(env, [task], ["a"])[0].components == {"fine": 1.0}


def test_a_gold_completion_that_fails_leaves_its_task_usable(serving):
    service = serving(Measured)
    remote = mrgym.make(service.url)
    task = mrgym.Task("p", id="t")  # no metadata, which gold_completion wants
    assert mrgym.score_completions(remote, [task], ["a"])[0].status == "ok"
    with pytest.raises(TaskError, match=r"task t: got KeyError\('k'\) for its gold"):
        remote.gold_completion(task)


def test_ids_may_be_long(serving):
    remote = mrgym.make(serving(Measured).url)
    task = mrgym.Task("p", id="t" * 100_000)
    assert mrgym.score_completions(remote, [task], ["a"])[0].task_id == task.id


def test_a_batch_longer_than_a_body_may_be_is_several_requests(serving):
    service = serving(Measured, max_body_bytes=4096)
    remote = mrgym.make(service.url)
    tasks = [remote.task_source("train")[0]] * 9
    rollouts = mrgym.score_completions(remote, tasks, ["y" * 1500] * 9)
    assert [r.components for r in rollouts] == [{"tokens": 0.0, "sound": 1.0}] * 9
    assert service.metric("mrgym_completions_scored_total") == 9
    assert service.metric('mrgym_requests_total{method="POST",route="/score",status="413"}') == 0


def test_prompts_of_tasks_made_without_end_are_not_kept_without_end(serving, monkeypatch):
    monkeypatch.setattr("mrgym.remote.text._KEPT", 3)
    remote = mrgym.make(serving(Measured).url)
    assert len(remote.task_source("train")) == 5
    for i in range(20):
        remote.prompt_for(mrgym.Task(f"own {i}"))
    assert len(remote._prompts) == 8
