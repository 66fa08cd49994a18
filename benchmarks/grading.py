r"""The math grader against Math-Verify: agreement with people, and verdicts a second.

python benchmarks/grading.py [--data ../shared/data] [--peer PYTHON_WITH_MATH_VERIFY]

The peer runs in the interpreter that --peer or the variable MATH_VERIFY_PYTHON names, in the same
run, on the same texts: as they are, and wrapped in ``\boxed{}`` or dollar signs where bare.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mrgym_envs.grading import grade, grade_batch, judge, set_workers, warm_up

INTEGERS = 5_000
REPEATS = 3
HEAVY = [(f"\\sin({2 * i}x)", f"\\boxed{{2\\sin({i}x)\\cos({i}x)}}") for i in range(1, 121)]
WRAPPINGS = {"as it is": "{}", "boxed": "\\boxed{{{}}}", "dollars": "${}$"}

PEER = r"""
import json, logging, sys, time
logging.disable(logging.CRITICAL)
from math_verify import parse, verify

def judged(gold, answer):
    try:
        return bool(verify(parse(gold), parse(answer)))
    except Exception:
        return False

for line in sys.stdin:
    pairs = json.loads(line)
    start = time.perf_counter()
    verdicts = [judged(gold, answer) for gold, answer in pairs]
    print(json.dumps([time.perf_counter() - start, verdicts]), flush=True)
"""


class Peer:
    """Math-Verify in another interpreter."""

    def __init__(self, python: str) -> None:
        self.python = python
        self._process = subprocess.Popen(
            [python, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, pairs: list[tuple[str, str]]) -> tuple[float, list[bool]]:
        """Return the seconds taken and the verdicts."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(pairs) + "\n")
        self._process.stdin.flush()
        seconds, verdicts = json.loads(self._process.stdout.readline())
        return seconds, verdicts


def find_peer(python: str | None) -> Peer | None:
    """Return the peer, if the interpreter can import it."""
    if python:
        command = [python, "-c", "import math_verify"]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return Peer(python)
    print("Math-Verify: not importable there; pass --peer or set MATH_VERIFY_PYTHON; skipped\n")
    return None


def read_cases(data: Path) -> list[dict[str, Any]]:
    """Return the rows with verdicts of other projects' own tests."""
    lines = (data / "math_cases_dev.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def ours(pairs: list[tuple[str, str]]) -> tuple[float, list[bool]]:
    """Return the seconds our grader takes, one call a pair, and its verdicts."""
    judge._read_short.cache_clear()  # the peer remembers nothing
    start = time.perf_counter()
    verdicts = [grade(gold=gold, answer=answer).correct for gold, answer in pairs]
    return time.perf_counter() - start, verdicts


def wrapped(cases: list[dict[str, Any]], form: str) -> list[tuple[str, str]]:
    """Return the texts, with what is bare in a wrapping."""

    def wrap(text: str) -> str:
        return text if "$" in text or "\\boxed" in text else form.format(text)

    return [
        (wrap(c["gold"]), wrap(c["answer"]) if c["form"] == "answer" else c["answer"])
        for c in cases
    ]


def agreement(cases: list[dict[str, Any]], verdicts: list[bool]) -> dict[str, tuple[int, int]]:
    """Return agreeing and all rows by tag."""
    right: Counter[str] = Counter()
    for case, verdict in zip(cases, verdicts, strict=True):
        right[case["tag"]] += verdict == case["expected"]
    total = Counter(case["tag"] for case in cases)
    return {tag: (right[tag], total[tag]) for tag in sorted(total)}


def summary(cases: list[dict[str, Any]], verdicts: list[bool]) -> str:
    """Return agreement on core and on all rows, with the false positives."""
    by_tag = agreement(cases, verdicts)
    core = by_tag["core"][0] / by_tag["core"][1]
    total = sum(right for right, _ in by_tag.values()) / len(cases)
    false = sum(v and not c["expected"] for c, v in zip(cases, verdicts, strict=True))
    return f"core {core:.3f}  all {total:.3f}  false positives {false}"


def integer_pairs() -> list[tuple[str, str]]:
    """Return integer golds with answers, half of them right."""
    rng = random.Random(0)
    golds = [rng.randrange(10**6) for _ in range(INTEGERS)]
    return [(str(g), f"\\boxed{{{g if rng.random() < 0.5 else g + 1}}}") for g in golds]


def show_agreement(cases: list[dict[str, Any]], peer: Peer | None) -> None:
    """Print how often verdicts agree with the expected ones."""
    pairs = wrapped(cases, "{}")
    _, verdicts = ours(pairs)
    print(f"{'mrgym':<24} {summary(cases, verdicts)}")
    if peer:
        runs = {name: peer.run(wrapped(cases, form))[1] for name, form in WRAPPINGS.items()}
        runs["best a row"] = [
            case["expected"] if case["expected"] in column else not case["expected"]
            for case, column in zip(cases, zip(*runs.values(), strict=True), strict=True)
        ]
        for name, found in runs.items():
            print(f"Math-Verify, {name:<11} {summary(cases, found)}")
    print("\nmrgym by tag:")
    for tag, (right, total) in agreement(cases, verdicts).items():
        print(f"  {tag:<22} {right:>3} / {total}")
    print("\nmrgym, rows that differ:")
    for case, verdict in zip(cases, verdicts, strict=True):
        if verdict != case["expected"]:
            kind = "false positive" if verdict else "false negative"
            print(f"  {kind} {case['tag']}: {case['gold'][-60:]!r} {case['answer'][-60:]!r}")


def show_speed(name: str, pairs: list[tuple[str, str]], peer: Peer | None) -> None:
    """Print verdicts a second, medians of interleaved repeats."""
    times = defaultdict(list)
    for _ in range(REPEATS):
        times["mrgym"].append(ours(pairs)[0])
        if peer:
            times["Math-Verify"].append(peer.run(pairs)[0])
    rates = {who: len(pairs) / statistics.median(seconds) for who, seconds in times.items()}
    shown = ", ".join(f"{who} {rate:,.0f}/s" for who, rate in rates.items())
    ratio = f", ratio {rates['mrgym'] / rates['Math-Verify']:.0f}x" if peer else ""
    print(f"{name}: {shown}{ratio}")


def show_scaling() -> None:
    """Print how verdicts that need algebra scale over worker processes."""
    seconds = {}
    for workers in (1, 2):
        set_workers(workers)
        warm_up()
        start = time.perf_counter()
        verdicts = grade_batch(HEAVY)
        seconds[workers] = time.perf_counter() - start
        assert all(verdict.correct for verdict in verdicts)
    rates = {n: len(HEAVY) / s for n, s in seconds.items()}
    print(f"algebra in 1 worker {rates[1]:.0f}/s, in 2 workers {rates[2]:.0f}/s")


def main() -> None:
    """Print agreement, speed and scaling."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--peer", default=os.environ.get("MATH_VERIFY_PYTHON"))
    args = parser.parse_args()
    if not args.data.is_dir():
        sys.exit(f"no data: {args.data} is absent; pass --data")
    cases, peer = read_cases(args.data), find_peer(args.peer)
    print(f"Python {platform.python_version()}, sympy {version('sympy')}, {os.cpu_count()} cores\n")
    warm_up()
    show_agreement(cases, peer)
    print()
    show_speed(f"{INTEGERS} integers", integer_pairs(), peer)
    show_speed(f"{len(cases)} cases, as they are", wrapped(cases, "{}"), peer)
    show_scaling()


if __name__ == "__main__":
    main()
