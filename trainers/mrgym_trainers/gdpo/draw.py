"""Drawing a step's groups: which tasks, whose prompts fit, and once more where none teaches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from mrgym.errors import ConfigError, TaskError
from mrgym.rollout import Group, check_error_rate
from mrgym.sampler import Prompt, Sampler, SamplingParams
from mrgym.scoring import Scorer
from mrgym.seeding import mix
from mrgym.tasks import Task, TaskSource
from mrgym.text import TextEnv
from mrgym_trainers.gdpo.config import GDPOConfig
from mrgym_trainers.gdpo.exchange import run_groups_on
from mrgym_trainers.gdpo.ranks import Ranks
from mrgym_trainers.gdpo.timing import Stopwatch, TimedScorer, timed_sampler

__all__ = ["Draw", "GroupSource", "PromptFilter", "TaskOrder"]

Signal = Callable[[Sequence[Group]], "list[bool]"]


class TaskOrder:
    """Training tasks for ever, in a new order every time round.

    Args:
        tasks: The tasks.
        seed: Seeds the orders.

    Attributes:
        position: Tasks handed out so far; setting it goes on from there.
    """

    def __init__(self, tasks: TaskSource, seed: int) -> None:
        self._tasks, self._seed = tasks, seed
        self._epoch, self._shuffled = -1, tasks
        self.position = 0

    def __len__(self) -> int:
        return len(self._tasks)

    def next(self) -> Task:
        """Return the next task."""
        epoch, index = divmod(self.position, len(self._tasks))
        if epoch != self._epoch:
            self._epoch = epoch
            self._shuffled = self._tasks.shuffled(self._seed * 1_000_003 + epoch)
        self.position += 1
        return self._shuffled[index]


class PromptFilter:
    """Tells prompts that fit from those that are too long.

    Args:
        env: The environment.
        sampler: Where completions come from.
        config: ``max_prompt_tokens``, ``max_completion_tokens`` and ``long_prompts``.

    Raises:
        ConfigError: If the model's context leaves no room for a prompt.
    """

    def __init__(self, env: TextEnv, sampler: Sampler, config: GDPOConfig) -> None:
        self._env, self._sampler, self._config = env, sampler, config
        context: int | None = getattr(sampler, "context_length", None)
        room = None if context is None else context - config.max_completion_tokens
        if room is not None and room < 1:
            raise ConfigError(
                f"max_completion_tokens: got {config.max_completion_tokens}, expected less than "
                f"the context of {context} tokens, so that a prompt fits before it; lower it"
            )
        limits = [limit for limit in (room, config.max_prompt_tokens) if limit is not None]
        self._most: int | None = min(limits, default=None)

    def prompt(self, task: Task) -> Prompt | None:
        """Return the task's encoded prompt, or None where it is too long and may be dropped.

        Raises:
            TaskError: If it is too long and ``long_prompts`` is ``"error"``.
        """
        prompt = self._env.prompt_for(task)
        if self._sampler.codec is None:
            return prompt
        prompt = msgspec.structs.replace(prompt, token_ids=self._sampler.codec.start(prompt))
        if self._most is None or len(prompt.token_ids) <= self._most:
            return prompt
        if self._config.long_prompts == "error":
            raise TaskError(
                f"task {task.id!r}: got a prompt of {len(prompt.token_ids)} tokens, expected at "
                f"most {self._most} (max_prompt_tokens, and the model's context less "
                f"max_completion_tokens={self._config.max_completion_tokens}); shorten it, lower "
                "max_completion_tokens, or set long_prompts=drop"
            )
        return None

    def fitting(self, tasks: TaskSource) -> TaskSource:
        """Return the tasks whose prompts fit.

        Raises:
            TaskError: If one is too long and may not be dropped, or none is left.
        """
        kept = [task for task in tasks if self.prompt(task) is not None]
        if len(kept) == len(tasks):
            return tasks
        if not kept:
            raise TaskError(f"{tasks!r}: got no prompt {self._room()}, expected some; raise it")
        return TaskSource(kept, name=f"{tasks!r} that fit")

    def _room(self) -> str:
        return f"of at most {self._most} tokens"


@dataclass(slots=True)
class Draw:
    """A step's groups, and what was drawn for them.

    Attributes:
        groups: The groups to learn from.
        completions: Completions sampled, those of dropped groups included.
        counts: ``groups/drawn``, ``groups/dropped``, ``groups/refills``, ``prompts/dropped``.
        seconds: Spent on ``sample`` and ``score``, side by side where the sampler streams.
    """

    groups: list[Group] = field(default_factory=list)
    completions: int = 0
    counts: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class GroupSource:
    """Draws the groups of a step.

    With ``dynamic_sampling`` (DAPO, arXiv 2503.14476), groups without signal are dropped and
    others drawn in their place, ``max_refills`` times at most; a step that finds no signal at all
    keeps the last ones drawn.

    Args:
        env: The environment.
        sampler: Where completions come from.
        scorer: Where score functions run.
        order: The tasks.
        config: The run's configuration.
        signal: Returns what says of each group whether it carries signal, as that stands when
            the drawing begins.
        ranks: Who draws; all ranks get all groups, so that they decide alike.
    """

    def __init__(
        self,
        env: TextEnv,
        sampler: Sampler,
        scorer: Scorer,
        order: TaskOrder,
        config: GDPOConfig,
        signal: Callable[[], Signal],
        ranks: Ranks | None = None,
    ) -> None:
        self._watch = Stopwatch()
        self._env, self._sampler = env, timed_sampler(sampler, self._watch)
        self._scorer = TimedScorer(scorer, self._watch)
        self._order, self._config, self._signal = order, config, signal
        self._ranks = ranks or Ranks()
        self._filter = PromptFilter(env, sampler, config)
        self._groups_drawn = 0
        self._prompts_dropped = 0

    def state(self) -> dict[str, int]:
        """Return where the source stands, for :meth:`load_state`."""
        return {"position": self._order.position, "groups_drawn": self._groups_drawn}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Go on from a state; the one of a new source where it is empty."""
        self._order.position = state.get("position", 0)
        self._groups_drawn = state.get("groups_drawn", 0)

    def draw(self, step: int) -> Draw:
        """Return the groups of a step.

        Raises: as what :meth:`prepared` returns.
        """
        return self.prepared(step)()

    def prepared(self, step: int) -> Callable[[], Draw]:
        """Return what draws the groups of a step; another thread may call it.

        Raises:
            SamplerError: From the sampler, as it is.
            ScoreError: If too many rollouts could not be scored.
            TaskError: If a prompt is too long, or all are.
        """
        return partial(self._draw, step, self._signal())

    def _draw(self, step: int, signal: Signal) -> Draw:
        config = self._config
        kept: list[Group] = []
        drawn: list[Group] = []
        rounds = 1 + (config.max_refills if config.dynamic_sampling else 0)
        self._prompts_dropped = 0
        for attempt in range(rounds):
            groups = self._run(config.prompts_per_step - len(kept), step, attempt)
            drawn += groups
            check_error_rate(drawn, config.max_error_rate)
            kept += self._informative(groups, signal)
            if len(kept) == config.prompts_per_step:
                break
        counts = {
            "groups/drawn": float(len(drawn)),
            "groups/dropped": float(len(drawn) - len(kept or groups)),
            "groups/refills": float(attempt),
            "prompts/dropped": float(self._prompts_dropped),
        }
        completions = sum(len(r.turns) for group in drawn for r in group.rollouts)
        return Draw(kept or groups, completions, counts, self._watch.take())

    def _informative(self, groups: list[Group], signal: Signal) -> list[Group]:
        if not self._config.dynamic_sampling:
            return groups
        return [group for group, ok in zip(groups, signal(groups), strict=True) if ok]

    def _run(self, count: int, step: int, attempt: int) -> list[Group]:
        tasks, prompts = self._next_tasks(count)
        first = self._groups_drawn
        self._groups_drawn += count
        seed = mix(self._config.seed, step, attempt)
        return run_groups_on(
            self._ranks,
            self._env,
            self._sampler,
            tasks,
            self._config.group_size,
            sampling_params(self._config, seed),
            scorer=self._scorer,
            first_group=first,
            on_score_error=self._config.on_score_error,
            seed=self._config.seed + step,
            prompts=prompts,
        )

    def _next_tasks(self, count: int) -> tuple[list[Task], list[Prompt]]:
        tasks: list[Task] = []
        prompts: list[Prompt] = []
        in_a_row = 0
        while len(tasks) < count:
            task = self._order.next()
            prompt = self._filter.prompt(task)
            if prompt is not None:
                in_a_row = 0
                tasks.append(task)
                prompts.append(prompt)
                continue
            in_a_row += 1
            self._prompts_dropped += 1
            if in_a_row == len(self._order):
                raise TaskError(
                    f"{self._env.contract_name}: got {in_a_row} prompts that are all too long, "
                    "expected some that fit; raise max_prompt_tokens"
                )
        return tasks, prompts


def sampling_params(config: GDPOConfig, seed: int, **changes: Any) -> SamplingParams:
    """Return how training samples."""
    params = SamplingParams(
        max_tokens=config.max_completion_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        seed=seed,
    )
    return msgspec.structs.replace(params, **changes)
