"""The command line: verbs, exit codes (0 well, 1 ran and failed, 2 bad input), one-line errors."""

import json
import os
import subprocess
import sys
import threading
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from mrgym.cli import main
from mrgym.wire import read_rollouts

MATH = "math_multi_reward"

MY_ENVS = '''
import mrgym


class Haiku(mrgym.SingleTurnEnv):
    """Three short lines.

    More words.
    """

    def tasks(self, split):
        return [mrgym.Task(prompt=f"{split} {i}: ", id=f"{split}-{i}") for i in range(4)]

    @mrgym.component(low=0, high=1)
    def lines(self, task, completion):
        return float(completion.count("\\n") == 2)

    @mrgym.component(low=-1, high=0, weight=0.5)
    def brief(self, task, completion):
        return -min(len(completion), 20) / 20


class Broken(Haiku):
    @mrgym.component(low=0, high=1)
    def lines(self, task, completion):
        return 2.0


class Raising(Haiku):
    @mrgym.component(low=0, high=1)
    def lines(self, task, completion):
        raise OSError("the judge is down")


class Quitting(Haiku):
    @mrgym.component(low=0, high=1)
    def lines(self, task, completion):
        raise KeyboardInterrupt


class SomeGolds(Haiku):
    def gold_completion(self, task):
        return "a\\nb\\nc" if task.id.endswith("0") else None


class Sized(Haiku):
    def __init__(self, size: int = 1, label: str = "x"):
        super().__init__()
        assert (size, label) == (3, "3x"), (size, label)


NotAnEnv = dict
'''


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """Runs the command in a folder that holds ``my_envs.py``; gives exit code and output."""
    (tmp_path / "my_envs.py").write_text(MY_ENVS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args):
        sys.modules.pop("my_envs", None)
        monkeypatch.setattr(sys, "argv", ["mrgym", *map(str, args)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    yield run
    sys.modules.pop("my_envs", None)


def fails(done, code, *words):
    """Check an exit code and a one-line error that holds all words."""
    lines = [line for line in done.err.splitlines() if not line.startswith("warning: ")]
    assert done.code == code, done.err
    assert len(lines) == 1, done.err
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]
    assert done.out == ""


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --- list, check ----------------------------------------------------------------------------


def test_list_as_json_and_as_a_table(cli):
    rows = json.loads(cli("list", "--json").out)
    (row,) = (row for row in rows if row["id"] == f"{MATH}-v1")
    assert row["location"] == "mrgym_envs.math_multi_reward:MathMultiReward"
    assert row["summary"].startswith("Math word problems")
    assert f"{MATH}-v1" in cli("list").out


def test_a_broken_plugin_hides_no_other(cli, monkeypatch):
    from mrgym import registry

    broken = registry.EnvSpec("broken-v1", "no_such_module:Env")
    monkeypatch.setitem(registry._registered, "broken-v1", broken)
    rows = {row["id"]: row for row in json.loads(cli("list", "--json").out)}
    assert "cannot be imported" in rows["broken-v1"]["summary"]
    assert f"{MATH}-v1" in rows


def test_check_of_a_sound_environment_is_ok(cli):
    done = cli("check", MATH, "--max-tasks", 5)
    assert (done.code, done.err) == (0, "")
    assert "ok" in done.out.splitlines()[0]
    report = json.loads(cli("check", MATH, "--max-tasks", 5, "--json").out)
    assert (report["ok"], report["failures"]) == (True, [])


def test_check_of_a_broken_environment_exits_1_and_says_why(cli):
    done = cli("check", "my_envs:Broken")
    assert done.code == 1
    assert "FAILED" in done.out
    assert "lines=2.0" in done.out
    report = json.loads(cli("check", "my_envs:Broken", "--json").out)
    assert report["ok"] is False
    assert report["failures"]


@pytest.mark.parametrize("verb", ["check", "eval"])
def test_an_unknown_environment_is_bad_input_with_a_suggestion(cli, verb):
    fails(cli(verb, "math_multi_rewrad"), 2, "'math_multi_rewrad'", f"did you mean '{MATH}")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my_envs:Hiku", ["'Hiku'", "did you mean 'Haiku'"]),
        ("no_such_module:Env", ["no_such_module", "importable"]),
        ("my_envs:NotAnEnv", ["got dict", "expected a MultiRewardEnv"]),
    ],
)
def test_a_class_that_is_not_there_is_bad_input(cli, name, words):
    fails(cli("check", name), 2, *words)


def test_arguments_of_the_environment(cli):
    assert cli("check", "my_envs:Sized", "-e", "size=3", "-e", "label=3x").code == 0
    fails(cli("check", MATH, "-e", "signedd=true"), 2, "signedd", "did you mean 'signed'")
    fails(cli("check", MATH, "-e", "signed"), 2, "expected key=value")


def test_tasks_of_a_file(cli, tmp_path):
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(30)]
    tasks = write(tmp_path / "t.jsonl", *rows)
    args = ("--sampler", "scripted", "--tasks", tasks, "--split", "train", "--json")
    done = cli("eval", MATH, *args)
    means = json.loads(done.out)
    assert 0 < means["n"] < 30
    assert means["reward/correctness"] == 1.0
    fails(cli("eval", MATH, "--tasks", "absent.jsonl"), 2, "absent.jsonl", "got no file")
    fails(cli("eval", MATH, "--eval-tasks", "t.jsonl"), 2, "--eval-tasks: got no --tasks")


# --- eval: scripted -------------------------------------------------------------------------


def scripted(cli, *args):
    return cli("eval", "my_envs:Haiku", "--sampler", "scripted", *args)


def test_gold_completions_are_replayed_without_a_file(cli, tmp_path):
    done = cli(
        "eval", MATH, "--sampler", "scripted", "--json", "--limit", 10, "--n", 2,
        "--save", tmp_path / "deep" / "rollouts.jsonl",
    )  # fmt: skip
    means = json.loads(done.out)
    assert (means["env"], means["split"], means["n"], means["failed"]) == (MATH, "eval", 20, 0)
    assert means["reward/correctness"] == means["reward/format"] == means["reward/integer"] == 1.0
    assert means["reward"] == 3.0
    saved = list(read_rollouts(tmp_path / "deep" / "rollouts.jsonl"))
    assert len(saved) == 20
    for rollout in saved:
        assert f"<answer>{rollout.answer}</answer>" in rollout.turns[0].completion


def test_the_table_shows_every_component_and_the_sum(cli):
    done = cli("eval", MATH, "--sampler", "scripted", "--limit", 4)
    assert done.code == 0
    for word in ("correctness", "format", "integer", "sum", "3.000", "standard error"):
        assert word in done.out


@pytest.mark.parametrize("key", ["task_id", "prompt"])
def test_completions_by_task(cli, tmp_path, key):
    names = [f"eval-{i}" if key == "task_id" else f"eval {i}: " for i in (3, 2, 1, 0)]
    texts = ["a\nb\nc", "x", "y", "z"]
    rows = [{key: name, "completion": text} for name, text in zip(names, texts, strict=True)]
    path = write(tmp_path / "c.jsonl", *rows)
    save = tmp_path / "s.jsonl"
    means = json.loads(scripted(cli, "--completions", path, "--json", "--save", save).out)
    assert means["reward/lines"] == 0.25
    assert [r.turns[0].completion for r in read_rollouts(save)] == texts[::-1]


def test_completions_in_order_and_several_of_a_task(cli, tmp_path):
    path = write(tmp_path / "c.jsonl", *(f"text {i}" for i in range(8)))
    save = tmp_path / "s.jsonl"
    assert scripted(cli, "--completions", path, "--n", 2, "--save", save).code == 0
    assert [r.turns[0].completion for r in read_rollouts(save)] == [f"text {i}" for i in range(8)]
    objects = write(tmp_path / "o.jsonl", *({"completion": f"text {i}"} for i in range(4)))
    assert scripted(cli, "--completions", objects).code == 0


def test_unusual_characters_in_a_completion_break_no_line(cli, tmp_path):
    text = "a\u2028b\x85c\nd\ne"
    path = tmp_path / "c.jsonl"
    path.write_text(f"{json.dumps(text, ensure_ascii=False)}\n\n" * 4, encoding="utf-8")
    save = tmp_path / "s.jsonl"
    assert scripted(cli, "--completions", path, "--save", save).code == 0
    assert {r.turns[0].completion for r in read_rollouts(save)} == {text}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'"fine"\n{broken\n', ["line 2", "{broken", "mend the line"]),
        (b"5\n", ["line 1", "got '5'"]),
        (b'{"text": "x"}\n', ["line 1", "'completion'"]),
        (b'{"completion": 3, "task_id": "eval-0"}\n', ["line 1"]),
        (b'"a"\n\xff\xfe\n', ["line 2"]),
        (b'"a"\n{"task_id": "eval-0", "completion": "b"}\n', ["expected one kind"]),
    ],
)
def test_a_file_of_completions_that_cannot_be_read_is_bad_input(cli, tmp_path, content, words):
    path = tmp_path / "c.jsonl"
    path.write_bytes(content)
    fails(scripted(cli, "--completions", path), 2, str(path), *words)


def test_a_missing_file_of_completions_is_bad_input(cli):
    fails(scripted(cli, "--completions", "absent.jsonl"), 2, "absent.jsonl: got no file")


@pytest.mark.parametrize("count", [0, 3, 5])
def test_a_script_in_order_must_be_as_long_as_the_tasks(cli, tmp_path, count):
    """Pairing completions with the wrong tasks would give a wrong score in silence."""
    path = write(tmp_path / "c.jsonl", *["a"] * count)
    fails(scripted(cli, "--completions", path), 2, f"got {count} completions", "expected 4 ")


def test_a_script_that_misses_a_task_is_a_failure(cli, tmp_path):
    other = write(tmp_path / "o.jsonl", {"task_id": "eval-9", "completion": "x"})
    fails(scripted(cli, "--completions", other), 1, "no completion for task 'eval-0'")


def test_an_environment_without_golds_needs_a_file(cli):
    fails(scripted(cli), 2, "no gold completions", "--completions FILE")


def test_an_environment_with_some_golds_names_a_task_without(cli):
    done = cli("eval", "my_envs:SomeGolds", "--sampler", "scripted")
    fails(done, 1, "no completion for task 'eval-1'")


def test_scores_that_fail_are_a_failure_with_counts(cli, tmp_path):
    path = write(tmp_path / "c.jsonl", "a", "b", "c", "d")
    done = cli("eval", "my_envs:Raising", "--sampler", "scripted", "--completions", path)
    fails(done, 1, "4 failures in 4 rollouts", "the judge is down", "expected at most 10%")


def test_a_score_out_of_range_is_named(cli, tmp_path):
    path = write(tmp_path / "c.jsonl", "a", "b", "c", "d")
    done = cli("eval", "my_envs:Broken", "--sampler", "scripted", "--completions", path)
    fails(done, 1, "lines=2.0", "[0", "task eval-0")


@pytest.mark.parametrize(
    "args", [("--limit", "0"), ("--n", "0"), ("--temperature", "-1"), ("--sampler", "llama")]
)
def test_an_option_out_of_range_is_bad_input(cli, args):
    done = cli("eval", MATH, *args)
    assert done.code == 2
    assert args[0] in done.err
    assert "Traceback" not in done.err


# --- eval: models ---------------------------------------------------------------------------


def test_eval_of_a_model(cli):
    args = ("eval", MATH, "--model", "tiny", "--limit", 16, "--max-tokens", 36, "--json")
    means = json.loads(cli(*args, "--temperature", 0).out)
    assert means["n"] == 16
    assert means["reward/format"] > 0.5
    sampled = [cli(*args, "--seed", seed).out for seed in (0, 0, 1)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_eval_of_something_that_is_no_model_is_bad_input(cli, tmp_path):
    (tmp_path / "empty").mkdir()
    fails(cli("eval", MATH, "--model", "./empty"), 2, "model './empty'", "without config.json")
    fails(cli("eval", MATH, "--model", "./absent"), 2, "no such folder")


@pytest.fixture
def endpoint():
    """A local OpenAI-compatible server that records requests; ``status`` and ``reply`` are set."""
    seen = SimpleNamespace(bodies=[], headers=[], status=200, reply=None)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers["Content-Length"])
            seen.bodies.append(json.loads(self.rfile.read(length)))
            seen.headers.append(dict(self.headers))
            choice = {"message": {"content": "a\nb\nc"}, "finish_reason": "stop"}
            default = {"choices": [choice] * seen.bodies[-1]["n"]}
            body = json.dumps(seen.reply or default).encode()
            self.send_response(seen.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    seen.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield seen
    server.shutdown()
    server.server_close()


def openai(cli, url, *args):
    return cli("eval", "my_envs:Haiku", "--sampler", "openai", "--base-url", url, *args)


def test_eval_of_an_endpoint(cli, endpoint, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    done = openai(cli, endpoint.url, "--model", "m", "--n", 2, "--temperature", 0.5, "--json")
    means = json.loads(done.out)
    assert (means["n"], means["reward/lines"]) == (8, 1.0)
    assert len(endpoint.bodies) == 4
    assert {(b["model"], b["n"], b["temperature"]) for b in endpoint.bodies} == {("m", 2, 0.5)}
    assert sorted(b["seed"] for b in endpoint.bodies) == [0, 2, 4, 6]
    asked = {b["messages"][0]["content"] for b in endpoint.bodies}
    assert asked == {f"eval {i}: " for i in range(4)}
    assert {h["Authorization"] for h in endpoint.headers} == {"Bearer secret"}


def test_an_endpoint_that_refuses_is_a_failure(cli, endpoint):
    endpoint.status, endpoint.reply = 404, {"error": "no such model"}
    fails(openai(cli, endpoint.url), 1, "HTTP 404", "no such model", "check model name")


def test_an_endpoint_that_answers_something_else_is_a_failure(cli, endpoint):
    endpoint.reply = {"hello": "world"}
    fails(openai(cli, endpoint.url), 1, "OpenAI-compatible endpoint")


def test_an_endpoint_that_is_down_is_a_failure(cli, monkeypatch):
    """Case Tencent-Hunyuan/UniRL#214; awslabs/agentcore-rl-toolkit#122: no empty answers."""
    monkeypatch.setattr("mrgym.sampler.time.sleep", lambda seconds: None)
    done = openai(cli, "http://127.0.0.1:9/v1")
    fails(done, 1, "http://127.0.0.1:9", "check that the server is up")


def test_an_endpoint_needs_an_address(cli):
    done = cli("eval", "my_envs:Haiku", "--sampler", "openai")
    fails(done, 2, "--base-url", "http://localhost:8000/v1")


# --- train, report --------------------------------------------------------------------------

QUICK = (
    "steps=2", "prompts_per_step=2", "group_size=2", "eval_tasks=2", "max_completion_tokens=8",
)  # fmt: skip


def test_train_as_json_leaves_a_run_folder(cli, tmp_path):
    done = cli("train", MATH, *QUICK, "--out", "run", "--seed", 3, "--json")
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["env"], summary["model"], summary["seed"], summary["steps"]) == (
        MATH, "tiny", 3, 2,
    )  # fmt: skip
    assert done.err == ""
    for name in ("config.yaml", "metrics.jsonl", "report.html", "rollouts", "checkpoints"):
        assert (tmp_path / "run" / name).exists(), name


def test_train_on_a_class_in_the_working_directory_and_report_it(cli, tmp_path):
    done = cli("train", "my_envs:Haiku", *QUICK)
    assert done.code == 0, done.err
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("my_envs.Haiku-")
    report = folder.relative_to(tmp_path) / "report.html"
    for word in ("lines", "brief", "sum", "greedy end", f"report: {report}"):
        assert word in done.out
    assert "eval at step" in done.err
    assert json.loads((folder / "summary.json").read_text())["env"] == "my_envs:Haiku"
    again = cli("report", folder, "--to", "page.html")
    assert (again.code, again.out.strip()) == (0, "page.html")
    assert (tmp_path / "page.html").read_text() == (folder / "report.html").read_text()


def test_a_run_can_be_repeated_from_its_config(cli, tmp_path):
    first = cli("train", "my_envs:Haiku", *QUICK, "weights.lines=2", "--out", "a", "--json")
    again = cli("train", "my_envs:Haiku", "--config", "a/config.yaml", "--out", "b", "--json")
    assert again.code == 0, again.err
    one, other = json.loads(first.out), json.loads(again.out)
    assert {**one, "wall_s": 0} == {**other, "wall_s": 0}
    assert one["weights"] == {"lines": 2.0, "brief": 0.5}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["step=2"], ["unknown key 'step'", "did you mean 'steps'"]),
        (["steps"], ["'steps'", "expected key=value"]),
        (["group_size=1"], ["group_size: got 1", "expected at least 2"]),
        (["weights.line=2"], ["did you mean 'lines'", "['lines', 'brief']"]),
        (["--config", "absent.yaml"], ["absent.yaml: got no file"]),
        (["--model", "./absent"], ["./absent", "no such folder"]),
        (["--out", "my_envs.py"], ["my_envs.py: got a file"]),
    ],
)
def test_train_refuses_bad_input_before_anything_runs(cli, tmp_path, args, words):
    fails(cli("train", "my_envs:Haiku", *QUICK[1:], *args), 2, *words)
    assert not (tmp_path / "runs").exists()


def test_train_keeps_an_earlier_run_unless_told(cli, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text("{}")
    args = ("train", "my_envs:Haiku", *QUICK, "--out", "run", "--json")
    fails(cli(*args), 2, "already holds a run", "--overwrite")
    assert (tmp_path / "run" / "summary.json").read_text() == "{}"
    assert cli(*args, "--overwrite").code == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"


def test_train_with_scores_that_fail_is_a_failure(cli, tmp_path):
    done = cli("train", "my_envs:Raising", *QUICK, "--out", "run", "--json")
    fails(done, 1, "2 failures in 2 rollouts", "the judge is down")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_ctrl_c_before_the_first_step_ends_in_order(cli, tmp_path):
    done = cli("train", "my_envs:Quitting", *QUICK, "--out", "run", "--json")
    assert done.code == 1
    assert "interrupted: checkpoint and summary are in run" in done.err
    assert "Traceback" not in done.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"


def test_report_of_something_else_is_bad_input(cli, tmp_path):
    fails(cli("report", tmp_path / "absent"), 2, "absent")
    fails(cli("report", tmp_path), 2, str(tmp_path))


# --- in a process of its own ----------------------------------------------------------------


def start(*args, cwd, without=()):
    """Run the command with some packages missing."""
    hide = "".join(f"sys.modules[{name!r}] = None; " for name in without)
    code = f"import sys; {hide}from mrgym.cli import main; main()"
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", code, *args], cwd=cwd, env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("args", "missing"),
    [
        (("train", MATH), "torch"), (("eval", MATH), "torch"), (("report", "."), "matplotlib"),
    ],
)  # fmt: skip
def test_a_missing_extra_prints_the_install_command(tmp_path, args, missing):
    done = start(*args, cwd=tmp_path, without=[missing])
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {missing}: not installed")
    assert line.endswith("pip install 'mrgym[train]'")


def test_the_core_verbs_need_no_extra(tmp_path):
    (tmp_path / "my_envs.py").write_text(MY_ENVS)
    (tmp_path / "c.jsonl").write_text('"a"\n' * 4)
    without = ("torch", "transformers", "yaml", "matplotlib", "datasets")
    for args in (
        ("list", "--json"), ("check", "my_envs:Haiku"),
        ("eval", "my_envs:Haiku", "--sampler", "scripted", "--completions", "c.jsonl"),
    ):  # fmt: skip
        done = start(*args, cwd=tmp_path, without=without)
        assert done.returncode == 0, done.stderr


def test_the_installed_command_finds_a_class_in_the_working_directory(tmp_path):
    (tmp_path / "my_envs.py").write_text(MY_ENVS)
    script = os.path.join(os.path.dirname(sys.executable), "mrgym")
    done = subprocess.run(
        [script, "check", "my_envs:Haiku"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    unknown = subprocess.run(
        [script, "check", "nothing"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert unknown.returncode == 2
    assert unknown.stderr.startswith("error: ")
    assert unknown.stderr.count("\n") == 1
