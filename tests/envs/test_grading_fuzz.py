"""Properties that hold for any text."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mrgym_envs.grading import Status, close_workers, grade

PIECES = [
    *"0123456789 ()[]{}+-*/^_=<>,.;:!|&%$'\"\\",
    *(f"\\{name}" for name in "frac sqrt pi infty sin log text boxed left pm cup bmod".split()),
    *"\\frac{1}{ \\sqrt{ \\text{ \\boxed{ \\begin{pmatrix} \\end{pmatrix} \\{ \\} \\\\".split(),
    *"x y e i and or 9^9^9 1e999 1/2 1,000 2,5 <think> </think> <answer> </answer>".split(),
    "\0", "\u200b", "\u0305", "²", "½", "∞", "#### ", "the answer is ", "see figure", "**",
]  # fmt: skip
texts = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=25).map("".join),
    st.text(max_size=60),
)
quick = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module", autouse=True)
def _workers():
    yield
    close_workers()


@quick
@given(gold=texts, answer=texts)
def test_any_texts_give_a_verdict(gold, answer):
    verdict = grade(gold=gold, answer=answer, timeout=0.5)
    assert verdict.status in get_args(Status)
    assert verdict.status != "error", verdict


@quick
@given(gold=texts, answer=st.none())
def test_nothing_answers_nothing(gold, answer):
    assert not grade(gold=gold, answer="", timeout=0.5).correct


@quick
@given(value=st.integers(-(10**12), 10**12), other=st.integers(-(10**12), 10**12))
def test_integers_are_right_only_if_equal(value, other):
    assert grade(gold=str(value), answer=f"\\boxed{{{value:,}}}").correct
    assert grade(gold=str(value), answer=f"\\boxed{{{other}}}").correct == (value == other)


@quick
@given(value=st.fractions(max_denominator=10**6), factor=st.integers(1, 1000))
def test_fractions_may_be_written_in_any_terms(value, factor):
    top, bottom = value.numerator * factor, value.denominator * factor
    answer = f"\\boxed{{\\frac{{{top}}}{{{bottom}}}}}"
    assert grade(gold=f"{value.numerator}/{value.denominator}", answer=answer).correct
    wrong = f"\\boxed{{\\frac{{{top + 1}}}{{{bottom}}}}}"
    assert not grade(gold=f"{value.numerator}/{value.denominator}", answer=wrong).correct


polynomials = st.lists(st.integers(-9, 9), min_size=2, max_size=5).filter(any)


def written(coefficients):
    return "+".join(f"({c})x^{{{n}}}" for n, c in enumerate(coefficients))


@quick
@given(left=polynomials, right=polynomials)
def test_products_equal_their_expansions_only(left, right):
    expanded = [0] * (len(left) + len(right) - 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            expanded[i + j] += a * b
    product = f"({written(left)})({written(right)})"
    assert grade(gold=written(expanded), answer=f"\\boxed{{{product}}}").correct
    expanded[0] += 1
    assert not grade(gold=written(expanded), answer=f"\\boxed{{{product}}}").correct
