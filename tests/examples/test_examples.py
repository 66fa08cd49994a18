"""Every example runs, as its docstring says."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MRGYM = Path(sys.executable).with_name("mrgym")


def run(*command: str, cwd: Path) -> str:
    env = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_score_text_prints_the_components(tmp_path):
    out = run(sys.executable, str(EXAMPLES / "score_text.py"), cwd=tmp_path)
    assert "'14'" in out
    assert "{'correctness': 1.0, 'format': 0.0, 'integer': 1.0}" in out
    assert "{'correctness': 0.0, 'format': 0.0, 'integer': 0.0}" in out


def test_custom_env_file_is_short_enough_to_read():
    assert len((EXAMPLES / "my_envs.py").read_text().splitlines()) <= 40


def test_custom_env_outside_the_repository_checks_and_trains(tmp_path):
    shutil.copy(EXAMPLES / "my_envs.py", tmp_path)
    assert "my_envs" not in sys.modules
    assert "ok" in run(str(MRGYM), "check", "my_envs:Haiku", cwd=tmp_path).splitlines()[0]
    run(
        *(str(MRGYM), "train", "my_envs:Haiku", "--out", "run"),
        *("steps=2", "prompts_per_step=4", "group_size=4", "eval_tasks=2"),
        cwd=tmp_path,
    )
    rollouts = (tmp_path / "run/rollouts/step_000002.jsonl").read_text().splitlines()
    assert len(rollouts) == 16
    assert (tmp_path / "run/report.html").is_file()


@pytest.mark.slow
def test_train_cpu_prints_start_and_end(tmp_path):
    script = str(EXAMPLES / "train_cpu.py")
    out = run(sys.executable, script, "--steps", "2", "--out", "run", cwd=tmp_path)
    assert [line.split()[0] for line in out.splitlines()] == [
        "reward/correctness",
        "reward/format",
        "reward/integer",
        "reward",
    ]


@pytest.mark.slow
def test_compare_estimators_runs_both(tmp_path):
    script = str(EXAMPLES / "compare_estimators.py")
    out = run(sys.executable, script, "--steps", "2", cwd=tmp_path)
    assert out.splitlines()[0].startswith("gdpo: correct")
    assert out.splitlines()[1].startswith("grpo: correct")
