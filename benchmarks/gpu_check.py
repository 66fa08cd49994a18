"""What one GPU can do with mrgym, without network, in under eight minutes: a table and a JSON file.

    python benchmarks/gpu_check.py [--out gpu_check.json]     # needs CUDA
    python benchmarks/gpu_check.py --cpu                      # every part at toy size, on the CPU
    python benchmarks/gpu_check.py --only train,fsdp2

Every part has a process and a time limit of its own, so that a failure stops no other part. The
exit code is 0 where no part failed and 1 otherwise; a part whose package is missing is skipped.
Models are random and made here: figures tell of speed and agreement, not of quality.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from gpu_parts import PARTS, Values, size_of

MINUTES = 7.5
_CPU_PATIENCE = 2  # vLLM starts slowly where other work has the cores
PACKAGES = ("mrgym", "torch", "transformers", "vllm")


def run_part(name: str, device: str, folder: str, limit: float) -> Values:
    """Return a part's figures and status, from a process of its own."""
    if reason := _not_here(name, device):
        return {"status": "skipped", "reason": reason}
    if limit <= 0:
        return {"status": "skipped", "reason": "no time left"}
    result, log = (Path(folder) / f"{name}.{kind}" for kind in ("json", "log"))
    command = [sys.executable, __file__, "--part", name, device, folder, str(result)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    start = time.perf_counter()
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        ended = _wait(child, limit)
    found: Values = {"seconds": time.perf_counter() - start}
    tail = log.read_text(errors="replace").strip().splitlines()[-60:]
    if not ended:
        return {"status": "timeout", "reason": f"over {limit:.0f} s", "log": tail, **found}
    if not result.is_file():
        reason = tail[-1] if tail else f"exit code {child.returncode}"
        return {"status": "error", "reason": reason, "log": tail, **found}
    found |= json.loads(result.read_text())
    failed = found.pop("failed", [])
    if failed:
        return {"status": "failed", "reason": "; ".join(failed), **found}
    return {"status": "ok", **found}


def _wait(child: subprocess.Popen[bytes], limit: float) -> bool:
    """Return whether a process ended in time; nothing it started is left behind."""
    try:
        child.wait(limit)
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return True


def _not_here(name: str, device: str) -> str | None:
    if name.startswith("vllm") and importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    if name == "vllm_ipc" and device == "cpu":
        return "needs CUDA"
    return None


def check(names: list[str], device: str, minutes: float) -> Values:
    """Return the figures of all parts; prints a line as each ends."""
    deadline = time.perf_counter() + 60 * minutes
    parts: Values = {}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        for name in names:
            limit = PARTS[name][1] * (_CPU_PATIENCE if device == "cpu" else 1)
            limit = min(limit, deadline - time.perf_counter())
            parts[name] = run_part(name, device, folder, limit)
            print(_line(name, parts[name]), flush=True)
    return {"device": device_name(device), "versions": versions(), "parts": parts}


def _line(name: str, part: Values) -> str:
    hidden = ("status", "reason", "log", "seconds")
    figures = [f"{k} {_short(v)}" for k, v in part.items() if k not in hidden and v is not None]
    cells = (name, part["status"], f"{part.get('seconds', 0):.0f}", "; ".join(figures))
    return "| " + " | ".join(cells) + f" | {part.get('reason', '')} |"


def _short(value: object) -> str:
    return f"{value:,.3g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}"


def versions() -> dict[str, str]:
    """Return versions of Python and packages that are there."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def device_name(device: str) -> str:
    """Return what the figures are of."""
    if device == "cpu":
        return f"CPU, toy size ({platform.machine()}, {os.cpu_count()} cores)"
    import torch

    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def main() -> int:
    """Run the parts, or one of them as the process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="every part at toy size on the CPU")
    parser.add_argument("--only", default="", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--minutes", type=float, default=MINUTES, help="limit of the whole")
    parser.add_argument("--part", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        name, device, folder, result = args.part
        Path(result).write_text(json.dumps(PARTS[name][0](size_of(device, folder))))
        return 0
    names = args.only.split(",") if args.only else [*PARTS]
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--only: got {unknown}, expected names among {[*PARTS]}")
    device = "cpu" if args.cpu else _cuda(parser)
    if names[0] != "model":
        names = ["model", *(name for name in names if name != "model")]
    print(f"{device_name(device)}; {versions()}\n\n| part | status | s | figures | reason |")
    print("| --- | --- | ---: | --- | --- |")
    found = check(names, device, args.minutes)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\nwritten to {args.out}")
    return int(any(p["status"] not in ("ok", "skipped") for p in found["parts"].values()))


def _cuda(parser: argparse.ArgumentParser) -> str:
    import torch

    if not torch.cuda.is_available():
        parser.error("device: got no CUDA GPU, expected one; --cpu runs every part at toy size")
    return "cuda"


if __name__ == "__main__":
    sys.exit(main())
