"""Scoring completions that exist already gives what rollouts give."""

import pytest

import mrgym
from mrgym.errors import RolloutError, ScoreError

GOOD = "<think>3+4=7 7*2=14</think>\n<answer>14</answer>"
TASKS = [mrgym.Task(prompt="What is (3 + 4) * 2?", answer="14"), mrgym.Task("1+1?", "2")]


class Countdown(mrgym.MultiTurnEnv):
    """Ends at ``!``; the score is the number said."""

    max_turns = 3
    components = mrgym.components(
        last=mrgym.Component(), all=mrgym.Component(reduce="sum"), parity=mrgym.Component()
    )

    def tasks(self, split):
        return [mrgym.Task("count"), mrgym.Task("count down")]

    def respond(self, state, completion):
        return None if "!" in completion else "go on"

    def scores(self, state, completion):
        number = float(completion.strip("!"))
        return {"last": number, "all": number, "parity": number % 2}


@pytest.mark.parametrize(
    "said", [["1!"], ["2", "3!"], ["1", "2", "4"], ["1", "2", "4!"]], ids=" ".join
)
def test_turns_score_as_in_a_rollout(said):
    env = Countdown()
    task = mrgym.Task("count")
    sampler = mrgym.ScriptedSampler(said)
    [expected] = mrgym.run_group(env, sampler, task, 1, mrgym.SamplingParams()).rollouts
    [got] = mrgym.score_completions(env, [task], [said])
    assert got == expected


def test_texts_score_as_in_rollouts():
    env = mrgym.make("math_multi_reward")
    texts = [GOOD, "14", "fourteen", "<answer>14", ""]
    sampler = mrgym.ScriptedSampler(texts)
    group = mrgym.run_group(env, sampler, TASKS[0], len(texts), mrgym.SamplingParams())
    rollouts = mrgym.score_completions(env, [TASKS[0]] * len(texts), texts)
    assert [r.components for r in rollouts] == [r.components for r in group.rollouts]
    assert len({tuple(r.components.values()) for r in rollouts}) > 1
    assert [r.group for r in rollouts] == [0, 1, 2, 3, 4]


def test_a_talk_that_stops_early_is_truncated():
    [rollout] = mrgym.score_completions(Countdown(), [TASKS[0]], [["2", "5"]])
    assert rollout.components == {"last": 5.0, "all": 7.0, "parity": 1.0}
    assert (rollout.terminated, rollout.truncated) == (False, True)
    assert rollout.reward == 13.0


def test_turns_beyond_the_end_are_refused():
    with pytest.raises(RolloutError, match=r"got 1 turns after the end.*ended it after 2"):
        mrgym.score_completions(Countdown(), [TASKS[0]], [["1", "2!", "3"]])
    with pytest.raises(RolloutError, match="after the end"):
        mrgym.score_completions(mrgym.make("math_multi_reward"), [TASKS[0]], [["14", "14"]])


@pytest.mark.parametrize("wrong", [None, 14, [], [None], [1, 2], b"14", {"role": "assistant"}])
def test_what_is_no_text_is_refused(wrong):
    with pytest.raises(RolloutError, match="expected text"):
        mrgym.score_completions(mrgym.make("math_multi_reward"), [TASKS[0]], [wrong])


def test_counts_must_agree():
    with pytest.raises(RolloutError, match="got 1 completions for 2 tasks"):
        mrgym.score_completions(mrgym.make("math_multi_reward"), TASKS, ["14"])


def test_a_failing_function_is_a_status_not_a_zero():
    def broken(task, completion):
        raise ValueError("no score")

    env = mrgym.from_functions(TASKS, {"broken": broken})
    [rollout] = mrgym.score_completions(env, TASKS[:1], ["14"])
    assert (rollout.status, rollout.components, rollout.valid) == ("error", {}, False)
    assert "no score" in rollout.error
    with pytest.raises(ScoreError, match="no score"):
        mrgym.score_completions(env, TASKS[:1], ["14"], on_score_error="raise")


def test_an_unknown_policy_for_failures_is_refused():
    with pytest.raises(RolloutError, match="on_score_error='zero'"):
        mrgym.score_completions(Countdown(), [TASKS[0]], ["1!"], on_score_error="zero")
