"""The built-in word problems: right, varied, the same everywhere, and never leaking."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from fractions import Fraction

import pytest

from mrgym.errors import TaskError
from mrgym_envs.math_multi_reward.generator import (
    DIFFICULTIES,
    KINDS,
    SPLITS,
    easy_problem_count,
    generate,
    split_of,
)

EVERY_KIND = [(difficulty, kind) for difficulty in DIFFICULTIES for kind in KINDS[difficulty]]
SYMBOLS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}


def left_to_right(kind, operands):
    """Work a chain out with exact fractions, independently of the generator."""
    value = Fraction(operands[0])
    for name, operand in zip(kind.split("_"), operands[1:], strict=True):
        value = {
            "add": value + operand,
            "subtract": value - operand,
            "multiply": value * operand,
            "divide": value / operand,
        }[name]
    return value


def fingerprint():
    lists = [
        generate(split=split, difficulty=difficulty, seed=7, count=200)
        for split in SPLITS
        for difficulty in DIFFICULTIES
    ]
    return hashlib.sha256(repr(lists).encode()).hexdigest()


@pytest.mark.parametrize(("difficulty", "kind"), EVERY_KIND)
@pytest.mark.parametrize("split", SPLITS)
def test_answers_and_solutions_are_right(split, difficulty, kind):
    for p in generate(split=split, difficulty=difficulty, seed=3, count=120, kinds=[kind]):
        assert (p.kind, p.difficulty) == (kind, difficulty)
        assert p.answer.isascii()
        assert p.answer.isdigit()
        assert int(p.answer) == left_to_right(kind, p.operands) <= 9_999
        assert p.solution.endswith(f"={p.answer}")
        assert re.findall(r"\d+(\D)\d+=", p.solution) == [SYMBOLS[n] for n in kind.split("_")]
        for left, symbol, right, result in re.findall(r"(\d+)(\D)(\d+)=(\d+)", p.solution):
            name = next(n for n, s in SYMBOLS.items() if s == symbol)
            assert int(result) == left_to_right(name, (int(left), int(right)))


@pytest.mark.parametrize(("difficulty", "kind"), EVERY_KIND)
def test_stories_tell_the_operands_in_order_and_vary(difficulty, kind):
    problems = generate(split="train", difficulty=difficulty, seed=1, count=120, kinds=[kind])
    for p in problems:
        assert tuple(map(int, re.findall(r"\d+", p.question))) == p.operands
        assert p.question.endswith("?")
        assert not re.search(r"[{}]|  |\n", p.question)
    openings = {re.sub(r"\d+", "#", p.question) for p in problems}
    assert len(openings) >= 8


def test_difficulties_differ_in_steps_size_and_length():
    lists = {d: generate(split="train", difficulty=d, seed=0, count=500) for d in DIFFICULTIES}
    steps = {d: {len(p.operands) - 1 for p in problems} for d, problems in lists.items()}
    assert steps == {"easy": {2}, "medium": {2, 3}, "hard": {3, 4}}
    assert max(max(p.operands) for p in lists["easy"]) == 15
    assert all(p.question.count(". ") == 0 for p in lists["easy"])
    words = [sum(len(p.question.split()) for p in problems) / 500 for problems in lists.values()]
    assert words[0] * 1.5 < words[1] < words[2] / 1.2


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_no_operands_of_eval_occur_in_train(difficulty):
    seen = {
        split: {
            p.operands
            for seed in (0, 1)
            for p in generate(split=split, difficulty=difficulty, seed=seed, count=3000)
        }
        for split in SPLITS
    }
    assert not seen["train"] & seen["eval"]
    for split in SPLITS:
        assert {split_of(operands) for operands in seen[split]} == {split}


def test_a_fifth_is_held_out_and_the_counts_are_known():
    assert easy_problem_count() == 5341
    assert easy_problem_count("train") == 4291
    assert easy_problem_count("eval") == 1050


def test_the_same_arguments_give_the_same_problems_in_another_process():
    assert fingerprint() == "b925401364bf41aee4f0046d9ed3e1fa87f648354951759a2598eb943848fd7a"
    code = (
        "from mrgym_envs.math_multi_reward.generator import generate\n"
        "p = generate(split='eval', difficulty='hard', seed=5, count=50)\n"
        "print(repr(p))"
    )
    here = generate(split="eval", difficulty="hard", seed=5, count=50)
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == repr(here)


def test_seeds_differ_and_shorter_lists_are_prefixes():
    def some(**changes):
        return generate(
            **{"split": "train", "difficulty": "easy", "seed": 0, "count": 40} | changes
        )

    assert some() == some(count=90)[:40]
    assert some() != some(seed=1)
    assert some(count=0) == []


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_questions_are_distinct(split, difficulty):
    problems = generate(split=split, difficulty=difficulty, seed=0, count=4000)
    assert len({p.question for p in problems}) == 4000


def test_train_repeats_and_eval_refuses_when_the_space_is_spent(monkeypatch):
    from mrgym_envs.math_multi_reward import generator

    monkeypatch.setitem(generator._RANGES, "easy", {"add": (2, 3), "multiply": (2, 2)})
    monkeypatch.setattr(generator, "_HELD_OUT_OF", 2)
    few = {"difficulty": "easy", "seed": 0, "count": 5000, "kinds": ["add_multiply"]}
    problems = generate(split="train", **few)
    assert len(problems) == 5000
    assert len({p.question for p in problems}) < 500
    with pytest.raises(TaskError, match=r"got count=5000 for eval/easy, expected at most \d+"):
        generate(split="eval", **few)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "evla"}, r"got split 'evla', expected one of .*; did you mean 'eval'\?"),
        ({"difficulty": "esay"}, r"got difficulty 'esay'.*; did you mean 'easy'\?"),
        ({"kinds": ["add_multipy"]}, r"got kind of 'easy' .*; did you mean 'add_multiply'\?"),
        ({"kinds": ["zzz"]}, "; choose one of them"),
        ({"kinds": []}, "got no kinds"),
        ({"count": -1}, "got count=-1, expected 0 or more"),
    ],
)
def test_unknown_arguments_are_named(changes, message):
    with pytest.raises(TaskError, match=message):
        generate(**{"split": "train", "difficulty": "easy", "seed": 0, "count": 1} | changes)
