"""Agreement with people: other projects' own test cases, real outputs, competition solutions."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mrgym_envs.grading import grade

POLICY_FALSE_POSITIVES = {
    ("0.1, 4, 2", "4, .1, 2"): "a list without brackets has no order, unless ordered=True",
    ("2x + 3", "Let me solve this... The answer is 2x + 3"): "an answer needs no box",
    ("\\frac{1}{2}", "\\frac{2}{4}"): "equal, though not the same text",
    ("\\frac{1}{2}", "Answer: \\boxed{0.5}"): "equal, though not the same text",
}


def rows(shared: Path, name: str) -> list[dict[str, Any]]:
    path = shared / "data" / name
    if not path.is_file():
        pytest.skip(f"no data: {path.name} is absent")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_agrees_with_the_cases_of_other_projects(shared):
    right, total = Counter(), Counter()
    for row in rows(shared, "math_cases_dev.jsonl"):
        verdict = grade(gold=row["gold"], answer=row["answer"])
        assert verdict.status != "error", (row, verdict)
        for key in ("all", row["tag"]):
            total[key] += 1
            right[key] += verdict.correct == row["expected"]
    assert right["core"] >= 0.97 * total["core"]
    assert right["all"] >= 0.92 * total["all"]


def test_accepts_no_wrong_answer_but_by_policy(shared):
    for row in rows(shared, "math_cases_dev.jsonl"):
        if not row["expected"] and (row["gold"], row["answer"]) not in POLICY_FALSE_POSITIVES:
            assert not grade(gold=row["gold"], answer=row["answer"]).correct, row


def test_agrees_on_real_outputs(shared):
    for row in rows(shared, "math_outputs_dev.jsonl"):
        assert grade(gold=row["gold"], answer=row["answer"]).correct == row["expected"], row


def test_solutions_of_competition_problems_are_right(shared):
    for row in rows(shared, "math500.jsonl"):
        assert grade(gold=row["answer"], answer=row["solution"]).correct, row["answer"]
        assert grade(gold=row["solution"], answer=f"${row['answer']}$").correct, row["answer"]


def test_answers_to_other_problems_are_wrong(shared):
    golds = [row["answer"] for row in rows(shared, "math500.jsonl")]
    for gold, other in zip(golds, golds[1:] + golds[:1], strict=True):
        if gold != other.removeprefix("x="):
            assert not grade(gold=gold, answer=f"\\boxed{{{other}}}").correct, (gold, other)


def test_grade_school_golds_are_right(shared):
    for row in rows(shared, "gsm8k_test.jsonl")[:300]:
        assert grade(gold=row["answer"], answer=row["answer"]).correct, row["answer"]
