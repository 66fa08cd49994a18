"""Training through a service is training on its environment."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch", reason="needs the extra train")

from mrgym_trainers import GDPOConfig, GDPOTrainer


def reward_means(env, folder):
    """Train for two steps and return the means of all rewards, by step and kind of line."""
    config = GDPOConfig(
        steps=2, prompts_per_step=2, group_size=4, max_completion_tokens=16, eval_tasks=4
    )
    GDPOTrainer(env, config, out=folder).train()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: v for key, v in line.items() if key in ("kind", "step") or key.startswith("reward")}
        for line in lines
    ]


@pytest.mark.slow
def test_training_through_an_address_gives_the_same_rewards(math_service, tmp_path):
    local = reward_means("math_multi_reward", tmp_path / "local")
    assert reward_means(math_service.url, tmp_path / "remote") == local
    trained = [line for line in local if line["kind"] == "train"]
    assert len(trained) == 2
    assert {"reward/format/mean", "reward/correctness/mean"} <= trained[0].keys()
    assert math_service.metric("mrgym_completions_scored_total") >= 16
