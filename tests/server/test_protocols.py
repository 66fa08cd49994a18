"""Other systems' interfaces stand behind the same guard."""

from __future__ import annotations

import asyncio
import threading
import time

import httpx
import pytest

import mrgym
from mrgym.server import ServerConfig
from mrgym.server.guard import Guard, Switch
from mrgym.server.metrics import Metrics

TOKEN = "a-token-for-tests-0123456789"


def test_nemo_gym_behind_the_guard(serving):
    env = mrgym.make("math_multi_reward")
    service = serving(env, protocol="nemo-gym", token=TOKEN, max_body_bytes=4096)
    assert httpx.get(f"{service.url}/", trust_env=False).status_code == 401
    assert service.http.get("/").status_code == 200
    assert service.http.post("/verify", content=b"x" * 5000).status_code == 413
    assert service.http.post("/verify", json={}).status_code == 422
    assert service.http.get("/nope").headers["x-request-id"]
    assert service.metric('mrgym_requests_total{method="POST"') == 2


def test_openenv_behind_the_guard(serving):
    pytest.importorskip("openenv", reason="needs openenv (make test-peers)")
    websockets = pytest.importorskip("websockets.sync.client", reason="needs websockets")
    env = mrgym.make("math_multi_reward")
    service = serving(env, protocol="openenv", token=TOKEN, body_timeout=0.5)
    assert httpx.get(f"{service.url}/schema", trust_env=False).status_code == 401
    assert service.http.get("/schema").status_code == 200
    url = f"ws://127.0.0.1:{service.port}/ws"
    with pytest.raises(Exception, match="403"):
        websockets.connect(url)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with websockets.connect(url, additional_headers=headers) as channel:
        for pause in (0.0, 1.0):  # longer than a request's head may take
            time.sleep(pause)
            channel.send('{"type": "reset", "data": {"seed": 1}}')
            assert '"observation"' in channel.recv()


class Endless(mrgym.SingleTurnEnv):
    """Hangs where the completion says so."""

    release = threading.Event()

    def tasks(self, split):
        return [mrgym.Task(f"{split} {i}", id=f"{i}") for i in range(3)]

    @mrgym.component(low=0, high=1)
    def fine(self, task, completion):
        if completion == "hang":
            self.release.wait(30)
        return 1


def verify(service, text):
    content = [{"type": "output_text", "text": text, "annotations": []}]
    output = [{"type": "message", "role": "assistant", "content": content}]
    row = {
        "responses_create_params": {"input": "?"},
        "response": {"output": output, "status": "completed"},
        "verifier_metadata": {"task_id": "1", "split": "train"},
    }
    return service.http.post("/verify", json=row)


def test_nemo_gym_answers_within_the_request_timeout(serving):
    service = serving(Endless(), protocol="nemo-gym", request_timeout=0.5)
    assert verify(service, "fine").json()["reward_components"] == {"fine": 1.0}
    try:
        response = verify(service, "hang")
    finally:
        Endless.release.set()
    assert (response.status_code, response.json()["error"]["type"]) == (504, "EnvironmentTimeout")
    assert response.json()["error"]["request_id"] == response.headers["x-request-id"]
    assert "--request-timeout" in response.json()["error"]["message"]
    assert service.metric('mrgym_requests_total{method="POST",route="/verify",status="504"}') == 1


def test_nemo_gym_goes_on_after_an_endless_score_in_a_worker(serving):
    Endless.release.clear()
    settings = {"scoring": "workers", "score_workers": 1, "score_deadline": 0.5}
    service = serving(Endless(), protocol="nemo-gym", **settings)
    assert verify(service, "hang").status_code == 500
    assert verify(service, "fine").json()["reward_components"] == {"fine": 1.0}


def answered(app, **settings):
    """Return what a guard sends for one GET."""
    guard = Guard(app, ServerConfig(), Metrics(), Switch(), **settings)
    scope = {"type": "http", "method": "GET", "path": "/x", "headers": []}
    sent = []

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        sent.append(message)

    asyncio.run(guard(scope, receive, send))
    return sent


def test_what_takes_too_long_is_cancelled():
    ended = []

    async def slow(scope, receive, send):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    assert answered(slow, answer_within=0.05)[0]["status"] == 504
    assert ended == ["cancelled"]


def test_a_timeout_of_the_applications_own_is_its_own_error():
    async def own(scope, receive, send):
        raise TimeoutError

    assert answered(own, answer_within=30.0)[0]["status"] == 500
