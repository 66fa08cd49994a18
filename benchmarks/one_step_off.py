"""What sampling one step ahead gains: the trainer on one core, vLLM on another, both ways in turn.

    python benchmarks/one_step_off.py [--turns 3] [--steps 30] [--model tiny|9M]

Run it with a Python that has vLLM, on two free cores. Each turn trains a fresh policy in turn
(sample, then learn) and one step off (sample while learning), in processes of their own; the
trainer's process is pinned to the first core and the engine's to the second. Printed are the
seconds of a step (their median, the first ones left out), how they are spent, and the ratio of
each turn. At best it is (sampling + learning + sync) / (max(sampling, learning) + sync).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import torch
from ranks import SIZES, new_model

WARM_UP = 5
PHASES = ("step", "draw", "sample", "score", "update", "sync", "probe")


def pin(pid: int, core: int) -> None:
    """Keep a process, and every thread it has, on a core."""
    for thread in psutil.Process(pid).threads():
        os.sched_setaffinity(thread.id, {core})


def train(model: str, steps: int, *, ahead: bool, cores: tuple[int, int]) -> None:
    """Train, and print the median seconds by phase as JSON."""
    from mrgym_trainers import GDPOConfig, GDPOTrainer
    from mrgym_trainers.gdpo import train as loop

    torch.set_num_threads(1)
    make_sampler = loop.make_sampler

    def pinned(*args: object) -> object:
        sampler = make_sampler(*args)  # type: ignore[arg-type]
        for child in psutil.Process().children(recursive=True):
            pin(child.pid, cores[1])
        pin(os.getpid(), cores[0])
        return sampler

    loop.make_sampler = pinned  # type: ignore[assignment]
    config = GDPOConfig(
        model=model, sampler="vllm", vllm={"kv_cache_gib": 0.5}, one_step_off=ahead, steps=steps,
        prompts_per_step=32, group_size=8, max_completion_tokens=36, eval_tasks=8,
        checkpoint_every=0, device="cpu", learning_rate=1e-5,
    )  # fmt: skip
    trainer = GDPOTrainer("math_multi_reward", config)
    trainer.train()
    lines = [line for line in trainer.history if line["kind"] == "train"][WARM_UP:]
    median = {p: statistics.median(line[f"time/{p}_s"] for line in lines) for p in PHASES}
    sys.stdout.write(json.dumps(median) + "\n")


def side(model: str, steps: int, *, ahead: bool, cores: tuple[int, int]) -> dict[str, float]:
    """Return what a process of its own measured."""
    command = [sys.executable, __file__, "--side", "ahead" if ahead else "turn"]
    command += ["--model", model, "--steps", str(steps), "--cores", *map(str, cores)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(cores[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    median: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return median


def main() -> None:
    """Run both ways in turn and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--model", default="tiny", choices=[*SIZES], metavar="NAME")
    parser.add_argument("--cores", type=int, nargs=2, default=(0, 1))
    parser.add_argument("--side", choices=["turn", "ahead"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    cores = (args.cores[0], args.cores[1])
    with tempfile.TemporaryDirectory() as folder:
        if args.side:
            model = new_model(args.model, Path(folder))
            train(model, args.steps, ahead=args.side == "ahead", cores=cores)
            return
        print(f"{args.model}, 32 x 8 completions, {args.steps} steps, cores {cores}")
        print("turn  mode " + "".join(f"{p:>9}" for p in PHASES))
        ratios = []
        for turn in range(args.turns):
            both = {}
            for ahead in (False, True) if turn % 2 == 0 else (True, False):
                both[ahead] = side(args.model, args.steps, ahead=ahead, cores=cores)
                cells = "".join(f"{1000 * both[ahead][p]:>6.0f} ms" for p in PHASES)
                print(f"{turn:>4}  {'ahead' if ahead else 'turn':<5}{cells}", flush=True)
            ratios.append(both[False]["step"] / both[True]["step"])
            first = both[False]
            rest = first["step"] - first["draw"] - first["update"]
            best = first["step"] / (max(first["draw"], first["update"]) + rest)
            print(f"      ratio {ratios[-1]:.2f} (at best {best:.2f})", flush=True)
    print(f"one step off is {statistics.median(ratios):.2f} times as fast (median of the turns)")


if __name__ == "__main__":
    main()
