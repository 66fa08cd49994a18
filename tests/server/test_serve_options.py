"""What ``mrgym serve`` is told is held, or refused before anything listens."""

from __future__ import annotations

import sys
from functools import partial

import pytest
from typer.testing import CliRunner

import mrgym
from mrgym.cli import app
from mrgym.errors import ConfigError, MissingExtraError, TaskError
from mrgym.server import ServerConfig
from mrgym.server.serve import build_app, serve


@pytest.fixture
def config_of(monkeypatch):
    """The configuration that a command line comes to; nothing is served."""

    def run(*arguments):
        seen = []
        monkeypatch.setattr(
            "mrgym.server.serve.serve", lambda env, config, **_: seen.append(config)
        )
        command = sys.modules["mrgym.cli.serve"]  # the package has a function of that name
        monkeypatch.setattr(command, "end_process", lambda code: None)
        result = CliRunner().invoke(app, ["serve", "math_multi_reward", *arguments])
        if result.exception is not None:
            raise result.exception
        return seen[0]

    return run


@pytest.mark.parametrize(
    ("protocol", "option", "value"),
    [
        ("nemo-gym", "--max-batch", "1024"),
        ("nemo-gym", "--max-sessions", "64"),
        ("nemo-gym", "--idle-timeout", "5"),
        ("nemo-gym", "--score-threads", "4"),
        ("nemo-gym", "--score-workers", "2"),
        ("nemo-gym", "--score-deadline", "5"),
        ("openenv", "--max-batch", "1"),
        ("openenv", "--scoring", "threads"),
        ("openenv", "--score-threads", "4"),
        ("openenv", "--score-workers", "2"),
        ("openenv", "--score-deadline", "5"),
        ("mrgym", "--score-workers", "2"),
        ("mrgym", "--score-deadline", "5"),
    ],
)
def test_an_option_without_effect_is_refused_even_with_its_default(
    config_of, protocol, option, value
):
    with pytest.raises(ConfigError, match=f"{option}: got .* under --protocol {protocol}"):
        config_of("--protocol", protocol, option, value)


@pytest.mark.parametrize(
    "arguments",
    [
        "--protocol nemo-gym --scoring workers --score-workers 3 --score-deadline 2",
        "--protocol nemo-gym --request-timeout 3 --body-timeout 2",
        "--protocol openenv --max-sessions 3 --idle-timeout 2 --request-timeout 4",
        "--protocol mrgym --max-batch 3 --scoring workers --score-workers 3 --score-threads 2",
        "--max-sessions 3",
    ],
)
def test_an_option_with_an_effect_is_taken(config_of, arguments):
    words = arguments.split()
    config = config_of(*words)
    given = {k[2:].replace("-", "_"): v for k, v in zip(words[::2], words[1::2], strict=True)}
    assert {name: str(getattr(config, name)).removesuffix(".0") for name in given} == given
    assert config.model_fields_set - {"token"} == given.keys()


def test_a_bad_value_names_its_option(config_of):
    with pytest.raises(ConfigError, match=r"--max-sessions: got 0"):
        config_of("--max-sessions", "0")


def test_serving_from_python_refuses_the_same():
    with pytest.raises(ConfigError, match="--max-batch: got 2 under --protocol openenv"):
        serve(mrgym.make("math_multi_reward"), ServerConfig(protocol="openenv", max_batch=2))


def test_openenv_gets_its_limits(monkeypatch):
    given = {}
    monkeypatch.setattr("mrgym.adapters.openenv.create_app", lambda env, **kw: given.update(kw))
    config = ServerConfig(protocol="openenv", max_sessions=3, idle_timeout=2.5)
    build_app(mrgym.make("math_multi_reward"), config)
    assert given == {"max_concurrent_envs": 3, "session_timeout": 2.5}


@pytest.fixture
def task_files(tmp_path):
    """A JSONL file of tasks, one of which a line is broken, and one that is not there."""
    good, broken = tmp_path / "good.jsonl", tmp_path / "broken.jsonl"
    good.write_text("".join(f'{{"prompt": "{i}+1", "answer": "{i + 1}"}}\n' for i in range(9)))
    broken.write_text('{"prompt": "1+1", "answer": "2"}\n{"promt": "1+2"}\n')
    return good, broken, tmp_path / "nope.jsonl"


@pytest.mark.parametrize("protocol", ["mrgym", "nemo-gym", "openenv"])
def test_given_tasks_that_are_broken_stop_the_start(monkeypatch, task_files, protocol):
    monkeypatch.setattr("mrgym.adapters.openenv.create_app", lambda env, **limits: None)
    good, broken, nope = task_files
    make = partial(mrgym.make, "math_multi_reward")
    config = ServerConfig(protocol=protocol)
    build_app(partial(make, tasks=good), config)
    for tasks, message in (
        ({"tasks": nope}, "nope.jsonl: got no file"),
        ({"tasks": broken}, "broken.jsonl, line 2"),
        ({"tasks": good, "eval_tasks": nope}, "nope.jsonl: got no file"),
        ({"tasks": good, "eval_tasks": good}, "expected"),
    ):
        with pytest.raises(TaskError, match=message):
            build_app(partial(make, **tasks), config)


class Own(mrgym.SingleTurnEnv):
    """Has the splits it is told."""

    def __init__(self, *splits):
        super().__init__()
        self.splits = splits

    def tasks(self, split):
        return [mrgym.Task(f"{split} {i}") for i in range(3)] if split in self.splits else []

    @mrgym.component(low=0, high=1)
    def fine(self, task, completion):
        return 1


def test_one_split_of_an_environments_own_may_be_missing_but_not_in_silence(serving):
    with pytest.warns(UserWarning, match=r"Own: a split is not served \(.*eval.*got no tasks"):
        service = serving(Own("train"))
    assert service.http.get("/env").json()["tasks"] == {"train": 3}
    with pytest.raises(TaskError, match="got no tasks"):
        build_app(Own(), ServerConfig())


def test_without_fastapi_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "mrgym.server.app", raising=False)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(MissingExtraError, match=r"fastapi: not installed.*mrgym\[serve\]"):
        build_app(mrgym.make("math_multi_reward"), ServerConfig())
