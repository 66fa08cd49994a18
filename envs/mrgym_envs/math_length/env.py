"""The environment: math problems scored for correctness, and for length where they are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from mrgym import Gate, Task, component
from mrgym.errors import ConfigError, RewardContractError
from mrgym.text import Split, Tasks
from mrgym_envs.math_multi_reward.env import BadGolds, Correctness, Golds, MathMultiReward

__all__ = ["MathLength", "Unit"]

Unit: TypeAlias = Literal["tokens", "characters"]


class MathLength(MathMultiReward):
    """Math problems; a right answer earns more if the completion is short.

    A conditioned length reward as in GDPO (arXiv 2601.05242); the slope is our choice.

    Reward Space:
        * ``correctness``: 1 if the answer means the same as the gold answer, else 0.
        * ``length``: 1 for completions up to ``limit``, falling in a straight line to 0 at twice
          the limit; always 0 where ``correctness`` is 0.

    Observation Space:
        The question and a newline, as text (chat messages with the instruction in ``info``).

    Action Space:
        The completion, as text; with its token ids if ``unit="tokens"``.

    Args:
        limit: Longest completion that has the full length score.
        unit: What is counted: ``"characters"``, or ``"tokens"`` as they were sampled.
        correctness: See :class:`~mrgym_envs.math_multi_reward.MathMultiReward`, as for all below.
        tasks: Instead of the built-in ones: a JSONL file, a dataset id, or tasks of your own.
        eval_tasks: Held-out tasks that go with ``tasks``.
        split: Which tasks ``reset`` draws from.
        difficulty: ``"easy"``, ``"medium"`` or ``"hard"``, for built-in tasks.
        kinds: Kinds of built-in problems; all by default.
        train_count: Number of built-in training tasks.
        eval_count: Number of built-in held-out tasks.
        seed: Seed of the built-in tasks.
        prefill_think: Whether the completion begins inside ``<think>`` already.
        require_tags: Whether a completion without answer tags has no answer.
        golds: Whether thousands commas are taken out of golds (``"normalise"`` or ``"keep"``).
        bad_golds: ``"error"`` or ``"drop"``, for golds the grader cannot read.

    Raises:
        ConfigError: If an option cannot work.
        TaskError: When tasks are loaded: golds that cannot be read.
    """

    instruction = (
        "Solve the problem. Be brief. Work it out between <think> and </think>; then, on the next "
        "line, give the final answer alone between <answer> and </answer>."
    )
    format = None  # type: ignore[assignment]
    integer = None  # type: ignore[assignment]

    def __init__(
        self,
        *,
        limit: int = 1000,
        unit: Unit = "characters",
        correctness: Correctness = "equivalent",
        tasks: Tasks | None = None,
        eval_tasks: Tasks | None = None,
        split: Split = "train",
        difficulty: str = "easy",
        kinds: Sequence[str] | None = None,
        train_count: int = 4096,
        eval_count: int = 512,
        seed: int = 0,
        prefill_think: bool = False,
        require_tags: bool = False,
        golds: Golds = "normalise",
        bad_golds: BadGolds = "error",
    ) -> None:
        super().__init__(
            tasks=tasks,
            eval_tasks=eval_tasks,
            split=split,
            difficulty=difficulty,
            kinds=kinds,
            train_count=train_count,
            eval_count=eval_count,
            seed=seed,
            prefill_think=prefill_think,
            require_tags=require_tags,
            golds=golds,
            correctness=correctness,
            bad_golds=bad_golds,
        )
        self._choose("unit", unit, ("tokens", "characters"))
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ConfigError(
                f"{self.contract_name}: got limit={limit!r}, expected a whole number of {unit} "
                "above 0; give one"
            )
        self.limit = limit
        self.unit = unit

    @component(low=0, high=1, gate=Gate(on="correctness", at_least=1))
    def length(self, task: Task, completion: str) -> float:
        """1 up to the limit, falling to 0 at twice the limit; 0 unless the answer is right."""
        return min(1.0, max(0.0, 2.0 - self._measured(completion) / self.limit))

    def _measured(self, completion: str) -> int:
        if self.unit == "characters":
            return len(completion)
        token_ids: Sequence[int] = getattr(completion, "token_ids", ())
        if completion and not token_ids:
            raise RewardContractError(
                f"{self.contract_name}: got a completion of {len(completion)} characters without "
                "token ids, expected them with unit='tokens'; use a sampler that keeps token ids, "
                "or unit='characters'"
            )
        return len(token_ids)
