"""The NeMo Gym resources server over HTTP; NeMo Gym's own code calls it in the peer test."""

import json
import threading

import gymnasium
import pytest

import mrgym
from mrgym import Component, Task, components
from mrgym.adapters import nemo_gym
from mrgym.adapters._nemo_gym_response import completion_of, response_of
from mrgym.errors import MissingExtraError, RewardDefinitionError, WireError
from mrgym.scoring import WorkerScorer

pytest.importorskip("fastapi", reason="needs fastapi")
from fastapi.testclient import TestClient


class Echo(mrgym.SingleTurnEnv):
    """Scores that a test can look through."""

    def tasks(self, split):
        return [Task(f"say {split} {i}", answer=i, id=str(i)) for i in range(3)]

    @mrgym.component(low=0, high=100)
    def length(self, task, completion):
        return len(completion)

    @mrgym.component
    def answer(self, task, completion):
        if completion == "crash":
            raise OSError("no grader")
        return float("nan") if completion == "nan" else task.answer

    @mrgym.component
    def cut(self, task, completion):
        return completion.truncated

    @mrgym.component
    def held_out(self, task, completion):
        return "eval" in task.prompt


class Talk(mrgym.MultiTurnEnv):
    components = components(a=Component(), b=Component())


@pytest.fixture(scope="module")
def client():
    return TestClient(nemo_gym.create_app(Echo), raise_server_exceptions=False)


def row_of(task_id="1", split="train", **fields):
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "say"}]},
        "verifier_metadata": {"task_id": task_id, "split": split},
        **fields,
    }


def verify(client, said, **fields):
    response = said if isinstance(said, dict) else response_of(mrgym.Completion(said))
    return client.post("/verify", json={**row_of(**fields), "response": response})


def message(*texts, role="assistant", **fields):
    parts = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return {"type": "message", "role": role, "content": parts, **fields}


def test_the_sample_has_our_components(sample):
    client = TestClient(nemo_gym.create_app(sample.env))
    rows = {row["verifier_metadata"]["task_id"]: row for row in nemo_gym.rows(sample.env)}
    for task, text, expected in zip(
        sample.tasks, sample.completions, sample.components, strict=True
    ):
        body = {**rows[task.id], "response": response_of(mrgym.Completion(text))}
        answer = client.post("/verify", json=body).json()
        assert answer["reward_components"] == expected
        assert {name: answer[name] for name in expected} == expected
        assert answer["reward"] == sum(expected.values())


def test_verify_echoes_the_row_and_adds_numbers(client):
    response = response_of(mrgym.Completion("four"))
    body = {**row_of(), "response": response, "extra": {"a": [1, None]}, "_ng_task_index": 7}
    answer = client.post("/verify", json=body).json()
    assert {key: answer[key] for key in body} == body
    expected = {"length": 4.0, "answer": 1.0, "cut": 0.0, "held_out": 0.0}
    assert answer["reward_components"] == expected
    assert {name: answer[name] for name in expected} == expected
    assert answer["reward"] == 5.0
    assert answer.keys() == {*body, *expected, "reward", "reward_components"}


def test_rows_name_their_tasks_on_both_splits(client):
    for split in ("train", "eval"):
        rows = [*nemo_gym.rows(Echo(), split, agent="simple_agent")]
        assert [row["verifier_metadata"]["task_id"] for row in rows] == ["0", "1", "2"]
        assert rows[2]["responses_create_params"]["input"] == [
            {"role": "user", "content": f"say {split} 2"}
        ]
        assert rows[0]["agent_ref"] == {"name": "simple_agent"}
        answer = client.post("/verify", json={**rows[2], "response": response_of_text("")}).json()
        assert answer["reward_components"]["held_out"] == (split == "eval")
        assert answer["reward_components"]["answer"] == 2


def response_of_text(text):
    return response_of(mrgym.Completion(text))


def test_a_row_may_hold_its_task(client):
    metadata = {"task": {"prompt": "own", "answer": 42}}
    answer = verify(client, "x", verifier_metadata=metadata)
    assert answer.json()["reward_components"]["answer"] == 42


def test_a_session_gives_a_cookie_and_looks_at_the_row(client):
    one, two = client.post("/seed_session", json=row_of()), client.post("/seed_session", json={})
    assert one.json() == two.json() == {}
    assert one.cookies["mrgym_session"] != two.cookies["mrgym_session"]
    assert verify(client, "x").status_code == 200  # the cookie goes with it
    unknown = client.post("/seed_session", json=row_of("9"))
    assert unknown.status_code == 422
    assert "'9'" in unknown.json()["detail"]


def test_the_rest_of_the_contract(client):
    assert client.get("/reverify_mode").json() == "stateless"
    assert client.get("/").json()["components"] == ["length", "answer", "cut", "held_out"]
    body = {**row_of(), "response": response_of_text("four")}
    captured = client.post("/ng-rollout/3-1/verify", json=body)
    assert captured.json() == client.post("/verify", json=body).json()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"response": None}, "response"),
        ({"responses_create_params": None}, "responses_create_params"),
        ({"verifier_metadata": None}, "verifier_metadata"),
        ({"verifier_metadata": {}}, "task_id"),
        ({"verifier_metadata": {"task_id": ["1"]}}, "task_id"),
        ({"verifier_metadata": {"task_id": "1", "split": "test"}}, "split"),
        ({"verifier_metadata": {"task_id": "9"}}, "'9'"),
        ({"verifier_metadata": {"task": {"prompt": []}}}, "prompt"),
        ({"verifier_metadata": {"task": 3}}, "task"),
        ({"verifier_metadata": {"task": {"prompt": "q", "anwser": 1}}}, "did you mean 'answer'"),
        ({"length": 3}, "length"),
        ({"response": {}}, "output"),
        ({"response": {"output": [1]}}, "output"),
        ({"response": {"output": [{"type": "message", "role": "assistant"}]}}, "text"),
        ({"response": {"output": [], "status": "failed"}}, "failed"),
        ({"response": {"output": [], "error": {"code": "server_error"}}}, "server_error"),
    ],
)
def test_what_cannot_be_used_is_422(client, change, named):
    body = {**row_of(), "response": response_of_text("x"), **change}
    for missing in [key for key, value in change.items() if value is None]:
        del body[missing]
    answer = client.post("/verify", json=body)
    assert answer.status_code == 422
    assert named in answer.text


@pytest.mark.parametrize("value", ["NaN", "1e999", '"\\ud800"'])
def test_what_json_cannot_hold_is_422(client, value):
    body = (
        json.dumps({**row_of(), "response": response_of_text("x")})[:-1] + f', "extra": {value}}}'
    )
    answer = client.post("/verify", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert "JSON" in answer.text


@pytest.mark.parametrize("said", ["crash", "nan"])
def test_a_failed_score_is_an_error_and_no_reward(client, said):
    answer = verify(client, said)
    assert answer.status_code == 500
    assert "reward" not in answer.json()
    assert "answer" in answer.json()["detail"]
    assert "on_score_error" not in answer.json()["detail"]  # there is no such setting here
    assert verify(client, "x").status_code == 200


def test_scores_may_run_in_workers(sample):
    with WorkerScorer(workers=1) as scorer:
        client = TestClient(nemo_gym.create_app(sample.env, scorer=scorer))
        row = next(nemo_gym.rows(sample.env))
        body = {**row, "response": response_of_text("<answer>1</answer>")}
        assert client.post("/verify", json=body).json()["reward_components"]["integer"] == 1.0


def test_requests_do_not_meet_inside_score_functions():
    class Alone(Echo):
        inside = 0

        @mrgym.component
        def met(self, task, completion):
            type(self).inside += 1
            threading.Event().wait(0.01)
            seen = type(self).inside
            type(self).inside -= 1
            return seen > 1

    client = TestClient(nemo_gym.create_app(Alone))
    met = []
    threads = [
        threading.Thread(target=lambda: met.append(verify(client, "x").json()["met"]))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == [0.0] * 8


# What a response says


def test_texts_are_joined_and_reasoning_comes_back():
    reasoning = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": t} for t in ("one", "")],
    }
    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"}
    result = {"type": "function_call_output", "call_id": "1", "output": "tool text"}
    output = [reasoning, message("a", "b"), call, result, message("c"), message("u", role="user")]
    completion = completion_of({"output": output})
    assert completion == "<think>one</think><think></think>abc"
    assert not completion.truncated


def test_refusals_plain_contents_and_empty_outputs():
    refused = {"type": "message", "role": "assistant"} | {
        "content": [{"type": "refusal", "refusal": "I will not."}]
    }
    assert completion_of({"output": [refused]}) == "I will not."
    assert completion_of({"output": [{"role": "assistant", "content": "plain"}]}) == "plain"
    assert completion_of({"output": []}) == ""


@pytest.mark.parametrize(
    "mark",
    [{"status": "incomplete"}, {"incomplete_details": {"reason": "max_output_tokens"}}],
)
def test_an_incomplete_response_is_truncated(client, mark):
    response = {"output": [message("x")], **mark}
    assert completion_of(response).truncated
    assert verify(client, response).json()["cut"] == 1.0


@pytest.mark.parametrize("stop_reason", ["stop", "length"])
def test_a_completion_survives_the_way_there_and_back(stop_reason):
    completion = mrgym.Completion("\u2028 <think>\x00</think>", stop_reason=stop_reason)
    back = completion_of(json.loads(json.dumps(response_of(completion))))
    assert (back, back.truncated) == (completion, completion.truncated)


def test_content_that_is_no_text():
    with pytest.raises(WireError, match="only text"):
        completion_of({"output": [message() | {"content": [{"type": "output_image"}]}]})


# Metrics


def test_metrics_speak_of_every_component(client):
    answers = [verify(client, "x" * n).json() | {"_ng_task_index": n % 2} for n in range(4)]
    metrics = client.post("/aggregate_metrics", json={"verify_responses": answers}).json()
    agent = metrics["agent_metrics"]
    assert (agent["mean/length"], agent["max/length"], agent["min/length"]) == (1.5, 3, 0)
    assert agent["median/length"] == 1.5
    assert agent["std/length"] == pytest.approx((5 / 3) ** 0.5)
    assert metrics["key_metrics"] == {k: v for k, v in agent.items() if k.startswith("mean/")}
    assert metrics["key_metrics"].keys() == {
        f"mean/{name}" for name in ("reward", "length", "answer", "cut", "held_out")
    }
    groups = metrics["group_level_metrics"]
    assert [(g["_ng_task_index"], g["num_rollouts"], g["mean/length"]) for g in groups] == [
        (0, 2, 1.0),
        (1, 2, 2.0),
    ]


def test_metrics_of_little_or_nothing(client):
    def post(responses):
        return client.post("/aggregate_metrics", json={"verify_responses": responses}).json()

    empty = {"group_level_metrics": [], "agent_metrics": {}, "key_metrics": {}}
    assert post([]) == empty
    assert post([{"reward": 2.0}])["agent_metrics"]["std/reward"] == 0.0
    huge = "1" + "0" * 400
    body = f'{{"verify_responses": [{{"reward": {huge}}}]}}'
    headers = {"content-type": "application/json"}
    assert client.post("/aggregate_metrics", content=body, headers=headers).status_code == 422


# What is refused when the server is made


class Abstains(Echo):
    @mrgym.component(optional=True)
    def seen(self, task, completion):
        return mrgym.ABSENT


def named(name):
    class Clash(mrgym.SingleTurnEnv):
        components = mrgym.components(**{name: Component(), "other": Component()})

        def scores(self, task, completion):
            return {name: 0, "other": 0}

    return Clash()


@pytest.mark.parametrize("name", sorted(nemo_gym.TAKEN))
def test_taken_names_are_refused(name):
    with pytest.raises(RewardDefinitionError, match=name):
        nemo_gym.create_app(named(name))


@pytest.mark.parametrize(
    ("env", "named"),
    [
        (Abstains, "optional components"),
        (Talk, "one completion"),
        (lambda: mrgym.from_gymnasium(gymnasium.make("CartPole-v1")), "text environment"),
        (lambda: mrgym.make("math_multi_reward", prefill_think=True), "prefill"),
    ],
    ids=["optional", "turns", "no text", "prefill"],
)
def test_what_would_be_lost_is_refused(env, named):
    with pytest.raises(RewardDefinitionError, match=named):
        nemo_gym.create_app(env)


def test_without_fastapi_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fastapi", None)
    with pytest.raises(MissingExtraError, match=r"mrgym\[serve\]"):
        nemo_gym.create_app(Echo)
