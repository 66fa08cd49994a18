"""What a local environment with spaces gives, the remote one gives, or it says that it cannot."""

from __future__ import annotations

import multiprocessing
import warnings

import gymnasium as gym
import numpy as np
import pytest

import mrgym
from mrgym.errors import SpaceError, WireError
from mrgym.server import create_app
from mrgym.server.space_wire import describe_space, read_space, value_to_wire

FORMATS = pytest.mark.parametrize("format", ["msgpack", "json"])


def test_the_order_of_a_dict_is_kept():
    pairs = [("z", gym.spaces.Discrete(9)), ("a", gym.spaces.Discrete(9))]
    space = gym.spaces.Dict(pairs)
    back = read_space(describe_space(space))
    assert [*back] == ["z", "a"]
    space.seed(1), back.seed(1)
    assert [*back.sample().items()] == [*space.sample().items()]


class Odd(gym.spaces.Box):
    """A subclass, which the other side does not have."""


@pytest.mark.parametrize(
    "space",
    [Odd(0, 1), gym.spaces.Dict({1: gym.spaces.Discrete(2)}), gym.spaces.Tuple([Odd(0, 1)])],
)
def test_spaces_that_would_arrive_as_others_are_refused_at_the_start(counter_class, space):
    env = counter_class()
    env.observation_space = space
    with pytest.raises(SpaceError, match="flatten it"):
        create_app(env)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(
    ("space", "value"),
    [
        (gym.spaces.Discrete(3), 1.7),
        (gym.spaces.Discrete(3), "1"),
        (gym.spaces.Box(-128, 127, (1,), np.int8), np.array([300])),
        (gym.spaces.Box(0, 255, (1,), np.uint8), np.array([256], np.uint16)),
        (gym.spaces.Box(-np.inf, np.inf, (1,), np.float32), np.array([1e300])),
    ],
)
def test_a_value_is_never_cut_to_fit(space, value, binary):
    with pytest.raises(SpaceError, match="expected a value of"):
        value_to_wire(space, value, binary=binary)


class Told(mrgym.MultiRewardEnv):
    """Says several kinds of things in info."""

    components = mrgym.components(moved=mrgym.Component(low=-1, high=1))

    def __init__(self):
        self.observation_space = gym.spaces.Discrete(9)
        self.action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        return 0, {"mask": np.array([1, 0]), "pair": (1, (2,)), "raw": b"ab", "nan": np.nan}

    def step(self, action):
        self.turn += 1
        return self.emit(self.turn, {"moved": action - 1})


@FORMATS
def test_entries_of_info_that_stay_behind_are_named_once(serving, format):
    remote = mrgym.make(serving(Told).url, format=format)
    with pytest.warns(UserWarning, match=r"entries \['raw', 'nan'\] of info"):
        _, info = remote.reset(seed=1)
    assert info == {"mask": [1, 0], "pair": [1, [2]]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remote.reset(seed=1)


@FORMATS
@pytest.mark.parametrize("value", [float("nan"), (1, 2), {1: 2}, np.arange(2)])
def test_options_that_would_arrive_as_others_are_refused(serving, format, value):
    remote = mrgym.make(serving(Told).url, format=format)
    with pytest.raises(WireError, match="options: got a value that cannot be sent as it is"):
        remote.reset(seed=1, options={"start": value})


@pytest.mark.filterwarnings("ignore:entries|.*of info")
def test_a_fork_does_not_share_the_session(serving):
    service = serving(Told)
    remote = mrgym.make(service.url)
    remote.reset(seed=1)
    ours, theirs = multiprocessing.Pipe()

    def forked():
        try:
            remote.step(2)
            theirs.send("stepped")
        except gym.error.ResetNeeded:
            remote.reset(seed=1)
            theirs.send(remote.step(0)[1])
        remote.close()

    for target in (remote.close, forked):
        child = multiprocessing.get_context("fork").Process(target=target)
        child.start()
        child.join(20)
    assert ours.recv() == -1.0
    assert remote.step(2)[:2] == (1, 1.0)
    assert service.metric("mrgym_sessions") == 1
