"""verifiers' own scoring, rollouts and evaluation with mrgym environments, and the way back."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verifiers.v1", reason="needs verifiers (make test-peers)")

import verifiers.v1 as vf
from verifiers.v1.cli.eval.runner import run_eval
from verifiers.v1.configs.cli.eval import EvalConfig

import mrgym
from mrgym.adapters.verifiers import environment, from_verifiers, taskset
from mrgym.errors import RewardDefinitionError


def tasks_of(cls, **config):
    """Return a taskset of a class, as verifiers makes it."""
    config_type = next(
        arg
        for base in cls.__orig_bases__
        for arg in base.__args__
        if issubclass(arg, vf.TasksetConfig)
    )
    return cls(config_type(**config))


def test_identical_components_for_the_sample_there_and_back(sample):
    there = tasks_of(taskset(sample.env))
    back = from_verifiers(there, limit=20)
    mine = {task.id: task for split in ("train", "eval") for task in back.task_source(split)}
    tasks = [mine[task.id] for task in sample.tasks]
    rollouts = mrgym.score_completions(back, tasks, sample.completions)
    assert [r.components for r in rollouts] == sample.components


def test_tasks_carry_prompt_answer_and_identity():
    env = mrgym.make("math_multi_reward", train_count=3, eval_count=2)
    cls = taskset(env)
    train, held_out = [*tasks_of(cls)], [*tasks_of(cls, split="eval")]
    assert [t.data.id for t in train] == [t.id for t in env.task_source("train")]
    assert [t.key for t in held_out] == [f"eval/{t.id}" for t in env.task_source("eval")]
    assert train[1].data.answer == env.task_source("train")[1].answer
    assert train[1].data.prompt == env.messages(env.task_source("train")[1])[0]["content"]
    assert [t.data.split for t in tasks_of(taskset(env, "eval"))] == ["eval"] * 2


def test_weights_by_name_and_verifiers_own_settings():
    cls = taskset("math_multi_reward", weights={"format": 0.5})
    task = next(iter(tasks_of(cls)))
    hooks = {hook.__name__: hook._vf_weight for hook in task.hooks("reward")}
    assert hooks == {"correctness": 1.0, "format": 0.5, "integer": 1.0}
    overridden = tasks_of(cls, task=vf.TaskConfig(rewards={"format": {"weight": 0.25}}))
    hooks = {hook.__name__: hook._vf_weight for hook in next(iter(overridden)).hooks("reward")}
    assert hooks["format"] == 0.25
    with pytest.raises(RewardDefinitionError, match=r"'fromat'.*did you mean 'format'\?"):
        taskset("math_multi_reward", weights={"fromat": 1})


def test_an_environment_that_begins_the_turn_is_refused():
    with pytest.raises(RewardDefinitionError, match="verifiers: got prefill '<think>'"):
        taskset(mrgym.make("math_multi_reward", prefill_think=True))


MODULE = """
import asyncio
import httpx
import mrgym
import verifiers.v1 as vf
from mrgym.adapters.verifiers import environment, taskset
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult


class ScriptHarness(vf.Harness[vf.HarnessConfig]):
    \"\"\"Asks once, in this process: the shipped harnesses install their programs with uv.\"\"\"

    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ):
        system, prompt = self.resolve_prompt(data)
        asked = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt
        if system is not None:
            asked = [vf.SystemMessage(content=system), *asked]
        body = {"model": ctx.model, "messages": [message_to_wire(m) for m in asked]}
        headers = {"authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient() as client:
            reply = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
        return ProgramResult(0 if reply.is_success else 1, reply.text, "")


"""

MATH = """
class Graded(mrgym.SingleTurnEnv):
    calls = 0

    def tasks(self, split):
        first = 0 if split == "train" else 100
        system = {"role": "system", "content": "Answer."}
        return [
            mrgym.Task([system, {"role": "user", "content": f"What is {i}?"}], str(i), id=f"t{i}")
            for i in range(first, first + 3)
        ]

    @mrgym.component(low=0, high=1, weight=2.0)
    async def right(self, task, completion):
        Graded.calls += 1
        await asyncio.sleep(0)
        if "boom" in completion:
            raise ValueError("boom")
        return completion == f" {task.answer}\\n"

    @mrgym.component(low=0, high=1)
    def cut(self, task, completion):
        return completion.truncated

    @mrgym.component(low=0, high=9, optional=True)
    def digit(self, task, completion):
        return int(completion[1]) if completion[1:2].isdigit() else mrgym.ABSENT


Tasks = taskset(Graded(), weights={"cut": -1.0})
__all__ = ["Tasks", "ScriptHarness"]
"""

TALK = """
class Talk(mrgym.MultiTurnEnv):
    max_turns = 3

    def tasks(self, split):
        first = 0 if split == "train" else 100
        return [mrgym.Task(f"Count from {i}.", str(i), id=f"t{i}") for i in range(first, first + 3)]

    def respond(self, state, completion):
        if completion == "stop":
            return None
        return f"{state.turn}, {len(state.turn_scores)} scored: {completion}!"

    calls = 0

    @mrgym.component(low=0, high=10, reduce="sum")
    def turns(self, state, completion):
        Talk.calls += 1
        if completion == "boom":
            raise ValueError("boom")
        return 1

    @mrgym.component(low=0, high=1, reduce="max")
    def cut(self, state, completion):
        return completion.truncated

    @mrgym.component(low=0, high=1)
    def stopped(self, state, completion):
        return completion == "stop"


Tasks = taskset(Talk())
TalkEnv = environment(Tasks)
"""


@pytest.fixture
def served():
    """A chat-completion server; ``served.answer`` makes (text, finish reason) of the messages."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            server.asked.append(body["messages"])
            text, reason = server.answer(body["messages"])
            message = {"role": "assistant", "content": text}
            shared = {"id": "c", "created": 0, "model": body["model"]}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            if body.get("stream"):
                kind = {**shared, "object": "chat.completion.chunk"}
                told = [{"index": 0, "delta": message, "finish_reason": reason}]
                chunks = [{**kind, "choices": told}, {**kind, "choices": [], "usage": usage}]
                events = [*map(json.dumps, chunks), "[DONE]"]
                self.send("text/event-stream", "".join(f"data: {e}\n\n" for e in events))
            else:
                told = [{"index": 0, "message": message, "finish_reason": reason}]
                reply = {**shared, "object": "chat.completion", "choices": told, "usage": usage}
                self.send("application/json", json.dumps(reply))

        def send(self, kind, text):
            data = text.encode()
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def evaluate(served, tmp_path, monkeypatch):
    """Run verifiers' own evaluation of a module and return the traces and the lines on disk."""
    monkeypatch.syspath_prepend(tmp_path)

    def run(name, source, *, rollouts=1, agent=None, **env):
        (tmp_path / f"{name}.py").write_text(MODULE + textwrap.dedent(source))
        config = EvalConfig(
            env={
                "taskset": {"id": name, **env},
                "agent": {"runtime": {"type": "subprocess"}, **(agent or {})},
            },
            model="scripted",
            client={"base_url": f"http://127.0.0.1:{served.server_port}/v1", "api_key_var": "NONE"},
            num_rollouts=rollouts,
            rich=None,
            push=False,
            output_dir=tmp_path / "out",
        )
        episodes = asyncio.run(run_eval(config))
        (file,) = (tmp_path / "out").rglob("traces.jsonl")
        return [e.traces[0] for e in episodes], file.read_text()

    return run


def scores_of(trace):
    return {
        name: reward and (reward.score, reward.weight) for name, reward in trace.rewards.items()
    }


def test_an_evaluation_by_verifiers_gives_our_components(evaluate, served):
    def answer(messages):
        number = messages[-1]["content"].removeprefix("What is ").removesuffix("?")
        return {"0": (" 0\n", "stop"), "1": (" x", "length"), "2": (" boom", "stop")}[number]

    served.answer = answer
    traces, written = evaluate("graded_math", MATH, rollouts=2)
    assert served.asked[0][0] == {"role": "system", "content": "Answer."}
    by_id = {}
    for trace in traces:
        by_id.setdefault(trace.task.data.id, []).append(trace)
    assert [scores_of(t) for t in by_id["t0"]] == [
        {"right": (1.0, 2.0), "cut": (0.0, -1.0), "digit": (0.0, 1.0)}
    ] * 2
    assert [scores_of(t) for t in by_id["t1"]] == [{"right": (0.0, 2.0), "cut": (1.0, -1.0)}] * 2
    assert all(trace.ok for i in ("t0", "t1") for trace in by_id[i])
    for trace in by_id["t2"]:
        assert not trace.ok
        assert set(scores_of(trace).values()) == {None}
        assert trace.last_error.type == "TaskError"
        assert "right: ValueError('boom')" in trace.last_error.message
    import graded_math

    assert graded_math.Graded.calls == 6  # once a rollout, though three rewards ask
    assert len(written.splitlines()) == 6


def test_held_out_tasks_by_verifiers_own_setting(evaluate, served):
    served.answer = lambda messages: (" 100\n", "stop")
    traces, _ = evaluate("graded_held_out", MATH, split="eval")
    assert sorted(t.task.data.id for t in traces) == ["t100", "t101", "t102"]
    assert sum(t.rewards["right"].score for t in traces) == 1


def test_a_conversation_is_played_and_scored(evaluate, served):
    def answer(messages):
        said = sum(message["role"] == "assistant" for message in messages)
        if messages[0]["content"] == "Count from 0.":
            return ("stop" if said == 1 else "one", "stop")
        return (f"say {said}", "stop" if messages[0]["content"] != "Count from 2." else "length")

    served.answer = answer
    traces, _ = evaluate("talk_played", TALK + '__all__ = ["Tasks", "TalkEnv", "ScriptHarness"]\n')
    scores = {t.task.data.id: scores_of(t) for t in traces}
    assert all(t.ok for t in traces), [t.last_error for t in traces]
    assert scores == {
        "t0": {"turns": (2.0, 1.0), "cut": (0.0, 1.0), "stopped": (1.0, 1.0)},
        "t1": {"turns": (3.0, 1.0), "cut": (0.0, 1.0), "stopped": (0.0, 1.0)},
        "t2": {"turns": (1.0, 1.0), "cut": (1.0, 1.0), "stopped": (0.0, 1.0)},
    }
    import talk_played

    assert talk_played.Talk.calls == 2 + 3 + 1  # every turn once
    longest = max(served.asked, key=len)
    assert [m["content"] for m in longest] == [
        "Count from 1.", "say 0", "1, 0 scored: say 0!", "say 1", "2, 1 scored: say 1!"
    ]  # fmt: skip


def test_a_trace_of_a_conversation_is_scored_again_from_what_was_said(evaluate, served):
    served.answer = lambda messages: ("stop" if len(messages) > 2 else "one", "stop")
    source = TALK + '__all__ = ["Tasks", "TalkEnv", "ScriptHarness"]\n'
    traces, _ = evaluate("talk_again", source)
    import talk_again

    tasks = {task.data.id: task for task in tasks_of(talk_again.Tasks)}
    for trace in traces:
        first = scores_of(trace)
        read = type(trace).model_validate(trace.model_dump(mode="json"))
        read.rewards.clear()
        asyncio.run(tasks[trace.task.data.id].score(read))
        assert scores_of(read) == first


def test_a_turn_that_cannot_be_scored_is_an_error(evaluate, served):
    served.answer = lambda messages: ("boom", "stop")
    source = TALK + '__all__ = ["Tasks", "TalkEnv", "ScriptHarness"]\n'
    traces, _ = evaluate("talk_failing", source)
    for trace in traces:
        assert not trace.ok
        assert set(trace.rewards.values()) == {None}
        assert "got error from turns: ValueError('boom')" in trace.last_error.message


def test_a_limit_of_verifiers_ends_a_conversation_without_cutting_its_reply(evaluate, served):
    served.answer = lambda messages: ("go on", "stop")
    source = TALK + '__all__ = ["Tasks", "TalkEnv", "ScriptHarness"]\n'
    traces, _ = evaluate("talk_limited", source, agent={"max_turns": 2})
    for trace in traces:
        assert trace.stop_condition == "max_turns"
        assert scores_of(trace) == {"turns": (2.0, 1.0), "cut": (0.0, 1.0), "stopped": (0.0, 1.0)}


def test_a_conversation_without_its_environment_is_an_error(evaluate, served):
    served.answer = lambda messages: ("one", "stop")
    traces, _ = evaluate("talk_alone", TALK + '__all__ = ["Tasks", "ScriptHarness"]\n')
    for trace in traces:
        assert not trace.ok
        assert set(trace.rewards.values()) == {None}
        assert "expected the whole conversation; export" in trace.last_error.message


def test_a_reply_without_text_is_an_error(evaluate, served):
    served.answer = lambda messages: (None, "stop")
    traces, _ = evaluate("graded_silent", MATH)
    assert not any(trace.ok for trace in traces)
    assert all(r is None for trace in traces for r in trace.rewards.values())
    assert "the last without text" in traces[0].last_error.message


@pytest.mark.slow
@pytest.mark.parametrize(("source", "exported"), [(MATH, ""), (TALK, "Tasks TalkEnv")])
def test_the_command_line_with_a_harness_of_verifiers(served, tmp_path, source, exported):
    """As the docs have it; this harness installs its program with uv, from a package index."""
    here = Path(sys.executable).parent
    if not (here / "uv").exists():
        pytest.skip("needs uv beside Python, with which verifiers installs harnesses")
    served.answer = lambda messages: (" 1\n" if len(messages) < 3 else "stop", "stop")
    names = f"__all__ = {exported.split()}\n" if exported else ""
    (tmp_path / "by_command.py").write_text(MODULE + source + names)
    command = (
        "vf-eval by-command --env.agent.harness.id null --env.agent.runtime.type subprocess "
        f"--client.base-url http://127.0.0.1:{served.server_port}/v1 --model scripted "
        "--no-push --no-rich -o out"
    )
    path = f"{here}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(here / command.split()[0]), *command.split()[1:]],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    (file,) = (tmp_path / "out").rglob("traces.jsonl")
    traces = [json.loads(line)["traces"][0] for line in file.read_text().splitlines()]
    errors = [error["message"] for trace in traces for error in trace["errors"]]
    if any("failed to prepare uv script" in error for error in errors):
        pytest.skip("needs a package index, from which verifiers installs harnesses")
    assert done.returncode == 0, done.stderr
    assert not errors
    scores = {
        t["task"]["data"]["id"]: {n: r["score"] for n, r in t["rewards"].items()} for t in traces
    }
    if exported:
        assert scores == {f"t{i}": {"turns": 2.0, "cut": 0.0, "stopped": 1.0} for i in range(3)}
    else:
        assert scores == {
            f"t{i}": {"right": float(i == 1), "cut": 0.0, "digit": 1.0} for i in range(3)
        }


def test_environment_is_made_of_its_taskset():
    cls = environment(taskset("math_multi_reward"))
    assert issubclass(cls, vf.Env)


class Alone(mrgym.MultiTurnEnv):
    """Whose answers are not fit for several threads, though its score function is async."""

    max_turns = 3
    inside = met = 0

    def tasks(self, split):
        return [mrgym.Task(f"{split}?", id="1")]

    def _enter(self):
        self.inside += 1
        self.met = max(self.met, self.inside)
        time.sleep(0.002)
        self.inside -= 1

    def start(self, task, rng):
        self._enter()
        return super().start(task, rng)

    def respond(self, state, completion):
        self._enter()
        return "go on"

    @mrgym.component(low=0, high=3, reduce="sum")
    async def turns(self, state, completion):
        return 1


class Scripted:
    """A conversation in which the agent says the same at every turn."""

    def __init__(self, number):
        self.trace = SimpleNamespace(id=str(number), info={}, is_truncated=False)

    async def turn(self, message=None):
        said = vf.AssistantMessage(content="x")
        return SimpleNamespace(terminated=False, messages=[said], root_reply=None)


def test_conversations_at_a_time_do_not_meet_inside_the_environment():
    env = Alone()
    scorer = taskset(env).mrgym_scorer
    data = SimpleNamespace(id="1", split="train")
    talks = [Scripted(i) for i in range(8)]

    async def all_of_them():
        await asyncio.gather(*(scorer.converse(data, talk) for talk in talks))
        return await asyncio.gather(*(scorer.components(data, talk.trace) for talk in talks))

    assert asyncio.run(all_of_them()) == [{"turns": 3.0}] * 8
    assert env.met == 1
