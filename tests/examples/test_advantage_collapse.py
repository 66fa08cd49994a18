"""The example runs on its own and shows the figures of the specification."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "advantage_collapse.py"


@pytest.fixture(scope="module")
def data():
    return runpy.run_path(str(SCRIPT))["main"]()


def test_runs_as_a_script():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(
        command, env=environment, capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr
    for expected in ("497", "318", "(1,1)", "does not separate pure", "+0.707"):
        assert expected in done.stdout


@pytest.mark.parametrize(
    ("estimator", "by_group_size", "by_components"),
    [
        ("grpo", [2, 4, 7, 11, 16, 29, 46, 67, 121], [4, 7, 14, 23, 41]),
        ("dr_grpo", [3, 6, 10, 15, 21, 36, 55, 78, 136], [4, 10, 20, 35, 56]),
        ("gdpo", [3, 6, 14, 26, 38, 81, 145, 230, 497], [4, 14, 45, 127, 318]),
    ],
)
def test_counts(data, estimator, by_group_size, by_components):
    assert list(data["by_group_size"][estimator].values()) == by_group_size
    assert list(data["by_components"][estimator].values()) == by_components


def test_grpo_cannot_tell_one_reward_from_both(data):
    groups = data["two_groups"]
    assert groups["grpo"][:2] == pytest.approx(groups["grpo"][2:])
    before = [-0.7071, 0.7071, -1.4142, 1.4142]
    assert groups["gdpo before whitening"] == pytest.approx(before, abs=1e-4)
    assert groups["gdpo"] == pytest.approx([-0.548, 0.548, -1.095, 1.095], abs=1e-3)


def test_pure_trade_offs_are_told_honestly(data):
    rows = data["trade_off"]
    assert rows["gdpo, weights 1 and 1"] == [0, 0]
    assert rows["grpo, weights 1 and 1"] == [0, 0]
    for name in ("gdpo", "grpo"):
        assert rows[f"{name}, weights 1 and 0.5"] == pytest.approx([0.7071, -0.7071], abs=1e-4)


def test_unequal_scales(data):
    best = {name: values.index(max(values)) for name, values in data["scales"].items()}
    assert best == {"grpo": 3, "gdpo": 1}
