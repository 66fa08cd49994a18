"""What is taken as the answer of a response."""

from __future__ import annotations

import pytest

from mrgym_envs.grading import grade
from mrgym_envs.grading.boxes import find_boxes
from mrgym_envs.grading.extract import extract, extract_gold

FOUND = [
    (r"First \boxed{5}. wrong; so \boxed{7}.", "7"),
    (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{42}}}", "42"),
    (r"\boxed{\boxed{\boxed{3}}}", "3"),
    (r"\beginboxed{8}", "8"),
    (r"\boxed{1}, \boxed{2} and \boxed{3}", "1, 2, 3"),
    (r"\boxed{1} papers and \boxed{2} bins", "1, 2"),
    (r"\boxed{1} no no no no no \boxed{2}", "2"),
    (r"\boxed{840} twice: \boxed{840}", "840"),
    ("<think>2 + 2 = 5</think>\n<answer>4</answer>", "4"),
    (r"<answer>It is \boxed{4}</answer>", "4"),
    (r"reasoning </think> \boxed{63}", "63"),
    ("#### 42" + " and so on" * 48, "42"),
    ("We get 41.\n#### 42\n", "42"),
    ("The answer is 42.", "42"),
    ("Answer: $\\frac12$ because", "$\\frac12$"),
    ("... 437+2*234=905 ... Final Answer: **73**", "73"),
    ("Final Answer: The final answer is $10,455$. I hope it is correct.", "$10,455$"),
    ("Therefore $x \\neq 3$ holds.", "x \\neq 3"),
    ("Answer \\[ 9 \\]", "9"),
    ("We pay $80 + $43 = $123 in all", "$123"),
    ("So 858 candies in 26 bags of **33**", "33"),
    ("答案:每份应该是 (\\frac{2}{5}) 吨。", "\\frac{2}{5}"),
    ("42<|im_end|>\n<|im_start|>user\nWhat is 7?", "42"),
    ("it is 5 or 6", "5, 6"),
    ("The point is (2, 3).", "(2, 3)"),
    ("The solutions are $x=1$ and $x=2$.", "x=1, x=2"),
]
NOT_FOUND = [
    "",
    "AZYUK2A",
    r"<think>maybe \boxed{42}</think> I do not know.",
    r"<think>maybe \boxed{42}",
    r"Put your answer as \boxed{42}. I don't know.",
    r"so it is \boxed{4",
    "(lambda: open('marker', 'w'))() or 0",
    "().__class__.__base__.__subclasses__() or 0",
]


@pytest.mark.parametrize(("response", "answer"), FOUND)
def test_finds(response, answer):
    assert extract(response) == answer


@pytest.mark.parametrize("response", NOT_FOUND)
def test_finds_nothing(response):
    assert not grade(gold="42", answer=response).correct
    assert grade(gold="0", answer=response).status in ("unparsed", "incorrect")


def test_hashes_need_no_tail_window():
    assert grade(gold="42", answer="#### 42\n" + "x" * 480).correct


def test_a_box_wins_over_prose():
    assert not grade(gold="42", answer=r"\boxed{41}. Also 42 is nice. The answer is 42.").correct


@pytest.mark.parametrize(
    ("gold", "read"),
    [
        (r"so $x = \boxed{5}$.", "5"),
        ("7 * 6 = <<7*6=42>>42\n#### 42", "42"),
        (" 180 ", "180"),
        ("Alina and the answer is\n(C) Cecile", "(C) Cecile"),
    ],
)
def test_reads_golds(gold, read):
    assert extract_gold(gold) == read


def test_boxes_are_found_in_order_and_outermost():
    boxes = find_boxes(r"\boxed{1 + \boxed{2}} { \boxed{3}")
    assert [box.content for box in boxes] == [r"1 + \boxed{2}", "3"]


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("B", "It's not A because it makes no sense, therefore I think it's B", True),
        ("D", "D. it can't be A or B", True),
        ("(A) Cecile", "C", False),
        ("C Cecile", "C", True),
        (r"\text{(A)}", "(A) 5 apples", True),
        (r"\textbf{(C)}\ 12", "12", True),
        (r"\textbf{(C)}\ 12", "B", False),
        ("B", r"<think>\boxed{B}</think>\boxed{A}", False),
        ("E", r"\mathrm{E}*2", False),
    ],
)
def test_choices(gold, answer, right):
    assert grade(gold=gold, answer=answer).correct == right


def test_an_article_is_no_choice():
    assert not grade(gold="A", answer="A bird has two wings, so there are ten.").correct
