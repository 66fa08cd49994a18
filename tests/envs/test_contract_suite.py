"""What every registered environment keeps; a new one is tested by being registered."""

from __future__ import annotations

import inspect
import itertools
import math
import pickle

import pytest

import mrgym
from mrgym.text import TextEnv

ENVS = mrgym.list_envs()
TEXT_ENVS = [i for i in ENVS if isinstance(mrgym.make(i), TextEnv)]
WITH_GOLDS = [i for i in TEXT_ENVS if mrgym.make(i).max_turns == 1]
HEADINGS = ["Reward Space", "Observation Space", "Action Space"]
JUNK = ["", " ", "?", "0", "\x00", "<answer></answer>", "<think>", "\\boxed{}", "a" * 5000, "🎲"]


def actions(env, count=20):
    env.action_space.seed(7)
    return [env.action_space.sample() for _ in range(count)]


def transitions(env, seed=3):
    """Reward, ends and components of some random steps."""
    env.reset(seed=seed)
    for action in actions(env):
        _, reward, terminated, truncated, info = env.step(action)
        yield reward, terminated or truncated, info["reward_components"]
        if terminated or truncated:
            env.reset()


def golds(env, count=25):
    """Tasks of both splits with their golds."""
    tasks = [t for split in ("train", "eval") for t in env.task_source(split)[:count]]
    return [(task, env.gold_completion(task)) for task in tasks]


def score(env, task, completion):
    env.reset(options={"task": task})
    return env.step(completion)[4]["reward_components"]


@pytest.mark.parametrize("env_id", ENVS)
class TestEveryEnvironment:
    def test_the_check_passes(self, env_id):
        report = mrgym.check_env(env_id, max_tasks=25)
        assert report.ok, str(report)

    def test_the_docstring_has_the_headings_and_names_every_component(self, env_id):
        env = mrgym.make(env_id)
        doc = inspect.getdoc(type(env)) or ""
        assert [h for h in HEADINGS if f"\n{h}:\n" in doc] == HEADINGS
        assert [name for name in env.components if f"``{name}``" not in doc] == []

    def test_every_component_says_what_it_measures(self, env_id):
        assert all(component.doc for component in mrgym.make(env_id).components.values())

    def test_the_same_seed_and_actions_give_the_same(self, env_id):
        assert [*transitions(mrgym.make(env_id))] == [*transitions(mrgym.make(env_id))]

    def test_a_pickled_one_plays_the_same(self, env_id):
        env = mrgym.make(env_id)
        copy = pickle.loads(pickle.dumps(env))
        assert [*transitions(copy)] == [*transitions(env)]

    def test_components_lie_in_their_ranges_and_add_up(self, env_id):
        env = mrgym.make(env_id)
        for reward, over, values in transitions(env):
            assert reward == math.fsum(values.values())
            assert values.keys() <= env.components.keys()
            declared = [(v, env.components[name]) for name, v in values.items()]
            assert all(c.low <= v <= c.high for v, c in declared) or not over


@pytest.mark.parametrize("env_id", WITH_GOLDS)
class TestTextEnvironments:
    def test_golds_score_full_marks(self, env_id):
        env = mrgym.make(env_id)
        full = {n: c.high for n, c in env.components.items() if math.isfinite(c.high)}
        for task, gold in golds(env):
            assert score(env, task, gold).items() >= full.items(), task.id

    @pytest.mark.parametrize("junk", JUNK, ids=ascii)
    def test_junk_scores_less(self, env_id, junk):
        env = mrgym.make(env_id)
        for task, gold in golds(env, 5):
            assert math.fsum(score(env, task, junk).values()) < math.fsum(
                score(env, task, gold).values()
            )

    def test_another_tasks_gold_scores_less(self, env_id):
        env = mrgym.make(env_id)
        pairs = golds(env)
        for (task, gold), (other, wrong) in itertools.pairwise(pairs):
            if task.answer != other.answer:
                assert score(env, task, wrong) != score(env, task, gold)


@pytest.mark.parametrize("env_id", TEXT_ENVS)
class TestTasks:
    def test_train_and_eval_share_no_prompt(self, env_id):
        env = mrgym.make(env_id)
        train, held_out = ({str(t.prompt) for t in env.task_source(s)} for s in ("train", "eval"))
        assert train
        assert held_out
        assert not train & held_out

    def test_tasks_are_the_same_every_time(self, env_id):
        sources = [mrgym.make(env_id).task_source("eval") for _ in range(2)]
        assert [*sources[0]] == [*sources[1]]

    def test_prompts_fit_the_observation_space(self, env_id):
        env = mrgym.make(env_id)
        assert all(env.plain_prompt(t) in env.observation_space for t in env.task_source("train"))
