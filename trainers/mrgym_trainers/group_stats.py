"""Group and batch statistics that are the same to the last bit in any order of the rollouts.

Rows of a group may arrive interleaved, in any order, from any number of ranks. Sums are therefore
taken over slices of the significand that add up exactly in float64, so no order can show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from mrgym_trainers.advantage_config import AdvantageConfig

__all__ = [
    "MAX_ROWS",
    "Groups",
    "correlations",
    "exact_sums",
    "group_range",
    "group_std",
    "mean_and_std",
    "normalise",
    "positive",
]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
_Kind = TypeVar("_Kind", bound=np.generic)

_FEW_BITS, _MANY_BITS = 13, 26
MAX_ROWS = 2**_MANY_BITS
"""Sums of more rows than this would no longer be exact."""

_NO_SPREAD = 1e-12
"""Variance of the others, relative to that of the group, that is rounding noise."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Rollouts sorted by group: ``order_B`` sorts them, group p starts at ``starts_P[p]``."""

    order_B: IntArray | slice
    starts_P: IntArray
    sizes_P: IntArray

    @classmethod
    def from_ids(cls, ids_B: IntArray) -> Groups:
        """Return the groups of arbitrary integer ids [B], at least one; sizes may differ."""
        order_B: IntArray | slice = slice(None)  # the usual case, rows already lie by group
        if (ids_B[1:] < ids_B[:-1]).any():
            order_B = np.argsort(ids_B, kind="stable")
        sorted_B = ids_B[order_B]
        starts_P = np.flatnonzero(np.append(True, sorted_B[1:] != sorted_B[:-1]))
        return cls(order_B, starts_P, np.diff(starts_P, append=len(ids_B)))

    def spread(self, values_P: npt.NDArray[_Kind]) -> npt.NDArray[_Kind]:
        """Return per-group values [..., P] repeated for each of the group's rows [..., B]."""
        return np.repeat(values_P, self.sizes_P, axis=-1)

    def reduce(self, ufunc: np.ufunc, values_B: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return ``ufunc`` over each group's rows, [..., B] to [..., P]."""
        return _reduce_segments(ufunc, values_B, self.starts_P)

    def counts(self, present_B: BoolArray) -> IntArray:
        """Return how many of each group's rows are present, [..., B] to [..., P]."""
        if present_B.all():
            return np.broadcast_to(self.sizes_P, (*present_B.shape[:-1], len(self.sizes_P)))
        return self.reduce(np.add, present_B.astype(np.int64))

    def sums(self, values_B: FloatArray) -> FloatArray:
        """Return each group's sum of values between -1 and 1, [..., B] to [..., P]."""
        return exact_sums(values_B, self.starts_P, int(self.sizes_P.max()))

    def restore(self, values_B: npt.NDArray[_Kind]) -> npt.NDArray[_Kind]:
        """Return sorted rows [..., B] in the caller's order."""
        result = np.empty_like(values_B)
        result[..., self.order_B] = values_B
        return result


def exact_sums(values_B: FloatArray, starts_P: IntArray, longest: int) -> FloatArray:
    """Return the sum of each segment, [..., P], the same bits whatever the order of its rows.

    Each value is cut into slices so short that a segment of them adds up without rounding
    (ExtractVector: Rump, Ogita and Oishi, 2008, "Accurate floating-point summation"). The rest,
    below 2**-78, is dropped.

    Args:
        values_B: [..., B], each between -1 and 1.
        starts_P: [P], the first row of each segment.
        longest: Rows of the longest segment, at most MAX_ROWS.
    """
    bits = _FEW_BITS if longest <= 2**_FEW_BITS else _MANY_BITS
    width = 52 - bits
    shift = 1.5 * 2.0**bits
    rest_B = values_B.copy()
    slices = []
    for _ in range(78 // width):
        slice_B = rest_B + shift
        slice_B -= shift
        slices.append(_reduce_segments(np.add, slice_B, starts_P))
        rest_B -= slice_B
        rest_B *= 2.0**width
    total_P: FloatArray = slices.pop()
    while slices:
        total_P = total_P * 2.0**-width + slices.pop()
    return total_P


def _reduce_segments(
    ufunc: np.ufunc, values_B: npt.NDArray[Any], starts_P: IntArray
) -> npt.NDArray[Any]:
    """Return ``ufunc`` over segments of the last axis; flat, which is twice as fast as by axis."""
    leading, rows = values_B.shape[:-1], values_B.shape[-1]
    offsets = np.arange(0, values_B.size, rows)[:, None]
    result: npt.NDArray[Any] = ufunc.reduceat(values_B.ravel(), (offsets + starts_P).ravel())
    return result.reshape(*leading, len(starts_P))


def group_range(
    scores_KB: FloatArray, present_KB: BoolArray, groups: Groups
) -> tuple[FloatArray, FloatArray]:
    """Return lowest score and max - min of each group, both [K, P]; 0 where no row is present."""
    low_KP = groups.reduce(np.minimum, _masked(scores_KB, present_KB, np.inf))
    high_KP = groups.reduce(np.maximum, _masked(scores_KB, present_KB, -np.inf))
    low_KP = np.where(np.isfinite(low_KP), low_KP, 0.0)
    return low_KP, np.where(np.isfinite(high_KP), high_KP - low_KP, 0.0)


def normalise(
    scores_KB: FloatArray, present_KB: BoolArray, groups: Groups, config: AdvantageConfig
) -> FloatArray:
    """Return each row's advantage within its group, [K, B]: ``(r - baseline) / (std + eps)``.

    Exactly 0 where the row is absent, where fewer than two rows are present and where the group
    is constant.

    Args:
        scores_KB: [K, B] finite scores in group order.
        present_KB: [K, B] rows that enter the statistics.
        groups: The groups of the rows.
        config: ``baseline``, ``scale``, ``group_eps``, ``leave_one_out_std``, ``float32_factors``.
    """
    count_KP = groups.counts(present_KB)
    centred_KB, unit_KP = _centre(scores_KB, present_KB, count_KP, groups)
    numerator_KB = centred_KB
    if config.baseline == "leave_one_out":  # r - mean of the others = (r - mean) n / (n - 1)
        numerator_KB = centred_KB * groups.spread(_bessel(count_KP))
    if not config.scale:
        return numerator_KB * groups.spread(unit_KP)
    if config.baseline == "leave_one_out" and config.leave_one_out_std == "others":
        return _over_std_of_others(numerator_KB, centred_KB, count_KP, unit_KP, groups, config)
    squares_KP = groups.sums(centred_KB**2)
    std_KP = np.sqrt(_unbiased(squares_KP, count_KP, config.float32_factors))
    divisor_KP = std_KP + _in_units(config.group_eps, unit_KP)
    return numerator_KB / groups.spread(positive(divisor_KP))


def group_std(
    scores_KB: FloatArray, present_KB: BoolArray, groups: Groups, config: AdvantageConfig
) -> FloatArray:
    """Return each group's unbiased std in units of the score, [K, P], without epsilon.

    Exactly 0 where fewer than two rows are present and where the group is constant.
    """
    count_KP = groups.counts(present_KB)
    centred_KB, unit_KP = _centre(scores_KB, present_KB, count_KP, groups)
    squares_KP = groups.sums(centred_KB**2)
    return np.sqrt(_unbiased(squares_KP, count_KP, config.float32_factors)) * unit_KP


def correlations(
    values_KB: FloatArray, present_KB: BoolArray
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], FloatArray]:
    """Return each pair of rows (two [M]) and their Pearson correlation [M], NaN if one is constant.

    Over the columns where both are present; the same bits in any order of the columns.
    """
    left_M, right_M = np.triu_indices(len(values_KB), 1)
    if not len(left_M):
        return left_M, right_M, np.empty(0)
    both_MB = present_KB[left_M] & present_KB[right_M]
    everyone = Groups(slice(None), np.zeros(1, np.int64), np.array([values_KB.shape[1]]))
    count_MP = everyone.counts(both_MB)
    left_MB, _ = _centre(values_KB[left_M], both_MB, count_MP, everyone)
    right_MB, _ = _centre(values_KB[right_M], both_MB, count_MP, everyone)
    left_MP, right_MP = everyone.sums(left_MB**2), everyone.sums(right_MB**2)
    scale_MP = np.sqrt(left_MP) * np.sqrt(right_MP)
    result_MP = everyone.sums(left_MB * right_MB) / positive(scale_MP)
    return left_M, right_M, np.where(scale_MP > 0, np.clip(result_MP, -1.0, 1.0), np.nan)[:, 0]


def _centre(
    scores_KB: FloatArray, present_KB: BoolArray, count_KP: IntArray, groups: Groups
) -> tuple[FloatArray, FloatArray]:
    """Return scores minus their group's mean, [K, B], and the unit they are in, [K, P].

    Scores are first moved to the group's minimum and scaled by a power of two. Both are nearly
    free of rounding, so a large offset or a tiny spread costs no digits.
    """
    low_KP, span_KP = group_range(scores_KB, present_KB, groups)
    unit_KP = _power_of_two(span_KP)
    moved_KB = (scores_KB - groups.spread(low_KP)) / groups.spread(unit_KP)
    moved_KB = _masked(moved_KB, present_KB, 0.0)
    mean_KP = groups.sums(moved_KB) / np.maximum(count_KP, 1)
    return _masked(moved_KB - groups.spread(mean_KP), present_KB, 0.0), unit_KP


def _bessel(count_KP: IntArray) -> FloatArray:
    """Return n / (n - 1), 1 for a single row."""
    return count_KP / np.maximum(count_KP - 1, 1)


def _over_std_of_others(
    numerator_KB: FloatArray,
    centred_KB: FloatArray,
    count_KP: IntArray,
    unit_KP: FloatArray,
    groups: Groups,
    config: AdvantageConfig,
) -> FloatArray:
    """Return the numerator over std + eps of the other rows, undivided where they are constant."""
    std_KB = _std_of_others(centred_KB, count_KP, groups)
    eps_KB = groups.spread(_in_units(config.group_eps, unit_KP))
    # Constant others have no scale to offer; dividing by eps alone gives values in thousands.
    undivided_KB = groups.spread(_in_units(1.0, unit_KP))
    divisor_KB = np.where(std_KB > 0, std_KB + eps_KB, undivided_KB)
    return numerator_KB / divisor_KB


def _std_of_others(centred_KB: FloatArray, count_KP: IntArray, groups: Groups) -> FloatArray:
    """Return each row's unbiased std over the other rows, [K, B]; exactly 0 if only noise."""
    squares_KP = groups.sums(centred_KB**2)
    all_KB = groups.spread(squares_KP)
    others_KB = all_KB - centred_KB**2 * groups.spread(_bessel(count_KP))
    others_KB = np.where(others_KB > _NO_SPREAD * all_KB, others_KB, 0.0)
    std_KB: FloatArray = np.sqrt(others_KB / groups.spread(np.maximum(count_KP - 2, 1)))
    return std_KB


def mean_and_std(
    values_B: FloatArray, weights_B: FloatArray, float32_factors: bool = False
) -> tuple[float, float]:
    """Return the weighted mean and unbiased std, the same bits in any order of the rows.

    Args:
        values_B: [B] finite values.
        weights_B: [B] whole numbers, 0 leaves a row out; 1 a rollout, or its token count.
        float32_factors: Round n/(n-1) to float32.
    """
    total, heaviest = float(weights_B.sum()), _power_of_two(weights_B.max())
    share_B = weights_B / heaviest
    unit = _power_of_two(np.abs(values_B).max())
    start, rows = np.zeros(1, dtype=np.int64), len(values_B)
    mean = exact_sums(values_B / unit * share_B, start, rows) * unit * heaviest / max(total, 1.0)
    centred_B = (values_B - mean) / (2 * unit)
    squares = exact_sums(centred_B**2 * share_B, start, rows) * heaviest
    std = np.sqrt(_unbiased(squares, np.array([total]), float32_factors)) * (2 * unit)
    return float(mean[0]), float(std[0])


def _unbiased(squares: FloatArray, count: npt.NDArray[Any], float32_factors: bool) -> FloatArray:
    """Return ``squares / (count - 1)``, 0 for fewer than two rows."""
    variance: FloatArray = squares / np.maximum(count - 1, 1)
    if float32_factors:
        factor = count.astype(np.float32) / np.maximum(count - 1, 1).astype(np.float32)
        variance = squares / np.maximum(count, 1) * factor.astype(np.float64)
    return variance


def _power_of_two(values: npt.ArrayLike) -> FloatArray:
    """Return the smallest power of two above each value, 1 for 0."""
    return np.ldexp(1.0, np.frexp(values)[1])


def _in_units(eps: float, unit_KP: FloatArray) -> FloatArray:
    """Return eps in units of the scaled scores (infinite for a spread near the smallest float)."""
    with np.errstate(over="ignore"):
        return np.asarray(eps / unit_KP, dtype=np.float64)


def _masked(values: FloatArray, keep: BoolArray, otherwise: float) -> FloatArray:
    """Return the values, ``otherwise`` where they are not kept."""
    return values if keep.all() else np.where(keep, values, otherwise)


def positive(divisor: FloatArray) -> FloatArray:
    """Return a divisor that is safe where it is 0; what it divides is 0 there as well."""
    return np.where(divisor > 0, divisor, 1.0)
