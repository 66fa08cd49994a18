"""Completions a second and peak memory of GDPOTrainer and of TRL's GRPOTrainer, in one run.

Both train the same model on the same tasks, with the same prompts, K rewards, batch, lengths,
temperature, stop tokens and AdamW settings, in float32 on CPU. TRL aggregates with
``multi_objective_aggregation="normalize_then_sum"``. Every measurement has a process of its own;
the sides take turns. Starting, loading, evaluation and the first step are left out of the rates.

Set up an environment that has both, then run from the checkout::

    python -m venv trl_env
    trl_env/bin/pip install trl==1.16.0
    trl_env/bin/pip install -e .[train]
    python benchmarks/trainer_vs_trl.py --python trl_env/bin/python \
        --smollm2 FOLDER_OF_SMOLLM2_135M_INSTRUCT --gsm8k GSM8K_TRAIN_JSONL

``--sampler vllm`` adds our trainer with vLLM as a third side (``--vllm-python`` names an
interpreter that has it; the memory of the engine's own processes is not counted).

TRL's defaults changed in its favour: ``bf16`` (on) and ``gradient_checkpointing`` (on) are off;
forward passes hold 32 rows (gradient accumulation; generation takes the whole batch at once), which
is faster and smaller here than one pass for all; nothing is logged, saved or evaluated. Its
optimiser stays the fused AdamW it comes with. Its reward functions call the environment's methods
directly. Ours is as it comes, with ``micro_batch_tokens=4096``.

Our trainer leaves rollouts without advantage out of forward and backward ("kept" is the share that
is not). In the cases named "every rollout counts" a further reward, a hash of the completion, gives
all of them an advantage, so that both sides do the same work.

FLOP are 6 x parameters of the linear layers x positions (padding included; the head at completions
only), without attention; beside them stands the rate of the same matrix products alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from trainer_sides import Case, Result

WORKER = Path(__file__).with_name("trainer_sides.py")
MB = 2**20
PHASES = ("sample", "score", "forward", "backward", "optimizer", "other")


def measure(python: str, side: str, case: Case, threads: int, sampler: str) -> Result:
    """Run one side in a process of its own and return what it printed last."""
    env = os.environ | {
        "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    spec = json.dumps([side, asdict(case), sampler])
    done = subprocess.run(
        [python, str(WORKER), spec], env=env, capture_output=True, text=True, check=False
    )
    with suppress(IndexError, json.JSONDecodeError):
        result: Result = json.loads(done.stdout.splitlines()[-1])
        return result
    raise SystemExit(f"{side}, {case.name}: got exit code {done.returncode}\n{done.stderr[-2000:]}")


def compare(case: Case, sides: Sequence[tuple[str, str, str]], threads: int) -> list[str]:
    """Measure all sides in turns, print the table's rows, and return the rows on time."""
    results: dict[str, list[Result]] = {name: [] for name, _, _ in sides}
    for turn in range(case.turns):
        for name, python, sampler in sides if turn % 2 == 0 else reversed(sides):
            if any("skipped" in result for result in results[name]):
                continue
            side = "trl" if name == "TRL" else "ours"
            results[name].append(measure(python, side, case, threads, sampler))
    print(f"\n{case.name}: {case.prompts} x {case.group} completions of <= {case.tokens} tokens,")
    print(f"  {case.steps} steps measured, {case.turns} turns")
    base, notes = results["TRL"], []
    for name, taken in results.items():
        if "skipped" in taken[0]:
            print(f"  {name:12} skipped: {taken[0]['skipped']}")
            continue
        print(f"  {name:12} {row(taken, base)}")
        if name != "TRL":
            notes += time_rows(name, taken)
    share = statistics.median(r["phases"]["sample"] / r["phases"]["step"] for r in base)
    notes.append(f"  TRL          generate {share:.0%} of the step")
    return [f"\n{case.name}", *notes]


def row(taken: Sequence[Result], base: Sequence[Result]) -> str:
    """Return rate, ratio to TRL turn by turn, length and memory."""
    ratios = sorted(one["rate"] / other["rate"] for one, other in zip(taken, base, strict=True))
    middle = {key: statistics.median(r[key] for r in taken) for key in ("rate", "length")}
    peak = max(r["peak"] for r in taken) / MB
    over = max(r["over_start"] for r in taken) / MB
    kept = statistics.mean(r.get("kept", 1.0) for r in taken)
    return (
        f"{middle['rate']:8.1f} completions/s  {statistics.median(ratios):5.2f} x "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f})  peak {peak:6.0f} MB, {over:6.0f} over start  "
        f"{middle['length']:5.1f} tokens  kept {kept:4.0%}"
    )


def time_rows(name: str, taken: Sequence[Result]) -> list[str]:
    """Return where the time went, and FLOP/s beside those of the bare matrix products."""
    phases = [dict(r["phases"]) for r in taken]
    for spent in phases:
        spent["other"] = spent["step"] - sum(spent[n] for n in PHASES if n != "other")
    shares = {n: statistics.median(spent[n] / spent["step"] for spent in phases) for n in PHASES}
    outside = shares["score"] + shares["optimizer"] + shares["other"]
    passes = [spent["forward"] + spent["backward"] for spent in phases]
    reached = statistics.median(r["flop"] / s for r, s in zip(taken, passes, strict=True))
    bare = statistics.median(r["matmul_flops"] for r in taken)
    return [
        f"  {name:12} " + ", ".join(f"{n} {share:.1%}" for n, share in shares.items()),
        f"  {'':12} outside sampling, forward and backward {outside:.1%}; forward + backward "
        f"{reached / 1e9:.1f} GFLOP/s of {bare / 1e9:.1f} measured ({reached / bare:.0%})",
    ]


def make_cases(smollm2: str | None, gsm8k: str | None, quick: bool) -> list[Case]:
    """Return the cases; SmolLM2's only where folder and file are given."""
    counts = "every rollout counts"
    cases = [
        Case("tiny", "tiny", 8, 8, 36, steps=12, turns=3),
        Case("tiny, large batch", "tiny", 32, 16, 36, steps=6, turns=2),
        Case(f"tiny, large batch, {counts}", "tiny", 32, 16, 36, steps=6, turns=1, hashed=True),
    ]
    if smollm2 and gsm8k:
        small = Case(f"SmolLM2-135M, {counts}", smollm2, 2, 4, 64, steps=1, turns=2)
        cases.append(replace(small, hashed=True, gsm8k=gsm8k))
    if quick:
        return [replace(case, steps=max(case.steps // 3, 1), turns=1) for case in cases]
    return cases


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter with TRL and mrgym")
    parser.add_argument("--smollm2", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--gsm8k", help="JSONL file of GSM8K training rows")
    parser.add_argument("--sampler", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--vllm-python", help="interpreter with vLLM and mrgym")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each side")
    parser.add_argument("--quick", action="store_true", help="fewer steps, for a smoke test")
    options = parser.parse_args()
    sides = [("ours", options.python, "transformers"), ("TRL", options.python, "")]
    if options.sampler == "vllm":
        sides.append(("ours, vLLM", options.vllm_python or options.python, "vllm"))
    start = time.perf_counter()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, {options.threads} threads a side, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    notes: list[str] = []
    for case in make_cases(options.smollm2, options.gsm8k, options.quick):
        notes += compare(case, sides, options.threads)
    print("\nwhere our time goes (medians over turns)")
    print("\n".join(notes))
    print(f"\ntook {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
