"""TRL's GRPOTrainer: a reward function for every component, and a dataset of the tasks.

::

    from mrgym.adapters import trl as mrgym_trl
    from trl import GRPOConfig, GRPOTrainer

    env = mrgym.make("math_multi_reward")
    trainer = GRPOTrainer(
        model,
        reward_funcs=mrgym_trl.reward_functions(env),
        train_dataset=mrgym_trl.dataset(env, "train"),
        args=GRPOConfig(
            reward_weights=mrgym_trl.reward_weights(env, {"format": 0.5}),
            multi_objective_aggregation="normalize_then_sum",  # GDPO, arXiv 2601.05242
            bf16=torch.cuda.is_available(),
        ),
    )

An environment of several turns needs ``rollout_func=mrgym_trl.rollout_function(env)`` beside.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mrgym.adapters._common import need, no_clash, text_env, weights_by_name
from mrgym.adapters._trl_scores import BatchScores, RewardFunction
from mrgym.env import MultiRewardEnv
from mrgym.errors import ConfigError, RewardDefinitionError
from mrgym.scoring import Scorer
from mrgym.spaces import Message
from mrgym.tasks import Task
from mrgym.text import Split, TextEnv

__all__ = [
    "TAKEN",
    "RewardFunction",
    "dataset",
    "reward_functions",
    "reward_weights",
    "rollout_function",
]

# Columns of the table of completions that TRL writes with ``log_completions=True``.
TAKEN = frozenset({"step", "prompt", "completion", "advantage", "image"})


def reward_functions(
    env: MultiRewardEnv[Any, Any] | str,
    *,
    tokenizer: Any = None,
    max_completion_length: int | None = None,
    max_error_rate: float = 0.1,
    scorer: Scorer | None = None,
) -> list[RewardFunction]:
    """Return one reward function a component, in declared order, for ``reward_funcs=``.

    Each is named after its component, so TRL logs ``rewards/<name>/mean``. A completion is scored
    once, however many of them ask. What abstained, and every score of a completion that could not
    be scored, is ``None``: TRL leaves it out. Failures are logged as warnings and, with the
    presence of optional components, as metrics.

    Args:
        env: A text environment, or its id. Tasks are found by the column ``task_id``.
        tokenizer: Decodes ``completion_ids``, where TRL takes the text apart (a tokenizer with a
            response template moves the thinking out of it).
        max_completion_length: TRL's own limit. Completions of that many tokens that do not end in
            an end token of ``tokenizer`` then read ``truncated``.
        max_error_rate: A batch with a larger share of failed completions stops the run.
        scorer: Where score functions run; here by default.

    Raises:
        RewardDefinitionError: If ``env`` is no text environment, or a name is taken.
        ConfigError: If ``max_completion_length`` stands without ``tokenizer``.
    """
    text = text_env(env, "trl")
    no_clash(text, "trl", TAKEN)
    if max_completion_length is not None and tokenizer is None:
        raise ConfigError(
            f"trl: got max_completion_length={max_completion_length} without a tokenizer, expected "
            "both, because completions may end at the limit by themselves; pass tokenizer=..."
        )
    scores = BatchScores(text, tokenizer, max_completion_length, max_error_rate, scorer)
    return [RewardFunction(name, scores) for name in text._declared()]


def reward_weights(
    env: MultiRewardEnv[Any, Any] | str, weights: Mapping[str, float] | None = None
) -> list[float]:
    """Return the weights in the order of :func:`reward_functions`, for ``reward_weights=``.

    Args:
        env: The environment, or its id.
        weights: Weight by name; the declared one where left out.

    Raises:
        RewardDefinitionError: For a name that no component has.
    """
    return [*weights_by_name(text_env(env, "trl"), weights, "trl").values()]


def dataset(
    env: MultiRewardEnv[Any, Any] | str, split: Split = "train", *, chat: bool = False
) -> Any:
    """Return the tasks as a ``datasets.Dataset``, for ``train_dataset=`` or ``eval_dataset=``.

    Its columns are ``prompt``, ``task_id``, ``split`` and ``answer`` (JSON where it is no text),
    which TRL hands to reward functions; keep ``remove_unused_columns=False``, TRL's default.

    Args:
        env: A text environment, or its id.
        split: Which tasks.
        chat: Whether prompts are chat messages (for models with a chat template) or plain text.

    Raises:
        MissingExtraError: If ``datasets`` is not installed.
        RewardDefinitionError: If a prompt has no such form: a conversation in plain text, or a
            turn that begins with text of the environment's own in chat form.
    """
    datasets, text = need("datasets", "trl"), text_env(env, "trl")
    rows = [
        {
            "prompt": prompt_of(text, task, chat=chat),
            "task_id": task.id,
            "split": split,
            "answer": _as_text(task.answer),
        }
        for task in text.task_source(split)
    ]
    return datasets.Dataset.from_list(rows)


def rollout_function(env: MultiRewardEnv[Any, Any] | str, *, max_error_rate: float = 0.1) -> Any:
    """Return a ``rollout_func=`` that plays all turns; see :mod:`mrgym.adapters._trl_rollouts`.

    TRL's own model generates, ``max_completion_length`` tokens a turn at most; the environment
    answers, and what it says is masked out of the loss. The scores reach
    :func:`reward_functions`, which are passed beside.

    Raises:
        RewardDefinitionError: If ``env`` is no text environment.
        TaskError: If two different tasks have the same prompt: TRL hands on nothing else to tell
            them apart.
    """
    from mrgym.adapters._trl_rollouts import RolloutFunction

    return RolloutFunction(text_env(env, "trl"), max_error_rate)


def _as_text(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer, default=str)


def prompt_of(env: TextEnv, task: Task, *, chat: bool) -> str | list[Message]:
    """Return the prompt in the form TRL is given.

    Raises:
        RewardDefinitionError: If there is no such form.
    """
    prompt = env.prompt_for(task)
    if not chat and prompt.chat_only:
        raise RewardDefinitionError(
            f"dataset: got chat messages in task {task.id}, expected text for plain prompts; pass "
            f"chat=True, or give {env.contract_name} a plain_prompt"
        )
    if chat and prompt.prefill and env.max_turns == 1:
        raise RewardDefinitionError(
            f"dataset: got {env.contract_name}, whose completions begin with {prompt.prefill!r}, "
            "expected none, because TRL ends every chat prompt with its template; pass "
            "chat=False, or make the environment without a prefill"
        )
    return prompt.messages if chat else prompt.text + prompt.prefill
