"""Steps of the tiny policy on this machine against the queueing model and its simulation.

    python benchmarks/scaling_cpu.py [--steps 4]

Two sizes of batch fit four numbers: seconds of a sampling iteration, of a row in it, of a trained
token and of an update. Other sizes are predicted from these and from the lengths that were sampled.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from scaling_simulation import simulate
from scaling_theory import Engine, Lengths, Setup, Trainer, Work

from mrgym_trainers import GDPOConfig, GDPOTrainer

FITTED, PREDICTED = (8, 32), (16, 64)
_ROUNDS = 3
_ROWS = 256  # sample_rows: more completions are sampled one batch after another


@dataclass(frozen=True)
class Measured:
    """The fastest of a run's phases and steps, and the lengths of all its completions.

    The fastest, since other work on the machine only ever adds time.
    """

    rollouts: int
    sample_s: float
    update_s: float
    step_s: float
    lengths: Lengths
    prompt: int


def measure(prompts: int, steps: int) -> Measured:
    """Train the tiny policy here and return what its steps took; the first one is left out."""
    config = GDPOConfig(steps=steps + 1, prompts_per_step=prompts, eval_tasks=1, rollouts_every=1)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        GDPOTrainer("math_multi_reward", config, out=out).train()
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        stored = [path.read_text().splitlines() for path in (out / "rollouts").iterdir()]
    rows = [json.loads(line) for part in stored for line in part]
    timed = [line for line in lines if line["kind"] == "train"][1:]
    seconds = (min(line[f"time/{k}_s"] for line in timed) for k in PHASES)
    lengths = Lengths.observed([sum(row["loss_mask"]) for row in rows])
    prompt = round(statistics.mean(len(row["prompt_token_ids"]) for row in rows))
    return Measured(prompts * config.group_size, *seconds, lengths, prompt)


PHASES = ("sample", "update", "step")


def fastest(runs: tuple[Measured, ...]) -> Measured:
    """Return the fastest phases and steps of some runs of one size."""
    return replace(runs[0], **{f"{k}_s": min(getattr(r, f"{k}_s") for r in runs) for k in PHASES})


def fit(runs: list[Measured]) -> tuple[Engine, Trainer]:
    """Return the engine and trainer through two runs of different size."""
    longest = [run.lengths.mean_longest(run.rollouts) for run in runs]
    tokens = [run.lengths.mean * run.rollouts for run in runs]
    base_s, row_s = np.linalg.solve(np.array([longest, tokens]).T, [run.sample_s for run in runs])
    read = [run.rollouts * (run.prompt + run.lengths.mean) for run in runs]
    token_s, fixed_s = np.linalg.solve([[r, 1] for r in read], [run.update_s for run in runs])
    engine = Engine(max(base_s, 0.0), max(row_s, 0.0), 0.0, 0.0, slots=_ROWS)
    return engine, Trainer(token_s, fixed_s=max(fixed_s, 0.0))


def predict(engine: Engine, trainer: Trainer, run: Measured) -> float:
    """Return the simulated seconds of a run's step: both phases take turns in one process."""
    waves = max(1, run.rollouts // _ROWS)
    part = Work(run.rollouts // waves, run.lengths, run.prompt)
    idle = Trainer(0.0)
    sampled = simulate(Setup("colocated", 1, engine, 1, idle, 0.0), part, steps=8)
    work = replace(part, rollouts=run.rollouts)
    return waves * sampled.step_s + trainer.seconds(work.tokens)


def table_cpu(steps: int) -> None:
    """Print predicted and measured steps of the tiny policy."""
    sizes = (*FITTED, *PREDICTED)
    # The machine's speed drifts: sizes take turns, so that each meets it at its fastest.
    rounds = [[measure(prompts, steps) for prompts in sizes] for _ in range(_ROUNDS)]
    runs = dict(zip(sizes, map(fastest, zip(*rounds, strict=True)), strict=True))
    engine, trainer = fit([runs[prompts] for prompts in FITTED])
    print(
        f"\nfitted on {FITTED} prompts x 8: {engine.base_s * 1e3:.2f} ms an iteration and "
        f"{engine.row_s * 1e6:.1f} us a row in it; {trainer.token_s * 1e6:.0f} us a token and "
        f"{trainer.fixed_s * 1e3:.0f} ms an update"
    )
    print("\n| prompts x 8 | sample s | update s | step s | predicted s | error |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for prompts, run in runs.items():
        expected = predict(engine, trainer, run)
        print(
            f"| {prompts} | {run.sample_s:.3f} | {run.update_s:.3f} | {run.step_s:.3f} | "
            f"{expected:.3f} | {expected / run.step_s - 1:+.0%} |"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, "
        f"{os.cpu_count()} cores, 1 torch thread, load {os.getloadavg()[0]:.1f}"
    )
    table_cpu(args.steps)


if __name__ == "__main__":
    main()
