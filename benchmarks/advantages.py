"""Time compute_advantages against the ways of other trainers, and against the number of rollouts.

Run from the checkout: ``python benchmarks/advantages.py [--quick]``. The rivals are written here,
in the manner of trainers that visit one prompt at a time with torch (by group id, or by comparing
prompt tokens) and of trainers that reshape to [prompts, group]. All run in one process, taking
turns on the same float64 scores, and must agree.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from mrgym import reward_key
from mrgym_trainers.advantages import compute_advantages

NAMES = ("correct", "format", "length")
GROUP_SIZE = 16
PROMPT_TOKENS = 64
EPS = 1e-4


@dataclass(frozen=True)
class Batch:
    """Scores by component [B], group ids [B] and prompt tokens [B, T]."""

    scores: dict[str, torch.Tensor]
    group_ids: torch.Tensor
    prompts_BT: torch.Tensor


Way = Callable[[Batch], torch.Tensor]


def vectorised(batch: Batch) -> torch.Tensor:
    """Return advantages [B] from compute_advantages, tensors in and tensors out."""
    columns = {reward_key(name): column for name, column in batch.scores.items()}
    advantages: torch.Tensor = compute_advantages(columns, batch.group_ids).advantages
    return advantages


def loop_over_ids(batch: Batch) -> torch.Tensor:
    """Return the same from a loop over components and group ids."""
    total = torch.zeros_like(batch.scores[NAMES[0]])
    for component in batch.scores.values():
        advantage = torch.zeros_like(component)
        for group_id in torch.unique(batch.group_ids):
            mask = batch.group_ids == group_id
            group = component[mask]
            advantage[mask] = (group - group.mean()) / (group.std() + EPS)
        total += advantage
    return whiten(total)


def loop_over_prompts(batch: Batch) -> torch.Tensor:
    """Return the same from a loop that finds the rollouts of a prompt by its tokens."""
    total = torch.zeros_like(batch.scores[NAMES[0]])
    for component in batch.scores.values():
        advantage = torch.zeros_like(component)
        for prompt in torch.unique(batch.prompts_BT, dim=0):
            mask = (batch.prompts_BT == prompt).all(dim=1)
            group = component[mask]
            advantage[mask] = (group - group.mean()) / (group.std() + EPS)
        total += advantage
    return whiten(total)


def reshaped(batch: Batch) -> torch.Tensor:
    """Return the same by reshaping, for equal groups in order and no missing score only."""
    scores_BK = torch.stack(list(batch.scores.values()), dim=1)
    scores_PGK = scores_BK.view(-1, GROUP_SIZE, len(NAMES))
    centred_PGK = scores_PGK - scores_PGK.mean(dim=1, keepdim=True)
    return whiten((centred_PGK / (scores_PGK.std(dim=1, keepdim=True) + EPS)).sum(dim=2).view(-1))


def whiten(total: torch.Tensor) -> torch.Tensor:
    """Return advantages whitened over the batch [B]."""
    return (total - total.mean()) / (total.std() + EPS)


def make_batch(prompts: int, shuffle: bool = False, tokens: int = 0) -> Batch:
    """Return binary and continuous random scores of prompts * 16 rollouts."""
    rng = np.random.default_rng(prompts)
    rollouts = prompts * GROUP_SIZE
    ids = np.repeat(np.arange(prompts), GROUP_SIZE)
    columns = (rng.integers(0, 2, rollouts), rng.integers(0, 2, rollouts), rng.random(rollouts))
    scores = {n: torch.tensor(c, dtype=torch.float64) for n, c in zip(NAMES, columns, strict=True)}
    ids = rng.permutation(ids) if shuffle else ids
    prompts_PT = rng.integers(0, 150_000, (prompts, tokens))
    return Batch(scores, torch.tensor(ids), torch.tensor(prompts_PT[ids]))


def milliseconds(way: Way, batch: Batch, calls: int = 1) -> float:
    """Return the mean wall-clock time of successive calls."""
    start = time.perf_counter()
    for _ in range(calls):
        way(batch)
    return (time.perf_counter() - start) / calls * 1e3


def compare(rival: Way, prompts: int, turns: int, rival_calls: int = 1) -> None:
    """Print a rival's time, ours, the ratio turn by turn and the largest difference."""
    batch = make_batch(prompts, tokens=PROMPT_TOKENS if rival is loop_over_prompts else 0)
    gap = float((rival(batch) - vectorised(batch)).abs().max())
    pairs = [
        (milliseconds(rival, batch, rival_calls), milliseconds(vectorised, batch, 10))
        for _ in range(turns)
    ]
    ratios = sorted(theirs / ours for theirs, ours in pairs)
    theirs, ours = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(
        f"{rival.__name__:18} {prompts:7} {theirs:10.2f} ms {ours:8.2f} ms "
        f"{statistics.median(ratios):8.1f} x ({ratios[0]:.1f} to {ratios[-1]:.1f}) {gap:9.0e}"
    )
    if gap > 1e-9:
        raise SystemExit(f"{rival.__name__} and compute_advantages do not agree")


def grow(sizes: list[int], turns: int) -> None:
    """Print our time for growing batches, rows in group order and shuffled."""
    print("\n  rollouts   in order  ns/rollout   shuffled  ns/rollout")
    medians: list[float] = []
    for prompts in sizes:
        row = f"{prompts * GROUP_SIZE:10,}"
        for shuffle in (False, True):
            batch = make_batch(prompts, shuffle)
            took = statistics.median(milliseconds(vectorised, batch) for _ in range(turns))
            row += f" {took:8.2f} ms {took / prompts / GROUP_SIZE * 1e6:10.0f} "
            medians.append(took)
        print(row)
    slope = np.polyfit(np.log(sizes[-3:]), np.log(medians[::2][-3:]), 1)[0]
    print(f"  in order, time grows as rollouts^{slope:.2f} over the last {len(sizes[-3:])} sizes")


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, for a smoke test")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    print(
        f"python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}, "
        f"{platform.machine()}, {os.cpu_count()} cores, 1 torch thread, load "
        f"{os.getloadavg()[0]:.1f}\n"
    )
    print("16 rollouts a group, 3 components; medians over turns, ours the mean of 10 calls a turn")
    print(f"{'rival':18} {'groups':>7} {'rival':>13} {'ours':>11} {'ratio':>10}")
    compare(loop_over_ids, 64 if quick else 512, turns=3 if quick else 15)
    compare(loop_over_prompts, 64 if quick else 512, turns=3)
    compare(loop_over_ids, 32, turns=3 if quick else 15)
    compare(reshaped, 64 if quick else 512, turns=3 if quick else 15, rival_calls=10)
    grow([64, 512] if quick else [64, 512, 4_096, 16_384, 65_536], turns=3 if quick else 5)


if __name__ == "__main__":
    main()
