"""check_env: everything the contract promises, tried on a real environment."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

from mrgym.components import SUM_ABS_TOL, SUM_REL_TOL, ComponentSet, RewardVector
from mrgym.env import MultiRewardEnv
from mrgym.errors import RegistryError, RewardContractError
from mrgym.registry import make
from mrgym.sampler import Completion
from mrgym.scoring import InlineScorer
from mrgym.tasks import Task
from mrgym.text import TextEnv

__all__ = ["CheckReport", "check_env"]

_STEPS = 20
_JUNK = ("", "?", "\x00 \u202e <answer></answer> ) ( 1e999")


@dataclass
class CheckReport:
    """What a check found.

    Attributes:
        env: Name of the environment.
        passed: What was tried and held.
        failures: What did not hold, one line each.
        notes: Warnings, and what could not be tried.
    """

    env: str
    passed: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    def __str__(self) -> str:
        lines = [f"{self.env}: {'ok' if self.ok else 'FAILED'}"]
        lines += [f"  failed  {text}" for text in self.failures]
        lines += [f"  passed  {text}" for text in self.passed]
        lines += [f"  note    {text}" for text in self.notes]
        return "\n".join(lines)


def check_env(
    env_or_id: gym.Env[Any, Any] | str, *, max_tasks: int = 100, seed: int = 0, **kwargs: Any
) -> CheckReport:
    """Try everything the reward contract promises and report it; nothing is raised for a bad env.

    Args:
        env_or_id: An environment (wrappers included in the check), an id, or a class path.
        max_tasks: Most tasks of each split whose gold completion is scored.
        seed: Seed of resets and random actions.
        **kwargs: Arguments for an environment given by id.
    """
    env = make(env_or_id, **kwargs) if isinstance(env_or_id, str) else env_or_id
    base = env.unwrapped
    if not isinstance(base, MultiRewardEnv):
        raise RegistryError(
            f"check_env: got {type(base).__name__}, expected a MultiRewardEnv; "
            "wrap a plain environment with mrgym.from_gymnasium(env)"
        )
    report = CheckReport(base.contract_name)
    checks: list[tuple[str, Callable[[], str | None]]] = [
        ("components are declared", lambda: _declared(base)),
        ("Gymnasium's own checker passes", lambda: _gymnasium(env)),
        ("every step keeps the contract", lambda: _steps(env, base._declared(), seed)),
        ("the same seed and actions give the same rewards", lambda: _deterministic(env, seed)),
        ("it survives pickling", lambda: _picklable(base)),
        ("vector envs carry reward_components", lambda: _vectorised(env, seed)),
    ]
    for title, check in checks:
        _run(report, title, check)
    if not isinstance(base, TextEnv):
        return report
    tasks = "train and eval tasks load and share nothing"
    if _run(report, tasks, lambda: _splits(base)):  # without tasks there is nothing to score
        _run(report, "gold completions score full marks", lambda: _gold(base, max_tasks, report))
        _run(report, "junk and other tasks' golds score less", lambda: _junk(base, max_tasks))
    return report


def _run(report: CheckReport, title: str, check: Callable[[], str | None]) -> bool:
    """Note what a check finds, and return whether it passed."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            failure = check()
        except Exception as error:  # whatever a checked environment raises is a finding
            failure = f"{type(error).__name__}: {error}"
    report.notes.extend(f"{title}: {w.message}" for w in caught)
    if failure is None:
        report.passed.append(title)
    elif failure:
        report.failures.append(f"{title}: {failure}")
    return failure is None


def _declared(env: MultiRewardEnv[Any, Any]) -> None:
    env._declared()


def _gymnasium(env: gym.Env[Any, Any]) -> None:
    gymnasium_check_env(env.unwrapped, skip_render_check=True, skip_close_check=True)


def _transitions(
    env: gym.Env[Any, Any], seed: int
) -> Iterator[tuple[Any, float, bool, bool, dict[str, Any]]]:
    env.action_space.seed(seed)
    env.reset(seed=seed)
    for step in range(_STEPS):
        transition = env.step(_action(env, step))
        yield transition  # type: ignore[misc]
        if transition[2] or transition[3]:
            env.reset()


def _action(env: gym.Env[Any, Any], step: int) -> Any:
    """Return a random action, or every other time the gold completion: 0 hides a wrong factor."""
    base = env.unwrapped
    if step % 2 and isinstance(base, TextEnv) and base._state is not None:
        gold = base.gold_completion(base._state.task)
        if gold is not None:
            return gold
    return env.action_space.sample()


def _steps(env: gym.Env[Any, Any], declared: ComponentSet, seed: int) -> str | None:
    for observation, reward, _, _, info in _transitions(env, seed):
        if observation not in env.observation_space:  # Gymnasium's checker only warns
            return f"got observation {str(observation)[:80]}, expected {env.observation_space}"
        values = info.get("reward_components")
        if not isinstance(values, dict):
            return f"info['reward_components'] is missing{_blame(env)}"
        declared.check(values, subject="step", check_range=False)
        total = math.fsum(values.values())
        if not math.isclose(reward, total, rel_tol=SUM_REL_TOL, abs_tol=SUM_ABS_TOL):
            return (
                f"got reward={reward!r}, expected {total!r}, the sum of {values}{_blame(env)}; "
                "make what was added or scaled a component"
            )
    return None


def _blame(env: gym.Env[Any, Any]) -> str:
    names = []
    while isinstance(env, gym.Wrapper):
        names.append(type(env).__name__)
        env = env.env
    return f" (wrapped in {', '.join(names)})" if names else ""


def _deterministic(env: gym.Env[Any, Any], seed: int) -> str | None:
    if env.spec is not None and env.spec.nondeterministic:
        return None
    runs = [[(t[1], t[4].get("reward_components")) for t in _transitions(env, seed)] for _ in "ab"]
    for step, (first, second) in enumerate(zip(*runs, strict=True)):
        if first != second:
            return f"got {first} then {second} at step {step}, expected the same"
    return None


def _picklable(env: MultiRewardEnv[Any, Any]) -> str | None:
    back = pickle.loads(pickle.dumps(env))
    if [*back._declared()] != [*env._declared()]:
        return f"got components {[*back._declared()]} back, expected {[*env._declared()]}"
    return None


def _vectorised(env: gym.Env[Any, Any], seed: int) -> str | None:
    # Copied, not pickled: a wrapper may hold a lambda, which is no fault of the environment.
    vector = gym.vector.SyncVectorEnv([lambda: copy.deepcopy(env)] * 2)
    vector.reset(seed=seed)
    _, _, _, _, infos = vector.step(vector.action_space.sample())
    names = set(infos.get("reward_components", ()))
    base = env.unwrapped
    assert isinstance(base, MultiRewardEnv)
    missing = {name for name, c in base._declared().items() if not c.optional} - names
    return f"got {sorted(names)}, missing {sorted(missing)}" if missing else None


def _splits(env: TextEnv) -> None:
    env.task_source("train")
    env.task_source("eval")


def _sample_tasks(env: TextEnv, count: int) -> list[Task]:
    return [task for split in ("train", "eval") for task in env.task_source(split)[:count]]


def _score(env: TextEnv, tasks: Sequence[Task], texts: Sequence[str]) -> list[RewardVector]:
    states = [env.start(task, np.random.default_rng(0)) for task in tasks]
    outcomes = env.play_turn(states, [Completion(text) for text in texts], InlineScorer())
    failed = [outcome.error for outcome in outcomes if outcome.vector is None]
    if failed:
        raise RewardContractError(f"got no score ({failed[0]}), expected one")
    return [outcome.vector for outcome in outcomes if outcome.vector is not None]


def _golds(env: TextEnv, count: int) -> list[tuple[Task, str]]:
    pairs = [(task, env.gold_completion(task)) for task in _sample_tasks(env, count)]
    return [(task, gold) for task, gold in pairs if gold is not None]


def _gold(env: TextEnv, count: int, report: CheckReport) -> str | None:
    golds = _golds(env, count) if env.max_turns == 1 else []
    if not golds:
        report.notes.append("no gold_completion, so full marks could not be tried")
        return ""
    full = {name: c.high for name, c in env._declared().items() if math.isfinite(c.high)}
    tasks, texts = [task for task, _ in golds], [text for _, text in golds]
    for task, vector in zip(tasks, _score(env, tasks, texts), strict=True):
        short = {n: v for n, v in vector.values.items() if n in full and v != full[n]}
        if short:
            return f"got {short} for the gold of task {task.id!r}, expected {full}"
    return None


def _junk(env: TextEnv, count: int) -> str | None:
    if env.max_turns > 1:
        return ""
    golds = _golds(env, count)
    tasks = [task for task, _ in golds] or _sample_tasks(env, 5)
    junk = [v for text in _JUNK for v in _score(env, tasks, [text] * len(tasks))]
    if not golds:
        return None
    best = _score(env, tasks, [gold for _, gold in golds])
    if max(v.reward for v in junk) >= min(v.reward for v in best):
        return f"got {max(v.reward for v in junk)} for junk, expected less than a gold's reward"
    return _shuffled(env, golds, best)


def _shuffled(
    env: TextEnv, golds: Sequence[tuple[Task, str]], best: Sequence[RewardVector]
) -> str | None:
    """Score every task with the gold of one whose answer differs."""
    answers = [task.answer for task, _ in golds]
    others = [next((g for (t, g) in golds if t.answer != a), None) for a in answers]
    kept = [i for i, other in enumerate(others) if other is not None]
    scored = _score(env, [golds[i][0] for i in kept], [others[i] or "" for i in kept])
    for i, vector in zip(kept, scored, strict=True):
        if vector.reward >= best[i].reward:
            return f"got full marks for another task's gold on {golds[i][0].id!r}, expected less"
    return None
