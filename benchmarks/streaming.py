"""What slow scoring costs a step: 50 ms a completion on worker processes, beside sampling.

    python benchmarks/streaming.py [--steps 4] [--workers 2] [--rows 64] [--sampler vllm]

The tiny policy trains for some steps with a score function that waits, and again with one that
does not. A step should take no longer than the slower of sampling and scoring, and what is left
of a step: printed is ``step / (max(sample, score) + rest)``, with ``sample`` and ``rest`` from
the steps with fast scoring and ``score`` measured alone, all completions of a step at once. 1.00
is a perfect overlap; without any it would be ``(sample + score + rest) / (max(sample, score) +
rest)``. The first step, in which workers start, is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import mrgym
from mrgym.sampler import Completion
from mrgym.scoring import WorkerScorer
from mrgym_envs.math_multi_reward import MathMultiReward


class SlowMath(MathMultiReward):
    """The bundled environment with a component that takes its time."""

    delay = 0.0

    @mrgym.component(low=0, high=0)
    def patience(self, task: mrgym.Task, completion: str) -> float:
        """Wait, as a judge over the network would."""
        time.sleep(self.delay)
        return 0.0


class SlowMath50(SlowMath):
    """50 ms a completion."""

    delay = 0.05


def phases(env: type[SlowMath], args: argparse.Namespace) -> dict[str, float]:
    """Return the median seconds of a step's phases."""
    from mrgym_trainers import GDPOConfig, GDPOTrainer

    config = GDPOConfig(
        steps=args.steps + 1,
        sampler=args.sampler,
        scoring="workers",
        score_workers=args.workers,
        sample_rows=args.rows,
        eval_tasks=1,
        advantage={"weights": {"patience": 0.0}},
    )
    with tempfile.TemporaryDirectory() as folder:
        GDPOTrainer(env(), config, out=Path(folder) / "run").train()
        text = (Path(folder) / "run" / "metrics.jsonl").read_text()
    lines = [line for line in map(json.loads, text.splitlines()) if line["kind"] == "train"][1:]
    keys = ("sample", "score", "draw", "update", "other", "step")
    return {key: statistics.median(line[f"time/{key}_s"] for line in lines) for key in keys}


def scoring_alone(workers: int) -> float:
    """Return the seconds that the slow scores of a step take with nothing beside them."""
    env = SlowMath50()
    tasks = list(env.task_source("train"))[:32]
    states = [env.start(task, np.random.default_rng(0)) for task in tasks for _ in range(8)]
    completions = [Completion("<think>1</think>\n<answer>1</answer>") for _ in states]
    with WorkerScorer(workers=workers, deadline=60) as scorer:
        scorer.score(env, states[: 2 * workers], completions[: 2 * workers])  # workers start
        start = time.perf_counter()
        scorer.score(env, states, completions)
        return time.perf_counter() - start


def main() -> None:
    """Run both and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sampler", default="transformers")
    parser.add_argument("--rows", type=int, default=64, help="completions sampled at a time")
    args = parser.parse_args()
    fast, slow = phases(SlowMath, args), phases(SlowMath50, args)
    score = scoring_alone(args.workers)
    rest = fast["step"] - fast["draw"]
    for name, values in (("fast", fast), ("slow", slow)):
        print(name, " ".join(f"{key} {value:.2f} s" for key, value in values.items()))
    slower = max(fast["sample"], score)
    floor = slower + rest
    print(f"scoring alone {score:.2f} s, rest of the step {rest:.2f} s, floor {floor:.2f} s")
    print(f"step / floor: {slow['step'] / floor:.3f}")
    print(f"(step - rest) / max(sample, score): {(slow['step'] - rest) / slower:.3f}")
    print(f"without overlap it would be {(fast['sample'] + score + rest) / floor:.3f}")


if __name__ == "__main__":
    main()
