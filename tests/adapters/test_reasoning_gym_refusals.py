"""reasoning-gym's adapter without reasoning-gym."""

from __future__ import annotations

import sys

import pytest

import mrgym
from mrgym.adapters.reasoning_gym import (
    dataset_names,
    from_reasoning_gym,
    tagged_answer,
    tagged_format,
)
from mrgym_envs.math_multi_reward.answers import extract_answer, has_format

TEXTS = [
    "",
    "<think>a</think>\n<answer>1</answer>",
    "<think>a</think><answer>1</answer>",
    "<think>a</think>\n<answer>1</answer> ",
    "<think>a</think>\n<answer>1</answer>\n<answer>2</answer>",
    "<think><think>a</think>\n<answer>1</answer>",
    "<answer>1</answer>",
    "<answer>1",
    "1</answer>",
    "</answer><answer>",
    "<answer><answer> 3 </answer></answer>",
    "x <answer>\n 4\t</answer> y <answer></answer>",
]


@pytest.mark.parametrize("use", [dataset_names, lambda: from_reasoning_gym("chain_sum")])
def test_without_the_package_the_extra_is_named(monkeypatch, use):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(mrgym.MissingExtraError, match=r"pip install 'mrgym\[reasoning-gym\]'"):
        use()


@pytest.mark.parametrize("text", TEXTS)
def test_answers_and_format_are_read_as_the_math_environments_do(text):
    assert tagged_answer(text) == extract_answer(text, require_tags=True)
    assert tagged_format(text) == has_format(text)
