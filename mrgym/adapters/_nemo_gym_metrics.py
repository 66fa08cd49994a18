"""What ``/aggregate_metrics`` answers: statistics of every number of the verify responses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mrgym.components import as_score
from mrgym.errors import WireError

__all__ = ["ROLLOUT", "TASK", "aggregate"]

TASK = "_ng_task_index"
ROLLOUT = "_ng_rollout_index"

Numbers = dict[str, float]


def aggregate(responses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return mean, max, min, median and std of every number, by task and over all.

    A number counts where it stands at the top level of a verify response, or in its token usage.
    The std is unbiased, and 0 over a single rollout.

    Raises:
        WireError: If a number is not finite.
    """
    numbers = [_numbers(response) for response in responses]
    by_task: dict[int, list[int]] = {}
    for i, response in enumerate(responses):
        by_task.setdefault(_task(response), []).append(i)
    overall = _describe(numbers)
    return {
        "group_level_metrics": [
            {TASK: task, "num_rollouts": len(members)} | _describe(numbers[i] for i in members)
            for task, members in sorted(by_task.items())
        ],
        "agent_metrics": overall,
        "key_metrics": {key: v for key, v in overall.items() if key.startswith("mean/")},
    }


def _task(response: Mapping[str, Any]) -> int:
    task = response.get(TASK, 0)
    return task if isinstance(task, int) else 0


def _numbers(response: Mapping[str, Any]) -> Numbers:
    inner = response.get("response")
    usage = inner.get("usage") if isinstance(inner, Mapping) else None
    fields = {**response, **(usage if isinstance(usage, Mapping) else {})}
    numbers = {
        name: as_score(value, name, "verify response")
        for name, value in fields.items()
        if isinstance(value, (int, float)) and name not in (TASK, ROLLOUT)
    }
    infinite = [name for name, value in numbers.items() if not math.isfinite(value)]
    if infinite:
        raise WireError(
            f"verify response: got {infinite} that are no finite numbers, expected finite ones; "
            "send the answers of /verify as they are"
        )
    return numbers


def _describe(rows: Iterable[Numbers]) -> dict[str, float]:
    columns: dict[str, list[float]] = {}
    count = 0
    for row in rows:
        count += 1
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    out: dict[str, float] = {}
    for name, values in columns.items():
        out[f"mean/{name}"] = statistics.fmean(values)
        out[f"max/{name}"] = max(values)
        out[f"min/{name}"] = min(values)
        out[f"median/{name}"] = statistics.median(values)
        if len(values) > 1 or count == 1:
            out[f"std/{name}"] = statistics.stdev(values) if len(values) > 1 else 0.0
    return out
