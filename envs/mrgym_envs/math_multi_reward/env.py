"""The environment: math word problems scored for correctness, format and integer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from mrgym import SingleTurnEnv, Task, TaskSource, component
from mrgym.errors import TaskError
from mrgym.tasks import huggingface_tasks, row_id, task_from_row
from mrgym.text import HUB_SPLITS, Split, Tasks
from mrgym_envs.math_multi_reward.answers import (
    extract_answer,
    has_format,
    is_integer,
    normalise_gold,
    read_gold,
)
from mrgym_envs.math_multi_reward.generator import Problem, generate

__all__ = ["MathMultiReward"]

GSM8K = "openai/gsm8k"


class MathMultiReward(SingleTurnEnv):
    """Math word problems; every completion is scored for three things, each 0 or 1.

    Reward Space:
        * ``correctness``: the answer equals the gold answer, character by character.
        * ``format``: the completion is one ``<think>...</think>``, a newline, and one
          ``<answer>...</answer>``, from start to end.
        * ``integer``: the answer is made of ASCII digits only.

        The answer is what stands after the last ``<answer>`` and before the next ``</answer>``,
        stripped; without tags it is the whole completion.

    Observation Space:
        The question and a newline, as text (chat messages with the instruction in ``info``).

    Action Space:
        The completion, as text.

    Args:
        tasks: ``None`` for the built-in generator, a JSONL file with ``question`` and ``answer``
            (GSM8K's ``#### 72`` is read as 72), ``"openai/gsm8k"``, or tasks of your own.
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
        golds: ``"normalise"`` takes thousands commas out of gold answers, which must be numbers;
            ``"keep"`` takes golds as they are.

    Raises:
        TaskError: When tasks are loaded: a gold answer that is not a number, with file and line.
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
        golds: Literal["normalise", "keep"] = "normalise",
    ) -> None:
        own_test_split = isinstance(tasks, str) and tasks == GSM8K and eval_tasks is None
        super().__init__(
            tasks=tasks, eval_tasks=GSM8K if own_test_split else eval_tasks, split=split
        )
        self.prefill = "<think>" if prefill_think else ""
        self._signed = signed
        self._require_tags = require_tags
        self._golds = golds
        self._builtin = (difficulty, tuple(kinds) if kinds else None, seed)
        self._counts: dict[Split, int] = {"train": train_count, "eval": eval_count}

    def tasks(self, split: Split) -> TaskSource:
        """Return built-in tasks; held-out operands never occur in training."""
        return _builtin_tasks(split, self._counts[split], *self._builtin)

    def task_from_row(self, row: Mapping[str, Any]) -> Task:
        """Return the task of a row with a question and a (GSM8K-style or bare) answer."""
        task = task_from_row(row)
        gold = read_gold(task.answer)
        if self._golds == "normalise":
            gold = normalise_gold(gold)
        return Task(task.prompt, gold, row_id(row))

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
        """1 if the answer equals the gold answer exactly."""
        return bool(self.answer(completion) == task.answer)

    @component(low=0, high=1)
    def format(self, task: Task, completion: str) -> bool:
        """1 if the completion is one think block, a newline and one answer block."""
        return has_format(self.prefill + completion)

    @component(low=0, high=1)
    def integer(self, task: Task, completion: str) -> bool:
        """1 if the answer is digits only."""
        answer = self.answer(completion)
        return answer is not None and is_integer(answer, signed=self._signed)

    def _source(self, tasks: Tasks, split: Split) -> TaskSource:
        if isinstance(tasks, str) and tasks == GSM8K:
            source = huggingface_tasks(
                GSM8K, config="main", split=HUB_SPLITS[split], parse=self.task_from_row
            )
        else:
            source = super()._source(tasks, split)
        self._check_golds(source)
        self._warn_of_signs(source)
        return source

    def _check_golds(self, source: TaskSource) -> None:
        for task in source:
            if not isinstance(task.answer, str):
                raise TaskError(
                    f"{source.name}, task {task.id}: got gold answer {task.answer!r}, expected "
                    "text; write mrgym.Task(prompt=..., answer=str(...))"
                )

    def _warn_of_signs(self, source: TaskSource) -> None:
        signs = sum(task.answer.startswith(("-", "+")) for task in source)
        if signs and not self._signed:
            warnings.warn(
                f"{self.contract_name}: {signs} golds of {source.name} carry a sign, so "
                "correctness and integer cannot both be 1 there; pass signed=True to allow it",
                stacklevel=2,
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
