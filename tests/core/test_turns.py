"""Conversations: turns, their scores, and how these become an episode's."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import pytest

import mrgym
from mrgym import ABSENT, Component, Gate, RewardContractError, Task
from mrgym.sampler import Completion

TASKS = [Task(f"{i} + 1?", str(i + 1), id=f"t{i}") for i in range(20)]


def play(env, *completions, task=TASKS[0]):
    """Reset to a task, step through the completions, and return the last transition."""
    env.reset(seed=0, options={"task": task})
    for completion in completions:
        transition = env.step(completion)
    return transition


def scores_of(env, *completions):
    return play(env, *completions)[4]["reward_components"]


class Talk(mrgym.MultiTurnEnv):
    """A completion is a number, the score of its turn; ``!`` ends the talk."""

    max_turns = 4

    def tasks(self, split):
        return TASKS

    def respond(self, state, completion):
        return None if "!" in completion else f"turn {state.turn}"


def talk(**declared):
    """A talk with components that all score the number, or ABSENT for ``-``."""

    def scores(self, state, completion):
        text = completion.strip("!")
        return {name: ABSENT if text == "-" else float(text) for name in declared}

    return type("Talk", (Talk,), {"components": mrgym.components(**declared), "scores": scores})()


class TestReductions:
    @pytest.mark.parametrize(
        ("turns", "sums"),
        [
            (["1", "0", "0.5!"], {"sum": 1.5, "last": 0.5, "max": 1.0, "mean": 0.5}),
            (["1", "1", "1!"], {"sum": 3.0, "last": 1.0, "max": 1.0, "mean": 1.0}),
            (["-2", "-1!"], {"sum": -3.0, "last": -1.0, "max": -1.0, "mean": -1.5}),
            (["0.25!"], {"sum": 0.25, "last": 0.25, "max": 0.25, "mean": 0.25}),
            (["0.1", "0.2", "0.3!"], {"sum": 0.6, "last": 0.3, "max": 0.3, "mean": 0.2}),
        ],
        ids=["falls", "3-turn format", "negative", "1-turn success", "fractions"],
    )
    @pytest.mark.parametrize("rule", ["sum", "last", "max", "mean"])
    def test_turns_become_an_episode_by_the_declared_rule(self, rule, turns, sums):
        """NovaSky-AI/SkyRL#2104."""
        got = scores_of(talk(scored=Component(reduce=rule)), *turns)
        assert got == {"scored": pytest.approx(sums[rule], abs=1e-15)}

    def test_last_is_the_default(self):
        assert Component().reduce == "last"

    @pytest.mark.parametrize("rule", ["last", "max", "mean"])
    def test_retries_do_not_farm_a_format_reward(self, rule):
        """NovaSky-AI/SkyRL#2104: three well-formed turns earn what one does."""
        env = talk(format=Component(low=0, high=1, reduce=rule))
        assert scores_of(env, "1", "1", "1!") == scores_of(env, "1!") == {"format": 1.0}

    def test_the_declared_range_holds_for_the_episode(self):
        """NovaSky-AI/SkyRL#2104: a sum of turns that leaves the bounds is an error."""
        with pytest.raises(RewardContractError, match=r"format=3\.0, expected within .*\[0, 1\]"):
            play(talk(format=Component(low=0, high=1, reduce="sum")), "1", "1", "1!")
        wide = talk(format=Component(low=0, high=3, reduce="sum"))
        assert scores_of(wide, "1", "1", "1!") == {"format": 3.0}

    def test_components_have_rules_of_their_own(self):
        env = talk(total=Component(reduce="sum"), final=Component(), best=Component(reduce="max"))
        assert scores_of(env, "2", "1!") == {"total": 3.0, "final": 1.0, "best": 2.0}

    @pytest.mark.parametrize("turns", [["1", "0", "0.5!"], ["3!"], ["1", "1", "1", "1"], ["-1!"]])
    @pytest.mark.parametrize("rule", ["sum", "last", "max", "mean"])
    def test_rewards_of_the_steps_add_up_to_the_episode(self, rule, turns):
        env = talk(a=Component(reduce=rule), b=Component(low=-9, high=9))
        env.reset(seed=0)
        steps = [env.step(turn) for turn in turns]
        final = steps[-1][4]["reward_components"]
        assert math.fsum(s[1] for s in steps) == math.fsum(final.values())
        for name, value in final.items():
            assert math.fsum(s[4]["reward_components"][name] for s in steps) == value

    def test_recorded_statistics_are_the_episode(self):
        env = gym.wrappers.RecordEpisodeStatistics(talk(a=Component(reduce="sum"), b=Component()))
        assert play(env, "1", "2", "0.5!")[4]["episode"]["r"] == 4.0

    @pytest.mark.parametrize(
        ("turns", "values"),
        [(["1", "-", "0!"], {"a": 0.5}), (["-", "1!"], {"a": 1.0}), (["-", "-!"], {})],
    )
    def test_turns_that_abstained_are_left_out(self, turns, values):
        assert scores_of(talk(a=Component(optional=True, reduce="mean")), *turns) == values

    def test_a_required_component_may_not_abstain_on_every_turn(self):
        with pytest.raises(RewardContractError, match=r"ABSENT for component 'a'"):
            play(talk(a=Component()), "-", "-!")

    @pytest.mark.parametrize("turns", [["nan", "1!"], ["inf", "1!"], ["1", "nan!"]])
    @pytest.mark.parametrize("rule", ["last", "sum"])
    def test_a_nan_on_any_turn_is_an_error(self, turns, rule):
        with pytest.raises(RewardContractError, match=r"got a=.*expected .*finite number"):
            play(talk(a=Component(reduce=rule)), *turns)

    @pytest.mark.parametrize("score", [None, "1", np.ones(1)], ids=repr)
    def test_a_score_that_is_no_number_on_an_early_turn(self, score):
        env = type("Talk", (Talk,), {"a": mrgym.component(name="a")(lambda self, s, c: score)})()
        with pytest.raises(RewardContractError, match=r"got a="):
            play(env, "1")

    def test_gates_look_at_the_episode(self):
        gated = Component(low=0, high=1, gate=Gate("a", 2))
        env = talk(a=Component(reduce="sum"), b=gated)
        assert scores_of(env, "1", "1!") == {"a": 2.0, "b": 1.0}
        assert scores_of(env, "0", "1!") == {"a": 1.0, "b": 0.0}


class TestTurns:
    def test_turns_before_the_last_read_zero_and_show_their_scores(self):
        env = talk(a=Component(low=0.5, high=1), b=Component(optional=True))
        observation, reward, terminated, truncated, info = play(env, "1")
        assert (observation, reward, terminated, truncated) == ("turn 1", 0.0, False, False)
        assert info["reward_components"] == {"a": 0.0}
        assert info["turn_scores"] == {"a": 1.0, "b": 1.0}

    @pytest.mark.parametrize("max_turns", [1, 2, 4])
    def test_the_turn_limit_truncates_with_complete_components(self, max_turns):
        env = talk(a=Component(reduce="sum"), b=Component())
        env.max_turns = max_turns
        _, reward, terminated, truncated, info = play(env, *["1"] * max_turns)
        assert (terminated, truncated) == (False, True)
        assert info["reward_components"] == {"a": float(max_turns), "b": 1.0}
        assert reward == max_turns + 1

    def test_a_completion_cut_by_the_token_limit_ends_the_talk_scored(self):
        """PrimeIntellect-ai/verifiers#1543; #1751."""
        cut = Completion("0.5", stop_reason="length")
        _, _, terminated, truncated, info = play(talk(a=Component()), "1", cut)
        assert (terminated, truncated) == (False, True)
        assert info["reward_components"] == {"a": 0.5}

    def test_the_conversation_is_kept(self):
        class Remembers(Talk):
            instruction = "Count."

            @mrgym.component
            def heard(self, state, completion):
                return "|".join(m["content"] for m in state.messages) == (
                    "Count.\n\n0 + 1?|a|turn 1|b|turn 2|c!"
                )

        assert scores_of(Remembers(), "a", "b", "c!") == {"heard": 1.0}

    def test_replies_may_be_messages(self):
        class Tools(Talk):
            @mrgym.component
            def roles(self, state, completion):
                return len([m for m in state.messages if m["role"] == "tool"])

            def respond(self, state, completion):
                return [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]

        env = Tools()
        assert play(env, "x")[0] == "1\n2"
        assert play(env, "x", "y")[4]["turn_scores"] == {"roles": 4.0}

    def test_respond_that_raises_is_an_error_of_the_environment(self):
        class Broken(Talk):
            right = mrgym.component(name="a")(lambda self, task, completion: 1)

            def respond(self, state, completion):
                raise OSError("tool gone")

        with pytest.raises(mrgym.ScoreError, match=r"respond: OSError\('tool gone'\)"):
            play(Broken(), "x")
