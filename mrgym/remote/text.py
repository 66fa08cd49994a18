"""A text environment that a service scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mrgym.components import ABSENT, Absent, Component, RewardVector
from mrgym.errors import RemoteError, RewardContractError, ScoreError, TaskError
from mrgym.remote.client import Client
from mrgym.remote.declared import declared_components
from mrgym.remote.sendable import same_task, task_in
from mrgym.sampler import Completion, Prompt
from mrgym.scoring import ScoreMethod, Scorer
from mrgym.scoring.declare import EVERY
from mrgym.server import schemas as wire
from mrgym.server.random_state import set_random, write_random
from mrgym.server.space_wire import read_space
from mrgym.spaces import Message
from mrgym.tasks import Task, TaskSource
from mrgym.text import Split, State, Tasks, TextEnv, TurnOutcome

__all__ = ["RemoteTextEnv"]

_PAGE = 1000
_KEPT = 4096
_SAID = "remote_said"
_RANDOM = "remote_random"


class RemoteTextEnv(TextEnv):
    """A text environment whose completions a service scores.

    Args:
        client: The connection.
        described: What the service says of its environment.
        tasks: Instead of the service's own.
        eval_tasks: Held-out tasks that go with ``tasks``.
    """

    def __init__(
        self,
        client: Client,
        described: wire.EnvOut,
        *,
        tasks: Tasks | None = None,
        eval_tasks: Tasks | None = None,
    ) -> None:
        super().__init__(tasks=tasks, eval_tasks=eval_tasks)
        self.components = declared_components(described, client.url)
        self.instruction, self.prefill = described.instruction, described.prefill
        self.max_turns, self.split = described.max_turns, described.split
        self.action_space = read_space(described.action_space or {})
        self.observation_space = read_space(described.observation_space or {})
        every = ScoreMethod(EVERY, "scores", Component(), batched=True, wants_state=False)
        self.score_methods = {EVERY: every}  # type: ignore[misc]
        self._client = client
        self._described = described
        self._known: dict[str, tuple[Task, Split]] = {}
        self._prompts: dict[str, tuple[Task, wire.PromptOut]] = {}

    @property
    def contract_name(self) -> str:
        """The environment's own name and where it runs."""
        return f"{self._described.id} at {self._client.url}"

    def tasks(self, split: Split) -> TaskSource:
        """Return the service's tasks of a split."""
        tasks: list[Task] = []
        total = 1
        while len(tasks) < total:
            page = self._client.tasks(split, len(tasks), _PAGE)
            total = page.total
            if not page.tasks:
                raise self._client.nonsense(f"{len(tasks)} of {total} tasks and an empty page")
            tasks += [self._remember(pair, split) for pair in page.tasks]
        return TaskSource(tasks, name=f"{self.contract_name} [{split}]")

    def prompt_for(self, task: Task) -> Prompt:
        """Return the prompt the service makes of a task."""
        prompt = self._prompt(task)
        return Prompt(
            prompt.text,
            list(prompt.messages),
            prompt.prefill,
            task_id=task.id,
            chat_only=prompt.chat_only,
        )

    def plain_prompt(self, task: Task) -> str:
        """Return the prompt for models without a chat template."""
        return self._prompt(task).text

    def messages(self, task: Task) -> list[Message]:
        """Return the prompt as chat messages."""
        return list(self._prompt(task).messages)

    def gold_completion(self, task: Task) -> str | None:
        """Return the service's gold completion of a task.

        Raises:
            TaskError: If its environment could not give one.
        """
        prompt = self._prompt(task)
        if prompt.gold_error is not None:
            raise TaskError(
                f"{self.contract_name}, task {task.id}: got {prompt.gold_error} for its gold "
                "completion, expected text or None; give a task like the environment's own"
            )
        return prompt.gold

    def start(self, task: Task, rng: np.random.Generator) -> State:
        """Return the state of a new episode, with the numbers its service is to draw."""
        data: dict[str, Any] = {_SAID: []}
        if self._described.conversation:
            data[_RANDOM] = write_random(rng)
        return State(task, self.messages(task), data=data, rng=rng)

    def play_turn(
        self, states: Sequence[State], completions: Sequence[Completion], scorer: Scorer
    ) -> list[TurnOutcome]:
        """Advance episodes by one completion each; the service scores, whatever the scorer.

        Raises:
            RewardContractError: If an answer breaks the contract.
            RemoteError: If the service cannot be asked, or a replayed conversation differs.
        """
        for state, completion in zip(states, completions, strict=True):
            state.turn += 1
            state.messages.append(Message(role="assistant", content=completion.text))
            state.data[_SAID].append(completion)
        if not self._described.conversation:
            items = [self._item(s, c) for s, c in zip(states, completions, strict=True)]
            scored = self._client.score(items, self._described.limits)
            return [self._scored(s, r) for s, r in zip(states, scored, strict=True)]
        turns = [self._turn(s, c) for s, c in zip(states, completions, strict=True)]
        played = self._client.turns(turns, self._described.limits)
        return [self._played(s, r) for s, r in zip(states, played, strict=True)]

    def scores(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[dict[str, Any]]:
        """Return the scores of completions before gates, for whoever asks without an episode.

        Raises:
            ScoreError: If one has no scores.
        """
        items = [
            wire.ScoreItem(completion=str(text), token_ids=_tokens([text]), **self._named(task))
            for task, text in zip(tasks, completions, strict=True)
        ]
        results = self._client.score(items, self._described.limits)
        failed = next((r for r in results if r.status != "ok"), None)
        if failed is not None:
            raise ScoreError(
                f"{self.contract_name}, task {failed.task_id}: got {failed.status} "
                f"({failed.error}), expected scores; mend the score function"
            )
        return [{**dict.fromkeys(self.components, ABSENT), **r.raw_components} for r in results]

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _item(self, state: State, completion: Completion) -> wire.ScoreItem:
        return wire.ScoreItem(
            completion=completion.text,
            truncated=completion.truncated,
            token_ids=_tokens([completion]),
            **self._named(state.task),
        )

    def _turn(self, state: State, completion: Completion) -> wire.TurnItem:
        return wire.TurnItem(
            completion=[said.text for said in state.data[_SAID]],
            truncated=completion.truncated,
            token_ids=_tokens(state.data[_SAID]),
            random=state.data[_RANDOM],
            **self._named(state.task),
        )

    def _named(self, task: Task) -> dict[str, Any]:
        """Return how a task is named: by id where it is the service's own, else whole."""
        known = self._known.get(task.id)
        if known is not None and same_task(known[0], task):
            return {"task_id": task.id, "split": known[1]}
        return {"task": task_in(task)}

    def _scored(self, state: State, result: wire.ScoreResult) -> TurnOutcome:
        outcome = TurnOutcome([], result.terminated, result.truncated, result.status, result.error)
        if result.status == "ok":
            outcome.vector = self._vector(state, result)
            state.turn_scores.append(dict(outcome.vector.raw))
        elif result.turn_scores:
            state.turn_scores.append({**result.turn_scores})
        return outcome

    def _played(self, state: State, result: wire.TurnResult) -> TurnOutcome:
        outcome = TurnOutcome(
            result.answers, result.terminated, result.truncated, result.status, result.error
        )
        if result.random is not None:  # the next episode goes on with what this one left
            set_random(state.rng, result.random)
        if result.status != "ok":
            if result.turn_scores:
                state.turn_scores.append({**result.turn_scores})
            return outcome
        self._check_replay(state, result)
        state.messages[:] = result.messages
        turn: dict[str, float | Absent] = dict.fromkeys(self.components, ABSENT)
        turn.update(result.turn_scores)
        if self.max_turns > 1:
            self._declared().check_turn(turn, subject=self._subject(state))
        state.turn_scores.append(turn)
        if outcome.over:
            outcome.vector = self._vector(state, result)
        return outcome

    def _check_replay(self, state: State, result: wire.TurnResult) -> None:
        before = state.messages if state.turn > 1 else []
        if result.messages[: len(before)] != before:
            raise RemoteError(
                f"{self._subject(state)}: got another conversation when its turns were replayed, "
                "expected the same; the environment's answers must depend on task, random numbers "
                "and completions alone (drive it through a session otherwise)"
            )

    def _vector(self, state: State, result: wire.ScoreResult) -> RewardVector:
        """Return what a service's scores amount to here, after it said the same."""
        subject = self._subject(state)
        declared = self._declared()
        missing = {n: ABSENT for n, c in declared.items() if c.optional}
        vector = declared.score({**missing, **result.raw_components}, subject=subject)
        if result.task_id != state.task.id:
            raise self._client.nonsense(f"scores of {result.task_id!r} for {state.task.id!r}")
        if vector.values != result.components or vector.reward != result.reward:
            raise RewardContractError(
                f"{subject}: got components {result.components} and reward {result.reward!r} for "
                f"scores {result.raw_components}, expected {vector.values} and {vector.reward!r}; "
                "do service and client run the same mrgym release?"
            )
        return vector

    def _remember(self, pair: wire.TaskPrompt, split: Split) -> Task:
        self._known.setdefault(pair.task.id, (pair.task, split))
        self._prompts.setdefault(pair.task.id, (pair.task, pair.prompt))
        return pair.task

    def _prompt(self, task: Task) -> wire.PromptOut:
        kept = self._prompts.get(task.id)
        if kept is not None and same_task(kept[0], task):
            return kept[1]
        prompt = self._client.prompts([task_in(task)])[0]
        self._prompts[task.id] = (task, prompt)
        if len(self._prompts) > len(self._known) + _KEPT:  # tasks may be made without end
            own = next(id for id in self._prompts if id not in self._known)
            del self._prompts[own]
        return prompt


def _tokens(completions: Sequence[str]) -> list[list[int]]:
    """Return the tokens of every turn, or nothing where a sampler works on text alone."""
    ids = [[*getattr(completion, "token_ids", ())] for completion in completions]
    return ids if any(ids) else []
