"""Environments that hang or raise where none should, and what clients do about it."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
import time
import weakref

import pytest

import mrgym
from mrgym.errors import ConfigError
from mrgym.server import ServerConfig
from mrgym.server.lanes import Lanes
from mrgym.server.serve import listen


class Asked(mrgym.SingleTurnEnv):
    """Hangs where a prompt says so."""

    release = threading.Event()

    def tasks(self, split):
        return [mrgym.Task(f"{split} {i}", i) for i in range(3)]

    def plain_prompt(self, task):
        if task.prompt == "hang":
            self.release.wait(20)
        return super().plain_prompt(task)

    @mrgym.component(low=0, high=1)
    def fine(self, task, completion):
        return 1


TASK = {"prompt": "hang"}
ITEMS = {"items": [{"completion": "a", "task": TASK}]}


@pytest.mark.parametrize(
    ("path", "body"), [("/prompts", {"tasks": [TASK]}), ("/score", ITEMS), ("/turns", ITEMS)]
)
def test_a_prompt_that_hangs_holds_up_its_request_alone(serving, path, body):
    Asked.release.clear()
    service = serving(Asked, request_timeout=0.5)
    answers = []
    asking = threading.Thread(
        target=lambda: answers.append(service.http.post(path, json=body, timeout=20))
    )
    asking.start()
    time.sleep(0.1)
    start = time.monotonic()
    assert service.http.get("/health", timeout=5).status_code == 200
    assert service.http.get("/tasks").json()["total"] == 3
    assert time.monotonic() - start < 5  # not the hanging prompt's 20 s
    asking.join()
    Asked.release.set()
    assert (answers[0].status_code, answers[0].json()["error"]["type"]) == (
        504,
        "EnvironmentTimeout",
    )


def test_who_waits_for_a_session_that_ends_is_told_at_once(serving, counter_class):
    release = threading.Event()

    class Holding(counter_class):
        def step(self, action):
            release.wait(20)
            return super().step(action)

    service = serving(Holding, request_timeout=15)
    session = service.http.post("/sessions", json={}).json()["id"]
    service.http.post(f"/sessions/{session}/reset", json={"seq": 1})
    answers = {}

    def step(seq):
        body = {"action": [0.0], "seq": seq}
        answers[seq] = service.http.post(f"/sessions/{session}/step", json=body)

    steps = [threading.Thread(target=step, args=(seq,)) for seq in (2, 3)]
    for thread in steps:
        thread.start()
        time.sleep(0.15)
    ending = threading.Thread(target=service.http.delete, args=(f"/sessions/{session}",))
    ending.start()
    time.sleep(0.15)
    start = time.monotonic()
    release.set()
    for thread in (*steps, ending):
        thread.join()
    assert time.monotonic() - start < 10  # not the 15 s an environment may take
    assert answers[2].status_code == 200
    assert (answers[3].status_code, answers[3].json()["error"]["type"]) == (410, "SessionBroken")
    assert Holding.closed == 1


def test_what_close_raises_is_in_the_log_and_the_end_in_good_order(serving, counter_class, caplog):
    class Loud(counter_class):
        def close(self):
            raise RuntimeError("cannot close")

    service = serving(Loud)
    session = service.http.post("/sessions", json={}).json()["id"]
    assert service.http.delete(f"/sessions/{session}").status_code == 200
    with caplog.at_level(logging.WARNING):
        service.stop()
    said = [record.getMessage() for record in caplog.records]
    assert said == ["environment: close raised RuntimeError('cannot close')"] * 2
    assert not any(record.exc_info for record in caplog.records)


def test_a_close_that_hangs_does_not_keep_the_service(serving, counter_class, monkeypatch):
    monkeypatch.setattr("mrgym.server.app.CLOSING", 0.2)
    release = threading.Event()

    class Stuck(counter_class):
        def close(self):
            release.wait(60)

    serving(Stuck).stop()
    release.set()


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt, SystemExit])
def test_nothing_an_environment_raises_ends_a_thread(serving, error):
    class Raising(Asked):
        def plain_prompt(self, task):
            if task.prompt == "raise":
                raise error
            return super().plain_prompt(task)

    service = serving(Raising, score_threads=1, request_timeout=5)
    response = service.http.post("/prompts", json={"tasks": [{"prompt": "raise"}]})
    assert (response.status_code, response.json()["error"]["type"]) == (500, "EnvironmentError")
    assert service.http.post("/prompts", json={"tasks": [{"prompt": "p"}]}).status_code == 200


def test_an_error_that_is_no_unicode_is_answered(serving):
    class Raising(Asked):
        @mrgym.component(low=0, high=1)
        def fine(self, task, completion):
            raise mrgym.RewardContractError("no \udcff")

    response = serving(Raising).http.post(
        "/score", json={"items": [{"completion": "a", "task": {"prompt": "p"}}]}
    )
    assert response.json()["error"]["type"] == "RewardContractError"
    assert response.json()["error"]["message"] == r"no \udcff"


def test_calls_given_up_while_they_wait_are_let_go_of():
    class Body:
        pass

    release = threading.Event()

    async def play():
        lanes = Lanes(1, "test")
        hanging = lanes.submit(lambda: release.wait(20))
        body = Body()
        left = weakref.ref(body)
        lanes.submit(lambda body=body: None).cancel()
        del body
        await asyncio.sleep(0)
        gc.collect()
        gone = left() is None
        release.set()
        await hanging
        lanes.close()
        return gone, lanes.pending

    assert asyncio.run(play()) == (True, 0)


def test_a_client_that_asks_ahead_and_leaves_is_no_error(serving, caplog):
    Asked.release.clear()
    service = serving(Asked)
    body = b'{"tasks": [{"prompt": "hang"}]}'
    head = "POST /prompts HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    with caplog.at_level(logging.WARNING):
        with socket.create_connection(("127.0.0.1", service.port), timeout=10) as channel:
            channel.sendall(request * 3)
            time.sleep(0.2)
        time.sleep(0.2)
        Asked.release.set()
        time.sleep(0.2)
        assert service.http.get("/health").status_code == 200
    assert caplog.records == []


def ask(service, *lines):
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as channel:
        channel.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode())
        answer = b""
        while chunk := channel.recv(65536):
            answer += chunk
    return answer


@pytest.mark.parametrize("path", ["/health/", "/env/", "//health"])
def test_nobody_is_sent_to_another_host(math_service, path):
    answer = ask(math_service, f"GET {path} HTTP/1.1", "Host: elsewhere.example")
    assert answer.startswith(b"HTTP/1.1 404")
    assert b"elsewhere" not in answer


@pytest.mark.parametrize("host", ["x", "["])
def test_a_websocket_is_not_spoken_and_not_waited_for(math_service, host):
    lines = (
        "GET /health HTTP/1.1",
        f"Host: {host}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    )
    with socket.create_connection(("127.0.0.1", math_service.port), timeout=10) as channel:
        channel.sendall("\r\n".join([*lines, "", ""]).encode())
        assert channel.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("host", ["a..b", "ü" * 70, "a\0b"])
def test_a_host_that_is_no_name_is_one_error(host):
    with pytest.raises(ConfigError, match="expected an address"):
        listen(ServerConfig(host=host, port=0))
