"""Which reward combinations can an advantage tell apart, and which can it not?

Run: ``python examples/advantage_collapse.py``, no arguments, about a second.

GRPO adds the rewards up and normalises the sum; GDPO (arXiv 2601.05242) normalises each reward
within its group first. The sum makes different groups look alike ("reward advantage collapse").
Every figure below is computed on the spot by mrgym's own compute_advantages, without epsilons.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mrgym import reward_key
from mrgym_trainers.advantages import AdvantageConfig, AdvantageResult, compute_advantages

GROUP_SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16)
COMPONENT_COUNTS = (1, 2, 3, 4, 5)
ESTIMATORS = ("grpo", "dr_grpo", "gdpo")  # dr_grpo: GRPO without dividing by the std

Scores = dict[str, list[float]]


def advantages(
    scores: Scores, groups: list[int], estimator: str, weights: dict[str, float] | None = None
) -> AdvantageResult:
    """Advantages of scores by component name, with both epsilons at 0."""
    batch = {reward_key(name): column for name, column in scores.items()}
    config = AdvantageConfig(estimator=estimator, weights=weights, group_eps=0.0, batch_eps=0.0)
    return compute_advantages(batch, groups, config)


def count_distinct(estimator: str, group_size: int, components: int) -> int:
    """Number of different advantage vectors over all groups of binary scores, before whitening."""
    kinds = np.array(list(itertools.product((0.0, 1.0), repeat=components)))
    members = itertools.combinations_with_replacement(range(len(kinds)), group_size)
    scores_PGK = kinds[np.array(list(members))]
    prompts = len(scores_PGK)
    columns = {f"c{k}": scores_PGK[:, :, k].ravel().tolist() for k in range(components)}
    groups = np.repeat(np.arange(prompts), group_size).tolist()
    if estimator == "gdpo":
        estimator = "mo_grpo"  # gdpo without the whitening, which is not counted here
    values = advantages(columns, groups, estimator).before_whitening.reshape(prompts, group_size)
    return len(np.unique(np.sort(np.round(values, 6) + 0.0, axis=1), axis=0))


def two_groups() -> dict[str, list[float]]:
    """One reward won against both won: rollouts (0,0), (0,1) and rollouts (0,0), (1,1)."""
    scores = {"correct": [0.0, 0.0, 0.0, 1.0], "format": [0.0, 1.0, 0.0, 1.0]}
    grpo, gdpo = (advantages(scores, [0, 0, 1, 1], name) for name in ("grpo", "gdpo"))
    return {
        "grpo": grpo.advantages.tolist(),
        "gdpo before whitening": gdpo.before_whitening.tolist(),
        "gdpo": gdpo.advantages.tolist(),
    }


def trade_off() -> dict[str, list[float]]:
    """Rollouts (1,0) and (0,1): each wins what the other loses."""
    scores = {"correct": [1.0, 0.0], "format": [0.0, 1.0]}
    unequal = {"correct": 1.0, "format": 0.5}
    return {
        "grpo, weights 1 and 1": advantages(scores, [0, 0], "grpo").advantages.tolist(),
        "gdpo, weights 1 and 1": advantages(scores, [0, 0], "gdpo").advantages.tolist(),
        "grpo, weights 1 and 0.5": advantages(scores, [0, 0], "grpo", unequal).advantages.tolist(),
        "gdpo, weights 1 and 0.5": advantages(scores, [0, 0], "gdpo", unequal).advantages.tolist(),
    }


def scales() -> dict[str, list[float]]:
    """A component of 0 or 1 beside one of 0 to 300: the sum listens to the large one."""
    scores = {"correct": [1.0, 1.0, 0.0, 0.0], "length": [0.0, 100.0, 200.0, 300.0]}
    return {
        name: advantages(scores, [0] * 4, name).advantages.tolist() for name in ("grpo", "gdpo")
    }


def show_counts(console: Console, title: str, counts: dict[str, dict[int, int]]) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("estimator")
    for heading in counts["gdpo"]:
        table.add_column(str(heading), justify="right")
    for estimator, row in counts.items():
        table.add_row(estimator, *map(str, row.values()))
    console.print(table)


def show_values(
    console: Console, title: str, columns: list[str], rows: dict[str, list[float]]
) -> None:
    table = Table(title=title, title_justify="left")
    for heading in ("estimator", *columns):
        table.add_column(heading, justify="left" if heading == "estimator" else "right")
    for name, values in rows.items():
        table.add_row(name, *(f"{value + 0.0:+.3f}" for value in values))
    console.print(table)


def main() -> dict[str, Any]:
    console = Console(width=100)
    data: dict[str, Any] = {
        "by_group_size": {
            e: {size: count_distinct(e, size, 2) for size in GROUP_SIZES} for e in ESTIMATORS
        },
        "by_components": {
            e: {k: count_distinct(e, 4, k) for k in COMPONENT_COUNTS} for e in ESTIMATORS
        },
        "two_groups": two_groups(),
        "trade_off": trade_off(),
        "scales": scales(),
    }
    show_counts(
        console,
        "Distinct advantage vectors, 2 binary rewards, by group size",
        data["by_group_size"],
    )
    show_counts(
        console,
        "Distinct advantage vectors, group of 4, by number of rewards",
        data["by_components"],
    )
    pairs = ["(0,0)", "(0,1)", "(0,0)", "(1,1)"]
    show_values(console, "Two groups: one reward won, both rewards won", pairs, data["two_groups"])
    console.print("GRPO gives both groups the same advantages; GDPO pays twice for winning both.\n")
    show_values(console, "A pure trade-off in one group", ["(1,0)", "(0,1)"], data["trade_off"])
    console.print(
        "At equal weights GDPO gives exactly 0 here, as GRPO does: it does not separate pure\n"
        "trade-offs. Weights do, and whitening then scales a lone group up to 0.707.\n"
    )
    answers = ["right, 0", "right, 100", "wrong, 200", "wrong, 300"]
    show_values(console, "Rewards of unequal scale (correct, length)", answers, data["scales"])
    console.print("GRPO's best is the long wrong answer, GDPO's best a right one.")
    return data


if __name__ == "__main__":
    main()
