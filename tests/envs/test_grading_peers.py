"""Inputs that broke other graders, by kind; each docstring names where it was seen."""

import asyncio
import inspect
import threading
import time

import pytest

from mrgym_envs.grading import grade

SLOW = {"gold": "\\sin(2x)", "answer": "\\boxed{2\\sin(x)\\cos(x)}"}


def status(gold, answer, **options):
    return grade(gold=gold, answer=answer, **options).status


def in_thread(task):
    out = []
    thread = threading.Thread(target=lambda: out.append(task()))
    thread.start()
    thread.join()
    return out[0]


def in_asyncio(task):
    async def main():
        return await asyncio.get_running_loop().run_in_executor(None, task)

    return asyncio.run(main())


@pytest.mark.parametrize("run", [in_thread, in_asyncio])
@pytest.mark.parametrize("case", [SLOW, {"gold": "7", "answer": "\\boxed{7}"}])
def test_the_verdict_is_the_same_off_the_main_thread(run, case):
    """huggingface/Math-Verify#55; #50; huggingface/trl#5281."""
    assert run(lambda: grade(**case)) == grade(**case)
    assert grade(**case).correct


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^{9}}}",
        "(10^7)!",
        "3^{1500000000}",
        "\\log(\\log(9^{9^{9^{9}}}))",
        "2^{2^{2^{99}}}+1",
    ],
)
def test_towers_end_within_the_deadline_and_never_score(answer):
    """huggingface/Math-Verify#65; #63."""
    start = time.monotonic()
    verdict = grade(gold="5", answer=f"\\boxed{{{answer}}}")
    assert time.monotonic() - start < 5  # deadline 1 s; the rest is a worker's start on a busy day
    assert not verdict.correct
    assert verdict.status in ("incorrect", "too_large", "timeout")
    assert grade(gold="5", answer="\\boxed{5}").correct


@pytest.mark.parametrize("timeout", [0.2, 0.5])
def test_fractional_deadlines_are_honoured(timeout):
    """Pattern seen in kyegomez/swarms#2323."""
    heavy = "\\boxed{\\sum_{k=1}^{10^{9}} \\frac{1}{k^2}}"
    start = time.monotonic()
    assert not grade(gold="1", answer=heavy, timeout=timeout).correct
    assert time.monotonic() - start < timeout + 4


@pytest.mark.parametrize("gold", ["see figure", "", "   ", "1/0", "\\frac{1", "????"])
@pytest.mark.parametrize("answer", ["same", "\\boxed{5}"])
def test_a_gold_that_cannot_be_read_is_never_right(gold, answer):
    """huggingface/open-r1#293; #215; #86; #566."""
    verdict = grade(gold=gold, answer=gold if answer == "same" else answer)
    assert not verdict.correct
    assert verdict.status == "bad_gold"


@pytest.mark.parametrize("gold", ["6", "6.0", "\\boxed{6}", "#### 6"])
def test_a_gold_needs_no_latex(gold):
    """huggingface/open-r1#566."""
    assert grade(gold=gold, answer="\\boxed{6}").correct


def test_gold_and_answer_cannot_be_swapped_by_position():
    """huggingface/open-r1#557; huggingface/Math-Verify#49; #25."""
    kinds = {p.kind for p in inspect.signature(grade).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
    for one, other in [("1/2", "0.5"), ("3", "4"), ("1000", "1,000"), ("2^3", "8")]:
        assert status(one, other) == status(other, one)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("\\frac{1}{2004!}", "\\frac{1}{2006!}"),
        ("\\frac{1}{2^{99}}", "\\frac{1}{2^{98}}"),
        ("1-\\frac{1}{\\mathrm{e}}", "1+\\frac{1}{\\mathrm{e}}"),
        ("1,2,\\ldots,n", "1,3,5,\\ldots,2n-1"),
        ("10^{-12}", "10^{-13}"),
        ("1", "21"),
        ("21", "1"),
    ],
)
def test_near_things_are_not_equal(gold, answer):
    """huggingface/Math-Verify#14; PrimeIntellect-ai/verifiers#763."""
    assert not grade(gold=gold, answer=f"\\boxed{{{answer}}}").correct


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("7", "First \\boxed{5}. wrong; so \\boxed{7}."),
        ("42", "#### 42" + " and so on" * 48),
        ("73", "... 437+2*234=905 ... Final Answer: **73**"),
        ("73", "It is __73__."),
        ("42", "#### 42 is what remains of them all."),
    ],
)
def test_the_last_mark_is_found_wherever_it_stands(gold, answer):
    """huggingface/Math-Verify#57; #76; verl-project/verl#7274; EvolvingLMMs-Lab/lmms-eval#1511."""
    assert grade(gold=gold, answer=answer).correct


@pytest.mark.parametrize(
    "answer",
    [
        "\\boxed{4,5,6}",
        "\\boxed{5} or \\boxed{6}",
        "\\boxed{5 \\text{ or } 6}",
        "<think>\\boxed{5}</think> I do not know.",
        "<think>\\boxed{5}",
        "\\boxed{5} no, \\boxed{6}",
        "#### 5 or perhaps it is 6",
    ],
)
def test_listing_guesses_does_not_score(answer):
    """huggingface/Math-Verify#57; huggingface/trl#4563."""
    assert not grade(gold="5", answer=answer).correct
