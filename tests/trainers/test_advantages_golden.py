"""Presets against what NeMo-RL, TRL and verl computed themselves on the same batches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mrgym import reward_key
from mrgym_trainers.advantages import AdvantageConfig, AdvantageResult, compute_advantages

GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "golden"
TOLERANCE = {"trl": 1e-9, "nemo_rl": 2e-4, "verl": 2e-4}  # TRL ran in float64, the others in 32

pytestmark = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="golden files not found: no 'shared' folder beside the checkout"
)


def golden_lines(peer: str) -> list[dict]:
    path = GOLDEN / f"advantages_{peer}.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def cases(peer: str, field: str = "gdpo") -> list:
    lines = [line for line in golden_lines(peer) if field in line]
    found = [pytest.param(line, id=str(line["case"])) for line in lines]
    absent = pytest.param(None, marks=pytest.mark.skip(reason=f"no golden file of {peer}"))
    return found or [absent]


def options(line: dict) -> dict:
    """Options recorded in a line, beyond the preset and the weights."""
    if "leave_one_out" not in line:
        return {}
    return {
        "baseline": "leave_one_out" if line["leave_one_out"] else "mean",
        "scale": line["normalize"],
    }


def run(line: dict, preset: str, **overrides: object) -> AdvantageResult:
    config = AdvantageConfig.preset(preset, **{**options(line), **overrides})
    assert (config.group_eps, config.batch_eps) == (line["group_eps"], line["batch_eps"])
    batch = {reward_key(name): scores for name, scores in line["components"].items()}
    lengths = line.get("completion_lengths")
    return compute_advantages(batch, line["group"], config, completion_lengths=lengths)


def worst(got: np.ndarray, expected: list[float]) -> float:
    return float(np.max(np.abs(got - np.array(expected))))


@pytest.mark.parametrize(
    ("preset", "line"),
    [
        pytest.param(preset, *case.values, id=f"{preset}-{case.id}", marks=case.marks)
        for preset in TOLERANCE
        for case in cases(preset)
    ],
)
def test_gdpo_matches_the_peer(preset, line):
    result = run(line, preset, weights=line["weights"])
    assert worst(result.advantages, line["gdpo"]) < TOLERANCE[preset]


@pytest.mark.parametrize("line", cases("trl", "grpo"))
def test_grpo_matches_trl(line):
    result = run(line, "trl", estimator="grpo", weights=line["weights"])
    assert worst(result.advantages, line["grpo"]) < TOLERANCE["trl"]


@pytest.mark.parametrize("line", cases("nemo_rl", "grpo_of_sum"))
def test_grpo_of_the_plain_sum_matches_nemo_rl(line):
    result = run(line, "nemo_rl", estimator="grpo")  # the peer sums without weights
    assert worst(result.advantages, line["grpo_of_sum"]) < TOLERANCE["nemo_rl"]


@pytest.mark.parametrize("preset", TOLERANCE)
def test_the_files_hold_cases(preset):
    assert len(golden_lines(preset)) >= 10


def test_trl_cases_cover_missing_scores_and_rows_without_any():
    tables = [list(line["components"].values()) for line in golden_lines("trl")]
    missing = [table for table in tables if any(None in column for column in table)]
    rows = [row for table in missing for row in zip(*table, strict=True) if set(row) == {None}]
    assert missing
    assert rows


def test_trl_figures_need_its_float32_factors():
    """TRL keeps weights and n/(n-1) in float32; without that its figures differ by about 1e-8."""
    gaps = [
        worst(
            run(line, "trl", weights=line["weights"], float32_factors=False).advantages,
            line["gdpo"],
        )
        for line in golden_lines("trl")
    ]
    assert 1e-9 < max(gaps) < 1e-6


def test_nemo_rl_cases_cover_leave_one_out_without_scale():
    seen = {(line["leave_one_out"], line["normalize"]) for line in golden_lines("nemo_rl")}
    assert seen == {(a, b) for a in (False, True) for b in (False, True)}
