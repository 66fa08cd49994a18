"""The bundled policy learns from its rewards, and from nothing else.

Held-out means at temperature 1 before and after 60 steps of 16 x 8, seed 0: correctness
0.29 -> 0.59, format 0.62 -> 0.97, integer 0.67 -> 0.99. With shuffled rewards: 0.21, 0.60 and 0.74.
"""

import pytest

from mrgym_trainers import GDPOConfig, GDPOTrainer

pytestmark = pytest.mark.slow

BUDGET = {"steps": 60, "prompts_per_step": 16, "group_size": 8, "eval_tasks": 384, "seed": 0}


def trained(**keys):
    config = GDPOConfig(**{**BUDGET, "eval_every": 1000, **keys})
    trainer = GDPOTrainer("math_multi_reward", config)
    return trainer.train(), trainer.history


@pytest.fixture(scope="module")
def learned():
    return trained()[0]["eval"]


@pytest.fixture(scope="module")
def control():
    return trained(shuffle_rewards=True)[0]["eval"]


def test_every_reward_rises_on_held_out_tasks(learned):
    start, end = learned["start"], learned["end"]
    assert end["reward/correctness"] > start["reward/correctness"] + 0.08
    assert start["reward/format"] < 0.75
    assert end["reward/format"] > 0.93
    assert start["reward/integer"] < 0.75
    assert end["reward/integer"] > 0.93


def test_shuffled_rewards_teach_nothing(learned, control):
    assert control["start"] == learned["start"]
    assert control["end"]["reward/correctness"] < control["start"]["reward/correctness"] + 0.02
    assert control["end"]["reward/format"] < 0.8
    assert control["end"]["reward"] < learned["end"]["reward"] - 0.5


def test_a_seed_fixes_the_whole_run():
    keys = {"steps": 4, "eval_tasks": 32}
    runs = [trained(**keys)[1] for _ in range(2)]
    numbers = [
        [
            {k: v for k, v in line.items() if not k.startswith(("time/", "speed/", "memory/"))}
            for line in run
        ]
        for run in runs
    ]
    assert numbers[0] == numbers[1]
    assert len(numbers[0]) == 4 + 4
