"""Ways around the contract that were found by trying: each is closed, and stays so."""

import asyncio

import gymnasium as gym
import pytest
from gymnasium.spaces import Discrete

import mrgym
from mrgym import RewardContractError, SamplingParams, ScriptedSampler, Task, component
from mrgym.sampler import Completion
from mrgym.tasks import TaskSource

WRONG = (0, 99.0, True, False, {"reward_components": {"nobody": 99.0}})


class Honest(mrgym.MultiRewardEnv[int, int]):
    components = mrgym.components(a=mrgym.Component(low=0, high=1))
    observation_space = action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        return self.emit(0, {"a": 1.0}, terminated=True)


class Silent:
    """A mixin that keeps ``__init_subclass__`` to itself."""

    def __init_subclass__(cls):
        pass

    def step(self, action):
        return WRONG


class Hidden(Silent, Honest):
    pass


class OwnStep(Honest):
    def __init__(self):
        self.step = lambda action: WRONG


class Replaced(Honest):
    pass


Replaced.step = lambda self, action: WRONG


@pytest.mark.parametrize("cls", [Hidden, OwnStep, Replaced])
def test_a_step_is_guarded_however_it_got_there(cls):
    with pytest.raises(RewardContractError, match=r"expected exactly \['a'\]"):
        cls().step(0)


def test_a_step_set_on_an_instance_still_steps():
    env = Honest()
    env.step = lambda action: (5, 1.0, True, False, {"reward_components": {"a": 1}})
    assert env.step(0) == (5, 1.0, True, False, {"reward_components": {"a": 1.0}})


class Turns(mrgym.MultiTurnEnv):
    max_turns = 3
    components = mrgym.components(a=mrgym.Component(low=0, high=1), b=mrgym.Component())
    script = ()

    def tasks(self, split):
        return [Task(f"{split} {i}") for i in range(3)]

    def respond(self, state, completion):
        return "go on"

    def scores(self, state, completion):
        return self.script[state.turn - 1]


def play(script):
    env = Turns()
    env.script = script
    task = env.task_source("train")[0]
    return mrgym.run_group(env, ScriptedSampler(lambda _: "x"), task, 1, SamplingParams())


def test_a_score_that_is_missing_on_a_later_turn_is_not_carried_over():
    with pytest.raises(RewardContractError, match=r"missing \['b'\]"):
        play([{"a": 1, "b": 1}, {"a": 0}, {"a": 0}])


@pytest.mark.parametrize("turn", [0, 1])
def test_a_score_out_of_range_on_an_early_turn_is_refused(turn):
    script = [{"a": 1, "b": 0}] * 3
    script[turn] = {"a": 500, "b": 0}
    with pytest.raises(RewardContractError, match=r"a=500\.0, expected within the declared"):
        play(script)


def test_a_component_may_abstain_on_a_turn():
    script = [{"a": 0.5, "b": 2}, {"a": mrgym.ABSENT, "b": 3}, {"a": mrgym.ABSENT, "b": 4}]
    assert play(script).rollouts[0].components == {"a": 0.5, "b": 4.0}


@pytest.mark.parametrize("reply", [3, True, b"x", {"role": "user"}, ["x"], []])
def test_a_reply_that_is_no_message_is_refused_in_words(reply):
    env = Turns()
    env.script = [{"a": 1, "b": 0}] * 3
    env.respond = lambda state, completion: reply
    with pytest.raises(RewardContractError, match="from respond, expected text, a list of"):
        mrgym.run_group(
            env, ScriptedSampler(lambda _: "x"), env.task_source("train")[0], 1, SamplingParams()
        )


class Quits(mrgym.SingleTurnEnv):
    def tasks(self):
        return [Task("a"), Task("b")]

    @component
    def leaves(self, task, completion):
        raise SystemExit(0)


class Cancels(mrgym.SingleTurnEnv):
    def tasks(self):
        return [Task("a"), Task("b")]

    @component
    async def leaves(self, task, completion):
        raise asyncio.CancelledError


@pytest.mark.parametrize("cls", [Quits, Cancels])
def test_a_score_function_cannot_end_the_run(cls):
    group = mrgym.run_group(cls(), ScriptedSampler(["x"]), Task("a"), 1, SamplingParams())
    assert group.rollouts[0].status == "error"
    assert group.rollouts[0].components == {}


class Doubled(gym.Wrapper):
    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return observation, 2 * reward, *rest


def test_a_wrong_factor_is_found_where_random_actions_score_zero():
    report = mrgym.check_env(Doubled(mrgym.make("math_multi_reward")))
    assert any("Doubled" in failure and "sum" in failure for failure in report.failures)


class Seeds:
    codec = None

    def __init__(self):
        self.seen = []

    def sample(self, prompts, n, params):
        self.seen.append(params.seed)
        return [[Completion("x")] * n for _ in prompts]


def test_turns_do_not_share_random_numbers():
    env, sampler = Turns(), Seeds()
    env.script = [{"a": 1, "b": 0}] * 3
    tasks = TaskSource([Task("t")])
    mrgym.run_groups(env, sampler, tasks, 2, SamplingParams(seed=7))
    assert len(set(sampler.seen)) == 3
    assert sampler.seen[0] == 7


@pytest.mark.parametrize("policy", ["ignore", "", None])
def test_an_unknown_policy_for_failures_is_not_taken_for_mask(policy):
    with pytest.raises(mrgym.RolloutError, match=r"on_score_error=.*, expected 'mask', 'raise'"):
        mrgym.run_group(
            Quits(), ScriptedSampler(["x"]), Task("a"), 1, SamplingParams(), on_score_error=policy
        )
