# ruff: noqa: RUF001 - characters that look like others are part of the bait
"""Throws hostile texts at the math grader for a while and counts what it should not do.

python benchmarks/grading_fuzz.py [--seconds 600] [--seed 0]

Counted as findings: an exception, status ``error``, a verdict later than the timeout plus half a
second, an answer graded wrong that is the readable gold itself, a child file that injected code
would have made.
"""

import argparse
import json
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from mrgym_envs.grading import grade, warm_up

TIMEOUT = 0.5
LATE = TIMEOUT + 0.5
PIECES = (
    *"0123456789 ()[]{}+-*/^_=<>,.;:!|&%$'\"\\~",
    *(f"\\{c} " for c in "frac sqrt pi infty sin cos log text boxed left right pm cup in".split()),
    *(f"\\{c}{{" for c in "frac sqrt text boxed begin{pmatrix} overline mathbb binom".split()),
    *"x y n e i abc and or 10^ 9^9^9 ! 1e999 99999999999 0.1 1/2 1,000 2,5".split(),
    *"４ ٣ ² ½ − ∞ π ** \\\\ }{ } { \\{ \\} x^ ^{ \\frac{1}{ \\sqrt{ 2^{2^{".split(),
    *"(10^7)! ((((( )))))".split(),
    *"<think> </think> <answer> </answer> \\int_0^1 \\sum_{k=1}^{n} \\lim_{x\\to\\infty}".split(),
    *"\\begin{cases} \\end{pmatrix} cm percent (A) \n \t \0 \u200b \u202e \u0305".split(" "),
    "#### ", "the answer is ", "Final Answer: The final answer is ", "see figure", "\\, dx",
    "\\bmod 7", "12:30 pm", "- - - -", "lambda: 0", "open('{canary}','w')",
    "__import__('os').system('touch {canary}')",
)  # fmt: skip


def junk(rng: random.Random, canary: str) -> str:
    """Return pieces of mathematics and worse, in random order."""
    parts = rng.choices(PIECES, k=rng.randrange(1, 30))
    text = "".join(parts).replace("{canary}", canary)
    return text * rng.randrange(2, 200) if rng.random() < 0.03 else text


def mutated(rng: random.Random, text: str, canary: str) -> str:
    """Return a text with a few random edits."""
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(text) + 1)
        cut = at + rng.randrange(0, 4)
        piece = junk(rng, canary) if rng.random() < 0.3 else rng.choice(PIECES)
        text = text[:at] + piece + text[cut:]
    return text.replace("{canary}", canary)


def fuzzed(rng: random.Random, texts: list[str], canary: str) -> str:
    """Return junk, or a text that was real once."""
    return junk(rng, canary) if rng.random() < 0.4 else mutated(rng, rng.choice(texts), canary)


def seeds() -> list[str]:
    """Return texts to mutate: the shared cases, where they are."""
    path = Path(__file__).parents[2] / "shared" / "data" / "math_cases_dev.jsonl"
    if not path.is_file():
        return ["\\boxed{\\frac{1}{2}}", "x^2+2x+1", "(0, 1]", "\\{1, 2\\}"]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row[side] for row in rows for side in ("gold", "answer") if len(row[side]) < 500]


def findings_of(gold: str, answer: str) -> tuple[str, list[str]]:
    """Return the status of a pair and what is wrong with it."""
    start = time.perf_counter()
    try:
        verdict = grade(gold=gold, answer=answer, timeout=TIMEOUT)
    except Exception as error:
        return "exception", [f"exception {error!r}"]
    wrong = []
    seconds = time.perf_counter() - start
    if seconds > LATE:
        wrong.append(f"late: {seconds:.2f} s")
    if verdict.status == "error":
        wrong.append(f"error: {verdict.reason}")
    return verdict.status, wrong


def main() -> None:
    """Fuzz, and print counts and findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, texts = random.Random(args.seed), seeds()
    statuses: Counter[str] = Counter()
    found: list[tuple[str, str, str]] = []
    warm_up(TIMEOUT)
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "canary"
        end = time.monotonic() + args.seconds
        while time.monotonic() < end:
            gold = rng.choice(texts) if rng.random() < 0.6 else fuzzed(rng, texts, str(canary))
            answer = fuzzed(rng, texts, str(canary))
            if rng.random() < 0.3:
                answer = f"\\boxed{{{gold}}}"
            status, wrong = findings_of(gold, answer)
            statuses[status] += 1
            found += [(what, gold[:300], answer[:300]) for what in wrong]
        if canary.exists():
            found.append(("canary", "", ""))
    print(f"Python {platform.python_version()}, seed {args.seed}, {args.seconds:g} s")
    print(f"{statuses.total():,} executions: {dict(statuses.most_common())}")
    print(f"{len(found)} findings")
    for what, gold, answer in found[:50]:
        print(f"  {what}\n    gold {gold!r}\n    answer {answer!r}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
