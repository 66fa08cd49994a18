"""What adapters share: taking an environment by name, and refusing what a peer would lose."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Collection, Mapping
from numbers import Real
from types import ModuleType
from typing import Any

from mrgym.env import MultiRewardEnv
from mrgym.errors import MissingExtraError, RewardDefinitionError, ScoreError, closest
from mrgym.registry import make
from mrgym.rollout import Rollout
from mrgym.score import score_completions
from mrgym.scoring import Scorer
from mrgym.scoring.declare import EVERY
from mrgym.tasks import Task
from mrgym.text import TextEnv

__all__ = [
    "need",
    "no_abstention",
    "no_clash",
    "no_prefill",
    "resolve",
    "scored",
    "text_env",
    "warn_one_at_a_time",
    "weights_by_name",
]


def need(module: str, extra: str) -> ModuleType:
    """Return a peer's module.

    Raises:
        MissingExtraError: If it is not installed; names the extra to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or package).partition(".")[0] != package:
            raise  # the peer is there, but something it imports is not
        raise MissingExtraError(package, extra) from error


def resolve(env: MultiRewardEnv[Any, Any] | str, **kwargs: Any) -> MultiRewardEnv[Any, Any]:
    """Return an environment, made here where its id (or ``"pkg.module:Class"``) is given."""
    return make(env, **kwargs) if isinstance(env, str) else env


def text_env(
    env: MultiRewardEnv[Any, Any] | str, peer: str, *, single_turn: bool = False, **kwargs: Any
) -> TextEnv:
    """Return a text environment that a peer can use.

    Args:
        env: The environment, or its id.
        peer: How error messages call the peer.
        single_turn: Whether the peer knows one completion a task only.
        **kwargs: Arguments of the environment, where an id is given.

    Raises:
        RewardDefinitionError: If it is no text environment, or has several turns and may not.
    """
    made = resolve(env, **kwargs)
    if not isinstance(made, TextEnv):
        raise RewardDefinitionError(
            f"{peer}: got {type(made).__name__}, expected a text environment (its completions are "
            "what is scored); subclass mrgym.SingleTurnEnv or mrgym.MultiTurnEnv"
        )
    if single_turn and made.max_turns > 1:
        raise RewardDefinitionError(
            f"{peer}: got {made.contract_name} with up to {made.max_turns} turns, expected one "
            f"completion a task, all that {peer} scores here; use the bundled trainer for turns"
        )
    return made


def no_abstention(env: MultiRewardEnv[Any, Any], peer: str, instead: str) -> None:
    """Refuse components that may abstain, where a peer has no way to leave one out.

    Raises:
        RewardDefinitionError: With their names, and what the peer makes of them ``instead``.
    """
    optional = [name for name, component in env._declared().items() if component.optional]
    if optional:
        raise RewardDefinitionError(
            f"{peer}: got optional components {optional} of {env.contract_name}, expected scores "
            f"that are always there, because {instead}; declare them without optional=True"
        )


def no_clash(env: MultiRewardEnv[Any, Any], peer: str, taken: Collection[str]) -> None:
    """Refuse component names that a peer uses for something else.

    Raises:
        RewardDefinitionError: With those names.
    """
    clashing = sorted({*env._declared()} & {*taken})
    if clashing:
        raise RewardDefinitionError(
            f"{peer}: got components {clashing} of {env.contract_name}, expected other names, "
            f"because {peer} uses these itself and would lose the scores; rename them"
        )


def no_prefill(env: TextEnv, peer: str) -> None:
    """Refuse an environment that begins the policy's turn, where a peer's prompts cannot.

    Raises:
        RewardDefinitionError: With the prefill.
    """
    if env.prefill:
        raise RewardDefinitionError(
            f"{peer}: got prefill {env.prefill!r} of {env.contract_name}, expected none, because "
            f"{peer} asks with chat messages alone and scores would miss it; switch it off"
        )


def warn_one_at_a_time(env: TextEnv, peer: str) -> None:
    """Say aloud that a peer hands over one completion at a time, where a component is batched.

    Whether a batched component only saves time, or compares the completions of a group (and
    scores one alone differently), cannot be told from its declaration.
    """
    methods = env.score_methods.values()
    batched = [m.component for m in methods if m.batched and m.component != EVERY]
    if batched:
        warnings.warn(
            f"{peer}: got batched components {batched} of {env.contract_name}, which {peer} hands "
            "one completion at a time; one that compares completions of a group scores otherwise",
            stacklevel=3,
        )


def weights_by_name(
    env: MultiRewardEnv[Any, Any], weights: Mapping[str, float] | None, peer: str
) -> dict[str, float]:
    """Return the weight of every component, in declared order; the declared one where left out.

    Raises:
        RewardDefinitionError: For a name that no component has, or a weight that is no finite
            number.
    """
    declared = env._declared().weights
    unknown = [name for name in weights or {} if name not in declared]
    if unknown:
        raise RewardDefinitionError(
            f"{peer}: got weights for {unknown}, expected names among {[*declared]}"
            f"{closest(unknown[0], declared)}; use the names of the components"
        )
    merged = declared | dict(weights or {})
    wrong = {n: w for n, w in merged.items() if not (isinstance(w, Real) and math.isfinite(w))}
    if wrong:
        raise RewardDefinitionError(
            f"{peer}: got weights {wrong}, expected finite numbers; write floats"
        )
    return {name: float(weight) for name, weight in merged.items()}


def scored(
    env: TextEnv, task: Task, completion: str, peer: str, scorer: Scorer | None = None
) -> Rollout:
    """Return the scored rollout of one completion, for a peer that asks for one at a time.

    Raises:
        ScoreError: If a score function failed; such a peer has no missing score.
    """
    rollout = score_completions(env, [task], [completion], scorer=scorer)[0]
    if rollout.status != "ok":
        raise ScoreError(
            f"{env.contract_name}, task {task.id}: got {rollout.status} from {rollout.error}, "
            f"expected scores; mend the score function ({peer} would learn from a zero)"
        )
    return rollout
