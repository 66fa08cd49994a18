"""One episode of a text environment: its state, what a turn led to, and how turns are reduced."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mrgym.components import ABSENT, Absent, ComponentSet, Reduction, RewardVector, as_score
from mrgym.errors import RewardContractError
from mrgym.scoring import Status
from mrgym.spaces import Message
from mrgym.tasks import Task

__all__ = ["State", "TurnOutcome", "reduce_turns", "turn_numbers"]

_REDUCTIONS: dict[Reduction, Callable[[list[float]], float]] = {
    "last": lambda scores: scores[-1],
    "sum": math.fsum,
    "max": max,
    "mean": lambda scores: math.fsum(scores) / len(scores),
}


@dataclass
class State:
    """Everything one episode knows.

    Attributes:
        task: What is to be solved.
        messages: The conversation so far, the policy's turns included.
        turn: Number of completions so far.
        turn_scores: Scores of every turn, by component.
        data: Free room for the environment.
        rng: The episode's own random numbers.
    """

    task: Task
    messages: list[Message] = field(default_factory=list)
    turn: int = 0
    turn_scores: list[dict[str, float | Absent]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    rng: np.random.Generator = field(default_factory=np.random.default_rng)


@dataclass(slots=True)
class TurnOutcome:
    """What one completion led to.

    Attributes:
        answers: The environment's next messages; empty when the episode is over.
        terminated: Whether the task ended the episode.
        truncated: Whether a limit (tokens, turns) ended it.
        status: ``"ok"``, ``"error"`` or ``"timeout"``.
        error: What went wrong.
        vector: The episode's checked scores, once it is over and ``status`` is ``"ok"``.
    """

    answers: list[Message]
    terminated: bool
    truncated: bool
    status: Status = "ok"
    error: str | None = None
    vector: RewardVector | None = None

    @property
    def over(self) -> bool:
        """Whether the episode ended with this turn."""
        return self.terminated or self.truncated


def turn_numbers(scores: Mapping[str, object], subject: str) -> dict[str, float | Absent]:
    """Return a turn's scores as finite floats; names and ranges are the episode's concern."""
    turn: dict[str, float | Absent] = {}
    for name, value in scores.items():
        score = value if isinstance(value, Absent) else as_score(value, name, subject)
        if score is not ABSENT and not math.isfinite(score):
            raise RewardContractError(
                f"{subject}: got {name}={score!r}, expected a finite number; "
                "handle the failed measurement, or abstain with mrgym.ABSENT"
            )
        turn[name] = score
    return turn


def reduce_turns(
    declared: ComponentSet, turns: Sequence[Mapping[str, float | Absent]]
) -> dict[str, float | Absent]:
    """Return the episode's scores: every component reduced over the turns it was measured on."""
    episode: dict[str, float | Absent] = {}
    for name in dict.fromkeys(name for turn in turns for name in turn):
        measured = (turn.get(name, ABSENT) for turn in turns)
        scores = [score for score in measured if score is not ABSENT]
        rule = declared[name].reduce if name in declared else "last"
        episode[name] = _REDUCTIONS[rule](scores) if scores else ABSENT
    return episode
