"""Any environment with text, by hand, as one that rollouts are drawn from."""

from __future__ import annotations

import pytest
from gymnasium import spaces

import mrgym
from mrgym import Component, Gate, SamplingParams, ScriptedSampler
from mrgym.stepwise import as_text_env

PARAMS = SamplingParams(max_tokens=8)


def group(env, sampler, task, n=1):
    """The rollouts of one group."""
    return mrgym.run_group(env, sampler, task, n, PARAMS).rollouts


class Steps(mrgym.MultiRewardEnv[str, str]):
    """By hand: counts its own steps, pays for the right word, ends on ``end``, cut at four."""

    components = mrgym.components(
        word=Component(low=0, high=1, reduce="max"),
        count=Component(low=0, gate=Gate("word", 1), reduce="sum"),
        rare=Component(optional=True),
    )
    alive = 0

    def __init__(self):
        self.observation_space = self.action_space = mrgym.spaces.TextSpace()
        Steps.alive += 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.word = 0, f"w{self.np_random.integers(1_000_000)}"
        return f"say {self.word}", {}

    def step(self, action):
        self.count += 1
        rare = self.count if action == "rare" else mrgym.ABSENT
        scores = {"word": action == self.word, "count": 1, "rare": rare}
        ends = {"terminated": action == "end", "truncated": self.count == 4}
        return self.emit(f"step {self.count}", scores, **ends)


class TestStepwise:
    """Any environment with text, by hand, as one that rollouts are drawn from."""

    def env(self):
        return as_text_env(Steps, train_seeds=6, eval_seeds=4)

    def run(self, *actions, n=1):
        env = self.env()
        return group(env, ScriptedSampler(actions), env.task_source("train")[0], n)

    def test_tasks_are_seeds_and_splits_share_none(self):
        env = self.env()
        sources = [env.task_source(split) for split in ("train", "eval")]
        assert [len(source) for source in sources] == [6, 4]
        assert [t.id for t in sources[0]][:2] == ["seed-0", "seed-1"]
        assert not {t.prompt for t in sources[0]} & {t.prompt for t in sources[1]}
        assert [*self.env().task_source("train")] == [*sources[0]]

    def test_components_are_reduced_by_their_rules_after_gates(self):
        word = self.env().task_source("train")[0].prompt.removeprefix("say ")
        (rollout,) = self.run(word, "x", word, "end")
        assert rollout.components == {"word": 1.0, "count": 2.0}
        assert [t.prompt for t in rollout.turns][1:] == ["step 1", "step 2", "step 3"]

    def test_abstentions_stay_absent(self):
        (rollout,) = self.run("rare", "end")
        assert rollout.components == {"word": 0.0, "count": 0.0, "rare": 1.0}

    @pytest.mark.parametrize(
        ("actions", "ends"), [(["end"], (True, False)), (["x"] * 4, (False, True))]
    )
    def test_the_environments_own_end_is_kept(self, actions, ends):
        (rollout,) = self.run(*actions)
        assert (rollout.terminated, rollout.truncated) == ends

    @pytest.mark.parametrize("n", [1, 5])
    def test_every_rollout_has_an_instance_of_its_own(self, n):
        """huggingface/OpenEnv#194; #239; #619."""
        env = self.env()
        task = env.task_source("train")[0]
        before = Steps.alive
        rollouts = group(env, ScriptedSampler(["x"] * n + ["end"] * n), task, n)
        assert Steps.alive == before + n
        assert [[t.prompt for t in r.turns] for r in rollouts] == [[task.prompt, "step 1"]] * n

    def test_it_passes_the_check(self):
        report = mrgym.check_env(self.env())
        assert report.ok, str(report)

    def test_a_text_env_is_returned_as_it_is(self):
        env = mrgym.make("math_multi_reward")
        assert as_text_env(lambda: env) is env

    def test_observations_must_be_text(self):
        class Numbers(Steps):
            observation_space = spaces.Discrete(2)

            def reset(self, *, seed=None, options=None):
                super().reset(seed=seed)
                return 0, {}

        with pytest.raises(mrgym.RegistryError, match=r"observation of type int, expected text"):
            as_text_env(Numbers).task_source("train")

    def test_a_step_that_breaks_the_contract_stops(self):
        class Wrong(Steps):
            def step(self, action):
                observation, reward, *rest = super().step(action)
                return (observation, reward + 1, *rest)

        env = as_text_env(Wrong, train_seeds=1, eval_seeds=1)
        with pytest.raises(mrgym.RewardContractError, match=r"Wrong: got reward"):
            group(env, ScriptedSampler(["x"]), env.task_source("train")[0])
