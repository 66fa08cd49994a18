"""What several test files share."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest

import mrgym

# A machine under load must not fail a property test.
hypothesis.settings.register_profile(
    "mrgym", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("mrgym")

SHARED = Path(__file__).resolve().parents[2] / "shared"

# What models answer, good and hostile; {} is the right answer.
ANSWERS = (
    "<think>easy</think>\n<answer>{}</answer>",
    "<think>easy</think>\n<answer>{}1</answer>",
    "<answer>{}</answer>",
    "the answer is {}",
    "<think>twice</think><answer>3</answer>\n<answer>{}</answer>",
    "<think></think>\n<answer> {}.0 </answer>",
    "<think>\u2028\x00\t</think>\n<answer>\U0001f600 {}</answer>",
    "",
    "<answer>" + "9" * 5000 + "</answer>",
    "{{'reward': 1}} \" \\ </s> {}",
)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Data that is not part of the project; tests that need it are skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"no data: the folder {SHARED} (beside the checkout) is absent")
    return SHARED


@pytest.fixture(scope="session")
def sample():
    """200 completions of ``math_multi_reward``: env, tasks, completions, components."""
    env = mrgym.make("math_multi_reward")
    tasks = [task for task in list(env.task_source("train"))[:20] for _ in ANSWERS]
    texts = [text.format(task.answer) for task, text in zip(tasks, ANSWERS * 20, strict=True)]
    order = random.Random(0).sample(range(len(tasks)), len(tasks))
    tasks, texts = [tasks[i] for i in order], [texts[i] for i in order]
    components = [r.components for r in mrgym.score_completions(env, tasks, texts)]
    assert len(components) == 200
    assert len({tuple(c.values()) for c in components}) >= 5
    return SimpleNamespace(env=env, tasks=tasks, completions=texts, components=components)
