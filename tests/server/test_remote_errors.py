"""Services that are down, slow, wrong, or lie: one clear error, in finite time."""

from __future__ import annotations

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

import mrgym
from mrgym.errors import ConfigError, RemoteError, RewardContractError, ScoreError
from mrgym.remote.client import Client
from mrgym.server.schemas import ScoreItem

TOKEN = "a-token-for-tests-0123456789"
TASK = mrgym.Task("2+2", "4", "t")


class Tampering:
    """A server between client and service that changes answers."""

    def __init__(self, target, change):
        self.requests = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                outer.requests.append((self.command, self.path))
                headers = {"Content-Type": self.headers.get("Content-Type", "application/json")}
                response = target.http.request(
                    self.command, self.path, content=body, headers={**headers, "Accept": "*/*"}
                )
                status, data, kind = change(self, response)
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = answer  # noqa: N815

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def tampered(math_service):
    """A function that gives the address of the service behind a change of its JSON answers."""
    servers = []

    def start(path, change):
        def apply(handler, response):
            data = response.content
            if handler.path.startswith(path):
                answer = change(json.loads(data))
                if isinstance(answer, tuple):
                    return answer
                data = json.dumps(answer).encode()
            return response.status_code, data, response.headers["content-type"]

        servers.append(Tampering(math_service, apply))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def connect(server, **settings):
    return mrgym.make(server.url, format="json", **{"retries": 0, "timeout": 10, **settings})


def result(**changes):
    def change(answer):
        answer["results"][0].update(changes)
        return answer

    return change


ZEROS = {"correctness": 0.0, "format": 0.0, "integer": 0.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"raw_components": {"correctness": 1.0, "format": 0.0}},
        {"raw_components": {**ZEROS, "charm": 1.0}},
        {"raw_components": {**ZEROS, "format": 1.5}},
        {"components": ZEROS},
        {"reward": 99.0},
    ],
)
def test_scores_that_break_the_contract_are_found_out(tampered, changes):
    env = connect(tampered("/score", result(**changes)))
    with pytest.raises(RewardContractError, match="math_multi_reward-v1 at http"):
        mrgym.score_completions(env, [TASK], ["4"])


@pytest.mark.parametrize(
    "change",
    [
        result(task_id="another"),
        result(status="fine"),
        result(reward="3"),
        result(raw_components={"correctness": None}),
        lambda answer: {"results": []},
        lambda answer: {"results": answer["results"] * 2},
        lambda answer: {},
        lambda answer: (200, b"\xff\xfe\x00", "application/json"),
        lambda answer: (200, b"[" * 100_000, "application/json"),
        lambda answer: (200, b"<html>hello</html>", "text/html"),
        lambda answer: (200, b"", "application/json"),
        lambda answer: (302, b"", "text/plain"),
        lambda answer: (404, b"nothing here", "text/plain"),
        lambda answer: (500, b'{"error": "no object"}', "application/json"),
    ],
)
def test_an_answer_that_is_none_is_one_error(tampered, change):
    env = connect(tampered("/score", change))
    with pytest.raises(RemoteError, match=r"^http://127\.0\.0\.1") as error:
        mrgym.score_completions(env, [TASK], ["4"])
    assert "\n" not in str(error.value)


def test_a_failed_score_is_a_status_here_too(tampered):
    failed = result(status="timeout", error="slow: no score", components={}, raw_components={})
    env = connect(tampered("/score", failed))
    (rollout,) = mrgym.score_completions(env, [TASK], ["4"])
    assert (rollout.status, rollout.error, rollout.components) == ("timeout", "slow: no score", {})
    with pytest.raises(ScoreError, match="slow: no score"):
        mrgym.score_completions(env, [TASK], ["4"], on_score_error="raise")


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: {**answer, "protocol": 2},
        lambda answer: {},
        lambda answer: {"protocol": 1},
        lambda answer: {**answer, "components": []},
        lambda answer: {**answer, "components": [{**answer["components"][0], "low": 5.0}]},
        lambda answer: (200, b"<html>", "text/html"),
    ],
)
def test_another_version_or_no_service_is_one_error(tampered, change):
    with pytest.raises(RemoteError, match=r"^http://127\.0\.0\.1.*expected"):
        connect(tampered("/env", change))


def test_an_empty_page_of_tasks_ends(tampered):
    env = connect(tampered("/tasks", lambda answer: {**answer, "tasks": []}))
    with pytest.raises(RemoteError, match="an empty page"):
        env.task_source("train")


def test_a_busy_service_is_asked_again(tampered):
    turned_away = []

    def change(answer):
        if len(turned_away) < 2:
            turned_away.append(1)
            return 503, b'{"error": {}}', "application/json"
        return answer

    env = connect(tampered("/score", change), retries=3)
    (rollout,) = mrgym.score_completions(env, [TASK], ["4"])
    assert rollout.components["correctness"] == 1.0


def test_a_lost_answer_of_a_step_is_asked_for_again(serving, counter_class):
    """The connection breaks after the service has stepped: the step must not be taken twice."""
    lost = []

    def change(handler, response):
        if handler.path.endswith("/step") and len(lost) < 2:
            lost.append(handler.path)
            handler.connection.shutdown(socket.SHUT_RDWR)
        return response.status_code, response.content, response.headers["content-type"]

    server = Tampering(serving(counter_class), change)
    env = mrgym.make(server.url, format="json", retries=3)
    env.reset(seed=1)
    assert env.step([0.5])[4]["reward_components"] == {"moved": 0.5}
    env.step([0.25])
    assert counter_class.steps_of_all == 2
    assert len([path for _, path in server.requests if path.endswith("/step")]) == 4
    env.close()
    server.close()


def test_the_token_is_needed_and_can_come_from_the_environment(serving, sample, monkeypatch):
    service = serving(sample.env, token=TOKEN)
    for token in (None, "wrong" * 5):
        with pytest.raises(RemoteError, match="expected the service's own; pass token="):
            mrgym.make(service.url, token=token)
    assert mrgym.make(service.url, token=TOKEN).max_turns == 1
    monkeypatch.setenv("MRGYM_TOKEN", TOKEN)
    assert mrgym.make(service.url).max_turns == 1


def test_nobody_there_is_one_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(RemoteError, match=r"ConnectError .* in 2 attempts"):
        mrgym.make(f"http://127.0.0.1:{port}", retries=1)


def test_one_that_does_not_answer_takes_finite_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RemoteError, match=r"ReadTimeout .*within 0\.3 s"):
            mrgym.make(url, timeout=0.3, retries=1)


def test_one_that_answers_in_drops_takes_finite_time():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip():
            channel, _ = listener.accept()
            with channel:
                channel.recv(65536)
                head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                channel.sendall(head + b"Content-Length: 100000\r\n\r\n")
                deadline = time.monotonic() + 20
                try:
                    while time.monotonic() < deadline:
                        channel.sendall(b" ")
                        time.sleep(0.05)
                except OSError:
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        with pytest.raises(RemoteError, match=r"no whole answer within 0\.5 s"):
            mrgym.make(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.5, retries=0)
        dripping.join()


@pytest.mark.parametrize(
    "url",
    ["http://", "https://:80", "http://h:99999", "http://u:p@h", "http://h/?a=1", "http://h:x"],
)
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="got address"):
        mrgym.make(url)


@pytest.mark.parametrize("settings", [{"format": "pickle"}, {"timeout": 0}, {"retries": -1}])
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ConfigError):
        Client("http://127.0.0.1:1", **settings)


def test_text_that_is_no_unicode_is_refused_here(math_service):
    client = Client(math_service.url)
    item = ScoreItem(completion="\ud800", task_id="x")
    with pytest.raises(mrgym.WireError, match="got a value that cannot be sent"):
        client.score([item], client.describe().limits)


def test_an_unknown_field_of_a_newer_service_is_no_harm():
    from mrgym.server.schemas import HealthOut

    assert msgspec.json.decode(b'{"status": "ok", "since": 3}', type=HealthOut).status == "ok"
