"""The trainer with vLLM as its sampler: the real thing, end to end, on CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

import mrgym
from mrgym.wire import read_rollouts
from mrgym_trainers import GDPOConfig, GDPOTrainer
from mrgym_trainers.gdpo.policy import load_policy

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SMALL = {"kv_cache_gib": 0.25}


def lines_of(folder, kind):
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]


def test_five_steps_of_the_tiny_policy(tmp_path):
    config = GDPOConfig(sampler="vllm", vllm=SMALL, steps=5, eval_tasks=64, prompts_per_step=8)
    summary = GDPOTrainer("math_multi_reward", config, out=tmp_path / "run").train()
    assert (summary["status"], summary["steps"]) == ("finished", 5)
    steps = lines_of(tmp_path / "run", "train")
    assert all(line["probe/gap_max"] < 1e-4 for line in steps)
    assert all(line["mismatch/max_abs"] < 1e-4 for line in steps)
    assert all(line["mismatch/truncated_frac"] == 0 for line in steps)
    assert all(line["loss/skipped"] == 0 and line["loss/grad_norm"] > 0 for line in steps)
    assert all(line["time/sync_s"] > 0 and line["time/probe_s"] > 0 for line in steps)
    greedy = [line for line in lines_of(tmp_path / "run", "eval") if line["mode"] == "greedy"]
    assert greedy[0]["reward/correctness"] > 0.5
    first = load_policy("tiny", device="cpu").model.state_dict()
    last = load_policy(str(tmp_path / "run" / "checkpoints" / "step_000005"), device="cpu")
    moved = [not weight.equal(first[name]) for name, weight in last.model.state_dict().items()]
    assert all(moved)


class Numbers(mrgym.SingleTurnEnv):
    """Rewards a small instruct model meets now and then, whatever the question."""

    @mrgym.component(low=0, high=1)
    def digits(self, task, completion):
        return sum(c.isdigit() for c in completion) / max(len(completion), 1)

    @mrgym.component(low=-1, high=0, weight=0.5)
    def brief(self, task, completion):
        return -min(len(completion), 400) / 400


def test_two_steps_of_a_real_language_model(tmp_path, smollm2, shared):
    config = GDPOConfig(
        model=smollm2, sampler="vllm", vllm={**SMALL, "max_model_len": 320}, steps=2,
        prompts_per_step=2, group_size=3, max_completion_tokens=48, eval_tasks=2,
        learning_rate=1e-5, micro_batch_tokens=1024, max_prompt_tokens=256, long_prompts="drop",
    )  # fmt: skip
    env = Numbers(tasks=shared / "data" / "gsm8k_train.jsonl")
    summary = GDPOTrainer(env, config, out=tmp_path / "run").train()
    assert summary["steps"] == 2
    steps = lines_of(tmp_path / "run", "train")
    assert all(line["probe/gap_max"] < 1e-3 for line in steps)
    assert all(line["mismatch/max_abs"] < 1e-3 for line in steps)
    assert all(line["loss/skipped"] == 0 and line["loss/grad_norm"] > 0 for line in steps)


def test_a_step_off_and_with_an_adapter(tmp_path):
    """The next batch is sampled meanwhile; the engine gets weights with the adapter added in."""
    config = GDPOConfig(
        sampler="vllm", vllm=SMALL, steps=4, eval_tasks=16, prompts_per_step=8, one_step_off=True,
        lora={"rank": 8}, learning_rate=5e-3, rollouts_every=1, eval_every=2,
    )  # fmt: skip
    summary = GDPOTrainer("math_multi_reward", config, out=tmp_path / "run").train()
    assert (summary["status"], summary["steps"]) == ("finished", 4)
    steps = lines_of(tmp_path / "run", "train")
    assert all(line["probe/gap_max"] < 1e-4 for line in steps if "probe/gap_max" in line)
    assert steps[0]["mismatch/max_abs"] < 1e-4
    assert all(line["mismatch/max_abs"] > 1e-3 for line in steps[1:])  # of older weights
    for step in (2, 3, 4):
        rollouts = read_rollouts(tmp_path / "run" / "rollouts" / f"step_{step:06d}.jsonl")
        assert {rollout.policy_version for rollout in rollouts} == {step - 2}


def test_a_signal_to_every_process_of_a_job_ends_it_after_a_step(tmp_path):
    command = ["-m", "mrgym", "train", "math_multi_reward", "--out", "run", "sampler=vllm"]
    settings = ["vllm.kv_cache_gib=0.25", "steps=100000", "eval_tasks=4", "prompts_per_step=2"]
    process = subprocess.Popen(
        [sys.executable, *command, *settings], cwd=tmp_path, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        for _ in range(1200):
            if metrics.is_file() and metrics.read_text().count('"train"') >= 3:
                break
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGTERM)  # as Slurm does; the engine gets it too
        _, err = process.communicate(timeout=120)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 75, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert (tmp_path / "run" / "checkpoints" / f"step_{summary['steps']:06d}").is_dir()
