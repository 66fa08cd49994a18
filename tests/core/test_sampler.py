"""Samplers: the script, and an OpenAI-compatible endpoint on a real socket."""

from __future__ import annotations

import json
import pickle
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import mrgym
from mrgym import OpenAISampler, SamplerError, SamplingParams, ScriptedSampler
from mrgym.sampler import Completion, Prompt, Sampler

PARAMS = SamplingParams()


def prompt(text="hi", **more):
    return Prompt(text, [{"role": "user", "content": text}], **more)


def choices(*texts, finish="stop"):
    messages = [{"message": {"content": text}, "finish_reason": finish} for text in texts]
    return {"choices": messages}


class TestCompletion:
    def test_it_is_its_text(self):
        completion = Completion("text", token_ids=[1, 2], sampler_logprobs=[-1, -2])
        assert completion == "text"
        assert (type(completion.text), completion.upper()) == (str, "TEXT")
        assert (completion.token_ids, completion.sampler_logprobs) == ((1, 2), (-1, -2))

    @pytest.mark.parametrize(("reason", "truncated"), [("stop", False), ("length", True)])
    def test_everything_survives_pickling(self, reason, truncated):
        completion = Completion("x", token_ids=[1], stop_reason=reason, policy_version=3)
        copy = pickle.loads(pickle.dumps(completion))
        assert (copy, copy.token_ids, copy.policy_version) == ("x", (1,), 3)
        assert copy.truncated is truncated

    @pytest.mark.parametrize("text", [None, 3, b"x", ["x"]], ids=repr)
    def test_it_is_made_of_text_only(self, text):
        with pytest.raises(TypeError, match=r"Completion: got .*expected text"):
            Completion(text)


class TestScripted:
    def sample(self, script, *prompts, n=1):
        return ScriptedSampler(script).sample(prompts or [prompt()], n, PARAMS)

    @pytest.mark.parametrize(
        ("script", "n", "wanted"),
        [
            (["a", "b"], 2, ["a", "b"]),
            (("a", "b", "c"), 2, ["a", "b"]),
            ({"hi": "a"}, 2, ["a", "a"]),
            ({"id": ["a", "b"], "hi": "never"}, 2, ["a", "b"]),
            (lambda p: p.text * 2, 2, ["hihi", "hihi"]),
            ([""], 1, [""]),
        ],
    )
    def test_it_replays_in_order(self, script, n, wanted):
        assert self.sample(script, prompt(task_id="id"), n=n) == [wanted]

    def test_a_completion_keeps_its_tokens(self):
        given = Completion("a", token_ids=[7], stop_reason="length")
        (((got),),) = self.sample([given])
        assert got is given

    @pytest.mark.parametrize(
        ("script", "said"),
        [
            (["a"], r"got 1 completions for the script, expected more"),
            ([], r"got 0 completions"),
            ({"hi": ["a"]}, r"got 1 completions for task 'hi'"),
            ({"other": "a"}, r"got no completion for task 'id'.*add it"),
            (lambda p: None, r"got None .*expected text"),
            ([3, 3], r"got 3 .*expected text"),
        ],
    )
    def test_a_script_that_ends_is_an_error_never_an_empty_answer(self, script, said):
        with pytest.raises(SamplerError, match=rf"ScriptedSampler: {said}"):
            self.sample(script, prompt(task_id="id"), n=2)

    def test_lists_go_on_over_calls(self):
        sampler = ScriptedSampler({"hi": ["a", "b"]})
        calls = [sampler.sample([prompt()], 1, PARAMS) for _ in range(2)]
        assert calls == [[["a"]], [["b"]]]

    def test_its_weights_are_not_ours(self):
        sampler = ScriptedSampler([])
        assert isinstance(sampler, Sampler)
        with pytest.raises(SamplerError, match=r"cannot be trained"):
            sampler.update_weights([], 1)
        sampler.close()


class Endpoint(ThreadingHTTPServer):
    """Answers from a list of (status, body), the last one for ever; keeps what was asked."""

    request_queue_size = 64

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.lock = threading.Lock()
        self.script([])

    def script(self, answers):
        self.answers, self.asked, self.headers = [*answers], [], []

    def next(self, body, headers):
        with self.lock:
            self.asked.append(body)
            self.headers.append(headers)
            return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, answer = self.server.next({**body, "path": self.path}, dict(self.headers))
        answer = answer(body) if callable(answer) else answer
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        """Say nothing."""


@pytest.fixture(scope="module")
def server():
    with Endpoint() as endpoint:
        thread = threading.Thread(target=endpoint.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield endpoint
        endpoint.shutdown()
        thread.join()


@pytest.fixture
def waits(monkeypatch):
    """How long the sampler would have waited; it does not."""
    waited = []
    monkeypatch.setattr("mrgym.sampler.time.sleep", waited.append)
    return waited


@pytest.fixture
def ask(server, waits):
    """Ask the server, which answers by the script."""
    samplers = []

    def asked(*answers, n=1, prompts=None, params=PARAMS, **options):
        server.script(answers)
        sampler = OpenAISampler(server.url, "tiny", **options)
        samplers.append(sampler)
        return sampler.sample(prompts or [prompt()], n, params)

    yield asked
    for sampler in samplers:
        sampler.close()


class TestEndpoint:
    @pytest.mark.parametrize("n", [1, 3, 8])
    def test_n_completions_in_one_request(self, ask, server, n):
        got = ask((200, lambda body: choices(*"abcdefgh"[: body["n"]])), n=n)
        assert got == [[*"abcdefgh"[:n]]]
        assert [(b["n"], b["path"]) for b in server.asked] == [(n, "/v1/chat/completions")]

    @pytest.mark.parametrize("served", [1, 2])
    def test_a_server_that_ignores_n_is_asked_again(self, ask, server, served):
        params = SamplingParams(seed=10)
        got = ask((200, choices(*"ab"[:served])), n=4, params=params)
        assert got == [["a"] * 4 if served == 1 else [*"abab"]]
        assert [b["n"] for b in server.asked] == [*range(4, 0, -served)]
        assert [b["seed"] for b in server.asked] == [*range(10, 14, served)]

    def test_more_than_asked_for_is_cut(self, ask):
        assert ask((200, choices(*"abc")), n=2) == [["a", "b"]]

    def test_prompts_keep_their_order(self, ask):
        prompts = [prompt(str(i)) for i in range(40)]
        got = ask((200, lambda body: choices(body["messages"][-1]["content"])), prompts=prompts)
        assert got == [[str(i)] for i in range(40)]

    @pytest.mark.parametrize(("finish", "reason"), [("stop", "stop"), ("length", "length")])
    def test_the_stop_reason_is_kept(self, ask, finish, reason):
        ((completion,),) = ask((200, choices("a", finish=finish)))
        assert completion.stop_reason == reason

    def test_parameters_key_and_messages_are_sent(self, ask, server):
        params = SamplingParams(max_tokens=5, temperature=0.5, top_p=0.9, top_k=3, seed=1)
        ask((200, choices("a")), params=params, api_key="secret")
        (body,) = server.asked
        assert body["messages"] == [{"role": "user", "content": "hi"}]
        assert body.items() >= {"model": "tiny", "max_tokens": 5, "temperature": 0.5}.items()
        assert body.items() >= {"top_p": 0.9, "top_k": 3, "seed": 1}.items()
        assert server.headers[0]["Authorization"] == "Bearer secret"

    def test_what_is_off_is_not_sent(self, ask, server):
        ask((200, choices("a")))
        assert not {"top_k", "seed", "continue_final_message"} & server.asked[0].keys()

    def test_a_prefill_is_an_open_assistant_turn(self, ask, server):
        ask((200, choices("a")), prompts=[prompt(prefill="<think>")])
        (body,) = server.asked
        assert body["messages"][-1] == {"role": "assistant", "content": "<think>"}
        assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)

    def test_an_environment_runs_on_it(self, server, waits):
        server.script([(200, choices("<think>1</think>\n<answer>7</answer>"))])
        env = mrgym.make("math_multi_reward", train_count=2, eval_count=2)
        sampler = OpenAISampler(server.url, "tiny")
        group = mrgym.run_group(env, sampler, env.task_source("train")[0], 2, PARAMS)
        sampler.close()
        assert [r.components["format"] for r in group.rollouts] == [1.0, 1.0]
        assert env.instruction in server.asked[0]["messages"][0]["content"]


class TestTroubleIsRetried:
    """Tencent-Hunyuan/UniRL#214; awslabs/agentcore-rl-toolkit#122."""

    @pytest.mark.parametrize("status", [429, 500, 502, 503])
    @pytest.mark.parametrize("times", [1, 3])
    def test_a_busy_server_is_asked_again(self, ask, server, waits, status, times):
        got = ask(*[(status, b"busy")] * times, (200, choices("a")))
        assert got == [["a"]]
        assert len(server.asked) == times + 1
        assert waits == sorted(waits)
        assert len(waits) == times

    @pytest.mark.parametrize("status", [429, 503])
    @pytest.mark.parametrize("retries", [0, 2])
    def test_patience_ends_with_an_error(self, ask, server, status, retries):
        said = rf"127\.0\.0\.1.*got HTTP {status} after {retries + 1} attempts"
        with pytest.raises(SamplerError, match=said):
            ask((status, b"busy"), retries=retries)
        assert len(server.asked) == retries + 1

    @pytest.mark.parametrize("retries", [0, 2])
    def test_a_refused_connection_is_an_error(self, waits, retries):
        with socket.socket() as taken:  # bound but not listening: connections are refused
            taken.bind(("127.0.0.1", 0))
            sampler = OpenAISampler(
                f"http://127.0.0.1:{taken.getsockname()[1]}", "x", retries=retries
            )
            with pytest.raises(SamplerError, match=rf"ConnectError.*after {retries + 1} attempts"):
                sampler.sample([prompt()], 1, PARAMS)
            sampler.close()
        assert len(waits) == retries

    @pytest.mark.parametrize("prompts", [1, 20])
    def test_one_failing_prompt_is_an_error_for_all(self, ask, prompts):
        with pytest.raises(SamplerError, match=r"HTTP 400"):
            ask((400, b"too long"), prompts=[prompt()] * prompts)


class TestAnswersThatAreNone:
    """Tencent-Hunyuan/UniRL#214; awslabs/agentcore-rl-toolkit#122: never an empty answer."""

    @pytest.mark.parametrize("status", [400, 401, 404, 422])
    def test_a_refusal_is_not_retried_and_shown(self, ask, server, waits, status):
        with pytest.raises(SamplerError, match=rf"got HTTP {status} \(model 'tiny' not found\)"):
            ask((status, b"model 'tiny' not found"))
        assert (len(server.asked), waits) == (1, [])

    @pytest.mark.parametrize("body", [b"<html>", b"", b"\xff\xfe", b"{"], ids=repr)
    def test_no_json(self, ask, body):
        with pytest.raises(SamplerError, match=r"expected JSON; check that the address"):
            ask((200, body))

    @pytest.mark.parametrize(
        "body",
        [
            {},
            {"error": "out of memory"},
            {"choices": None},
            {"choices": ["text"]},
            {"choices": [{}]},
            {"choices": [{"message": None}]},
            {"choices": [{"message": {}}]},
            {"choices": [{"message": {"content": [{"type": "text", "text": "a"}]}}]},
            {"choices": [{"text": "a"}]},
            [],
            None,
            "text",
            3,
        ],
        ids=json.dumps,
    )
    def test_json_of_another_kind(self, ask, body):
        with pytest.raises(SamplerError, match=r"expected a chat completion with choices"):
            ask((200, body))

    def test_no_choices_at_all(self, ask):
        with pytest.raises(SamplerError, match=r"got no choices, expected up to 2"):
            ask((200, {"choices": []}), n=2)

    def test_a_model_may_say_nothing(self, ask):
        assert ask((200, choices(""))) == [[""]]

    def test_no_content_is_no_empty_answer(self, ask):
        with pytest.raises(SamplerError, match=r"a choice without content .*, expected text"):
            ask((200, choices(None)))
