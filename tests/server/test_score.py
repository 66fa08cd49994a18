"""Scoring through the service: the same numbers in both formats, and bad items refused whole."""

from __future__ import annotations

import json
import threading
import time

import msgspec
import pytest

import mrgym

JSON, MSGPACK = "application/json", "application/msgpack"


def post(service, path, body, media=JSON, **headers):
    encoder = msgspec.msgpack.encode if media == MSGPACK else msgspec.json.encode
    content = body if isinstance(body, bytes) else encoder(body)
    return service.http.post(path, content=content, headers={"Content-Type": media, **headers})


def read(response):
    media = response.headers["content-type"]
    decoder = msgspec.msgpack.decode if media == MSGPACK else msgspec.json.decode
    return decoder(response.content)


def items_of(sample):
    return [
        {"completion": text, "task": {"prompt": task.prompt, "answer": task.answer, "id": task.id}}
        for task, text in zip(sample.tasks, sample.completions, strict=True)
    ]


@pytest.mark.parametrize("media", [JSON, MSGPACK])
def test_components_are_those_of_the_environment_in_process(math_service, sample, media):
    response = post(math_service, "/score", {"items": items_of(sample)}, media)
    assert response.headers["content-type"] == media
    results = read(response)["results"]
    assert [r["components"] for r in results] == sample.components
    assert [r["task_id"] for r in results] == [t.id for t in sample.tasks]
    assert all(r["reward"] == sum(r["components"].values()) for r in results)
    assert all(r["status"] == "ok" and r["terminated"] for r in results)


def test_one_by_one_and_by_task_id_it_is_the_same(math_service, sample):
    for task, text, expected in list(
        zip(sample.tasks, sample.completions, sample.components, strict=True)
    )[:30]:
        item = {"completion": [text], "task_id": task.id, "split": "train"}
        (result,) = read(post(math_service, "/score", {"items": [item]}))["results"]
        assert result["components"] == expected


def test_worker_processes_give_the_same(serving, sample):
    service = serving(sample.env, scoring="workers", score_workers=1)
    results = read(post(service, "/score", {"items": items_of(sample)[:40]}))["results"]
    assert [r["components"] for r in results] == sample.components[:40]


GOOD = {"completion": "4", "task": {"prompt": "2+2", "answer": "4"}}


@pytest.mark.parametrize(
    ("item", "subject"),
    [
        ({"completion": 5, "task_id": "x"}, "items[1].completion"),
        ({"completion": "4"}, "items[1]"),
        ({**GOOD, "task_id": "x"}, "items[1]"),
        ({"completion": "4", "task_id": "nobody"}, "items[1].task_id"),
        ({"completion": [], "task_id": "x"}, "items[1].completion"),
        ({"completion": ["a", "b"], "task": GOOD["task"]}, "items[1].completion"),
        ({**GOOD, "reward": 1}, "items[1]"),
        ({"completion": "4", "task": {"prompt": []}}, "items[1].task.prompt"),
        ({"completion": "4", "task": {"prompt": "a", "answer": 2**70}}, "items[1].task.answer"),
        ({"completion": "4", "task": {"prompt": "a", "metadata": {"a": [{}] * 3}, "x": 1}}, None),
        ("no object", "items[1]"),
    ],
)
def test_a_bad_item_is_refused_by_its_position_and_nothing_is_scored(math_service, item, subject):
    before = math_service.metric("mrgym_completions_scored_total")
    response = post(math_service, "/score", {"items": [GOOD, item, GOOD]})
    assert response.status_code == 422
    error = read(response)["error"]
    assert error.keys() == {"type", "message", "request_id", "subject"}
    assert subject is None or error["subject"] == subject
    assert error["request_id"] == response.headers["x-request-id"]
    assert math_service.metric("mrgym_completions_scored_total") == before


NEST = b"[" * 200_000 + b"]" * 200_000 + b"}}]}"


def deep(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("body", "media", "status"),
    [
        (b"", JSON, 400),
        (b"{", JSON, 400),
        (b"[]", JSON, 422),
        (b'{"items": []}', JSON, 422),
        (b'{"items": [NaN]}', JSON, 400),
        (b'{"items": [{"completion": "\\ud800", "task_id": "x"}]}', JSON, 400),
        (b'{"items": [{"completion": "\xff"}]}', JSON, 400),
        (b'{"items":' + b"[" * 200_000 + b"]" * 200_000 + b"}", JSON, 422),
        (b'{"items": [{"completion":"4","task":{"prompt":"a","answer":' + NEST, JSON, 400),
        (b'{"items": [{"completion":"4","task":{"prompt":"a","answer":1e999}}]}', JSON, 422),
        (b"\xc1", MSGPACK, 400),
        (b"\x91" * 200_000, MSGPACK, 422),
        (b"\x81\xa5items\xdd\xff\xff\xff\xff", MSGPACK, 400),
        (msgspec.msgpack.encode({"items": [{"completion": b"4", "task_id": "x"}]}), MSGPACK, 422),
        (json.dumps({"items": [GOOD]}).encode(), MSGPACK, 422),
        (json.dumps({"items": [GOOD]}).encode(), "text/plain", 415),
        (json.dumps({"items": [GOOD]}).encode(), "application/python-pickle", 415),
    ],
)
def test_bytes_that_are_no_request_are_refused(math_service, body, media, status):
    response = math_service.http.post("/score", content=body, headers={"Content-Type": media})
    assert response.status_code == status, response.text
    assert read(response)["error"]["message"]


@pytest.mark.parametrize(
    "answer", [float("nan"), msgspec.msgpack.Ext(1, b"x"), b"x", {1: 2}, deep(65)]
)
def test_values_json_cannot_carry_are_refused_in_msgpack_too(math_service, answer):
    item = {"completion": "4", "task": {"prompt": "a", "answer": answer}}
    response = post(math_service, "/score", {"items": [item]}, MSGPACK)
    assert response.status_code == 422
    assert read(response)["error"]["subject"] == "items[0].task.answer"


def test_a_batch_over_the_limit_is_refused(serving):
    service = serving(mrgym.make("math_multi_reward"), max_batch=2)
    assert post(service, "/score", {"items": [GOOD] * 2}).status_code == 200
    response = post(service, "/score", {"items": [GOOD] * 3})
    assert (response.status_code, read(response)["error"]["type"]) == (422, "BatchTooLarge")


class Moody(mrgym.SingleTurnEnv):
    """Does what the completion says."""

    release = threading.Event()

    def tasks(self, split):
        return [mrgym.Task(f"{split} {i}", i) for i in range(3)]

    @mrgym.component(low=0, high=1)
    def mood(self, task, completion):
        if completion == "raise":
            raise ValueError("no")
        if completion == "exit":
            raise SystemExit(3)
        if completion == "wait":
            self.release.wait(20)
        return 7 if completion == "lie" else 1


TASK = {"prompt": "p"}


def test_a_score_function_that_fails_is_a_status_and_leaves_the_others(serving):
    service = serving(Moody())
    items = [{"completion": text, "task": TASK} for text in ("ok", "raise", "exit", "ok")]
    results = read(post(service, "/score", {"items": items}))["results"]
    assert [r["status"] for r in results] == ["ok", "error", "error", "ok"]
    assert [r["components"] for r in results] == [{"mood": 1.0}, {}, {}, {"mood": 1.0}]
    assert "ValueError" in results[1]["error"]
    assert service.metric('mrgym_scoring_failures_total{status="error"}') == 2


def test_a_broken_contract_is_the_services_fault(serving):
    service = serving(Moody())
    response = post(service, "/score", {"items": [{"completion": "lie", "task": TASK}]})
    assert response.status_code == 500
    assert read(response)["error"]["type"] == "RewardContractError"
    assert "mood=7" in read(response)["error"]["message"]


def test_scoring_that_takes_too_long_is_a_timeout_of_its_items(serving):
    Moody.release.clear()
    service = serving(Moody(), request_timeout=0.3, score_threads=1)
    results = read(post(service, "/score", {"items": [{"completion": "wait", "task": TASK}]}))
    assert [r["status"] for r in results["results"]] == ["timeout"]
    # The thread still hangs, so what comes now waits, and is told to come again.
    response = post(service, "/score", {"items": [{"completion": "ok", "task": TASK}]})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    Moody.release.set()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        response = post(service, "/score", {"items": [{"completion": "ok", "task": TASK}]})
        if response.status_code == 200:
            break
    assert response.status_code == 200


def test_more_requests_than_may_wait_are_turned_away(serving):
    Moody.release.clear()
    service = serving(Moody(), max_pending=1, score_threads=1)
    item = {"completion": "wait", "task": TASK}
    answers = []

    def ask_until_taken():
        while (answer := post(service, "/score", {"items": [item]})).status_code == 429:
            pass
        answers.append(answer)

    first = threading.Thread(target=ask_until_taken)
    first.start()
    deadline = time.monotonic() + 10
    status = 200
    while status != 429 and time.monotonic() < deadline:
        status = post(
            service, "/score", {"items": [{"completion": "ok", "task": TASK}]}
        ).status_code
    Moody.release.set()
    first.join(10)
    assert status == 429
    assert read(answers[0])["results"][0]["components"] == {"mood": 1.0}


def test_tasks_come_in_pages_with_prompts(math_service, sample):
    page = read(math_service.http.get("/tasks?split=train&offset=5&limit=3"))
    source = sample.env.task_source("train")
    assert page["total"] == len(source)
    assert [t["task"]["id"] for t in page["tasks"]] == [t.id for t in source[5:8]]
    prompt = sample.env.prompt_for(source[5])
    assert page["tasks"][0]["prompt"]["text"] == prompt.text
    assert page["tasks"][0]["prompt"]["messages"] == prompt.messages
    assert page["tasks"][0]["prompt"]["gold"] == sample.env.gold_completion(source[5])
    assert read(math_service.http.get("/tasks?offset=99999999"))["tasks"] == []
    for query in ("split=test", "offset=-1", "limit=0", "limit=1001", "offset=x"):
        assert math_service.http.get(f"/tasks?{query}").status_code == 422


def test_accept_chooses_the_format_of_the_answer(math_service):
    response = post(math_service, "/score", {"items": [GOOD]}, JSON, Accept=MSGPACK)
    assert response.headers["content-type"] == MSGPACK
    assert read(response)["results"][0]["reward"] == 2.0
    response = math_service.http.get("/env", headers={"Accept": "text/html,*/*"})
    assert response.headers["content-type"] == JSON
