"""NeMo RL: an environment whose ``step`` gives ``reward/<name>`` tensors, as its GDPO wants them.

In the script that starts the run, before its data is set up::

    from mrgym.adapters import nemo_rl
    nemo_rl.register()           # ENV_REGISTRY["mrgym"] and its ACTOR_ENVIRONMENT_REGISTRY entry

and beside it, once::

    with open("train.jsonl", "w") as lines:
        for row in nemo_rl.rows("math_multi_reward"):
            print(json.dumps(row), file=lines)
    print(yaml.safe_dump(nemo_rl.config("math_multi_reward", train="train.jsonl")))
"""

from __future__ import annotations

import copy
import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from mrgym.adapters._common import need
from mrgym.adapters._nemo_rl_wiring import (
    ACTOR,
    PEER,
    config,
    register,
    registration,
    rows,
    usable,
)
from mrgym.components import ABSENT, reward_key
from mrgym.env import MultiRewardEnv
from mrgym.episode import State, TurnOutcome, reduce_turns
from mrgym.errors import (
    ConfigError,
    RolloutError,
    ScoreError,
    TaskError,
    closest,
)
from mrgym.sampler import Completion
from mrgym.scoring import InlineScorer, Scorer, WorkerScorer
from mrgym.tasks import Task

__all__ = [
    "ACTOR",
    "EnvironmentReturn",
    "NemoRLEnvironment",
    "config",
    "register",
    "registration",
    "rows",
]

OVER = "done"
"""What NeMo RL appends after the last turn; empty text may make its token ids floats."""


class EnvironmentReturn(NamedTuple):
    """What ``step`` returns: the fields of NeMo RL's own named tuple, in its order.

    Attributes:
        observations: One message a sample.
        metadata: What comes back with the next turn; ``None`` where the episode is over.
        next_stop_strings: ``None`` for each sample.
        rewards: ``{"reward/<name>": float32 Tensor[B]}``.
        terminateds: bool Tensor[B].
        answers: ``None``.
    """

    observations: list[dict[str, str]]
    metadata: list[dict[str, Any] | None]
    next_stop_strings: list[None]
    rewards: dict[str, Any]
    terminateds: Any
    answers: None


class _Config(BaseModel):
    """``env.<name>`` of NeMo RL's configuration."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    env: str | MultiRewardEnv[Any, Any]
    kwargs: dict[str, Any] = {}
    estimator: str = "gdpo"
    workers: int = 0
    reply: str = "{reply}"


class NemoRLEnvironment:
    """An environment of mrgym behind NeMo RL's ``EnvironmentInterface``.

    A turn's reward is what the episode's scores rose by, so that NeMo RL's sum over the turns is
    the episode's reduced score wherever it stops, also where it runs out of tokens or turns.

    Args:
        cfg: ``env`` (id or ``"pkg.module:Class"``), ``kwargs`` for it, ``estimator`` (``"gdpo"`` or
            ``"grpo"``), ``workers`` (processes that score; 0 scores in the actor, one batch at a
            time) and ``reply``: how an answer of the environment is put to the policy. NeMo RL
            adds no chat template to it, so that the model's markup has to stand around
            ``{reply}`` there.

    Raises:
        ConfigError: If a key is unknown or a value cannot work.
        RewardDefinitionError: If NeMo RL would lose or change something: a component that may
            abstain, a prefill, or fewer than two components with GDPO.
    """

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        self._cfg = _checked(cfg)
        self.env = usable(self._cfg.env, self._cfg.estimator, self._cfg.kwargs)
        self._scorer: Scorer = (
            WorkerScorer(workers=self._cfg.workers) if self._cfg.workers else InlineScorer()
        )
        self._lock = threading.Lock()

    def step(
        self,
        message_log_batch: Sequence[Sequence[Mapping[str, Any]]],
        metadata: Sequence[Mapping[str, Any]],
    ) -> EnvironmentReturn:
        """Return what the last turn of every conversation led to.

        Args:
            message_log_batch: Conversations, each ending with the policy's turn.
            metadata: Which task each is of: ``{"ground_truth": "train/<task id>"}`` (as
                :func:`rows` writes it), or what the last ``step`` returned.

        Raises:
            ScoreError: If a score function failed; there is no missing score in NeMo RL.
            RolloutError: If a conversation does not end with the policy's turn.
            TaskError: If there is no such task.
        """
        torch = need("torch", "nemo-rl")
        turns = [_last_turn(log) for log in message_log_batch]
        with self._lock:  # the first calls come together, and load the tasks
            known = [self._known(entry) for entry in metadata]
        outcomes = self._play([entry["state"] for entry in known], turns)
        scores = [self._so_far(k["state"], o) for k, o in zip(known, outcomes, strict=True)]
        return EnvironmentReturn(
            observations=[self._observation(outcome) for outcome in outcomes],
            metadata=[
                None if outcome.over else {"state": entry["state"], "paid": now}
                for entry, outcome, now in zip(known, outcomes, scores, strict=True)
            ],
            next_stop_strings=[None] * len(outcomes),
            rewards={
                reward_key(name): torch.tensor(
                    [now[name] - k["paid"][name] for now, k in zip(scores, known, strict=True)],
                    dtype=torch.float32,
                )
                for name in self.env._declared()
            },
            terminateds=torch.tensor([outcome.over for outcome in outcomes], dtype=torch.bool),
            answers=None,
        )

    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        """Return the batch as it is, and the mean of every component in it."""
        keys = [reward_key(name) for name in self.env._declared()]
        means = {f"{k}/mean": float(batch[k].float().mean()) for k in keys if k in batch}
        return batch, means

    def shutdown(self) -> None:
        """End the processes that score."""
        self._scorer.close()

    def _play(self, states: list[State], turns: list[Completion]) -> list[TurnOutcome]:
        if self._cfg.workers:
            outcomes = self.env.play_turn(states, turns, self._scorer)
        else:
            with self._lock:  # the actor takes many calls at once, score functions may not
                outcomes = self.env.play_turn(states, turns, self._scorer)
        for state, outcome in zip(states, outcomes, strict=True):
            if outcome.status != "ok":
                raise ScoreError(
                    f"{self.env.contract_name}, task {state.task.id}: got {outcome.status} from "
                    f"{outcome.error}, expected scores; mend the score function (NeMo RL would "
                    "learn from a zero)"
                )
        return outcomes

    def _known(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        if "state" in entry:
            # Ray hands out copies, a caller in the same process does not.
            return {"state": copy.deepcopy(entry["state"]), "paid": entry["paid"]}
        task = self._task(entry)
        rng = np.random.default_rng([0, zlib.crc32(task.id.encode())])
        return {
            "state": self.env.start(task, rng),
            "paid": dict.fromkeys(self.env._declared(), 0.0),
        }

    def _task(self, entry: Mapping[str, Any]) -> Task:
        split, _, task_id = str(entry.get("ground_truth", "")).partition("/")
        if split not in ("train", "eval") or not task_id:
            raise TaskError(
                f"{PEER}: got metadata {dict(entry)!r}"[:300] + ", expected {'ground_truth': "
                "'train/<task id>'}; write the dataset with mrgym.adapters.nemo_rl.rows"
            )
        return self.env.task_source(split).by_id(task_id)  # type: ignore[arg-type]

    def _so_far(self, state: State, outcome: TurnOutcome) -> dict[str, float]:
        """Return the episode's scores if it ended here; 0 for what was not measured yet."""
        declared = self.env._declared()
        if outcome.vector is not None:
            return outcome.vector.values
        reduced = reduce_turns(declared, state.turn_scores)
        measured = {name: score for name, score in reduced.items() if score is not ABSENT}
        return dict.fromkeys(declared, 0.0) | declared._apply_gates(measured)

    def _observation(self, outcome: TurnOutcome) -> dict[str, str]:
        if outcome.over:
            return {"role": "environment", "content": OVER}
        said = "\n".join(message["content"] for message in outcome.answers)
        return {"role": "environment", "content": self._cfg.reply.replace("{reply}", said) or OVER}


def __getattr__(name: str) -> Any:
    if name != ACTOR.rpartition(".")[2]:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # As NeMo RL declares its own: calls of many samples at once, and a restart loses nothing.
    options = {"max_restarts": -1, "max_task_retries": -1, "max_concurrency": 1000}
    actor = need("ray", "nemo-rl").remote(**options)(NemoRLEnvironment)
    return globals().setdefault(name, actor)


def _checked(cfg: Mapping[str, Any]) -> _Config:
    try:
        checked = _Config(**cfg)
    except ValidationError as error:
        wrong = error.errors()[0]
        key = ".".join(map(str, wrong["loc"][:1]))
        raise ConfigError(
            f"{PEER}: got {key}={cfg.get(key)!r} ({wrong['msg']}), expected keys of "
            f"{[*_Config.model_fields]}{closest(key, _Config.model_fields)}; mend env.<name>"
        ) from error
    if checked.estimator not in ("gdpo", "grpo") or checked.workers < 0:
        raise ConfigError(
            f"{PEER}: got estimator={checked.estimator!r}, workers={checked.workers}, expected "
            "'gdpo' or 'grpo', and 0 workers or more; mend env.<name>"
        )
    if "{reply}" not in checked.reply:
        raise ConfigError(
            f"{PEER}: got reply={checked.reply!r}, expected '{{reply}}' in it; the policy would "
            "not see the environment's answer"
        )
    return checked


def _last_turn(log: Sequence[Mapping[str, Any]]) -> Completion:
    last: Mapping[str, Any] = log[-1] if log else {}
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise RolloutError(
            f"{PEER}: got a conversation that ends with {dict(last)!r}"[:300] + ", expected the "
            "policy's turn, as text; call step after generation"
        )
    return Completion(last["content"])
