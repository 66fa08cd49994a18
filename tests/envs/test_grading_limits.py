"""Nothing hangs, runs, or grows, wherever grade is called from."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mrgym_envs.grading import close_workers, grade, grade_batch, set_workers, warm_up
from mrgym_envs.grading import workers as grading_workers

PROBE = {"gold": r"\sin(2x)", "answer": r"\boxed{2\sin x\cos x}"}
NASTY = r"\boxed{\int_0^1 \frac{\sin(x^x)}{x^{x^x}} \, dx}"
SLACK = 10.0
"""Seconds that a loaded machine may add; benchmarks measure the real figures."""


@pytest.fixture(scope="module", autouse=True)
def _workers():
    set_workers(1)
    warm_up()
    yield
    close_workers()


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^{9}}}",
        "(10^7)!",
        "3^{1500000000}",
        r"\log(\log(9^{9^{9^{9}}}))",
        r"\sum_{k=1}^{10^9} \frac1{k^2}",
        r"(2+\sqrt3)^{100000}",
        r"7^{7^{7^7}} \bmod 10",
    ],
)
def test_what_is_too_large_is_said_to_be(answer):
    verdict = grade(gold="5", answer=f"\\boxed{{{answer}}}")
    assert verdict.status in ("too_large", "timeout"), verdict


def test_a_worker_that_overruns_is_stopped_and_the_next_answer_is_graded():
    start = time.monotonic()
    assert grade(gold="1", answer=NASTY).status in ("timeout", "incorrect")
    assert time.monotonic() - start < 1.5 + SLACK
    assert grade(**PROBE).correct


def test_fractions_of_a_second_count():
    warm_up(0.3)
    start = time.monotonic()
    assert grade(gold="1", answer=NASTY, timeout=0.3).status == "timeout"
    assert time.monotonic() - start < 0.8 + SLACK


def test_adversarial_cases(shared, tmp_path, monkeypatch):
    path = shared / "cases" / "adversarial_dev.jsonl"
    if not path.is_file():
        pytest.skip(f"no data: {path.name} is absent")
    canary = Path("/tmp/canary")
    before = canary.exists()
    monkeypatch.chdir(tmp_path)
    for line in path.read_text().splitlines():
        case = json.loads(line)
        start = time.monotonic()
        verdict = grade(gold=case["gold"], answer=case["answer"])
        assert time.monotonic() - start < 1.5 + SLACK, case["name"]
        assert verdict.correct == (case["want"] == "correct"), (case["name"], verdict)
        assert verdict.status != "error", (case["name"], verdict)
        assert grade(gold="6", answer=r"\boxed{6}").correct
    assert grade(**PROBE).correct
    assert canary.exists() == before
    assert not list(tmp_path.iterdir())


def peak_memory() -> int:
    """Bytes a worker had resident at most."""
    with grading_workers._pools.pool(1.0) as pool:
        text = "".join(Path(f"/proc/{pid}/status").read_text() for pid in pool.pids)
    sizes = [line.split()[1] for line in text.splitlines() if line.startswith("VmHWM")]
    return max(int(size) for size in sizes) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_stay_below_a_gibibyte(shared):
    path = shared / "cases" / "adversarial_dev.jsonl"
    if not path.is_file():
        pytest.skip(f"no data: {path.name} is absent")
    for line in path.read_text().splitlines():
        case = json.loads(line)
        grade(gold=case["gold"], answer=case["answer"])
        assert grade(**PROBE).correct, case["name"]
        assert peak_memory() <= 1 << 30, case["name"]


BAIT = [
    "$", r"\[", " ", "\n", "- ", "1,", "a ", "{", "(", "((1", r"\frac", r"\sqrt{", r"\boxed{",
    r"\boxed{1} and ", r"put your \boxed{1} ", "The answer is ", "#### 1\n", "<think>", "^", "2^",
    "x+", "x*", "!", "|", "1 or ", "not A ", "**", r"\,", "I don't know ", r"\pm 1,", "1e9", "e",
    "(0,1)\\cup", r"\begin{pmatrix}", "°", "答案", "\u200b", "1:", "f'",
]  # fmt: skip


@pytest.mark.parametrize("piece", BAIT)
def test_long_texts_are_graded_in_time(piece):
    text = piece * (200_000 // len(piece))
    start = time.monotonic()
    for answer in (text, f"\\boxed{{{text[:30_000]}}}"):
        assert grade(gold="42", answer=answer).status not in ("error", "correct")
    assert time.monotonic() - start < 4 + SLACK


def test_a_million_characters():
    assert grade(gold="42", answer="word " * 200_000 + r"\boxed{42}").correct
    assert grade(gold="42", answer=r"\boxed{" + "1" * 10**6 + "}").status == "too_large"
    assert grade(gold="1" * 10**6, answer="1").status == "too_large"


def everywhere(verdict: object) -> None:
    assert verdict.correct, verdict


def test_a_thread_gives_the_same_verdict():
    found = []
    thread = threading.Thread(target=lambda: found.append(grade(**PROBE)))
    thread.start()
    thread.join()
    everywhere(found[0])


def test_many_threads_share_the_workers():
    with ThreadPoolExecutor(8) as pool:
        for verdict in pool.map(lambda _: grade(**PROBE), range(32)):
            everywhere(verdict)


def test_asyncio_gives_the_same_verdict():
    async def main():
        return await asyncio.gather(*(asyncio.to_thread(grade, **PROBE) for _ in range(4)))

    for verdict in asyncio.run(main()):
        everywhere(verdict)


def test_a_subprocess_gives_the_same_verdict():
    code = (
        "from mrgym_envs.grading import grade\n"
        "import sys\n"
        f"verdict = grade(**{PROBE!r})\n"
        "assert 'sympy' not in sys.modules\n"
        "sys.stdout.write(verdict.status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "correct"


def test_grading_in_this_process_imports_no_sympy():
    code = (
        "import sys\n"
        "from mrgym_envs.grading import grade\n"
        r"assert grade(gold='\\frac{\\sqrt2}{2}', answer='1/\\sqrt2').correct"
        "\nassert 'sympy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_exception_leaves_grade(monkeypatch):
    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr("mrgym_envs.grading.api.extract_gold", broken)
    verdict = grade(gold="x", answer="y")
    assert verdict.status == "error"
    assert "broken" in verdict.reason
    assert grade_batch([("x", "y"), ("1", "1")])[1].correct


def test_a_worker_that_cannot_start_is_an_error_verdict(monkeypatch):
    def broken(*_):
        raise OSError("no processes")

    monkeypatch.setattr("mrgym_envs.grading.api.judge_in_workers", broken)
    assert grade(**PROBE).status == "error"


def test_deadlines_beyond_those_kept_close_the_oldest_pool():
    for timeout in (0.61, 0.62, 0.63, 0.64, 0.65, 0.66):
        assert grade(**PROBE, timeout=timeout).status in ("correct", "timeout")
    assert len(grading_workers._pools._pools) <= grading_workers._POOLS_KEPT
