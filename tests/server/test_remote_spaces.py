"""A remote environment with spaces: the same observations, dtypes and components."""

from __future__ import annotations

import copy
import gc
import time

import gymnasium as gym
import numpy as np
import pytest

import mrgym
from mrgym.errors import RemoteError, RewardContractError, SpaceError, WireError
from mrgym.server.space_wire import describe_space, read_space, value_from_wire, value_to_wire
from mrgym.spaces import MessagesSpace, TextSpace
from mrgym.stepwise import as_text_env

pytestmark = pytest.mark.filterwarnings("ignore:.*of info have no form on the wire")

SPACES = [
    gym.spaces.Box(-1, 1, (2, 3), np.float32),
    gym.spaces.Box(-np.inf, np.inf, (4,), np.float64),
    gym.spaces.Box(np.float16([-np.inf, 0]), np.float16([1, np.inf]), dtype=np.float16),
    gym.spaces.Box(0, 255, (4, 5, 3), np.uint8),
    gym.spaces.Box(-(2**62), 2**62, (1,), np.int64),
    gym.spaces.Discrete(7, start=-3),
    gym.spaces.MultiDiscrete([3, 4]),
    gym.spaces.MultiDiscrete(np.array([[3, 4], [5, 6]]), dtype=np.int32),
    gym.spaces.MultiBinary([2, 2]),
    gym.spaces.Text(12, min_length=0, charset="abcé\U0001f600"),
    TextSpace(99),
    MessagesSpace(50),
    gym.spaces.Dict({"a": gym.spaces.Discrete(3), "b": gym.spaces.Box(0, 1, (2,), np.float32)}),
    gym.spaces.Tuple([gym.spaces.Discrete(3), gym.spaces.Dict({"x": TextSpace(9)})]),
]


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, tuple):
        return all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, (np.ndarray, np.generic)):
        return type(one) is type(other) and one.dtype == other.dtype and np.array_equal(one, other)
    return one == other


@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize("binary", [False, True])
def test_spaces_and_values_arrive_as_they_left(space, binary):
    back = read_space(describe_space(space))
    assert back == space
    space.seed(1)
    for _ in range(20):
        value = space.sample()
        data = value_to_wire(space, value, binary=binary)
        arrived = value_from_wire(back, data)
        assert same(value, arrived)
        assert back.contains(arrived)


def test_what_json_has_no_number_for_arrives_too():
    space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    value = np.array([np.nan, np.inf, -np.inf], np.float32)
    for binary in (False, True):
        back = value_from_wire(space, value_to_wire(space, value, binary=binary))
        assert np.array_equal(back, value, equal_nan=True)


@pytest.mark.parametrize(
    ("space", "data"),
    [
        (gym.spaces.Discrete(3), 3),
        (gym.spaces.Discrete(3), 1.0),
        (gym.spaces.Discrete(3), True),
        (gym.spaces.Discrete(3), 2**70),
        (gym.spaces.Box(0, 255, (1,), np.uint8), [256]),
        (gym.spaces.Box(0, 255, (1,), np.uint8), [0.5]),
        (gym.spaces.Box(0, 1, (2,), np.float32), b"123"),
        (gym.spaces.Box(0, 1, (2,), np.float32), [[1], 2]),
        (gym.spaces.MultiBinary(2), [0, 2]),
        (gym.spaces.Dict({"a": gym.spaces.Discrete(2)}), {}),
        (gym.spaces.Dict({"a": gym.spaces.Discrete(2)}), {"a": 1, "b": 1}),
        (gym.spaces.Tuple([gym.spaces.Discrete(2)]), [1, 1]),
        (TextSpace(3), "four"),
        (TextSpace(3), 3),
    ],
)
def test_data_that_stand_for_no_value_are_refused(space, data):
    with pytest.raises(SpaceError, match="expected a value of"):
        value_from_wire(space, data)


def test_a_space_without_a_form_is_refused_when_the_service_is_made(counter_class):
    from mrgym.server import create_app

    env = counter_class()
    env.action_space = gym.spaces.Sequence(gym.spaces.Discrete(2))
    with pytest.raises(SpaceError, match=r"got a space Sequence.*flatten it"):
        create_app(env)


@pytest.fixture(params=["msgpack", "json"])
def pair(serving, counter_class, request):
    service = serving(counter_class, max_sessions=4)
    remote = mrgym.make(service.url, format=request.param, retries=1)
    yield counter_class(), remote, service
    remote.close()


def test_it_steps_as_in_process(pair):
    env, remote, _ = pair
    assert remote.observation_space == env.observation_space
    assert remote.action_space == env.action_space
    assert dict(remote.components) == dict(env.components)
    for seed in (1, 2):
        ours, theirs = env.reset(seed=seed), remote.reset(seed=seed)
        assert same(ours[0], theirs[0])
        for action in (0.5, -0.25, 2.0, 0.0, 1 / 3):
            action = np.array([action], np.float32)
            ours, theirs = env.step(action), remote.step(action)
            assert same(ours[0], theirs[0])
            assert ours[1:] == theirs[1:]
    assert theirs[2] is True


def test_it_passes_the_check_and_frees_its_sessions(pair):
    _, remote, service = pair
    report = mrgym.check_env(remote)
    assert report.ok, str(report)
    remote.close()
    gc.collect()
    assert service.metric("mrgym_sessions") == 0


def test_a_copy_has_a_session_of_its_own(pair):
    _, remote, service = pair
    remote.reset(seed=1)
    other = copy.deepcopy(remote)
    with pytest.raises(gym.error.ResetNeeded):
        other.step(np.zeros(1, np.float32))
    other.reset(seed=2)
    assert service.metric("mrgym_sessions") == 2
    remote.step(np.ones(1, np.float32))
    other.close()
    assert service.metric("mrgym_sessions") == 1


def test_no_place_for_a_session_is_one_error(pair):
    remote = pair[1]
    others = [copy.deepcopy(remote) for _ in range(4)]
    for other in others:
        other.reset(seed=1)
    with pytest.raises(RemoteError, match=r"HTTP 429 \(sessions: got one more than 4"):
        remote.reset(seed=1)
    others[0].close()
    remote.reset(seed=1)
    for other in others:
        other.close()


def test_a_session_that_expired_is_one_error_and_reset_opens_another(serving, counter_class):
    service = serving(counter_class, idle_timeout=0.2)
    remote = mrgym.make(service.url)
    remote.reset(seed=1)
    time.sleep(0.8)
    with pytest.raises(RemoteError, match=r"expected an open one.*HTTP 404 UnknownSession"):
        remote.step(np.zeros(1, np.float32))
    with pytest.raises(gym.error.ResetNeeded):
        remote.step(np.zeros(1, np.float32))
    remote.reset(seed=1)
    remote.step(np.zeros(1, np.float32))


def test_an_environment_that_breaks_its_contract_says_so_here(serving, counter_class):
    class Lying(counter_class):
        def step(self, action):
            observation, reward, *rest = super().step(action)
            return (observation, reward + 1, *rest)

    remote = mrgym.make(serving(Lying).url)
    remote.reset(seed=1)
    with pytest.raises(RewardContractError, match="the sum of"):
        remote.step(np.zeros(1, np.float32))


def test_what_cannot_be_sent_does_not_bring_the_session_out_of_step(pair):
    _, remote, _ = pair
    remote.reset(seed=1)
    with pytest.raises(WireError, match="got a value that cannot be sent"):
        remote.reset(seed=1, options={"odd": object()})
    remote.reset(seed=1, options={"even": [1, "x"]})
    assert remote.step(np.zeros(1, np.float32))[1] == 0.0


def test_another_observation_than_the_spaces_is_one_error(serving, counter_class):
    class Grown(counter_class):
        def _look(self):
            return {**super()._look(), "where": np.zeros(7, np.float32)}

    service = serving(Grown)
    remote = mrgym.make(service.url)
    with pytest.raises(SpaceError, match="expected a value of"):
        remote.reset(seed=1)
    assert service.http.get("/health").status_code == 200


class Echo(mrgym.MultiRewardEnv):
    """Plain reset and step, with texts."""

    components = mrgym.components(length=mrgym.Component(low=0, high=9, reduce="sum"))

    def __init__(self):
        self.observation_space, self.action_space = TextSpace(100), TextSpace(100)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        return f"say {self.np_random.integers(1000)}", {}

    def step(self, action):
        self.turn += 1
        return self.emit(action[::-1], {"length": min(len(action), 9)}, terminated=self.turn == 2)


def test_rollouts_can_be_drawn_from_a_stepwise_text_environment(serving):
    service = serving(Echo)
    groups = []
    for make in (Echo, lambda: mrgym.make(service.url)):
        env = as_text_env(make, train_seeds=3, eval_seeds=2)
        sampler = mrgym.ScriptedSampler({t.id: ["abc", "defgh"] for t in env.task_source("train")})
        tasks = [*env.task_source("train")]
        groups.append(mrgym.run_groups(env, sampler, tasks, 1, mrgym.SamplingParams(8)))
    assert groups[0] == groups[1]
    assert groups[0][0].rollouts[0].components == {"length": 8.0}
