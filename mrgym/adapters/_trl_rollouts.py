"""Rollouts of several turns inside TRL's GRPOTrainer: its model, our environment and scores."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from mrgym.adapters._trl_scores import SCORED, handed_on
from mrgym.adapters.trl import prompt_of
from mrgym.errors import RolloutError, SamplerError, TaskError
from mrgym.rollout import run_groups
from mrgym.sampler import Codec, Completion, Prompt, SamplingParams
from mrgym.seeding import mix
from mrgym.tasks import Task
from mrgym.text import Split, TextEnv

__all__ = ["RolloutFunction"]

_SPLITS: tuple[Split, ...] = ("train", "eval")


class RolloutFunction:
    """What GRPOTrainer calls as ``rollout_func(prompts, trainer)``.

    Args:
        env: The environment.
        max_error_rate: A batch with a larger share of failed rollouts stops the run.

    Raises:
        TaskError: If two different tasks have the same prompt.
    """

    def __init__(self, env: TextEnv, max_error_rate: float) -> None:
        self._env = env
        self._max_error_rate = max_error_rate
        self._tasks: dict[str, Task] = {}
        for split in _SPLITS:
            for task in env.task_source(split):
                self._add(task)

    def _add(self, task: Task) -> None:
        keys = {_key(self._env.messages(task))}
        if not self._env.prompt_for(task).chat_only:
            keys.add(_key(prompt_of(self._env, task, chat=False)))
        for key in keys:
            known = self._tasks.setdefault(key, task)
            if (known.answer, known.metadata) != (task.answer, task.metadata):
                raise TaskError(
                    f"rollout_function: got tasks {known.id} and {task.id} with the same prompt, "
                    "expected different ones, because TRL hands on the prompt alone; tell them "
                    "apart in the prompt"
                )

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any] | None]:
        """Return one rollout a prompt: ids, mask, log-probabilities if known, and components.

        Raises:
            RolloutError: With more than one process, whose rollouts may differ in length.
            TaskError: If a prompt is none of the environment's.
            SamplerError: If a conversation outgrows the model's context.
            ScoreError: If too many rollouts could not be scored.
        """
        if trainer.accelerator.num_processes > 1:
            raise RolloutError(
                f"rollout_function: got {trainer.accelerator.num_processes} processes, expected "
                "one, because TRL generates on all of them together and conversations end at "
                "different turns; use one process, or the bundled trainer"
            )
        tasks = [self._task(prompt) for prompt in prompts]
        sampler = _TrainerSampler(trainer, chat=not isinstance(prompts[0], str))
        seed = mix(trainer.args.seed, trainer.state.global_step)
        groups = run_groups(self._env, sampler, tasks, 1, SamplingParams(), seed=seed)
        rollouts = [group.rollouts[0] for group in groups]
        log_metric = trainer._log_metric
        return {
            "prompt_ids": [r.prompt_token_ids for r in rollouts],
            "completion_ids": [r.token_ids for r in rollouts],
            "env_mask": [[int(sampled) for sampled in r.loss_mask] for r in rollouts],
            "logprobs": [r.sampler_logprobs for r in rollouts] if sampler.has_logprobs else None,
            SCORED: list(handed_on(self._env, rollouts, self._max_error_rate, log_metric)),
        }

    def _task(self, prompt: object) -> Task:
        key = _key(prompt)
        if key not in self._tasks:
            raise TaskError(
                f"rollout_function: got prompt {prompt!r}"[:200] + ", expected one of "
                f"{self._env.contract_name}; make the dataset with mrgym.adapters.trl.dataset(env)"
            )
        return self._tasks[key]


class _TrainerSampler:
    """Samples the next turn of every conversation from the model that TRL trains."""

    def __init__(self, trainer: Any, *, chat: bool) -> None:
        from mrgym_trainers.samplers.codec import TokenizerCodec

        self._trainer = trainer
        self._tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        codec = TokenizerCodec(self._tokenizer, trainer.eos_token_ids)
        codec.uses_template = chat
        self.codec: Codec | None = codec
        self._ends = {*trainer.eos_token_ids, self._tokenizer.pad_token_id}
        self.has_logprobs = False

    def sample(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams
    ) -> list[list[Completion]]:
        """Return one completion of every prompt (TRL's settings count, not ``params``)."""
        self._check_room(max(len(prompt.token_ids) for prompt in prompts))
        ids = [prompt.token_ids for prompt in prompts]
        completion_ids, logprobs = self._trainer._generate_single_turn(ids, None, {}, 1)
        self.has_logprobs = logprobs is not None
        logprobs = logprobs or [[0.0] * len(row) for row in completion_ids]
        return [
            [self._completion(row, own)] for row, own in zip(completion_ids, logprobs, strict=True)
        ]

    def update_weights(self, named_tensors: Iterable[tuple[str, Any]], version: int) -> None:
        """Nothing to do: TRL keeps its own engine up to date."""

    def close(self) -> None:
        """Nothing to free."""

    def _completion(self, ids: list[int], logprobs: list[float]) -> Completion:
        return Completion(
            self._tokenizer.decode(ids, skip_special_tokens=True),
            token_ids=ids,
            sampler_logprobs=logprobs,
            stop_reason="stop" if ids[-1] in self._ends else "length",
        )

    def _check_room(self, longest: int) -> None:
        config = self._trainer.model.config.get_text_config()
        room = getattr(config, "max_position_embeddings", None)
        limit = self._trainer.max_completion_length
        if room is not None and longest + limit > room:
            raise SamplerError(
                f"rollout_function: got a conversation of {longest} tokens and "
                f"max_completion_length={limit} for its next turn, expected at most {room} "
                "together (the model's context); lower max_completion_length or max_turns"
            )


def _key(prompt: object) -> str:
    """Return a prompt as one string; whatever else a dataset added to messages is left out."""
    if isinstance(prompt, str):
        return prompt
    messages = [[m["role"], m["content"]] for m in prompt]  # type: ignore[attr-defined]
    return json.dumps(messages)
