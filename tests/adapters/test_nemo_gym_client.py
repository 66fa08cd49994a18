"""A verify endpoint of NeMo Gym as an environment, against our own server and hostile ones."""

import asyncio
import json
import pickle
import re
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import mrgym
from mrgym import Component
from mrgym.adapters import nemo_gym, nemo_gym_client
from mrgym.adapters.nemo_gym import from_nemo_gym
from mrgym.errors import ConfigError, RewardContractError, RewardDefinitionError, TaskError

uvicorn = pytest.importorskip("uvicorn", reason="needs uvicorn")
pytest.importorskip("fastapi", reason="needs fastapi")

ROWS = [
    {"responses_create_params": {"input": [{"role": "user", "content": f"say {i}"}]}, "key": i}
    for i in range(5)
]
GOOD = {"reward": 1.5, "reward_components": {"a": 1, "b": 0.5}}


@contextmanager
def serving(app):
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


class Scripted(BaseHTTPRequestHandler):
    """Answers /verify with what the test says; keeps what it was sent."""

    def do_POST(self):
        length = int(self.headers["content-length"])
        body = json.loads(self.rfile.read(length))
        self.server.got.append((self.path, self.headers.get("cookie"), body))
        if self.path == "/verify":
            with self.server.counting:
                self.server.inside += 1
                self.server.most = max(self.server.most, self.server.inside)
            self.server.release.wait(self.server.delay)
            self.server.together.wait()
            with self.server.counting:
                self.server.inside -= 1
        self.send_response(self.server.status if self.path == "/verify" else 200)
        self.send_header("set-cookie", "session=abc")
        self.end_headers()
        said = self.server.answer if self.path == "/verify" else "{}"
        self.wfile.write(said.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def scripted():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    server.got, server.status, server.answer, server.delay = [], 200, json.dumps(GOOD), 0
    server.release, server.together = threading.Event(), threading.Barrier(1)
    server.counting, server.inside, server.most = threading.Lock(), 0, 0
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.release.set()
    server.shutdown()
    server.server_close()
    thread.join()


def env_of(server, components=("a", "b"), **options):
    return from_nemo_gym(server.url, components=components, tasks=ROWS, **options)


def scored(env, text="hello"):
    task = env.task_source("train")[0]
    return mrgym.score_completions(env, [task], [text])[0]


def test_there_and_back_the_sample_is_the_same(sample):
    rows = [*nemo_gym.rows(sample.env)][:400]
    with serving(nemo_gym.create_app(sample.env)) as url:
        env = from_nemo_gym(url, components=sample.env.components, tasks=rows, eval_tasks=rows[-1:])
        ours = {row["verifier_metadata"]["task_id"]: i for i, row in enumerate(rows)}
        source = env._given["train"]
        tasks = [source[ours[task.id]] for task in sample.tasks]
        got = mrgym.score_completions(env, tasks, sample.completions)
    assert [r.components for r in got] == sample.components
    assert [r.reward for r in got] == [sum(c.values()) for c in sample.components]


def test_the_row_goes_out_whole_with_its_cookie(scripted):
    env = env_of(scripted)
    rollout = scored(env, "hello")
    assert rollout.components == {"a": 1.0, "b": 0.5}
    (seed, _, seeded), (path, cookie, sent) = scripted.got
    assert (seed, path, cookie) == ("/seed_session", "/verify", "session=abc")
    assert seeded in ROWS
    assert {k: sent[k] for k in seeded} == seeded
    assert sent["response"]["output"][0]["content"][0]["text"] == "hello"


def test_an_env_like_any_other(scripted):
    env = env_of(scripted, components={"a": Component(low=0, high=1), "b": Component(low=0)})
    report = mrgym.check_env(env)
    assert report.ok, report.failures
    assert pickle.loads(pickle.dumps(env)).components == env.components
    assert env.step(env.reset(seed=0)[0])[1] == 1.5


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ({"reward": 1, "reward_components": {"a": 1}}, "missing"),
        ({"reward": 3, "reward_components": {"a": 1, "b": 1, "c": 1}}, "unknown"),
        ({"reward": 1, "reward_components": {"a": 1, "b": None}}, "real number"),
        ({"reward": 1, "reward_components": {"a": 1, "b": "0"}}, "real number"),
        ({"reward": float("nan"), "reward_components": {"a": 1, "b": float("nan")}}, "sum|finite"),
        ({"reward": 1.6, "reward_components": {"a": 1, "b": 0.5}}, "sum"),
        ({"reward": 1}, "single reward"),
        ({"reward_components": {"a": 1, "b": 0}}, "with a reward"),
        ([], "with a reward"),
    ],
)
def test_an_answer_that_breaks_the_contract_stops(scripted, answer, named):
    scripted.answer = json.dumps(answer)
    with pytest.raises(RewardContractError, match=named):
        scored(env_of(scripted))


@pytest.mark.parametrize(
    ("status", "answer", "named"),
    [
        (500, '{"detail": "no grader"}', "HTTP 500.*no grader"),
        (422, "{}", "HTTP 422"),
        (200, "<html>", "expected JSON"),
        (
            200,
            json.dumps(GOOD | {"reward": 0, "_ng_failure_class": "judge_failed"}),
            "judge_failed",
        ),
    ],
)
def test_a_failure_is_a_status_and_no_zero(scripted, status, answer, named):
    scripted.status, scripted.answer = status, answer
    rollout = scored(env_of(scripted))
    assert (rollout.status, rollout.components) == ("error", {})
    assert re.search(named, rollout.error)


def test_a_server_that_hangs_is_left(scripted):
    scripted.delay = 30
    rollout = scored(env_of(scripted, timeout=0.2))
    assert rollout.components == {}
    assert "within 0.2 s" in rollout.error


def test_a_server_that_is_not_there(scripted):
    env = from_nemo_gym("http://127.0.0.1:9", components=["a"], tasks=ROWS)
    rollout = scored(env)
    assert rollout.status == "error"
    assert "is the server running?" in rollout.error


def test_a_single_reward_and_an_optional_component(scripted):
    scripted.answer = json.dumps({"reward": 0.25})
    assert scored(env_of(scripted, ["reward"])).components == {"reward": 0.25}
    scripted.answer = json.dumps({"reward": 1, "reward_components": {"a": 1}})
    optional = {"a": Component(), "b": Component(optional=True)}
    assert scored(env_of(scripted, optional)).components == {"a": 1.0}


def test_a_batch_is_scored_side_by_side(scripted):
    scripted.together = threading.Barrier(4, timeout=20)
    env = env_of(scripted)
    rollouts = mrgym.score_completions(env, [env.task_source("train")[0]] * 4, list("abcd"))
    assert [r.status for r in rollouts] == ["ok"] * 4
    assert not scripted.together.broken


def test_a_large_batch_opens_a_limited_number_of_connections(scripted, monkeypatch):
    monkeypatch.setattr(nemo_gym_client, "AT_ONCE", 4)
    scripted.delay = 0.02
    env, count = env_of(scripted), 16
    for _ in range(2):  # every batch has an event loop of its own
        tasks = [env.task_source("train")[0]] * count
        rollouts = mrgym.score_completions(env, tasks, ["x"] * count)
        assert [r.status for r in rollouts] == ["ok"] * count
    assert 1 < scripted.most <= 4


def test_scores_inside_a_running_loop(scripted):
    async def inside():
        return scored(env_of(scripted))

    assert asyncio.run(inside()).components == {"a": 1.0, "b": 0.5}


def test_rows_become_tasks(tmp_path):
    parts = [{"type": "input_text", "text": "see"}, {"type": "input_text", "text": " this"}]
    rows = [
        {"responses_create_params": {"input": "plain"}},
        {"responses_create_params": {"input": [{"role": "developer", "content": parts}]}},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = from_nemo_gym("http://x", components=["a"], tasks=path, eval_tasks=ROWS)
    first, second = env.task_source("train")
    assert first.prompt == [{"role": "user", "content": "plain"}]
    assert second.prompt == [{"role": "developer", "content": "see this"}]
    assert second.metadata["nemo_gym_row"] == rows[1]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": "x"}, "responses_create_params"),
        ({"responses_create_params": {"input": []}}, "input"),
        ({"responses_create_params": {"input": "x", "tools": [{"name": "f"}]}}, "tools"),
        ({"responses_create_params": {"input": [{"type": "function_call"}]}}, "role and content"),
    ],
)
def test_rows_that_cannot_be_used(row, named):
    with pytest.raises(TaskError, match=named):
        from_nemo_gym("http://x", components=["a"], tasks=[row])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"url": "x:80"}, ConfigError),
        ({"timeout": 0}, ConfigError),
        ({"timeout": float("inf")}, ConfigError),
        ({"timeout": None}, ConfigError),
        ({"components": []}, RewardDefinitionError),
    ],
)
def test_options_that_cannot_work(options, error):
    with pytest.raises(error):
        from_nemo_gym(**{"url": "http://x", "components": ["a"], "tasks": ROWS} | options)
