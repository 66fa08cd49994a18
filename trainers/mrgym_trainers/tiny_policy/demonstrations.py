"""Deliberately imperfect demonstrations: a policy warmed up on them has something to learn.

There are slips for each reward, drawn independently: wrong arithmetic (correctness), a broken
layout (format) and an answer that is not written as an integer (integer). The right way stays the
most frequent one, so greedy decoding is far better than sampling; but a carry in the last step is
forgotten more often than not, which leaves greedy decoding something to learn as well.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from mrgym_envs.math_multi_reward.generator import Problem, generate

__all__ = ["Demonstration", "SlipRates", "demonstrate", "demonstrations"]

_OPERATIONS: Final[dict[str, Callable[[int, int], int]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}

_LAYOUT: Final = "<think>{working}</think>\n<answer>{answer}</answer>"
_BROKEN_LAYOUTS: Final = (
    "<think>{working}</think> <answer>{answer}</answer>",
    "<think>{working}\n<answer>{answer}</answer>",
    "{working}\n<answer>{answer}</answer>",
    "<think>{working}</think>\n{answer}",
    "<think>{working}</think>\n<answer>{answer}</answer> ok",
    "<think>{working}</think>\n<answer>{answer}</answer>\n<answer>{answer}</answer>",
)

_ANSWER_TEXTS: Final = ("{n}.0", "{n} in all", "about {n}", "= {n}", "{n}.", "{words}")
# fmt: off
_UNITS: Final = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
)
_TENS: Final = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
# fmt: on


@dataclass(frozen=True)
class SlipRates:
    """How often a demonstration goes wrong, and how.

    Attributes:
        carry: Share that forgets the carry of the last step, where it has one.
        arithmetic: Share with a result in one step that is wrong at random.
        layout: Share whose layout breaks the format.
        text: Share whose answer is not written as an integer.
    """

    carry: float = 0.60
    arithmetic: float = 0.38
    layout: float = 0.42
    text: float = 0.28


@dataclass(frozen=True)
class Demonstration:
    """A prompt and one completion of it, without the end-of-sequence token."""

    prompt: str
    completion: str


def demonstrations(
    *, seed: int, count: int, rates: SlipRates | None = None
) -> Iterator[Demonstration]:
    """Yield demonstrations for distinct easy ``train`` problems; a seed fixes all of them."""
    rng = random.Random(seed)
    for problem in generate(split="train", difficulty="easy", seed=seed, count=count):
        yield demonstrate(problem, rng, rates or SlipRates())


def demonstrate(problem: Problem, rng: random.Random, rates: SlipRates) -> Demonstration:
    """Return one demonstration of a problem, with slips at the given rates."""
    working, value = _working(problem, rng, rates)
    answer = _answer_text(value, rng) if rng.random() < rates.text else str(value)
    layout = rng.choice(_BROKEN_LAYOUTS) if rng.random() < rates.layout else _LAYOUT
    return Demonstration(problem.question + "\n", layout.format(working=working, answer=answer))


def _working(problem: Problem, rng: random.Random, rates: SlipRates) -> tuple[str, int]:
    """Return the working and its end result; a wrong step is carried on, as people do."""
    steps = re.findall(r"(\D)(\d+)=", problem.solution)
    slip_at = rng.randrange(len(steps)) if rng.random() < rates.arithmetic else -1
    value, parts = problem.operands[0], []
    for index, (symbol, operand) in enumerate(steps):
        forgets = index == len(steps) - 1 and rng.random() < rates.carry
        result = _result(symbol, value, int(operand), carry=not forgets)
        if index == slip_at:
            result = _near(result, rng)
        parts.append(f"{value}{symbol}{operand}={result}")
        value = result
    return " ".join(parts), value


def _result(symbol: str, left: int, right: int, *, carry: bool) -> int:
    """Return the result of a step, never negative; without its carry ``24+9`` is 23."""
    operation = _OPERATIONS[symbol]
    if carry or left < 10 or symbol not in "+*":
        return max(0, operation(left, right))
    tens, units = divmod(left, 10)
    tens = tens * right if symbol == "*" else tens + right // 10
    return tens * 10 + operation(units, right % 10 if symbol == "+" else right) % 10


def _near(result: int, rng: random.Random) -> int:
    """Return a wrong result near the right one."""
    return result + rng.choice([d for d in (-10, -3, -2, -1, 1, 2, 3, 10) if result + d >= 0])


def _answer_text(value: int, rng: random.Random) -> str:
    """Return an answer that names the number but is not an integer of digits."""
    return rng.choice(_ANSWER_TEXTS).format(n=value, words=_in_words(value))


def _in_words(value: int) -> str:
    """Return a number in English words; hundreds are kept short, as in ``2 hundred five``."""
    if value >= 100:
        return f"{value // 100} hundred {_in_words(value % 100)}"
    if value < len(_UNITS):
        return _UNITS[value]
    tens, unit = divmod(value, 10)
    return _TENS[tens - 2] + (f" {_UNITS[unit]}" if unit else "")
