"""The environment: math word problems scored for correctness, format and integer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from mrgym import Completion, SingleTurnEnv, Task, TaskSource, component
from mrgym.episode import State, TurnOutcome
from mrgym.errors import ConfigError, TaskError, closest
from mrgym.scoring import InlineScorer, Scorer
from mrgym.tasks import huggingface_tasks, row_id, task_from_row
from mrgym.text import HUB_SPLITS, Split, Tasks
from mrgym_envs.math_multi_reward.answers import (
    extract_answer,
    has_format,
    is_integer,
    normalise_gold,
    read_gold_of_row,
)
from mrgym_envs.math_multi_reward.equivalence import Equivalence, unreadable_golds
from mrgym_envs.math_multi_reward.generator import Problem, generate

__all__ = ["BadGolds", "Correctness", "Golds", "MathMultiReward"]

Correctness: TypeAlias = Literal["exact", "equivalent"]
Golds: TypeAlias = Literal["normalise", "keep"]
BadGolds: TypeAlias = Literal["error", "drop"]

GSM8K = "openai/gsm8k"
_SHOWN = 3


class MathMultiReward(SingleTurnEnv):
    """Math word problems; every completion is scored for three things, each 0 or 1.

    Reward Space:
        * ``correctness``: the answer equals the gold answer, character by character; with
          ``correctness="equivalent"``, it means the same to the math grader.
        * ``format``: the completion is one ``<think>...</think>``, a newline, and one
          ``<answer>...</answer>``, from start to end.
        * ``integer``: the answer is made of ASCII digits only.

        The answer is what stands after the last ``<answer>`` and before the next ``</answer>``,
        stripped; without tags it is the whole completion (in which the grader looks for it).

    Observation Space:
        The question and a newline, as text (chat messages with the instruction in ``info``).

    Action Space:
        The completion, as text.

    Args:
        tasks: ``None`` for the built-in generator, a JSONL file with ``question`` and ``answer``
            (GSM8K's ``#### 72`` is read as 72) or with ``problem`` and ``solution`` (the last
            box is the gold), ``"openai/gsm8k"`` or another dataset, or tasks of your own.
        eval_tasks: Held-out tasks that go with ``tasks``; a stable fifth of them by default.
        split: Which tasks ``reset`` draws from.
        difficulty: ``"easy"``, ``"medium"`` or ``"hard"``, for built-in tasks.
        kinds: Kinds of built-in problems; all by default.
        train_count: Number of built-in training tasks.
        eval_count: Number of built-in held-out tasks.
        seed: Seed of the built-in tasks.
        signed: Whether an integer may carry a sign.
        prefill_think: Whether the completion begins inside ``<think>`` already (the tag is put
            at the end of the prompt and counts for the format).
        require_tags: Whether a completion without answer tags has no answer.
        golds: ``"normalise"`` takes thousands commas out of gold answers, which must be numbers
            if correctness is exact; ``"keep"`` takes golds as they are.
        correctness: ``"exact"`` compares characters; ``"equivalent"`` asks
            :func:`mrgym_envs.grading.grade`.
        bad_golds: What becomes of golds the grader cannot read: ``"error"``, or ``"drop"`` to
            leave them out with a warning that counts them.

    Raises:
        TaskError: When tasks are loaded: a gold answer that is not a number, with file and line,
            or golds the grader cannot read, with their rows.
        ConfigError: If an option cannot work.
    """

    instruction = (
        "Solve the problem. Work it out between <think> and </think>; then, on the next line, "
        "give the final number alone between <answer> and </answer>."
    )

    def __init__(
        self,
        *,
        tasks: Tasks | None = None,
        eval_tasks: Tasks | None = None,
        split: Split = "train",
        difficulty: str = "easy",
        kinds: Sequence[str] | None = None,
        train_count: int = 4096,
        eval_count: int = 512,
        seed: int = 0,
        signed: bool = False,
        prefill_think: bool = False,
        require_tags: bool = False,
        golds: Golds = "normalise",
        correctness: Correctness = "exact",
        bad_golds: BadGolds = "error",
    ) -> None:
        self._choose("correctness", correctness, ("exact", "equivalent"))
        self._choose("golds", golds, ("normalise", "keep"))
        self._choose("bad_golds", bad_golds, ("error", "drop"))
        if bad_golds == "drop" and correctness == "exact":
            raise ConfigError(
                f"{self.contract_name}: got bad_golds='drop' with correctness='exact', expected it "
                "with 'equivalent'; remove one of the two"
            )
        own_test_split = isinstance(tasks, str) and tasks == GSM8K and eval_tasks is None
        super().__init__(
            tasks=tasks, eval_tasks=GSM8K if own_test_split else eval_tasks, split=split
        )
        self.prefill = "<think>" if prefill_think else ""
        self._signed = signed
        self._require_tags = require_tags
        self._golds = golds
        self._bad_golds = bad_golds
        self._equivalence = Equivalence() if correctness == "equivalent" else None
        if self._equivalence:
            self.instruction = self.instruction.replace("final number", "final answer")
        self._builtin = (difficulty, tuple(kinds) if kinds else None, seed)
        self._counts: dict[Split, int] = {"train": train_count, "eval": eval_count}

    def tasks(self, split: Split) -> TaskSource:
        """Return built-in tasks; held-out operands never occur in training."""
        return _builtin_tasks(split, self._counts[split], *self._builtin)

    def task_from_row(self, row: Mapping[str, Any]) -> Task:
        """Return the task of a row with a question and an answer or a solution."""
        task = task_from_row(row)
        return Task(task.prompt, self._gold_of_row(row), row_id(row))

    def _gold_of_row(self, row: Mapping[str, Any]) -> str:
        gold = ""
        try:
            gold = read_gold_of_row(row)
            return normalise_gold(gold) if self._golds == "normalise" else gold
        except TaskError:
            if self._equivalence is None:
                raise
            return gold  # need not be a number; a missing one is counted among the bad golds

    def plain_prompt(self, task: Task) -> str:
        """Return the question and a newline."""
        return f"{super().plain_prompt(task)}\n"

    def gold_completion(self, task: Task) -> str:
        """Return the gold answer in the wanted format."""
        working = task.metadata.get("solution", "...")
        full = f"<think>{working}</think>\n<answer>{task.answer}</answer>"
        return full.removeprefix(self.prefill)

    def answer(self, completion: str) -> str | None:
        """Return what a completion answers; ``None`` where required tags are missing."""
        return extract_answer(completion, require_tags=self._require_tags)

    @component(low=0, high=1)
    def correctness(self, task: Task, completion: str) -> bool:
        """1 if the answer equals the gold answer."""
        if self._equivalence is None:
            return bool(self.answer(completion) == task.answer)
        text = self._graded_text(completion)
        return text is not None and self._equivalence.holds(task.answer, text)

    @component(low=0, high=1)
    def format(self, task: Task, completion: str) -> bool:
        """1 if the completion is one think block, a newline and one answer block."""
        return has_format(self.prefill + completion)

    @component(low=0, high=1)
    def integer(self, task: Task, completion: str) -> bool:
        """1 if the answer is digits only."""
        answer = self.answer(completion)
        return answer is not None and is_integer(answer, signed=self._signed)

    def play_turn(
        self, states: Sequence[State], completions: Sequence[Completion], scorer: Scorer
    ) -> list[TurnOutcome]:
        """Advance episodes by one completion each; the grader sees all of them at once."""
        graded = self._equivalence is not None and isinstance(scorer, InlineScorer)
        with self._announced(states, completions) if graded else nullcontext():
            return super().play_turn(states, completions, scorer)

    def _announced(
        self, states: Sequence[State], completions: Sequence[Completion]
    ) -> AbstractContextManager[None]:
        assert self._equivalence is not None
        texts = [self._graded_text(completion) for completion in completions]
        pairs = zip((state.task.answer for state in states), texts, strict=True)
        return self._equivalence.announced(
            (gold, text) for gold, text in pairs if isinstance(gold, str) and text is not None
        )

    def _graded_text(self, completion: str) -> str | None:
        """Return the answer, or the whole turn where it is not marked (the grader finds it)."""
        answer = self.answer(completion)
        return self.prefill + completion if answer == completion.strip() else answer

    def _source(self, tasks: Tasks, split: Split) -> TaskSource:
        if isinstance(tasks, str) and tasks == GSM8K:
            source = huggingface_tasks(
                GSM8K, config="main", split=HUB_SPLITS[split], parse=self.task_from_row
            )
        else:
            source = super()._source(tasks, split)
        self._check_golds(source)
        if self._equivalence is not None:
            source = self._without_bad_golds(source)
        if "integer" in self._declared():
            self._warn_of_integers(source)
        return source

    def _check_golds(self, source: TaskSource) -> None:
        for task in source:
            if not isinstance(task.answer, str):
                raise TaskError(
                    f"{source.name}, task {task.id}: got gold answer {task.answer!r}, expected "
                    "text; write mrgym.Task(prompt=..., answer=str(...))"
                )

    def _without_bad_golds(self, source: TaskSource) -> TaskSource:
        """Return the tasks whose golds can be read, if the others may be dropped.

        Raises:
            TaskError: If they may not; with their number, and the rows and values of some.
        """
        bad = unreadable_golds([task.answer for task in source])
        if not bad:
            return source
        shown = "; ".join(
            f"row {i + 1} (task {source[i].id}): {source[i].answer[:80]!r}, {reason}"
            for i, reason in list(bad.items())[:_SHOWN]
        )
        found = f"{len(bad)} of {len(source)} gold answers that cannot be read ({shown}"
        found += "; ...)" if len(bad) > _SHOWN else ")"
        if self._bad_golds == "error":
            raise TaskError(
                f"{source.name}: got {found}, expected none; mend or remove the rows, or leave "
                "them out with bad_golds='drop'"
            )
        warnings.warn(f"{source.name}: left out {found}", stacklevel=2)
        kept = (task for i, task in enumerate(source) if i not in bad)
        return TaskSource(kept, name=source.name)

    def _warn_of_integers(self, source: TaskSource) -> None:
        signs = sum(task.answer.startswith(("-", "+")) for task in source)
        if signs and not self._signed:
            warnings.warn(
                f"{self.contract_name}: {signs} golds of {source.name} carry a sign, so "
                "correctness and integer cannot both be 1 there; pass signed=True to allow it",
                stacklevel=2,
            )
        others = sum(not is_integer(task.answer, signed=True) for task in source)
        if others and self._equivalence is not None:
            warnings.warn(
                f"{self.contract_name}: {others} golds of {source.name} are no integers, so their "
                "gold completions score 0 for integer; remove it with integer = None in a "
                "subclass, or use math_length",
                stacklevel=2,
            )

    def _choose(self, name: str, got: object, choices: Sequence[str]) -> None:
        if got not in choices:
            raise ConfigError(
                f"{self.contract_name}: got {name}={got!r}, expected one of {[*choices]}"
                f"{closest(str(got), choices)}; choose one"
            )


@lru_cache(maxsize=8)
def _builtin_tasks(
    split: Split, count: int, difficulty: str, kinds: tuple[str, ...] | None, seed: int
) -> TaskSource:
    problems = generate(split=split, difficulty=difficulty, seed=seed, count=count, kinds=kinds)
    return TaskSource((_task(p) for p in problems), name=f"built-in {difficulty} [{split}]")


def _task(problem: Problem) -> Task:
    metadata = {
        "kind": problem.kind,
        "difficulty": problem.difficulty,
        "operands": list(problem.operands),
        "solution": problem.solution,
    }
    return Task(problem.question, problem.answer, metadata=metadata)
