"""Going on with a run: which checkpoint, whether it is of the same run, and what is dropped if not.

Two runs are the same if environment, components, training tasks, model and configuration are;
keys that change no step (``FREE_KEYS``) may differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from mrgym.components import Component
from mrgym.errors import ConfigError
from mrgym.tasks import TaskSource
from mrgym.text import TextEnv
from mrgym_trainers.gdpo.checkpoint import (
    MANIFEST,
    TENSORS,
    TrainerRecord,
    read_rank_state,
    read_record,
    step_folder,
    verify,
)
from mrgym_trainers.gdpo.checkpoint_tensors import load_tensors
from mrgym_trainers.gdpo.config import GDPOConfig, load_config
from mrgym_trainers.gdpo.keeper import stored_steps
from mrgym_trainers.gdpo.policy import Policy
from mrgym_trainers.gdpo.ranks import Ranks
from mrgym_trainers.gdpo.run_state import RunState, restore_env, restore_random

__all__ = ["FREE_KEYS", "Resume", "open_run", "plain_args", "run_folder", "run_identity"]

FREE_KEYS: Final = frozenset(
    {
        "steps", "eval_every", "eval_tasks", "rollouts_every", "time_limit", "ranks_timeout",
        "checkpoint_every", "checkpoint_keep", "checkpoint_best", "checkpoint_async",
    }
)  # fmt: skip
"""Keys of the configuration that a resumed run may change."""

TASK_ORDER: Final = "the position in the tasks"
RANDOM: Final = "random states"
ENV_STATE: Final = "the environment's state"
ESTIMATOR: Final = "the estimator's state"
BEST_SO_FAR: Final = "the best evaluation so far"
WEIGHTS: Final = "weights and optimiser state"
LATER: Final = "later checkpoints"

# What is of no use where the part of a run's identity of that name differs.
_DROPPED: Final[Mapping[str, tuple[str, ...]]] = {
    "env": (ENV_STATE, BEST_SO_FAR),
    "env_args": (ENV_STATE,),
    "components": (ESTIMATOR, BEST_SO_FAR),
    "tasks": (TASK_ORDER,),
    "weights": (WEIGHTS,),
    "seed": (TASK_ORDER, RANDOM),
    "advantage": (ESTIMATOR,),
}
_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Resume:
    """A run to go on with.

    Attributes:
        folder: The run folder.
        checkpoint: The checkpoint to go on from; None where there is none, and the run begins
            again.
        record: What the checkpoint says of the run.
        later: Steps of checkpoints after it.
        dropped: What is not taken over, set by :meth:`check`.
    """

    folder: Path
    checkpoint: Path | None
    record: TrainerRecord | None
    later: list[int]
    dropped: set[str] = dataclasses.field(default_factory=set)

    @property
    def config(self) -> GDPOConfig:
        """The run's configuration."""
        return load_config(self.folder / "config.yaml")

    def check(self, identity: Mapping[str, Any], *, steps: int, force: bool = False) -> None:
        """Compare a run with this one; with ``force`` say what is dropped instead of refusing.

        Raises:
            ConfigError: If they differ, a later checkpoint would be lost, or the steps are done.
        """
        if self.record is None:
            return
        done = self.record.run.step
        if steps < done:
            raise ConfigError(
                f"resume {self.folder}: got steps={steps}, expected at least the {done} that are "
                "done; raise steps, or leave it out"
            )
        differing = differences(self.record.identity, identity)
        parts = {part for key in differing for part in _DROPPED.get(key.split(".")[0], ())}
        if self.later:
            parts.add(LATER)
        listed = ", ".join(sorted(parts)) or "nothing, but as another run"
        if (differing or self.later) and not force:
            told = [f"{key} = {now}, not {then}" for key, (then, now) in differing.items()]
            told += [f"checkpoints of steps {self.later} after it"] if self.later else []
            raise ConfigError(
                f"resume {self.folder}: got {'; '.join(told)}, expected the run of {self._name}; "
                f"change it back, or pass --force to go on, which drops {listed}"
            )
        self.dropped = parts
        if differing or self.later:
            _log.warning("resume %s: --force drops %s", self.folder, listed)

    def load(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        control: torch.Generator,
        env: TextEnv,
        ranks: Ranks,
    ) -> RunState:
        """Load what the checkpoint holds and was not dropped, and return where the run stands.

        A rank beyond those that wrote it takes the state of the first.

        Raises:
            ConfigError: If it does not fit.
        """
        if self.record is None or self.checkpoint is None:
            return RunState()
        if WEIGHTS not in self.dropped:
            load_tensors(self.checkpoint / TENSORS, policy, optimizer, ranks)
        rank = read_rank_state(self.checkpoint, ranks.rank) or read_rank_state(self.checkpoint)
        if rank is not None:
            if RANDOM not in self.dropped:
                restore_random(rank, control)
            if ENV_STATE not in self.dropped:
                restore_env(rank, env)
        return self._left(self.record.run)

    def _left(self, run: RunState) -> RunState:
        """Return where the run stood without what is dropped."""
        if TASK_ORDER in self.dropped:
            run = msgspec.structs.replace(run, tasks={**run.tasks, "position": 0})
        if ESTIMATOR in self.dropped:
            run = msgspec.structs.replace(run, estimator={})
        return msgspec.structs.replace(run, best=None) if BEST_SO_FAR in self.dropped else run

    @property
    def _name(self) -> str:
        return str(self.checkpoint and self.checkpoint.name)


def run_folder(path: str | Path) -> Path:
    """Return the run folder that is meant by itself or by a checkpoint in it.

    Raises:
        ConfigError: If it is none.
    """
    path = Path(path)
    folder = path.absolute().parent.parent if path.absolute().parent.name == "checkpoints" else path
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"resume {path}: got no config.yaml there, expected a run folder; give the folder "
            "passed to --out, or train without --resume"
        )
    return folder


def open_run(path: str | Path) -> Resume:
    """Return the run in a folder with its last good checkpoint, or with the one that is named.

    Args:
        path: A run folder, or one of the checkpoints in it.

    Raises:
        ConfigError: If it is no run folder, or all its checkpoints are damaged.
    """
    folder = run_folder(path)
    wanted = None if folder == Path(path) else Path(path).resolve()  # of a link, its target
    steps = stored_steps(folder / "checkpoints")
    if wanted is not None:
        record = _record(wanted)
        return Resume(folder, wanted, record, [s for s in steps if s > record.run.step])
    return _newest(folder, steps)


def _newest(folder: Path, steps: list[int]) -> Resume:
    reasons = []
    for step in reversed(steps):
        checkpoint = step_folder(folder / "checkpoints", step)
        try:
            return Resume(folder, checkpoint, _record(checkpoint), [])
        except ConfigError as error:
            reasons.append(str(error))
            _log.warning("resume: passing over %s", error)
    if reasons:
        raise ConfigError(
            f"resume {folder}: got no good checkpoint ({reasons[0]}), expected one; "
            "train without --resume into another folder"
        )
    _log.warning("resume %s: got no checkpoint, so the run begins again at step 0", folder)
    return Resume(folder, None, None, [])


def _record(checkpoint: Path) -> TrainerRecord:
    if not verify(checkpoint).resumable:
        raise ConfigError(
            f"{checkpoint / MANIFEST}: got a checkpoint of a run that was interrupted in an "
            "update, expected one of the end of a step; take an earlier one"
        )
    return read_record(checkpoint)


def run_identity(
    env: TextEnv,
    env_args: Mapping[str, Any] | None,
    tasks: TaskSource,
    policy: Policy,
    config: GDPOConfig,
) -> dict[str, Any]:
    """Return what a run is of, as plain JSON.

    Args:
        env: The environment.
        env_args: Its arguments; None where it was not made from them here.
        tasks: The training tasks.
        policy: The policy.
        config: The configuration, weights resolved.
    """
    shapes = [(name, list(weight.shape)) for name, weight in policy.model.named_parameters()]
    identity = {
        "env": env.contract_name,
        "env_args": None if env_args is None else {k: _plain(v) for k, v in env_args.items()},
        "components": {name: _component(c) for name, c in env.components.items()},
        "tasks": f"{len(tasks)} tasks of hash {_digest([_task(task) for task in tasks])}",
        "weights": f"{len(shapes)} tensors of hash {_digest(shapes)}",
        **config.model_dump(mode="json", exclude=set(FREE_KEYS)),
    }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(identity))
    return plain


def plain_args(env_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return an environment's arguments as far as a file can hold them."""
    plain = (str, int, float, bool, list, dict, Path, type(None))
    return {key: _plain(value) for key, value in env_args.items() if isinstance(value, plain)}


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the dotted keys whose values differ, with the saved value and the present one.

    A key that only one of the two knows is a difference, except at the top: another release may
    have added it.
    """
    if saved.get("env_args") is None or now.get("env_args") is None:
        saved, now = ({k: v for k, v in d.items() if k != "env_args"} for d in (saved, now))
    both = saved.keys() & now.keys()
    one, other = (_flat({k: v for k, v in d.items() if k in both}) for d in (saved, now))
    keys = [*one, *(key for key in other if key not in one)]
    pairs = {key: (one.get(key, "nothing"), other.get(key, "nothing")) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[prefix + key] = repr(item)
    return flat


def _component(component: Component) -> str:
    # Weights are the configuration's, and a doc changes no score.
    fields = (f.name for f in dataclasses.fields(component) if f.name not in ("weight", "doc"))
    return ", ".join(f"{name}={getattr(component, name)}" for name in fields)


def _task(task: Any) -> Any:
    return [task.id, task.prompt, task.answer, task.metadata]


def _digest(value: Any) -> str:
    data = msgspec.json.encode(msgspec.to_builtins(value, str_keys=True, enc_hook=_kind))
    return hashlib.sha256(data).hexdigest()[:16]


def _kind(value: Any) -> str:
    """Return what stands for a value without a JSON form; its text may hold an address."""
    return type(value).__qualname__


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())
    try:
        return msgspec.json.decode(msgspec.json.encode(value))
    except (TypeError, ValueError):
        return _kind(value)
