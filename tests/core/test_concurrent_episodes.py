"""Many episodes of an environment with state, in play at the same time."""

import itertools

import mrgym
from mrgym.rollout import run_groups
from mrgym.sampler import Completion, SamplingParams
from mrgym.stepwise import as_text_env

MADE = []


class Counter(mrgym.MultiRewardEnv[str, str]):
    """Adds up what it is told; its sum is right only if nobody else talks to it."""

    components = mrgym.components(total=mrgym.Component(low=0, high=1000, reduce="last"))

    def __init__(self):
        MADE.append(self)
        self.observation_space = mrgym.spaces.TextSpace()
        self.action_space = mrgym.spaces.TextSpace()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.total, self.turn = 0, 0
        return f"start {seed}", {}

    def step(self, action):
        self.turn += 1
        self.total += int(action)
        return self.emit(f"{self.total}", {"total": self.total}, terminated=self.turn == 3)


class Numbers:
    """Answers with another number every time."""

    codec = None

    def __init__(self):
        self.calls = itertools.count()

    def sample(self, prompts, n, params):
        return [[Completion(str(next(self.calls) % 7 + 1)) for _ in range(n)] for _ in prompts]


def test_64_episodes_of_a_stateful_environment_share_nothing():
    MADE.clear()
    env = as_text_env(Counter)
    tasks = [*env.task_source("train")[:16]]
    made_before = len(MADE)
    sampler = Numbers()
    groups = run_groups(env, sampler, tasks, 4, SamplingParams(max_tokens=4))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len(rollouts) == 64
    for rollout in rollouts:
        told = [int(turn.completion) for turn in rollout.turns]
        assert len(told) == 3
        assert rollout.components == {"total": float(sum(told))}
        # What it was told between turns is its own sum, too.
        assert [turn.prompt for turn in rollout.turns[1:]] == [str(told[0]), str(sum(told[:2]))]
    assert len({id(env) for env in MADE[made_before:]}) >= 64
    assert next(sampler.calls) == 64 * 3
