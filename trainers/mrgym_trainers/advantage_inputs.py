"""Reading a batch: columns of any kind become checked float64 rows, sorted by group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mrgym.components import ABSENT, PRESENT_PREFIX, REWARD_PREFIX, present_key, reward_key
from mrgym.errors import ConfigError, RolloutError, closest
from mrgym_trainers.advantage_config import AdvantageConfig
from mrgym_trainers.group_stats import MAX_ROWS, BoolArray, FloatArray, Groups, IntArray

__all__ = ["Column", "Inputs", "is_torch", "read_inputs"]

Column: TypeAlias = Any
"""A torch tensor, an array or a list [B]; in a list None (or ``mrgym.ABSENT``) marks absence."""

_LARGEST = 1e300


@dataclass(frozen=True, slots=True)
class Inputs:
    """A checked batch, rows sorted by group and components by name.

    Attributes:
        names: [K] component names.
        weights_K: [K] weights.
        scores_KB: [K, B] scores, 0 where absent.
        present_KB: [K, B] True where the score counts.
        usable_B: [B] True where the rollout counts.
        tokens_B: [B] completion lengths, or None.
        groups: The groups of the rows.
        resolution: Relative precision of the coarsest column, 0 for exact kinds.
    """

    names: tuple[str, ...]
    weights_K: FloatArray
    scores_KB: FloatArray
    present_KB: BoolArray
    usable_B: BoolArray
    tokens_B: FloatArray | None
    groups: Groups
    resolution: float


def read_inputs(
    batch: Mapping[str, Column],
    group_ids: Column,
    config: AdvantageConfig,
    valid: Column | None,
    completion_lengths: Column | None,
) -> Inputs:
    """Return the batch checked and sorted.

    Raises:
        RolloutError: A column, id or mask cannot be read, or the groups cannot be right.
        ConfigError: The weights do not cover exactly the batch's components.
    """
    names = _component_names(batch)
    weights_K = _resolve_weights(names, config)
    ids_B = _integers("group_ids", group_ids)
    groups = _form_groups(ids_B, config)
    valid_B = _mask("valid", valid, len(ids_B))
    columns = [_read_scores(batch, name, valid_B, config) for name in names]
    scores_KB = np.stack([scores_B for scores_B, _ in columns])
    present_KB = np.stack([present_B for _, present_B in columns])
    tokens_B = _token_counts(completion_lengths, len(ids_B))
    return Inputs(
        names=names,
        weights_K=weights_K,
        scores_KB=scores_KB[:, groups.order_B],
        present_KB=present_KB[:, groups.order_B],
        usable_B=np.any(present_KB, axis=0)[groups.order_B],
        tokens_B=None if tokens_B is None else tokens_B[groups.order_B],
        groups=groups,
        resolution=max(_resolution(batch[reward_key(name)]) for name in names),
    )


def is_torch(column: object) -> bool:
    """Return whether the column is a torch tensor, without importing torch."""
    return type(column).__module__.partition(".")[0] == "torch"


def _component_names(batch: Mapping[str, Column]) -> tuple[str, ...]:
    keys = sorted(str(key) for key in batch)
    names = tuple(key.removeprefix(REWARD_PREFIX) for key in keys if key.startswith(REWARD_PREFIX))
    if not names:
        raise RolloutError(
            f"batch: got keys {keys}, expected at least one {reward_key('<name>')!r}; "
            "build keys with mrgym.reward_key(name)"
        )
    for key in keys:
        if key.startswith(PRESENT_PREFIX) and key.removeprefix(PRESENT_PREFIX) not in names:
            raise RolloutError(
                f"batch: got {key!r} without its scores, expected one of "
                f"{[present_key(name) for name in names]}; drop it or add the scores"
            )
    return names


def _resolve_weights(names: tuple[str, ...], config: AdvantageConfig) -> FloatArray:
    weights = config.weights if config.weights is not None else dict.fromkeys(names, 1.0)
    unknown = sorted(set(weights) - set(names))
    missing = sorted(set(names) - set(weights))
    if unknown or missing:
        hint = closest(unknown[0], missing or names) if unknown else ""
        raise ConfigError(
            f"AdvantageConfig: weights: got {sorted(weights)}, expected exactly {list(names)} "
            f"(unknown {unknown}, missing {missing})" + (hint or "; name every component once")
        )
    weights_K = np.array([weights[name] for name in names], dtype=np.float64)
    return weights_K.astype(np.float32).astype(np.float64) if config.float32_factors else weights_K


def _form_groups(ids_B: IntArray, config: AdvantageConfig) -> Groups:
    if not 1 <= len(ids_B) <= MAX_ROWS:
        raise RolloutError(f"group_ids: got {len(ids_B)} rollouts, expected 1 to {MAX_ROWS}")
    groups = Groups.from_ids(ids_B)
    if len(ids_B) > 1 and groups.sizes_P.max() == 1 and not config.allow_singletons:
        raise RolloutError(
            f"group_ids: got {len(ids_B)} rollouts in as many groups, expected several rollouts a "
            "group (alone, each has advantage 0); give the rollouts of one task one id, or set "
            "allow_singletons=True in evaluation"
        )
    return groups


def _read_scores(
    batch: Mapping[str, Column], name: str, valid_B: BoolArray, config: AdvantageConfig
) -> tuple[FloatArray, BoolArray]:
    """Return scores [B], 0 where absent, and whether each counts [B]."""
    key = reward_key(name)
    scores_B, absent_B = _numbers(key, batch[key], len(valid_B))
    absent_B |= ~_mask(present_key(name), batch.get(present_key(name)), len(valid_B))
    if config.missing == "nan":
        absent_B |= np.isnan(scores_B)
    if config.missing == "error" and (absent_B & valid_B).any():
        row = int(np.flatnonzero(absent_B & valid_B)[0])
        raise RolloutError(
            f"{key}[{row}]: got no score, expected one for every rollout (missing='error'); "
            "score it, or choose missing='abstain'"
        )
    counts_B = valid_B & ~absent_B
    _check_finite(key, scores_B, counts_B)
    return np.where(counts_B, scores_B, 0.0), valid_B if config.missing == "zero" else counts_B


def _check_finite(key: str, scores_B: FloatArray, counts_B: BoolArray) -> None:
    bad_B = counts_B & ~(np.abs(scores_B) <= _LARGEST)
    if bad_B.any():
        row = int(np.flatnonzero(bad_B)[0])
        raise RolloutError(
            f"{key}[{row}]: got {scores_B[row]}, expected a finite number below {_LARGEST:g}; "
            f"mark an unmeasured score absent ({key.replace(REWARD_PREFIX, PRESENT_PREFIX, 1)!r}, "
            "or missing='nan'), a failed rollout unusable (valid)"
        )


def _numbers(key: str, column: Column, length: int) -> tuple[FloatArray, BoolArray]:
    """Return a column as float64 [B], NaN where absent, and where it is absent [B]."""
    array = _as_array(column)
    absent_B = np.zeros(array.shape, dtype=np.bool_)
    if array.dtype == object and array.ndim == 1:
        absent_B = np.array([value is None or value is ABSENT for value in array], dtype=np.bool_)
        filled = zip(array, absent_B, strict=True)
        array = _as_array([np.nan if absent else value for value, absent in filled])
    if array.dtype.kind not in "biuf" or array.shape != (length,):
        raise RolloutError(
            f"{key}: got {array.dtype} of shape {list(array.shape)}, expected numbers of shape "
            f"[{length}], one a rollout as in group_ids; nothing is broadcast"
        )
    return array.astype(np.float64), absent_B


def _integers(key: str, column: Column) -> IntArray:
    array = _as_array(column)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RolloutError(
            f"{key}: got {array.dtype} of shape {list(array.shape)}, expected integers of shape [N]"
        )
    return array.astype(np.int64)


def _mask(key: str, column: Column | None, length: int) -> BoolArray:
    """Return a mask [B], all True for None."""
    if column is None:
        return np.ones(length, dtype=np.bool_)
    numbers_B, _ = _numbers(key, column, length)
    if not np.isin(numbers_B, (0.0, 1.0)).all():
        raise RolloutError(f"{key}: got values other than 0 and 1, expected a mask")
    return numbers_B.astype(np.bool_)


def _token_counts(column: Column | None, length: int) -> FloatArray | None:
    if column is None:
        return None
    counts_B, _ = _numbers("completion_lengths", column, length)
    if not ((counts_B >= 0) & (counts_B == np.floor(counts_B)) & (counts_B < 2**31)).all():
        raise RolloutError(
            "completion_lengths: got a value that is no token count, expected 0, 1, ..."
        )
    return counts_B


def _as_array(column: Column) -> npt.NDArray[Any]:
    if is_torch(column):
        column = column.detach().cpu()
        column = (column.double() if column.is_floating_point() else column).numpy()
    try:
        return np.asarray(column)
    except ValueError:  # rows of unequal length
        return np.asarray(column, dtype=object)


def _resolution(column: Column) -> float:
    """Return the relative precision of a column's type, 0 for lists, integers and booleans."""
    if is_torch(column):
        import torch

        return torch.finfo(column.dtype).eps if column.is_floating_point() else 0.0
    if isinstance(column, Sequence):
        return 0.0
    dtype = np.asarray(column).dtype
    return float(np.finfo(dtype).eps) if dtype.kind == "f" else 0.0
