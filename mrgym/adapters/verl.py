"""verl: an environment as its reward function, with the rows and configuration of its GDPO.

    from mrgym.adapters import verl
    verl.write_module("reward.py", "math_multi_reward")
    pandas.DataFrame(verl.rows("math_multi_reward")).to_parquet("train.parquet")
    print(*verl.config_lines("math_multi_reward", "reward.py"))

The last line prints the arguments for ``python -m verl.trainer.main_ppo``.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from mrgym.adapters._common import (
    no_abstention,
    no_clash,
    no_prefill,
    scored,
    text_env,
    warn_one_at_a_time,
    weights_by_name,
)
from mrgym.env import MultiRewardEnv
from mrgym.errors import ConfigError, TaskError
from mrgym.scoring import Scorer
from mrgym.tasks import Task
from mrgym.text import Split, TextEnv

__all__ = ["TAKEN", "ComputeScore", "compute_score_for", "config_lines", "rows", "write_module"]

PEER = "verl"

# Columns of its batches beside which it puts the components, and keys of its logs.
TAKEN = frozenset(
    "score reward data_source prompt ability reward_model extra_info index tools_kwargs "
    "interaction_kwargs raw_prompt raw_prompt_ids dummy_tensor uid agent_name multi_modal_data "
    "multi_modal_inputs reward_extra_info turn_scores tool_rewards min_global_steps "
    "max_global_steps extras prompts responses response_mask input_ids attention_mask position_ids "
    "rm_scores token_level_scores token_level_rewards advantages returns values old_log_probs "
    "ref_log_prob rollout_log_probs input output gts step request_id".split()
)

_PLAIN = re.compile(r"[\w./-]+")
_NO_TEXT = frozenset({"null", "true", "false", "nan", "inf"})  # unless quoted, to Hydra


class ComputeScore(Protocol):
    """The signature that verl calls, by keyword."""

    def __call__(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: str,
        extra_info: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, float]:
        """Return ``score`` and every component."""
        ...


def compute_score_for(
    env: MultiRewardEnv[Any, Any] | str,
    *,
    kwargs: Mapping[str, Any] | None = None,
    scorer: Scorer | None = None,
) -> ComputeScore:
    """Return verl's ``compute_score`` for an environment: ``{"score": sum, <component>: score}``.

    Every sample has the same keys. The task is the one that ``extra_info`` names (see
    :func:`rows`).

    Args:
        env: A single-turn text environment, or its id.
        kwargs: Arguments of the environment, where an id is given.
        scorer: Where score functions run. Here by default, one completion at a time (verl calls
            from many threads); give a :class:`mrgym.scoring.WorkerScorer` for functions that may
            hang.

    Raises:
        RewardDefinitionError: If verl would lose or change something: several turns, a component
            that may abstain, a name that is taken, a prefill.
    """
    served = _usable(env, kwargs)
    one_at_a_time = threading.Lock()

    def compute_score(
        data_source: str,
        solution_str: str,
        ground_truth: str,
        extra_info: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> dict[str, float]:
        with one_at_a_time:
            task = _task(served, extra_info or {})
            if scorer is None:
                return _score(served, task, solution_str, None)
        return _score(served, task, solution_str, scorer)

    return compute_score


def write_module(path: str | Path, env: str, *, kwargs: Mapping[str, Any] | None = None) -> Path:
    """Write the file that ``reward.custom_reward_function.path`` names, and return its path.

    The environment is made when verl loads the file, so what is refused is refused at the start.

    Args:
        path: Where to write it.
        env: The environment's id, or ``"pkg.module:Class"``.
        kwargs: Arguments of the environment; JSON values.

    Raises:
        RewardDefinitionError: As :func:`compute_score_for`.
        ConfigError: If an argument cannot be written down.
    """
    _usable(env, kwargs)
    given = dict(kwargs or {})
    try:
        as_read = json.loads(json.dumps(given, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{PEER}: got kwargs {given!r} that cannot be written to a file ({error}), expected "
            "JSON values; write a module of your own that calls compute_score_for"
        ) from error
    path = Path(path)
    path.write_text(
        '"""Written by mrgym.adapters.verl.write_module."""\n\n'
        "from mrgym.adapters.verl import compute_score_for\n\n"
        f"compute_score = compute_score_for({env!r}, kwargs={as_read!r})\n",
        encoding="utf-8",
    )
    return path


def rows(
    env: MultiRewardEnv[Any, Any] | str,
    split: Split = "train",
    *,
    kwargs: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a verl dataset, for a parquet or JSON file.

    Args:
        env: The environment, or its id.
        split: Which tasks.
        kwargs: Arguments of the environment, where an id is given.

    Raises:
        RewardDefinitionError: As :func:`compute_score_for`.
    """
    served = _usable(env, kwargs)
    for index, task in enumerate(served.task_source(split)):
        gold = task.answer if isinstance(task.answer, str) else json.dumps(task.answer, default=str)
        yield {
            "data_source": served.contract_name,
            "prompt": served.messages(task),
            "ability": "",
            "reward_model": {"style": "rule", "ground_truth": gold},
            "extra_info": {"task_id": task.id, "split": split, "index": index},
        }


def config_lines(
    env: MultiRewardEnv[Any, Any] | str,
    path: str | Path,
    *,
    weights: Mapping[str, float] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the overrides that make verl train an environment with its GDPO.

    Example:
        >>> config_lines("math_multi_reward", "reward.py")[4]
        '+algorithm.gdpo_reward_keys=[correctness,format,integer]'

    Args:
        env: The environment, or its id.
        path: The file of :func:`write_module`, as verl is to find it.
        weights: Weights by component, over the declared ones.
        kwargs: Arguments of the environment, where an id is given.

    Raises:
        RewardDefinitionError: As :func:`compute_score_for`; if a weight is of no component, or
            no finite number.
    """
    merged = weights_by_name(_usable(env, kwargs), weights, PEER)
    return [
        f"reward.custom_reward_function.path={_quoted(str(path))}",
        "reward.custom_reward_function.name=compute_score",
        "reward.reward_manager.name=gdpo",
        "algorithm.adv_estimator=gdpo",
        f"+algorithm.gdpo_reward_keys=[{','.join(map(_quoted, merged))}]",
        f"+algorithm.gdpo_reward_weights=[{','.join(map(str, merged.values()))}]",
        "trainer.use_v1=False",
    ]


def _usable(env: MultiRewardEnv[Any, Any] | str, kwargs: Mapping[str, Any] | None) -> TextEnv:
    made = text_env(env, PEER, single_turn=True, **(kwargs or {}))
    no_abstention(made, PEER, "it looks up the same keys for every sample")
    no_clash(made, PEER, TAKEN)
    no_prefill(made, PEER)
    warn_one_at_a_time(made, PEER)
    return made


def _score(env: TextEnv, task: Task, text: str, scorer: Scorer | None) -> dict[str, float]:
    rollout = scored(env, task, text, PEER, scorer)
    return {"score": rollout.reward, **rollout.components}


def _task(env: TextEnv, extra_info: Mapping[str, Any]) -> Task:
    task_id, split = extra_info.get("task_id"), extra_info.get("split")
    if not isinstance(task_id, str) or split not in ("train", "eval"):
        raise TaskError(
            f"{PEER}: got extra_info {dict(extra_info)!r}"[:300] + ", expected 'task_id' and "
            "'split' ('train' or 'eval'); write the dataset with mrgym.adapters.verl.rows"
        )
    return env.task_source(split).by_id(task_id)


def _quoted(value: str) -> str:
    """Return a value as Hydra reads it: backslashes are doubled before a quote only."""
    if _PLAIN.fullmatch(value) and value.lower() not in _NO_TEXT:
        return value
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"'{escaped}'"
