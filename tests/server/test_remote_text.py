"""A remote text environment is an environment: the same tasks, prompts, scores and rollouts."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest

import mrgym
from mrgym.errors import RemoteError, TaskError
from mrgym.scoring import InlineScorer, WorkerScorer

PARAMS = mrgym.SamplingParams(16, seed=3)


@pytest.fixture(scope="module", params=["msgpack", "json"])
def remote(math_service, request):
    env = mrgym.make(math_service.url, format=request.param)
    yield env
    env.close()


def test_it_scores_as_in_process(remote, sample):
    rollouts = mrgym.score_completions(remote, sample.tasks, sample.completions)
    assert [r.components for r in rollouts] == sample.components
    local = mrgym.score_completions(sample.env, sample.tasks, sample.completions)
    assert rollouts == local


def test_it_declares_and_asks_the_same(remote, sample):
    assert dict(remote.components) == dict(sample.env.components)
    for split in ("train", "eval"):
        ours, theirs = sample.env.task_source(split), remote.task_source(split)
        assert [*theirs] == [*ours]
        assert [remote.prompt_for(t) for t in theirs[:20]] == [
            sample.env.prompt_for(t) for t in ours[:20]
        ]
        assert [remote.gold_completion(t) for t in theirs[:20]] == [
            sample.env.gold_completion(t) for t in ours[:20]
        ]


def test_a_task_of_ones_own_is_asked_and_scored(remote, sample):
    task = mrgym.Task([{"role": "user", "content": "3+4, as a number"}], "7", "mine", {"k": [1]})
    assert remote.prompt_for(task) == sample.env.prompt_for(task)
    assert remote.messages(task) == sample.env.messages(task)
    known = sample.tasks[0]
    other = mrgym.Task(known.prompt, "another answer", known.id)
    tasks, texts = [task, known, other], ["<answer>7</answer>", *[f"<answer>{known.answer}"] * 2]
    local = mrgym.score_completions(sample.env, tasks, texts)
    assert mrgym.score_completions(remote, tasks, texts) == local


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_it_passes_the_check(remote):
    report = mrgym.check_env(remote, max_tasks=20)
    assert report.ok, str(report)
    assert report.notes == []
    assert "gold completions score full marks" in report.passed


def test_groups_of_rollouts_are_the_same(remote, sample):
    script = {t.id: ["<answer>1</answer>", f"<answer>{t.answer}</answer>"] for t in sample.tasks}
    tasks = list(sample.env.task_source("train"))[:8]
    groups = [
        mrgym.run_groups(env, mrgym.ScriptedSampler(script), tasks, 2, PARAMS)
        for env in (remote, sample.env)
    ]
    assert groups[0] == groups[1]


def test_steps_are_the_same(remote, sample):
    for env in (remote, sample.env):
        env.action_space.seed(1)
    for seed in range(5):
        assert remote.reset(seed=seed) == sample.env.reset(seed=seed)
        assert remote.step("<answer>4</answer>") == sample.env.step("<answer>4</answer>")


def test_whatever_scorer_is_given_the_service_scores(remote, sample):
    with WorkerScorer(1) as scorer:
        rollouts = mrgym.score_completions(
            remote, sample.tasks[:5], sample.completions[:5], scorer=scorer
        )
        assert scorer.pids == []
    assert [r.components for r in rollouts] == sample.components[:5]
    states = [remote.start(t, np.random.default_rng(0)) for t in sample.tasks[:5]]
    completions = [mrgym.Completion(text) for text in sample.completions[:5]]
    outcomes = InlineScorer().score(remote, states, completions)
    assert [o.scores for o in outcomes] == sample.components[:5]


def test_a_pickled_one_goes_on(remote, sample):
    back = pickle.loads(pickle.dumps(remote))
    rollouts = mrgym.score_completions(back, sample.tasks[:5], sample.completions[:5])
    assert [r.components for r in rollouts] == sample.components[:5]
    back.close()


def test_more_completions_than_a_batch_are_several_requests(serving, sample):
    service = serving(sample.env, max_batch=64)
    env = mrgym.make(service.url)
    rollouts = mrgym.score_completions(env, sample.tasks, sample.completions)
    assert [r.components for r in rollouts] == sample.components
    assert service.metric('mrgym_requests_total{method="POST",route="/score"') == 4


def guess(text):
    return int(text) if text.isdecimal() and len(text) < 3 else 99


class Guess(mrgym.MultiTurnEnv):
    """Guess a number the episode draws; hints in between."""

    max_turns = 4
    components = mrgym.components(
        right=mrgym.Component(low=0, high=1),
        near=mrgym.Component(low=-100, high=0, reduce="mean"),
        tries=mrgym.Component(low=-4, high=0, reduce="sum", optional=True),
        quick=mrgym.Component(low=0, high=1, gate=mrgym.Gate(on="right", at_least=1)),
    )

    def tasks(self, split):
        return [mrgym.Task(f"guess, {split} {i}", metadata={"top": 10 + i}) for i in range(6)]

    def start(self, task, rng):
        state = super().start(task, rng)
        state.data["number"] = int(rng.integers(task.metadata["top"]))
        return state

    def respond(self, state, completion):
        if completion == "fail":
            raise ValueError("no")
        number = state.data["number"]
        if completion == str(number):
            return None
        return f"{'less' if guess(completion) > number else 'more'} {state.rng.integers(100)}"

    def scores(self, state, completion):
        distance = abs(guess(completion) - state.data["number"])
        return {
            "right": distance == 0,
            "near": -float(distance),
            "tries": mrgym.ABSENT if distance == 0 else -1,
            "quick": 1 / state.turn,
        }


def guesses(env):
    numbers = {task.id: [str((i * 3) % 12) for i in range(16)] for task in env.task_source("train")}
    return mrgym.ScriptedSampler(numbers)


def test_conversations_are_the_same(serving):
    env = Guess()
    remote = mrgym.make(serving(Guess).url)
    tasks = [*env.task_source("train")]
    groups = [mrgym.run_groups(e, guesses(env), tasks, 3, PARAMS, seed=5) for e in (env, remote)]
    assert groups[0] == groups[1]
    rollouts = [r for g in groups[0] for r in g.rollouts]
    assert {len(r.turns) for r in rollouts} >= {4}
    assert any(r.terminated for r in rollouts)
    said = [["1", "fail"], ["1", "2"], ["5"]]
    scored = [mrgym.score_completions(e, tasks[:3], said, seed=2) for e in (env, remote)]
    assert scored[0] == scored[1]
    assert [r.status for r in scored[0]] == ["error", "ok", "ok"]
    assert mrgym.check_env(remote).ok


def test_turns_after_the_end_are_refused_with_their_position(serving):
    service = serving(Guess)
    task = {"prompt": "p", "metadata": {"top": 1}}
    items = [{"completion": ["1"], "task": task}, {"completion": ["0", "1"], "task": task}]
    for path in ("/score", "/turns"):
        error = service.http.post(path, json={"items": items})
        assert error.status_code == 422
        assert error.json()["error"]["subject"] == "items[1].completion"


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("1-3-0-0", 200),
        ("f" * 32 + "-" + "f" * 32 + "-1-ffffffff", 200),
        ("1-2-0-0", 422),
        ("1-3-2-0", 422),
        ("1-3-0-100000000", 422),
        ("1-3-0", 422),
        ("f" * 33 + "-1-0-0", 422),
    ],
)
def test_only_a_generators_state_is_taken(serving, state, status):
    task = {"prompt": "p", "metadata": {"top": 5}}
    items = [{"completion": "1", "task": task, "random": state}]
    assert serving(Guess).http.post("/turns", json={"items": items}).status_code == status


def test_a_task_the_environment_cannot_start_is_refused_with_its_position(serving):
    service = serving(Guess)
    good, bad = (
        {"completion": "1", "task": {"prompt": "p", "metadata": m}} for m in ({"top": 1}, {})
    )
    for path in ("/score", "/turns"):
        response = service.http.post(path, json={"items": [good, bad]})
        assert response.status_code == 422
        assert response.json()["error"]["subject"] == "items[1].task"


def test_an_environment_that_replays_otherwise_is_found_out(serving):
    class Fickle(Guess):
        calls = 0

        def respond(self, state, completion):
            type(self).calls += 1
            return f"hint {self.calls}"

    remote = mrgym.make(serving(Fickle).url)
    tasks = [*remote.task_source("train")][:1]
    with pytest.raises(RemoteError, match="another conversation when its turns were replayed"):
        mrgym.run_groups(remote, guesses(remote), tasks, 1, PARAMS)


def test_tasks_can_be_given_here(math_service):
    tasks = [mrgym.Task(f"{i}+1", str(i + 1)) for i in range(8)]
    env = mrgym.make(math_service.url, tasks=tasks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sources = [env.task_source(split) for split in ("train", "eval")]
    assert {t.id for s in sources for t in s} == {t.id for t in tasks}
    with pytest.raises(TaskError):
        mrgym.make(math_service.url, tasks=tasks).task_source("test")
