"""Environments whose actions are completions of a language model.

:class:`SingleTurnEnv` is the short way: ``tasks(split)`` and one marked method a component.
:class:`MultiTurnEnv` adds ``respond(state, completion)``. Everything an episode knows is in its
:class:`State`, so one environment object serves any number of episodes at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeAlias

import gymnasium as gym
import numpy as np

from mrgym.components import ABSENT, ComponentSet, RewardVector
from mrgym.env import MultiRewardEnv, StepResult, reward_info
from mrgym.episode import State, TurnOutcome, reduce_turns, turn_numbers
from mrgym.errors import (
    RewardContractError,
    RewardDefinitionError,
    ScoreError,
    SpaceError,
    TaskError,
)
from mrgym.sampler import Completion, Prompt
from mrgym.scoring import InlineScorer, ScoreMethod, Scorer
from mrgym.scoring.declare import EVERY, collect_score_methods, score_every
from mrgym.spaces import Message, TextSpace, is_messages
from mrgym.tasks import (
    Task,
    TaskSource,
    check_disjoint,
    huggingface_tasks,
    jsonl_tasks,
    task_from_row,
)

__all__ = [
    "HUB_SPLITS",
    "MultiTurnEnv",
    "SingleTurnEnv",
    "Split",
    "State",
    "TextEnv",
    "TurnOutcome",
]

Split: TypeAlias = Literal["train", "eval"]
Reply: TypeAlias = "str | list[Message] | None"
Tasks: TypeAlias = "TaskSource | Iterable[Task] | str | Path"

HUB_SPLITS: dict[Split, str] = {"train": "train", "eval": "test"}


class TextEnv(MultiRewardEnv[str, str]):
    """What single-turn and multi-turn text environments share.

    Args:
        tasks: Instead of the environment's own: a source, tasks, a JSONL file, or a Hugging Face
            dataset id. Without ``eval_tasks`` a stable fifth is held out.
        eval_tasks: Held-out tasks that go with ``tasks``.
        split: Which tasks ``reset`` draws from.

    Attributes:
        instruction: Put before the question in chat form, e.g. the answer format wanted.
        prefill: Text the policy's turn begins with, such as ``"<think>"``.
        max_turns: Most completions of one episode.
    """

    instruction: str = ""
    prefill: str = ""
    max_turns: int = 1
    score_methods: ClassVar[dict[str, ScoreMethod]] = {}

    _range_holds_each_step = False
    _state: State | None = None
    _sources: dict[str, TaskSource]
    _given: dict[str, Tasks | None]
    split: Split

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Give every instance its spaces and task cache, whatever its ``__init__`` does."""
        self = super().__new__(cls)
        self.observation_space = TextSpace()
        self.action_space = TextSpace()
        self._sources = {}
        self._given = {"train": None, "eval": None}
        self.split = "train"
        return self

    def __init__(
        self,
        *,
        tasks: Tasks | None = None,
        eval_tasks: Tasks | None = None,
        split: Split = "train",
    ) -> None:
        self._given = {"train": tasks, "eval": eval_tasks}
        self.split = split

    def __init_subclass__(cls, **kwargs: Any) -> None:
        methods = collect_score_methods(cls)
        if methods and "components" in cls.__dict__:
            raise RewardDefinitionError(
                f"{cls.__qualname__}: got components=... and methods marked as components "
                f"{[*methods]}, expected one of the two; keep the marked methods"
            )
        if "scores" in cls.__dict__:
            cls.score_methods = score_every(cls)
        elif methods or cls.score_methods.keys() - {EVERY}:  # marked ones may all be removed
            cls.score_methods = methods
            cls.components = ComponentSet({n: m.declared for n, m in methods.items()})
        super().__init_subclass__(**kwargs)

    # What a subclass says

    def tasks(self, split: Split) -> Tasks:
        """Return the tasks of ``"train"`` or ``"eval"`` (to be overridden).

        Overridden without the ``split`` parameter, a stable fifth of the tasks is held out.
        """
        if self._given["train"] is not None or self._sources:
            return self.task_source(split)
        raise TaskError(
            f"{self.contract_name}: got no tasks, expected some; define tasks(self, split) "
            "or pass tasks=..."
        )

    def task_from_row(self, row: dict[str, Any]) -> Task:
        """Return the task of a JSONL or dataset row (may be overridden)."""
        return task_from_row(row)

    def plain_prompt(self, task: Task) -> str:
        """Return the prompt for models without a chat template (may be overridden)."""
        if isinstance(task.prompt, str):
            return task.prompt
        return "".join(f"{m['role']}: {m['content']}\n" for m in task.prompt)

    def messages(self, task: Task) -> list[Message]:
        """Return the prompt as chat messages, instruction included (may be overridden)."""
        if not isinstance(task.prompt, str):
            return [Message(role=m["role"], content=m["content"]) for m in task.prompt]
        text = f"{self.instruction}\n\n{task.prompt}" if self.instruction else task.prompt
        return [Message(role="user", content=text)]

    def gold_completion(self, task: Task) -> str | None:
        """Return a completion that should score full marks, if the environment knows one."""
        return None

    def start(self, task: Task, rng: np.random.Generator) -> State:
        """Return the state of a new episode (may be overridden).

        The policy's first prompt is ``plain_prompt`` and ``messages`` of the task; the state's
        messages are the record that later turns go on from.
        """
        return State(task, self.messages(task), rng=rng)

    def respond(self, state: State, completion: Completion) -> Reply:
        """Return the environment's answer to a completion; ``None`` ends the episode."""
        return None

    # What mrgym makes of it

    def task_source(self, split: Split) -> TaskSource:
        """Return the tasks of a split; train and eval never share a prompt.

        Raises:
            TaskError: If there are none, or a held-out prompt stands in train too.
        """
        if split not in ("train", "eval"):
            raise TaskError(
                f"{self.contract_name}: got split {split!r}, expected 'train' or 'eval'; "
                "name one of them"
            )
        if split not in self._sources:
            train, held_out = self._load_splits(split)
            sources = dict(self._sources)
            if train is not None:
                sources["train"] = train
            if held_out is not None:
                sources["eval"] = held_out
            if len(sources) == 2:
                check_disjoint(sources["train"], sources["eval"])
            self._sources = sources
            if len(sources) == 2:
                # What was given is spent (it may have been a generator, which cannot be pickled).
                self._given = {"train": None, "eval": None}
        return self._sources[split]

    def _load_splits(self, split: Split) -> tuple[TaskSource | None, TaskSource | None]:
        given = self._given["train"]
        if given is not None and self._given["eval"] is not None:
            return self._source(given, "train"), self._source(self._given["eval"], "eval")
        if given is not None:
            return self._source(given, "train").split()
        if not inspect.signature(self.tasks).parameters:
            return self._source(self.tasks(), "train").split()  # type: ignore[call-arg]
        source = self._source(self.tasks(split), split)
        return (source, None) if split == "train" else (None, source)

    def _source(self, tasks: Tasks, split: Split) -> TaskSource:
        if isinstance(tasks, TaskSource):
            return tasks
        if isinstance(tasks, Path) or (isinstance(tasks, str) and _is_file_name(tasks)):
            return jsonl_tasks(tasks, parse=self.task_from_row)  # type: ignore[arg-type]
        if isinstance(tasks, str):
            return huggingface_tasks(tasks, split=HUB_SPLITS[split], parse=self.task_from_row)  # type: ignore[arg-type]
        return TaskSource(tasks, name=f"{self.contract_name} [{split}]")

    def prompt_for(self, task: Task) -> Prompt:
        """Return what a policy is asked for a task, in every form."""
        has_own_text = type(self).plain_prompt is not TextEnv.plain_prompt
        return Prompt(
            self.plain_prompt(task),
            self.messages(task),
            self.prefill,
            task_id=task.id,
            chat_only=not isinstance(task.prompt, str) and not has_own_text,
        )

    def play_turn(
        self, states: Sequence[State], completions: Sequence[Completion], scorer: Scorer
    ) -> list[TurnOutcome]:
        """Advance episodes by one completion each: respond, score, and reduce what is over.

        Raises:
            RewardContractError: If a score breaks the contract. A function that raises or hangs
                gives a status instead.
        """
        outcomes = [self._advance(s, c) for s, c in zip(states, completions, strict=True)]
        live = [i for i, outcome in enumerate(outcomes) if outcome.status == "ok"]
        scored = scorer.score(self, [states[i] for i in live], [completions[i] for i in live])
        for i, result in zip(live, scored, strict=True):
            states[i].turn_scores.append(turn_numbers(result.scores, self._subject(states[i])))
            if result.status != "ok":
                outcomes[i] = TurnOutcome([], True, False, result.status, result.error)
                continue
            if self.max_turns > 1:
                turn = states[i].turn_scores[-1]
                self._declared().check_turn(turn, subject=self._subject(states[i]))
            if outcomes[i].over:
                outcomes[i].vector = self._episode_scores(states[i])
        return outcomes

    def _advance(self, state: State, completion: Completion) -> TurnOutcome:
        state.turn += 1
        state.messages.append(Message(role="assistant", content=completion.text))
        try:
            reply = self.respond(state, completion)
        except RewardContractError:
            raise
        except (Exception, SystemExit) as error:  # whatever it raises becomes a status
            return TurnOutcome([], True, False, "error", f"respond: {error!r}")
        if reply is None:
            return TurnOutcome([], True, completion.truncated)
        if completion.truncated or state.turn >= self.max_turns:
            return TurnOutcome([], False, True)
        answers = self._messages_of(reply)
        state.messages.extend(answers)
        return TurnOutcome(answers, False, False)

    def _messages_of(self, reply: object) -> list[Message]:
        if isinstance(reply, str):
            return [Message(role="user", content=reply)]
        if not reply or not is_messages(reply):
            raise RewardContractError(
                f"{self.contract_name}: got {type(reply).__name__} from respond, expected text, a "
                "list of messages, or None to end the episode; return one of them"
            )
        return list(reply)

    def _episode_scores(self, state: State) -> RewardVector:
        declared = self._declared()
        turns = state.turn_scores
        scores = turns[0] if len(turns) == 1 else reduce_turns(declared, turns)
        return declared.score(scores, subject=self._subject(state))

    def _subject(self, state: State) -> str:
        return f"{self.contract_name}, task {state.task.id}"

    # The Gymnasium side

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode and return the plain prompt.

        Args:
            seed: Seeds the choice of the task and the episode.
            options: ``{"task": Task}`` or ``{"task_id": str}`` to choose the task,
                ``{"split": "eval"}`` to draw from the held-out ones.
        """
        super().reset(seed=seed)
        task = self._choose_task(options or {})
        self._state = self.start(task, self.np_random)
        return self.plain_prompt(task), {"task_id": task.id, "messages": self.messages(task)}

    def _choose_task(self, options: dict[str, Any]) -> Task:
        if "task" in options:
            task: object = options["task"]
            if not isinstance(task, Task):
                raise TaskError(
                    f"{self.contract_name}: got task {task!r}, expected a mrgym.Task; "
                    "name a task by its id with options={'task_id': ...}"
                )
            return task
        source = self.task_source(options.get("split", self.split))
        if "task_id" in options:
            return source.by_id(options["task_id"])
        return source[int(self.np_random.integers(len(source)))]

    def step(self, action: str) -> StepResult[str]:
        """Score one completion.

        Before the last turn of an episode every component reads 0; the last one carries the
        reduced scores, so that rewards add up to the episode's whatever the reduction is.

        Raises:
            ScoreError: If a score function raised or hung.
            gymnasium.error.ResetNeeded: Before ``reset`` or after the episode's end.
        """
        if self._state is None:
            raise gym.error.ResetNeeded(f"{self.contract_name}: call reset() before step()")
        if not isinstance(action, str):
            raise SpaceError(
                f"{self.contract_name}: got action {action!r}, expected text; "
                "decode the completion first"
            )
        state = self._state
        completion = action if isinstance(action, Completion) else Completion(action)
        outcome = self.play_turn([state], [completion], InlineScorer())[0]
        if outcome.status != "ok":
            self._state = None
            raise ScoreError(f"{self.contract_name}: {outcome.error}; mend the score function")
        observation = "\n".join(m["content"] for m in outcome.answers)
        return self._step_result(state, outcome, observation)

    def _step_result(self, state: State, outcome: TurnOutcome, observation: str) -> StepResult[str]:
        declared = self._declared()
        info: dict[str, Any] = {"task_id": state.task.id}
        if self.max_turns > 1:
            info["turn_scores"] = {
                name: score for name, score in state.turn_scores[-1].items() if score is not ABSENT
            }
        if outcome.vector is None:
            zeros = {name: 0.0 for name, c in declared.items() if not c.optional}
            return observation, 0.0, False, False, {**info, "reward_components": zeros}
        self._state = None
        info |= reward_info(declared, outcome.vector)
        reward = outcome.vector.reward
        return observation, reward, outcome.terminated, outcome.truncated, info


class SingleTurnEnv(TextEnv):
    """One completion a task: subclasses give ``tasks(split)`` and one marked method a component.

    Where one computation yields all scores, declare ``components = mrgym.components(...)`` and
    define ``scores(self, task, completion)`` returning a mapping instead.

    Example:
        >>> class Polite(SingleTurnEnv):
        ...     def tasks(self, split):
        ...         return [Task(prompt="Say hello.")]
        ...     @component(low=0, high=1)
        ...     def greets(self, task, completion):
        ...         return "hello" in completion.lower()
    """


class MultiTurnEnv(TextEnv):
    """A conversation: subclasses add ``respond(state, completion)``.

    Score methods are called on every turn; each component's ``reduce`` rule makes the episode's
    score of them (``"last"`` by default, so that retries do not farm a format reward). A component
    that abstains on some turns is reduced over the others.
    """

    max_turns = 8


def _is_file_name(text: str) -> bool:
    # A hub id is "name" or "owner/name", without the ending of a file.
    if Path(text).exists():
        return Path(text).is_file()  # a folder is a dataset's
    looks_local = text.startswith((".", "/", "~")) or text.count("/") > 1
    return looks_local or text.endswith((".jsonl", ".json", ".txt"))
