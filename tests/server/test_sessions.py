"""Sessions: one environment each, never stepped twice, and freed when their client is gone."""

from __future__ import annotations

import socket
import threading
import time

import msgspec
import pytest

import mrgym

JSON = "application/json"


def call(service, path, body=None, method="POST"):
    return service.http.request(method, path, json={} if body is None else body)


def open_session(service, **body):
    response = call(service, "/sessions", body)
    assert response.status_code == 200, response.text
    return response.json()["id"]


def until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert met


def test_a_retried_step_gives_the_same_answer_and_is_not_taken_twice(serving, counter_class):
    service = serving(counter_class)
    path = f"/sessions/{open_session(service)}"
    assert call(service, f"{path}/reset", {"seq": 1, "seed": 3}).json()["seq"] == 1
    step = {"seq": 2, "action": [0.5]}
    first, again = (call(service, f"{path}/step", step).json() for _ in "ab")
    assert first == again
    assert first["info"]["reward_components"] == {"moved": 0.5}
    assert counter_class.steps_of_all == 1
    assert service.metric("mrgym_session_steps_total") == 1
    assert call(service, f"{path}/step", {"seq": 3, "action": [0.25]}).json()["reward"] == (
        pytest.approx(0.25 - 2 / 3)
    )


@pytest.mark.parametrize("seq", [0, 1, 4, 2**62])
def test_a_step_out_of_turn_is_a_conflict(serving, counter_class, seq):
    service = serving(counter_class)
    path = f"/sessions/{open_session(service)}"
    call(service, f"{path}/reset", {"seq": 1})
    call(service, f"{path}/step", {"seq": 2, "action": [0.5]})
    response = call(service, f"{path}/step", {"seq": seq, "action": [0.5]})
    assert (response.status_code, response.json()["error"]["type"]) == (409, "OutOfTurn")
    other = call(service, f"{path}/step", {"seq": 2, "action": [0.6]})
    assert other.status_code == 409  # the same number for another request
    assert counter_class.steps_of_all == 1


def test_two_requests_with_one_number_at_a_time_are_one_step(serving, counter_class):
    service = serving(lambda: counter_class(pause=0.3))
    path = f"/sessions/{open_session(service)}"
    call(service, f"{path}/reset", {"seq": 1})
    answers = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(
                call(service, f"{path}/step", {"seq": 2, "action": [1.0]}).json()
            )
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers[0] == answers[1] == answers[2]
    assert counter_class.steps_of_all == 1


def test_the_same_key_opens_one_session(serving, counter_class):
    service = serving(counter_class, max_sessions=2)
    assert open_session(service, key="k1") == open_session(service, key="k1")
    assert open_session(service, key="k2") != open_session(service, key="k1")
    assert service.metric("mrgym_sessions") == 2


def test_sessions_share_nothing(serving, counter_class):
    service = serving(counter_class)
    one, two = open_session(service), open_session(service)
    for session in (one, two):
        call(service, f"/sessions/{session}/reset", {"seed": 1})
    call(service, f"/sessions/{one}/step", {"action": [1.0]})
    seen = call(service, f"/sessions/{two}/step", {"action": [0.0]}).json()
    assert seen["observation"]["turn"] == 1


def test_at_capacity_a_session_is_refused_at_once(serving, counter_class):
    service = serving(counter_class, max_sessions=2)
    sessions = [open_session(service) for _ in range(2)]
    response = call(service, "/sessions")
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert "expected at most that many" in response.json()["error"]["message"]
    assert call(service, f"/sessions/{sessions[0]}", method="DELETE").status_code == 200
    open_session(service)
    assert counter_class.closed == 1


def test_64_sessions_at_a_time_keep_apart(serving, counter_class):
    service = serving(counter_class, max_sessions=64)
    sessions = [open_session(service) for _ in range(64)]
    for i, session in enumerate(sessions):
        call(service, f"/sessions/{session}/reset", {"seed": i})
    turns = [
        call(service, f"/sessions/{s}/step", {"action": [i / 64]}).json()["reward"]
        for i, s in enumerate(sessions)
    ]
    assert turns == [i / 64 for i in range(64)]
    assert call(service, "/sessions").status_code == 429


def test_an_idle_session_ends(serving, counter_class):
    service = serving(counter_class, idle_timeout=0.3)
    session = open_session(service)
    until(lambda: counter_class.closed == 1)
    response = call(service, f"/sessions/{session}/reset")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "UnknownSession")
    assert service.metric("mrgym_sessions") == 0


def begin_and_leave(service, path, body):
    content = msgspec.json.encode(body)
    lines = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\n"
    head = f"{lines}Content-Length: {len(content)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", service.port)) as channel:
        channel.sendall(head + content)
        time.sleep(0.15)


def test_a_client_killed_in_a_step_frees_its_session(serving, counter_class):
    service = serving(lambda: counter_class(pause=0.5), max_sessions=1, disconnect_grace=0.2)
    session = open_session(service)
    call(service, f"/sessions/{session}/reset", {"seq": 1})
    begin_and_leave(service, f"/sessions/{session}/step", {"seq": 2, "action": [0.5]})
    until(lambda: counter_class.closed == 1)
    open_session(service)


def test_a_client_that_comes_back_finds_its_session_and_answer(serving, counter_class):
    service = serving(lambda: counter_class(pause=0.5), disconnect_grace=5)
    session = open_session(service)
    call(service, f"/sessions/{session}/reset", {"seq": 1})
    step = {"seq": 2, "action": [0.5]}
    begin_and_leave(service, f"/sessions/{session}/step", step)
    answer = call(service, f"/sessions/{session}/step", step).json()
    assert answer["reward"] == 0.5
    assert counter_class.steps_of_all == 1


def test_a_client_killed_while_its_session_opens_frees_it(serving, counter_class):
    made = []

    def make():
        time.sleep(0.4 if made else 0)
        made.append(1)
        return counter_class()

    service = serving(make, max_sessions=1, disconnect_grace=0.2)
    begin_and_leave(service, "/sessions", {})
    until(lambda: counter_class.closed == 1)
    assert len(made) == 2


@pytest.mark.parametrize(
    ("action", "status"),
    [([0.5, 0.5], 422), ("up", 422), ([True], 422), ([[0.5]], 422), (None, 422), ([10**400], 422)],
)
def test_an_action_that_is_none_is_refused(serving, counter_class, action, status):
    service = serving(counter_class)
    path = f"/sessions/{open_session(service)}"
    call(service, f"{path}/reset")
    response = call(service, f"{path}/step", {"action": action})
    assert response.status_code == status, response.text
    assert counter_class.steps_of_all == 0


def test_a_step_before_reset_is_a_conflict(serving, counter_class):
    service = serving(counter_class)
    path = f"/sessions/{open_session(service)}"
    for _ in "ab":
        response = call(service, f"{path}/step", {"action": [0.5]})
        assert (response.status_code, response.json()["error"]["type"]) == (409, "ResetNeeded")


def test_an_environment_that_fails_is_the_services_fault_and_goes_on(serving, counter_class):
    class Broken(counter_class):
        def step(self, action):
            if action[0] > 0.5:
                raise KeyError("secret of the machine")
            return super().step(action)

    service = serving(Broken)
    path = f"/sessions/{open_session(service)}"
    call(service, f"{path}/reset")
    response = call(service, f"{path}/step", {"action": [1.0]})
    assert response.status_code == 500
    assert "KeyError" in response.text
    assert "secret" not in response.text
    assert call(service, f"{path}/step", {"action": [0.25]}).json()["reward"] == 0.25


def test_an_environment_that_hangs_loses_its_session_but_not_the_service(serving, counter_class):
    release = threading.Event()

    class Hanging(counter_class):
        def step(self, action):
            release.wait(20)
            return super().step(action)

    service = serving(Hanging, request_timeout=0.3, max_sessions=1)
    path = f"/sessions/{open_session(service)}"
    call(service, f"{path}/reset")
    assert call(service, f"{path}/step", {"action": [0.0]}).status_code == 504
    assert call(service, f"{path}/step", {"action": [0.0]}).status_code == 410
    assert call(service, path, method="DELETE").status_code == 200
    assert call(service, "/sessions").status_code == 429  # it still holds its environment
    release.set()
    until(lambda: call(service, "/sessions").status_code == 200)


def test_entries_of_info_without_a_form_are_named(serving, counter_class):
    service = serving(counter_class)
    answer = call(service, f"/sessions/{open_session(service)}/reset", {"options": {"a": 1}})
    assert answer.json()["left_out"] == ["odd"]
    assert answer.json()["info"] == {"options": {"a": 1}}


def test_a_text_environment_has_sessions_too(math_service):
    path = f"/sessions/{open_session(math_service)}"
    source = mrgym.make("math_multi_reward").task_source("eval")
    task = source[3]
    answer = call(math_service, f"{path}/reset", {"options": {"task_id": task.id, "split": "eval"}})
    assert answer.json()["info"]["task_id"] == task.id
    answer = call(math_service, f"{path}/step", {"action": f"<answer>{task.answer}</answer>"})
    assert answer.json()["info"]["reward_components"]["correctness"] == 1.0
    assert answer.json()["terminated"] is True
    for options in ({"task_id": []}, {"split": "x"}, {"other": 1}, {"task": "t"}):
        assert call(math_service, f"{path}/reset", {"options": options}).status_code == 422
    call(math_service, path, method="DELETE")
