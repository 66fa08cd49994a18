"""An engine a rank: two ranks sample and learn what one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from mrgym.wire import read_rollouts
from mrgym_trainers.samplers.vllm.server import VLLMServerSampler

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SETTINGS = {
    "model": "tiny", "device": "cpu", "sampler": "vllm", "vllm.kv_cache_gib": 0.2,
    "vllm.max_model_len": 200, "steps": 3, "prompts_per_step": 3, "group_size": 4,
    "max_completion_tokens": 36, "eval_tasks": 2, "rollouts_every": 1,
}  # fmt: skip


def trained(ranks, folder, **settings):
    """Return steps of rollouts, and the metrics of a run on some ranks."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(ranks)]
    settings = [f"{key}={value}" for key, value in (SETTINGS | settings).items()]
    command = ["-m", "mrgym.cli", "train", "math_multi_reward", "--out", str(folder), *settings]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, *command, "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [[*read_rollouts(path)] for path in sorted((folder / "rollouts").iterdir())]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return steps, [line for line in lines if line["kind"] == "train"]


@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_a_rank_makes_the_run_of_one(ahead, tmp_path):
    one, _ = trained(1, tmp_path / "one", one_step_off=ahead)
    two, metrics = trained(2, tmp_path / "two", one_step_off=ahead)
    assert [[(r.group, r.token_ids, r.advantage) for r in step] for step in two] == [
        [(r.group, r.token_ids, r.advantage) for r in step] for step in one
    ]
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert all(line["probe/gap_max"] < 1e-4 for line in metrics)


def test_ranks_that_send_nothing_still_gather():
    """Servers are shared: the first rank sends weights, the others go through them with it."""
    sampler = object.__new__(VLLMServerSampler)
    sampler._sender, sampler._version = None, 0
    gathered = []
    sampler.update_weights(((name, gathered.append(name)) for name in "ab"), 3)
    assert gathered == ["a", "b"]
    assert sampler._version == 3
