"""Ending: what was taken is finished, what is new is refused, and the process exits 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

SLOW = '''
import time
import mrgym

class Slow(mrgym.SingleTurnEnv):
    """Takes its time."""

    def tasks(self, split):
        return [mrgym.Task(f"{split} {i}", i) for i in range(3)]

    @mrgym.component(low=0, high=1)
    def patient(self, task, completion):
        time.sleep(float(completion))
        return 1
'''


@pytest.fixture
def start(tmp_path: Path):
    """A function that starts ``mrgym serve`` on a free port; returns the process and its URL."""
    (tmp_path / "slow_env.py").write_text(SLOW)
    started = []

    def run(*arguments, env=None):
        process = subprocess.Popen(
            [sys.executable, "-m", "mrgym", "serve", "slow_env:Slow", "--port", "0", *arguments],
            cwd=tmp_path,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        line = process.stdout.readline()
        return process, line.rpartition(" ")[2].strip()

    yield run
    for process in started:
        process.kill()
        process.communicate()


def ask(url, seconds, answers):
    body = {"items": [{"completion": str(seconds), "task": {"prompt": "p"}}]}
    answers.append(httpx.post(f"{url}/score", json=body, timeout=30, trust_env=False))


@pytest.mark.slow
def test_sigterm_finishes_what_was_taken_refuses_what_is_new_and_exits_0(start):
    process, url = start()
    answers = []
    taken = threading.Thread(target=ask, args=(url, 2.5, answers))
    taken.start()
    time.sleep(0.7)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    refused = httpx.get(f"{url}/env", trust_env=False)
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "Draining")
    assert refused.headers["retry-after"]
    taken.join()
    assert answers[0].json()["results"][0]["components"] == {"patient": 1.0}
    assert process.wait(10) == 0
    assert process.stderr.read() == ""


@pytest.mark.slow
def test_once_it_says_where_it_listens_it_ends_in_good_order(start):
    process, _ = start()
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 0


@pytest.mark.slow
def test_an_environment_that_hangs_does_not_keep_the_process(start):
    process, url = start("--drain-timeout", "0.5")
    answers = []
    hanging = threading.Thread(target=ask, args=(url, 60, answers))
    hanging.start()
    time.sleep(0.7)
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 0
    hanging.join()
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["type"] == "Draining"


@pytest.mark.slow
def test_a_bad_address_or_option_is_one_line(start):
    process, _ = start("--host", "0.0.0.0", env={"MRGYM_TOKEN": ""})
    assert process.wait(30) == 2
    error = process.stderr.read()
    assert error.startswith("error: mrgym serve: got host '0.0.0.0' without a token")
    assert error.count("\n") == 1
    process, _ = start("--max-sessions", "0")
    assert process.wait(30) == 2
    assert process.stderr.read().startswith("error: --max-sessions: got 0")
    process, _ = start("--tasks", "nope.jsonl")
    assert process.wait(30) == 2
    assert process.stderr.read() == (
        "error: nope.jsonl: got no file, expected a JSONL file of tasks; check the path\n"
    )
