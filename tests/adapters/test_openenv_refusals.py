"""OpenEnv's adapter without OpenEnv."""

from __future__ import annotations

import sys

import gymnasium as gym
import numpy as np
import pytest

import mrgym
from mrgym.adapters import _openenv_fields as fields
from mrgym.adapters.openenv import create_app, from_openenv

SAMPLES = [
    (gym.spaces.Discrete(3), 2),
    (gym.spaces.Discrete(3, start=-1), -1),
    (gym.spaces.MultiDiscrete([2, 3]), [1, 2]),
    (gym.spaces.MultiBinary(3), [0, 1, 1]),
    (gym.spaces.Box(-1, 1, (2,), np.float32), [0.1, -1.0]),
    (gym.spaces.Box(0, 255, (2, 2), np.uint8), [[0, 255], [7, 8]]),
    (mrgym.spaces.TextSpace(), "é\u2028"),
    (mrgym.spaces.MessagesSpace(), [{"role": "user", "content": "x"}]),
    (gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.Discrete(3)]), [1, 2]),
    (
        gym.spaces.Dict(a=gym.spaces.Discrete(2), b=gym.spaces.Box(0, 1, (1,), np.float64)),
        {"a": 1, "b": [0.1]},
    ),
]


@pytest.mark.parametrize(
    "use", [lambda: create_app("math_multi_reward"), lambda: from_openenv("x", components={})]
)
def test_without_the_package_the_extra_is_named(monkeypatch, use):
    monkeypatch.setitem(sys.modules, "openenv", None)
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(mrgym.MissingExtraError, match=r"pip install 'mrgym\[openenv\]'"):
        use()


@pytest.mark.parametrize(("space", "value"), SAMPLES)
def test_samples_travel_without_loss(space, value):
    fields.check_space(space)
    sample = fields.decode(space, value)
    assert sample in space
    again = fields.decode(space, fields.encode(space, sample))
    assert str(fields.encode(space, again)) == str(fields.encode(space, sample))


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (gym.spaces.Discrete(3), 3),
        (gym.spaces.Discrete(3), 1.5),
        (gym.spaces.Discrete(3), "1"),
        (gym.spaces.Discrete(3), [1]),
        (gym.spaces.Discrete(3), None),
        (gym.spaces.MultiDiscrete([2, 3]), [1.9, 2]),
        (gym.spaces.MultiDiscrete([2, 3]), [1]),
        (gym.spaces.Box(-1, 1, (2,), np.float32), [0.1]),
        (gym.spaces.Box(-1, 1, (2,), np.float32), [0.1, 1.5]),
        (gym.spaces.Box(-1, 1, (2,), np.float32), [0.1, None]),
        (gym.spaces.Box(-1, 1, (2,), np.float32), [0.1, float("nan")]),
        (gym.spaces.Box(0, 255, (1,), np.uint8), [256]),
        (gym.spaces.Box(0, 255, (1,), np.uint8), [-1]),
        (gym.spaces.Box(0, 255, (1,), np.uint8), [0.5]),
        (mrgym.spaces.TextSpace(), 3),
        (gym.spaces.Tuple([gym.spaces.Discrete(2)]), [1, 1]),
        (gym.spaces.Dict(a=gym.spaces.Discrete(2)), {"a": 1, "b": 1}),
        (gym.spaces.Dict(a=gym.spaces.Discrete(2)), {}),
        (gym.spaces.Dict(a=gym.spaces.Discrete(2)), None),
    ],
)
def test_what_is_no_sample_is_refused(space, value):
    with pytest.raises(mrgym.errors.SpaceError, match="expected a value of"):
        fields.decode(space, value)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_numbers_that_json_lacks_are_refused(value):
    space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    with pytest.raises(mrgym.errors.SpaceError, match="expected finite numbers and Unicode"):
        fields.encode(space, np.array([value]))


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Sequence(gym.spaces.Discrete(2)),
        gym.spaces.Dict(a=gym.spaces.Graph(gym.spaces.Discrete(2), None)),
    ],
)
def test_spaces_that_json_cannot_carry_are_refused(space):
    with pytest.raises(mrgym.errors.SpaceError, match="OpenEnv: got"):
        fields.check_space(space)


def test_info_says_what_it_leaves_out():
    info = {"n": np.int64(3), "a": np.array([1.5]), "o": object(), "x": float("inf"), "s": "t"}
    assert fields.info_for_json(info) == {
        **{"n": 3, "a": [1.5], "s": "t"},
        "info_left_out": ["o", "x"],
    }
