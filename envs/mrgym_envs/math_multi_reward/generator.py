"""The built-in generator of arithmetic word problems: no files, no network, no dependencies.

A problem is a chain of operations read from left to right: ``add_multiply`` over ``(3, 4, 2)``
is ``(3 + 4) * 2``. The chain gives the answer and the worked solution, a template gives the story.

Splits are made of operands, not of sentences: a stable hash holds out 20 % of all operand tuples,
whatever the kind, the wording and the difficulty. No tuple of ``eval`` ever occurs in ``train``.

The ``easy`` problems can be counted (:func:`easy_problem_count`): 5,341 distinct pairs of kind
and operands, of which 4,291 are in ``train`` and 1,050 in ``eval``; each has four wordings, most
of them with a choice of names and things.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import random
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from mrgym.errors import TaskError, closest

__all__ = [
    "DIFFICULTIES",
    "KINDS",
    "SPLITS",
    "Problem",
    "easy_problem_count",
    "generate",
    "split_of",
]

SPLITS: Final = ("train", "eval")
_HELD_OUT_OF: Final = 5  # one operand tuple in five is held out
_LARGEST: Final = 9_999  # no step of a solution goes beyond it: answers stay short
_TRIES: Final = 2_000  # in a row, for a question not yet given, before the space counts as spent

_OPERATIONS: Final[dict[str, tuple[str, Callable[[int, int], int]]]] = {
    "add": ("+", operator.add),
    "subtract": ("-", operator.sub),
    "multiply": ("*", operator.mul),
    "divide": ("/", operator.floordiv),
}

_RANGES: Final[dict[str, dict[str, tuple[int, int]]]] = {
    "easy": {"add": (2, 15), "subtract": (2, 15), "multiply": (2, 6)},
    "medium": {"add": (12, 350), "subtract": (12, 350), "multiply": (3, 24)},
    "hard": {"add": (12, 480), "subtract": (12, 480), "multiply": (3, 36), "divide": (2, 12)},
}

_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "easy": ("Ana", "Ben", "Eva", "Leo", "Mia", "Tom"),
    "medium": ("Amara", "Bruno", "Chloe", "Dinesh", "Elif", "Farid", "Greta", "Hana", "Ivan"),
    "hard": ("Jonas", "Keiko", "Lucia", "Malik", "Nadia", "Oscar", "Priya", "Rosa", "Samir"),
}

_THINGS: Final[dict[str, tuple[str, ...]]] = {
    "easy": ("pens", "cups", "nuts", "eggs", "figs", "toys"),
    "medium": ("stamps", "marbles", "buttons", "postcards", "beads", "tickets", "stickers"),
    "hard": ("bricks", "candles", "lemons", "notebooks", "seedlings", "tiles", "bottles"),
}

_EASY: Final[dict[str, tuple[str, ...]]] = {
    "add_subtract": (
        "{name} has {a} {things}, gets {b} more and loses {c}: how many are left?",
        "A box has {a} {things}, {b} go in and {c} go out: how many are left?",
        "How many {things} are left if {name} gets {a}, gets {b} more and loses {c}?",
        "How many {things} are left if {a} and {b} are in a box and {c} go out?",
    ),
    "subtract_add": (
        "{name} has {a} {things}, loses {b} and gets {c} more: how many are there?",
        "A box has {a} {things}, {b} go out and {c} go in: how many are there?",
        "How many {things} are there if {name} has {a}, loses {b} and gets {c} more?",
        "How many {things} are there if a box has {a}, {b} go out and {c} go in?",
    ),
    "multiply_add": (
        "{name} has {a} bags of {b} {things} and gets {c} more: how many are there?",
        "A box has {a} bags of {b} {things} and {c} more go in: how many are there?",
        "How many {things} are there if {name} has {a} bags of {b} and gets {c} more?",
        "How many {things} are there if {a} bags of {b} and {c} more are in a box?",
    ),
    "multiply_subtract": (
        "{name} has {a} bags of {b} {things} and loses {c}: how many are left?",
        "A box has {a} bags of {b} {things} and {c} go out: how many are left?",
        "How many {things} are left if {name} has {a} bags of {b} and loses {c}?",
        "How many {things} are left if {a} bags of {b} are in a box and {c} go out?",
    ),
    "add_multiply": (
        "{name} has {a} red and {b} blue {things} in each of {c} bags: how many are there?",
        "A bag has {a} red and {b} blue {things}: how many are in {c} bags?",
        "If {name} has {a} red and {b} blue {things} in a bag, how many are in {c} bags?",
        "If {a} red and {b} blue {things} go in each bag, how many are in {c} bags?",
    ),
}

_MEDIUM: Final[dict[str, tuple[str, ...]]] = {
    "add_subtract": (
        "{name} collects {things} and owns {a} of them; a cousin sends {b} more. After {c} are "
        "sold at the fair, how many {things} does {name} still own?",
        "A drawer holds {a} {things} when {name} drops in another {b}. If {c} are taken out for "
        "the school project, how many remain in the drawer?",
    ),
    "subtract_add": (
        "The shop opens with {a} {things} and sells {b} of them before noon. In the afternoon "
        "{name} delivers {c} new ones, so how many {things} does the shop have?",
        "{name} sorts {a} {things} and throws out {b} broken ones. Later {c} spare {things} turn "
        "up in the attic; how many good ones are there now?",
    ),
    "multiply_add": (
        "{name} fills {a} jars with {b} {things} each. Another {c} {things} do not fit and lie "
        "on the table, so how many are there altogether?",
        "Each of {a} pupils brings {b} {things} for the mosaic. The teacher, {name}, adds {c} "
        "from the cupboard; how many {things} can the class use?",
    ),
    "multiply_subtract": (
        "A parcel for {name} contains {a} packs of {b} {things}. On the way {c} of them get "
        "lost; how many {things} arrive?",
        "{name} buys {a} sheets with {b} {things} on each. After using {c} for the album, how "
        "many {things} are unused?",
    ),
    "add_multiply": (
        "Every week {name} makes {a} large and {b} small {things}. How many {things} are "
        "finished after {c} weeks of the same work?",
        "One set consists of {a} plain and {b} painted {things}. If {name} orders {c} sets, how "
        "many {things} will come?",
    ),
    "add_subtract_add": (
        "{name} has {a} {things} and wins {b} more at the club. Then {c} go to a neighbour and "
        "{d} arrive by post; how many {things} does {name} have at the end?",
        "A case holds {a} {things} and {name} puts {b} beside them. By evening {c} have been "
        "borrowed and {d} brought back; how many {things} are there?",
    ),
    "multiply_add_subtract": (
        "{name} packs {a} cartons of {b} {things} and one loose bundle of {c}. When {d} are "
        "rejected by the buyer, how many {things} are accepted?",
        "There are {a} trays with {b} {things} each, and {c} more on the bench. {name} removes "
        "{d} for repair; how many {things} stay?",
    ),
}

_HARD: Final[dict[str, tuple[str, ...]]] = {
    "add_divide_add": (
        "{name} looks after a store room. In the morning it holds {a} {things}, and a van brings "
        "{b} more. All of them are shared out evenly among {c} shelves. Later {name} sets {d} "
        "extra {things} on the first shelf. How many {things} are on the first shelf now?",
        "Two classes pool their {things}: one brings {a}, the other {b}. The pile is split "
        "equally between {c} teams. {name} leads one of the teams and finds {d} more at home. "
        "How many {things} does the team of {name} have?",
    ),
    "multiply_divide_subtract": (
        "A factory fills {a} crates with {b} {things} each. The whole load is spread evenly over "
        "{c} lorries, and {name} drives one of them. At the first stop {d} {things} are unloaded "
        "from it. How many {things} does {name} still carry?",
        "{name} and some friends buy {a} packets of {b} {things}. They divide everything into "
        "{c} equal parts and {name} takes one part. On the way home {d} of those {things} break. "
        "How many whole {things} does {name} have left?",
    ),
    "subtract_multiply_add": (
        "A market stall starts each day with {a} {things} and keeps {b} of them back for "
        "regulars. The rest are sold. {name} runs the stall for {c} days in this way and also "
        "sells {d} {things} at the evening fair. How many {things} does {name} sell in all?",
        "Each carton should contain {a} {things}, but {b} are missing from every one. {name} "
        "receives {c} such cartons. The supplier apologises and sends {d} {things} to make up "
        "for it. How many {things} has {name} received?",
    ),
    "multiply_add_divide": (
        "For the summer party {name} lays out {a} rows of {b} {things}. The neighbours carry "
        "over {c} more. After the party all the {things} are packed into {d} boxes with the same "
        "number in each. How many {things} go into one box?",
        "A hall has {a} cupboards with {b} {things} in each, and {c} stand in the corridor. "
        "{name} hands all of them out evenly to {d} groups. How many {things} does each group "
        "get?",
    ),
    "add_multiply_subtract_divide": (
        "A workshop makes {a} white and {b} black {things} in an hour. It runs for {c} hours, "
        "and {d} {things} then fail the final test. {name} packs the good ones into {e} equal "
        "pallets. How many {things} are on each pallet?",
        "In every garden of the street there are {a} old and {b} new {things}. The street has "
        "{c} gardens. A storm ruins {d} of all these {things}; the rest are collected by {name} "
        "and stored in {e} sheds, the same number in each. How many {things} does a shed hold?",
    ),
    "multiply_subtract_divide_add": (
        "{name} orders {a} bundles of {b} {things} for a building site. On arrival {c} are "
        "damaged and sent back. The others are shared evenly by {d} crews. One crew had {e} "
        "{things} already. How many {things} does that crew have now?",
        "A library of things owns {a} sets of {b} {things}. Readers have lost {c} of them over "
        "the years. What is left is moved to {d} branches in equal parts. The branch where "
        "{name} works buys {e} more. How many {things} can {name} lend out?",
    ),
}

_STORIES: Final = {"easy": _EASY, "medium": _MEDIUM, "hard": _HARD}

DIFFICULTIES: Final = tuple(_STORIES)
KINDS: Final[dict[str, tuple[str, ...]]] = {name: tuple(s) for name, s in _STORIES.items()}


@dataclass(frozen=True)
class Problem:
    """One word problem with its answer.

    Attributes:
        question: The story, one paragraph that ends with a question mark.
        answer: The gold answer, ASCII digits only.
        kind: The chain of operations, such as ``"add_multiply"``.
        difficulty: ``"easy"``, ``"medium"`` or ``"hard"``.
        operands: The numbers of the chain, in its order.
        solution: The working, such as ``"3+4=7 7*2=14"``.
    """

    question: str
    answer: str
    kind: str
    difficulty: str
    operands: tuple[int, ...]
    solution: str


def generate(
    *,
    split: str,
    difficulty: str,
    seed: int,
    count: int,
    kinds: Sequence[str] | None = None,
) -> list[Problem]:
    """Return ``count`` problems of a split; the same arguments always give the same list.

    A shorter list is a prefix of a longer one. Questions are distinct; only a ``train`` list that
    asks for more than there are goes on with repetitions.

    Args:
        split: ``"train"`` or ``"eval"``.
        difficulty: ``"easy"``, ``"medium"`` or ``"hard"``.
        seed: Any integer.
        count: How many problems.
        kinds: A selection of ``KINDS[difficulty]``; all of them by default.

    Raises:
        TaskError: A split, difficulty or kind is unknown, the count is negative, or ``eval`` has
            no ``count`` distinct questions.
    """
    chosen = _checked_kinds(split, difficulty, count, kinds)
    rng = random.Random(_stable_hash(f"{split}/{difficulty}/{seed}"))
    seen: set[str] = set()
    problems: list[Problem] = []
    for _ in range(count):
        problem = _unseen(rng, split, difficulty, chosen, seen)
        if problem is None:
            return _repeated(problems, split, difficulty, count)
        seen.add(problem.question)
        problems.append(problem)
    return problems


def split_of(operands: Sequence[int]) -> str:
    """Return the split that owns an operand tuple, in every kind, wording and difficulty."""
    held_out = _stable_hash(",".join(map(str, operands))) % _HELD_OUT_OF == 0
    return "eval" if held_out else "train"


def easy_problem_count(split: str | None = None) -> int:
    """Return the number of distinct (kind, operands) pairs of ``easy``, of one split or of both."""
    pairs = (operands for kind in KINDS["easy"] for operands in _all_operands(kind, "easy"))
    return sum(split is None or split_of(operands) == split for operands in pairs)


def _stable_hash(text: str) -> int:
    """Return the same integer for a text in every process and Python version."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _checked_kinds(
    split: str, difficulty: str, count: int, kinds: Sequence[str] | None
) -> tuple[str, ...]:
    """Return the kinds to draw from once every argument makes sense."""
    _require_known("split", split, SPLITS)
    _require_known("difficulty", difficulty, DIFFICULTIES)
    if count < 0:
        raise TaskError(f"generate: got count={count}, expected 0 or more; ask for a positive one")
    chosen = KINDS[difficulty] if kinds is None else tuple(kinds)
    for kind in chosen:
        _require_known(f"kind of {difficulty!r}", kind, KINDS[difficulty])
    if not chosen:
        raise TaskError("generate: got no kinds, expected at least one; leave kinds out for all")
    return chosen


def _require_known(what: str, got: str, known: Sequence[str]) -> None:
    """Raise TaskError, with a suggestion, unless a name is one of the known ones."""
    if got not in known:
        hint = closest(got, known) or "; choose one of them"
        raise TaskError(f"generate: got {what} {got!r}, expected one of {list(known)}{hint}")


def _unseen(
    rng: random.Random, split: str, difficulty: str, kinds: tuple[str, ...], seen: set[str]
) -> Problem | None:
    """Draw until a question of the split is new; None when the space looks spent."""
    for _ in range(_TRIES):
        problem = _draw(rng, split, difficulty, _pick(rng, kinds))
        if problem.question not in seen:
            return problem
    return None


def _repeated(problems: list[Problem], split: str, difficulty: str, count: int) -> list[Problem]:
    """Fill a train list up by going round again; an eval list must not repeat itself."""
    if split == "eval":
        raise TaskError(
            f"generate: got count={count} for eval/{difficulty}, expected at most "
            f"{len(problems)} distinct questions; lower the count or allow more kinds"
        )
    return list(itertools.islice(itertools.cycle(problems), count))


def _draw(rng: random.Random, split: str, difficulty: str, kind: str) -> Problem:
    """Draw one problem of a kind whose operands belong to the split."""
    while True:
        operands = tuple(_between(rng, low, high) for low, high in _bounds(kind, difficulty))
        results = _results(kind, operands)
        if results is not None and split_of(operands) == split:
            return _problem(rng, difficulty, kind, operands, results)


def _problem(
    rng: random.Random,
    difficulty: str,
    kind: str,
    operands: tuple[int, ...],
    results: tuple[int, ...],
) -> Problem:
    """Dress a chain up as a story."""
    numbers = dict(zip(string.ascii_lowercase, operands, strict=False))
    question = _pick(rng, _STORIES[difficulty][kind]).format(
        name=_pick(rng, _NAMES[difficulty]), things=_pick(rng, _THINGS[difficulty]), **numbers
    )
    solution = _solution(kind, operands, results)
    return Problem(question, str(results[-1]), kind, difficulty, operands, solution)


def _results(kind: str, operands: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the result of every step, or None for a chain that makes no sensible story."""
    value, results = operands[0], []
    for name, operand in zip(kind.split("_"), operands[1:], strict=True):
        if value == 0 or (name == "divide" and value % operand):
            return None
        value = _OPERATIONS[name][1](value, operand)
        if not 0 <= value <= _LARGEST:
            return None
        results.append(value)
    return tuple(results)


def _solution(kind: str, operands: tuple[int, ...], results: tuple[int, ...]) -> str:
    """Return the working, one equation a step."""
    symbols = (_OPERATIONS[name][0] for name in kind.split("_"))
    left = (operands[0], *results[:-1])
    steps = zip(left, symbols, operands[1:], results, strict=True)
    return " ".join(f"{a}{symbol}{b}={result}" for a, symbol, b, result in steps)


def _bounds(kind: str, difficulty: str) -> list[tuple[int, int]]:
    """Return the range of every operand; the first follows the first operation."""
    names = kind.split("_")
    return [_RANGES[difficulty][name] for name in (names[0], *names)]


def _all_operands(kind: str, difficulty: str) -> Iterator[tuple[int, ...]]:
    """Yield every operand tuple of a kind that makes a sensible story."""
    ranges = (range(low, high + 1) for low, high in _bounds(kind, difficulty))
    return (tup for tup in itertools.product(*ranges) if _results(kind, tup) is not None)


def _between(rng: random.Random, low: int, high: int) -> int:
    """Draw an integer of a closed range.

    Only ``random()`` is promised to give the same sequence in every Python version.
    """
    return low + int(rng.random() * (high - low + 1))


def _pick(rng: random.Random, options: Sequence[str]) -> str:
    """Draw one of several strings."""
    return options[_between(rng, 0, len(options) - 1)]
