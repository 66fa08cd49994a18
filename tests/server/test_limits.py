"""Who may ask, how much, and how slowly; whatever comes, the service stays up."""

from __future__ import annotations

import json
import socket
import time

import httpx
import pytest

import mrgym
from mrgym.errors import ConfigError
from mrgym.server import ServerConfig

TOKEN = "a-token-for-tests-0123456789"
BODY = json.dumps({"items": [{"completion": "4", "task": {"prompt": "2+2"}}]}).encode()


@pytest.fixture(scope="module")
def env():
    return mrgym.make("math_multi_reward")


@pytest.fixture(scope="module")
def guarded(module_serving, env):
    return module_serving(env, token=TOKEN)


def talk(service, *parts, pause=0.0, wait=5.0):
    """Send bytes on a socket, with pauses between; return what comes until it is closed."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=wait) as channel:
        for part in parts:
            try:
                channel.sendall(part)
            except OSError:  # answered and closed already
                break
            time.sleep(pause)
        answer = b""
        try:
            while chunk := channel.recv(65536):
                answer += chunk
        except (TimeoutError, ConnectionResetError):
            pass
    return answer


def head(*lines, method="POST", path="/score"):
    first = f"{method} {path} HTTP/1.1"
    lines = (first, "Host: x", "Content-Type: application/json", "Connection: close", *lines)
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_other_addresses_need_a_token(host):
    with pytest.raises(ConfigError, match=r"without a token, expected one.*MRGYM_TOKEN"):
        ServerConfig(host=host).check_exposure()
    ServerConfig(host=host, token=TOKEN).check_exposure()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_loopback_addresses_need_none(host):
    ServerConfig(host=host).check_exposure()


@pytest.mark.parametrize("token", ["short", "x" * 15, "with space " * 3, "ünïcode" * 4])
def test_a_poor_token_is_refused(token):
    with pytest.raises(ConfigError, match="got a token of"):
        ServerConfig(token=token).check_exposure()


def test_the_token_is_not_in_the_settings_text():
    assert TOKEN not in repr(ServerConfig(token=TOKEN))


@pytest.mark.parametrize(
    "sent",
    [None, "", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer", f"Bearer {TOKEN[:-1]}"],
)
@pytest.mark.parametrize("path", ["/env", "/metrics", "/openapi.json", "/nope"])
def test_without_the_token_nothing_but_health_is_answered(guarded, sent, path):
    with httpx.Client(base_url=guarded.url, trust_env=False) as http:
        assert_refused(http, {"Authorization": sent} if sent is not None else {}, path)
    assert guarded.http.get(path).status_code in (200, 404)


def assert_refused(http, headers, path):
    response = http.get(path, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["type"] == "Unauthorized"
    assert http.get("/health").json() == {"status": "ok"}
    # The scheme's case does not matter.
    assert http.get("/env", headers={"Authorization": f"bearer {TOKEN}"}).status_code == 200


def test_a_long_body_is_refused_before_it_is_read(serving, env):
    service = serving(env, max_body_bytes=2048)
    answer = talk(service, head("Content-Length: 999999999999"))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"BodyTooLarge" in answer
    assert talk(service, head(f"Content-Length: {len(BODY)}"), BODY).startswith(b"HTTP/1.1 200")


def test_a_long_chunked_body_is_refused_while_it_is_read(serving, env):
    service = serving(env, max_body_bytes=2048)
    chunk = b"400\r\n" + b"x" * 1024 + b"\r\n"
    answer = talk(service, head("Transfer-Encoding: chunked"), *[chunk] * 20)
    assert answer.startswith(b"HTTP/1.1 413")
    whole = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    assert talk(service, head("Transfer-Encoding: chunked"), whole).startswith(b"HTTP/1.1 200")


def test_a_slow_body_gets_a_timeout(serving, env):
    service = serving(env, body_timeout=0.4)
    drops = [BODY[i : i + 1] for i in range(12)]
    answer = talk(service, head(f"Content-Length: {len(BODY)}"), *drops, pause=0.1)
    assert answer.startswith(b"HTTP/1.1 408")
    assert service.http.get("/health").status_code == 200


def test_a_head_that_does_not_end_is_hung_up_on(serving, env):
    service = serving(env, body_timeout=0.4)
    drops = [b"POST /score HTTP/1.1\r\n"] + [b"X-Drop: 1\r\n"] * 12
    start = time.monotonic()
    assert talk(service, *drops, pause=0.1, wait=30) == b""
    assert talk(service, b"", wait=30) == b""
    assert time.monotonic() - start < 25  # it was the service that ended it
    assert service.http.get("/health").status_code == 200


def test_a_head_without_end_is_hung_up_on(serving, env):
    service = serving(env, body_timeout=30)
    start = time.monotonic()
    lines = [b"X-Long: " + b"x" * 8000 + b"\r\n"] * 40
    assert b"HTTP/1.1 2" not in talk(service, b"GET /health HTTP/1.1\r\n", *lines, wait=20)
    assert time.monotonic() - start < 15
    assert service.http.get("/health").status_code == 200


def test_a_connection_may_be_used_again_and_rest_between(serving, env):
    service = serving(env, body_timeout=0.5)
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as channel:
        for pause in (0.0, 0.8, 0.8):
            time.sleep(pause)
            channel.sendall(request)
            assert channel.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "junk",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"POST /score HTTP/9.9\r\n\r\n",
    ],
)
def test_junk_on_the_socket_does_no_harm(math_service, junk):
    talk(math_service, junk, wait=1)
    assert math_service.http.get("/health").status_code == 200


def test_a_client_that_leaves_in_its_body_does_no_harm(math_service):
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", math_service.port)) as channel:
            channel.sendall(head("Content-Length: 1000") + b"half")
    assert math_service.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("sent", "kept"), [("abc-1.2_3", True), ("", False), ("x" * 129, False), ("a b", False)]
)
def test_a_proper_request_id_comes_back(math_service, sent, kept):
    response = math_service.http.get("/nope", headers={"X-Request-ID": sent})
    assert (response.headers["x-request-id"] == sent) is kept
    assert response.json()["error"]["request_id"] == response.headers["x-request-id"]
    assert response.headers.get_list("x-request-id") == [response.headers["x-request-id"]]


def test_paths_and_methods_that_are_none_get_structured_answers(math_service):
    assert math_service.http.get("/docs").status_code == 404
    for method, path, allowed in (("PUT", "/score", "POST"), ("GET", "/sessions/x", "DELETE")):
        response = math_service.http.request(method, path)
        assert (response.status_code, response.headers["allow"]) == (405, allowed)
        assert response.json()["error"]["type"] == "MethodNotAllowed"


def test_metrics_count_requests_and_scores(serving, env):
    service = serving(env)
    for _ in range(3):
        service.http.post("/score", content=BODY, headers={"Content-Type": "application/json"})
    service.http.get("/somewhere/else/entirely")
    ok = 'mrgym_requests_total{method="POST",route="/score",status="200"}'
    assert service.metric(ok) == 3
    assert service.metric('mrgym_requests_total{method="GET",route="other",status="404"}') == 1
    assert service.metric("mrgym_completions_scored_total") == 3
    assert service.metric('mrgym_component_sum{component="integer"}') == 3
    assert service.metric('mrgym_request_seconds_count{route="/score"}') == 3
    assert service.metric("mrgym_sessions") == 0
