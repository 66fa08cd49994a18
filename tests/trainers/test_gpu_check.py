"""benchmarks/gpu_check.py runs all its parts, here at toy size on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SCRIPT.is_file(), reason="benchmarks/ is not here"),
]


def checked(out, *arguments):
    command = [sys.executable, str(SCRIPT), "--cpu", "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done, json.loads(out.read_text())["parts"]


def test_every_part_that_a_cpu_can_run_is_well(tmp_path):
    names = ["model", "train", "fsdp2", "sampler", "memory", "learns"]
    done, parts = checked(tmp_path / "out.json", "--only", ",".join(names))
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(names, "ok")
    assert done.returncode == 0
    assert all(f"| {name} | ok |" in done.stdout for name in names)
    assert parts["fsdp2"]["loss_gap"] < 1e-5
    assert parts["sampler"]["gap_max"] < 1e-3
    assert parts["sampler"]["logprob_mean"] < -0.5  # nothing would differ where all is certain
    assert parts["train"]["tokens_per_s"] > 0


def test_a_part_that_fails_or_hangs_stops_no_other(tmp_path):
    broken = tmp_path / "gpu_check.py"
    broken.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "import gpu_check, gpu_parts\n"
        "def wrong(size): raise ValueError('no such luck')\n"
        "def differs(size): return {'gap': 2.0, 'failed': ['gap 2']}\n"
        "def hangs(size): time.sleep(600)\n"
        "gpu_check.__file__ = __file__\n"
        "gpu_parts.PARTS.clear()\n"
        "gpu_parts.PARTS.update(model=(wrong, 60), hangs=(hangs, 4), differs=(differs, 60))\n"
        "sys.exit(gpu_check.main())\n"
    )
    out = tmp_path / "out.json"
    command = [sys.executable, str(broken), "--cpu", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    parts = json.loads(out.read_text())["parts"]
    assert done.returncode == 1
    assert parts["model"]["status"] == "error"
    assert "no such luck" in parts["model"]["reason"]
    assert parts["hangs"]["status"] == "timeout"
    assert parts["differs"] == {
        "status": "failed", "reason": "gap 2", "seconds": parts["differs"]["seconds"], "gap": 2.0
    }  # fmt: skip


@pytest.mark.gpu
def test_one_gpu(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
