"""What the tests of the adapters share: 200 completions, and the scores mrgym itself gives them."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

import mrgym

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
