"""Peak memory of log-probabilities, forward and backward, against the whole softmax.

Run from the checkout: ``python benchmarks/memory.py [--quick]`` (Linux, CPU). Every measurement
has a process of its own. It makes hidden states [T, H] and the weight [V, H], takes a small step
to have libraries loaded, asks the kernel to forget the peak (``/proc/self/clear_refs``), takes the
step and reads the peak of resident memory (``VmHWM``) over what was resident before (``VmRSS``).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mrgym_trainers.gdpo.logprobs import rows_per_chunk, selected_logprobs

TOKENS, WIDTH, TEMPERATURE = 1024, 576, 0.9
VOCABULARIES = (49_152, 151_936)
CHUNKS = (32, 64, 128, 256, 512)
PRECISIONS = {"float32": "float32", "master": "float32 weights, bfloat16 products"}
MB = 2**20

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def naive(hidden_MH: Tensor, weight_VH: Tensor, targets_M: Tensor) -> Tensor:
    """Return log-probabilities from the float32 logits of all rows."""
    logits_MV = hidden_MH @ weight_VH.to(hidden_MH.dtype).T
    if logits_MV.dtype == torch.bfloat16:
        logits_MV = logits_MV.float()
    logits_MV = logits_MV / TEMPERATURE
    return logits_MV.log_softmax(-1).gather(1, targets_M[:, None])[:, 0]


def chunked(rows: int) -> Way:
    """Return the chunked way (it gives the entropy as well)."""
    return lambda hidden_MH, weight_VH, targets_M: selected_logprobs(
        hidden_MH, weight_VH, None, targets_M, temperature=TEMPERATURE, chunk=rows
    )[0]


def make_inputs(vocabulary: int, tokens: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, weight and targets; logits have a standard deviation of 3.

    ``"master"`` stands for bfloat16 hidden states and float32 weights.
    """
    generator = torch.Generator().manual_seed(0)
    hidden_MH = torch.randn(tokens, WIDTH, generator=generator)
    weight_VH = torch.randn(vocabulary, WIDTH, generator=generator) * 3 / WIDTH**0.5
    targets_M = torch.randint(vocabulary, (tokens,), generator=generator)
    if dtype == "master":
        hidden_MH = hidden_MH.bfloat16()
    else:
        hidden_MH, weight_VH = (t.to(getattr(torch, dtype)) for t in (hidden_MH, weight_VH))
    return hidden_MH.requires_grad_(), weight_VH.requires_grad_(), targets_M


def step(way: Way, hidden_MH: Tensor, weight_VH: Tensor, targets_M: Tensor) -> Tensor:
    """Take the mean loss of fixed advantages backward and return the log-probabilities."""
    advantages_M = torch.randn(len(targets_M), generator=torch.Generator().manual_seed(1))
    logprobs_M = way(hidden_MH, weight_VH, targets_M)
    (logprobs_M * advantages_M).mean().backward()  # type: ignore[no-untyped-call]
    return logprobs_M.detach()


def status_mb(field: str) -> float:
    """Return a field of this process's status that is given in kB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":"))


def measure(vocabulary: int, tokens: int, rows: int, dtype: str) -> dict[str, float]:
    """Return peak memory and CPU seconds of a step here; 0 rows stand for the naive way."""
    torch.set_num_threads(1)
    way = chunked(rows) if rows else naive
    step(way, *make_inputs(64, 8, dtype))
    inputs = make_inputs(vocabulary, tokens, dtype)
    before = status_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    start = time.process_time()
    step(way, *inputs)
    seconds = time.process_time() - start
    gradients = sum(t.numel() * t.element_size() for t in inputs[:2]) / MB
    peak = status_mb("VmHWM")
    return {"extra": peak - before - gradients, "peak": peak, "seconds": seconds}


def measured(*arguments: object) -> dict[str, float]:
    """Return what :func:`measure` gives in a new process."""
    command = [sys.executable, __file__, "--measure", *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def compare(vocabulary: int, tokens: int, dtype: str, chunks: list[int], turns: int) -> None:
    """Print memory and time of the naive way and of chunk sizes, taking turns."""
    print(f"\nV {vocabulary:,}, T {tokens}, H {WIDTH}, {PRECISIONS[dtype]}")
    print("   rows    extra MB   ratio   whole process MB   ratio  CPU s   ratio")
    runs = {rows: [measured(vocabulary, tokens, rows, dtype)] for rows in (0, *chunks)}
    for _ in range(turns - 1):
        for rows, results in runs.items():
            results.append(measured(vocabulary, tokens, rows, dtype))
    shown = {
        rows: {
            key: (min if key == "seconds" else max)(result[key] for result in results)
            for key in results[0]
        }
        for rows, results in runs.items()
    }
    for rows, result in shown.items():
        name = f"{rows}{'*' if rows == rows_per_chunk(vocabulary) else ''}" if rows else "naive"
        ratios = {key: value / shown[0][key] for key, value in result.items()}
        print(
            f"{name:>7} {result['extra']:11,.0f} {ratios['extra']:7.3f} "
            f"{result['peak']:18,.0f} {ratios['peak']:7.2f} "
            f"{result['seconds']:7.2f} {ratios['seconds']:7.2f}"
        )


def differences(vocabulary: int, tokens: int) -> None:
    """Print how far float32 values and gradients of both ways are from float64."""
    columns = []
    for way, dtype in ((naive, "float64"), (naive, "float32"), (chunked(100), "float32")):
        inputs = make_inputs(vocabulary, tokens, dtype)
        columns.append([step(way, *inputs), inputs[0].grad, inputs[1].grad])
    print(f"\nLargest differences from float64, V {vocabulary:,}, T {tokens}   naive   chunked")
    names = ("log-probabilities", "gradient of hidden states", "gradient of weight")
    for name, exact, *ours in zip(names, *columns, strict=True):
        gaps = [float((one - exact).abs().max()) for one in ours]
        print(f"  {name:<30} (largest {exact.abs().max():.0e}) {gaps[0]:12.1e} {gaps[1]:9.1e}")
        if gaps[1] > 1e-5:
            raise SystemExit(f"{name}: got {gaps[1]:.1e}, expected at most 1e-5")


def main() -> None:
    """Run all parts, or one measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, for a smoke test")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        vocabulary, tokens, rows, dtype = args.measure
        print(json.dumps(measure(int(vocabulary), int(tokens), int(rows), dtype)))
        return
    torch.set_num_threads(1)
    print(
        f"python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, "
        f"{os.cpu_count()} cores, 1 torch thread, load {os.getloadavg()[0]:.1f}"
    )
    tokens, turns = (128, 1) if args.quick else (TOKENS, 2)
    for vocabulary in VOCABULARIES:
        chunks = sorted({*CHUNKS, rows_per_chunk(vocabulary)})
        compare(vocabulary, tokens, "float32", chunks, turns)
        compare(vocabulary, tokens, "master", [rows_per_chunk(vocabulary)], turns)
        differences(vocabulary, min(tokens, 256))


if __name__ == "__main__":
    main()
