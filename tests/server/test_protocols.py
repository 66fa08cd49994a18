"""Other systems' interfaces stand behind the same guard."""

from __future__ import annotations

import time

import httpx
import pytest

import mrgym

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
