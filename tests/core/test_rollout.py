"""Groups of rollouts: samplers and environments together."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import mrgym
from mrgym import Component, Gate, RolloutError, SamplingParams, ScoreError, ScriptedSampler, Task
from mrgym.evaluate import evaluate
from mrgym.rollout import check_error_rate
from mrgym.sampler import Completion
from mrgym.scoring import InlineScorer

TASKS = [Task(f"{i} + 1?", str(i + 1), id=f"t{i}") for i in range(8)]


PARAMS = SamplingParams(max_tokens=8)


class Sums(mrgym.SingleTurnEnv):
    """Right or wrong, and short or not."""

    def tasks(self, split):
        return TASKS[:6] if split == "train" else TASKS[6:]

    @mrgym.component(low=0, high=1)
    def right(self, task, completion):
        return completion == task.answer

    @mrgym.component(low=-9, high=0)
    def length(self, task, completion):
        return -len(completion)


class Guess(mrgym.MultiTurnEnv):
    """Says higher or lower until the answer is found; every attempt costs."""

    max_turns = 4

    def tasks(self, split):
        return Sums.tasks(self, split)

    def start(self, task, rng):
        state = super().start(task, rng)
        state.data["tries"] = []
        return state

    def respond(self, state, completion):
        state.data["tries"].append(str(completion))
        if completion == state.task.answer:
            return None
        return "higher" if completion < state.task.answer else "lower"

    @mrgym.component(low=0, high=1)
    def found(self, state, completion):
        return completion == state.task.answer

    @mrgym.component(low=0, high=4, reduce="sum")
    def tries(self, state, completion):
        return 1


def group(env, sampler, n=1, task=TASKS[0], **options):
    """The rollouts of one group."""
    return mrgym.run_group(env, sampler, task, n, PARAMS, **options).rollouts


def in_turn(*answers):
    """A script that ignores the prompt and answers in order."""
    left = [*answers]
    return lambda prompt: left.pop(0)


def functions(low=None, **named):
    """Environment and components of plain functions."""
    bound = {} if low is None else {"low": low}
    components = {name: Component(**bound) for name in named}
    return mrgym.from_functions(TASKS, named, components=components)


class TestSingleTurn:
    @pytest.mark.parametrize(
        "script",
        [
            ["1", "no", "2", "no"],
            {"t0": ["1", "no"], "t1": ["2", "no"]},
            {"0 + 1?": ["1", "no"], "t1": ["2", "no"]},
            in_turn("1", "no", "2", "no"),
        ],
        ids=["list", "mapping by id", "mapping by prompt", "callable"],
    )
    def test_every_form_of_script(self, script):
        groups = mrgym.run_groups(Sums(), ScriptedSampler(script), TASKS[:2], 2, PARAMS)
        assert [[r.components["right"] for r in g.rollouts] for g in groups] == [[1, 0], [1, 0]]

    @pytest.mark.parametrize(("n", "first"), [(1, 0), (3, 10), (8, 2)])
    def test_every_rollout_is_counted_once_under_its_group(self, n, first):
        """radixark/miles#1325; THUDM/slime#2062: groups go by id, not by position."""
        sampler = ScriptedSampler(lambda prompt: "1")
        groups = mrgym.run_groups(Sums(), sampler, TASKS[:4], n, PARAMS, first_group=first)
        rollouts = [r for g in groups for r in g.rollouts]
        expected = [(first + g, i, f"t{g}") for g in range(4) for i in range(n)]
        assert [(r.group, r.index, r.task_id) for r in rollouts] == expected
        assert [(g.group, g.task_id) for g in groups] == [(first + i, f"t{i}") for i in range(4)]

    def test_the_record_is_complete(self):
        (rollout,) = group(Sums(), ScriptedSampler(["1"]))
        assert rollout.components == rollout.raw_components == {"right": 1.0, "length": -1.0}
        assert rollout.reward == math.fsum(rollout.components.values())
        assert (rollout.status, rollout.terminated, rollout.truncated) == ("ok", True, False)
        assert rollout.answer == "1"
        (turn,) = rollout.turns
        assert (turn.prompt, turn.completion) == ("0 + 1?", "1")
        assert turn.scores == {"right": 1.0, "length": -1.0}

    @pytest.mark.parametrize("score", [np.float32(0.5), np.bool_(True), 1, True, np.array(0.5)])
    def test_turns_show_scores_of_every_type(self, score):
        (rollout,) = group(functions(a=lambda t, c: score), ScriptedSampler(["x"]))
        assert rollout.turns[0].scores == rollout.components == {"a": float(score)}

    def test_gates_leave_their_raw_scores(self):
        short = Component(low=0, high=1, gate=Gate("right", 1))
        components = {"right": Component(low=0, high=1), "short": short}
        named = {"right": lambda t, c: c == t.answer, "short": lambda t, c: 1}
        env = mrgym.from_functions(TASKS, named, components=components)
        (rollout,) = group(env, ScriptedSampler(["no"]))
        assert rollout.components == {"right": 0.0, "short": 0.0}
        assert rollout.raw_components == {"right": 0.0, "short": 1.0}


class TestEveryPathCarriesComponents:
    """NVIDIA-NeMo/RL#2892; NVIDIA-NeMo/Gym#1664."""

    WANTED = {"right": 1.0, "length": -1.0}.items()

    def paths():
        async def right(task, completion):
            await asyncio.sleep(0)
            return completion == task.answer

        class Batched(Sums):
            @mrgym.component(batched=True)
            def right(self, tasks, completions):
                return [c == t.answer for t, c in zip(tasks, completions, strict=True)]

        class Turns(mrgym.MultiTurnEnv):
            components = Sums.components
            tasks = Sums.tasks

            def scores(self, task, completion):
                return {"right": completion == task.answer, "length": -len(completion)}

        length = {"right": right, "length": lambda t, c: -len(c)}
        return {
            "single": Sums(),
            "async": mrgym.from_functions(TASKS, length),
            "batched": Batched(),
            "multi-turn": Turns(),
        }

    @pytest.mark.parametrize(("env"), [pytest.param(e, id=k) for k, e in paths().items()])
    def test_rollouts_and_steps_agree(self, env):
        (rollout,) = group(env, ScriptedSampler(["1"]))
        env.reset(seed=0, options={"task": TASKS[0]})
        assert env.step("1")[4]["reward_components"] == rollout.components
        assert rollout.components.items() == self.WANTED

    @pytest.mark.parametrize(("env"), [pytest.param(e, id=k) for k, e in paths().items()])
    def test_they_reach_the_estimator(self, env):
        """NVIDIA-NeMo/RL#2680; NVIDIA-NeMo/RL#2681: environment, batch and estimator agree."""
        pytest.importorskip("torch")
        from mrgym_trainers.advantages import AdvantageConfig, compute_advantages
        from mrgym_trainers.gdpo.batch import build_batch

        groups = mrgym.run_groups(env, ScriptedSampler(["1", "no"]), TASKS[:1], 2, PARAMS)
        batch = build_batch(groups, env.components)
        assert [k for k in batch if k.startswith("reward/")] == ["reward/right", "reward/length"]
        scores = {key: batch[key] for key in batch if "/" in key}
        advantages = compute_advantages(scores, batch["group_ids"], AdvantageConfig())
        assert advantages.by_component.keys() == env.components.keys()
        assert advantages.advantages[0] > 0


class TestMultiTurn:
    def test_turns_follow_each_other(self):
        (rollout,) = group(Guess(), ScriptedSampler(["0", "9", "1"]))
        assert [(t.prompt, t.completion) for t in rollout.turns] == [
            ("0 + 1?", "0"),
            ("higher", "9"),
            ("lower", "1"),
        ]
        assert rollout.components == {"found": 1.0, "tries": 3.0}
        assert [t.scores for t in rollout.turns][:2] == [{"found": 0.0, "tries": 1.0}] * 2
        assert (rollout.terminated, rollout.truncated) == (True, False)

    def test_rollouts_of_a_group_end_when_they_end(self):
        answers = {"0 + 1?": ["1", "0", "0"]}
        sampler = ScriptedSampler(lambda p: answers["0 + 1?"].pop(0) if p.text in answers else "1")
        rollouts = group(Guess(), sampler, n=3)
        assert [len(r.turns) for r in rollouts] == [1, 2, 2]
        assert [r.components["tries"] for r in rollouts] == [1.0, 2.0, 2.0]

    def test_the_next_prompt_holds_the_conversation_in_both_forms(self):
        asked = []
        sampler = ScriptedSampler(lambda prompt: asked.append(prompt) or str(len(asked) - 1))
        group(Guess(), sampler)
        assert [p.text for p in asked] == ["0 + 1?", "0 + 1?0\nhigher\n"]
        assert [m["role"] for m in asked[1].messages] == ["user", "assistant", "user"]
        assert [m["content"] for m in asked[1].messages] == ["0 + 1?", "0", "higher"]

    def test_the_turn_limit_truncates(self):
        (rollout,) = group(Guess(), ScriptedSampler(["0"] * 4))
        assert (rollout.terminated, rollout.truncated) == (False, True)
        assert rollout.components == {"found": 0.0, "tries": 4.0}

    def test_episodes_of_a_group_draw_the_same_random_numbers(self):
        class Dice(Guess):
            def respond(self, state, completion):
                return str(state.rng.integers(1000))

        def said(seed, task=TASKS[0]):
            rollouts = group(Dice(), ScriptedSampler(lambda p: "0"), n=3, task=task, seed=seed)
            return [[t.prompt for t in r.turns[1:]] for r in rollouts]

        assert said(0) == said(0)
        assert said(0)[0] == said(0)[1] == said(0)[2]
        assert said(0) != said(1)
        assert said(0) != said(0, TASKS[1])


class TestTruncation:
    """PrimeIntellect-ai/verifiers#1543; #1751: cut, still scored, and once."""

    @pytest.mark.parametrize("cls", [Sums, Guess])
    @pytest.mark.parametrize("text", ["", "0", "parti"])
    def test_a_cut_completion_is_scored_completely(self, cls, text):
        cut = Completion(text, stop_reason="length")
        (rollout,) = group(cls(), ScriptedSampler([cut]))
        assert rollout.truncated
        assert rollout.components.keys() == cls.components.keys()
        assert (rollout.status, rollout.turns[0].stop_reason) == ("ok", "length")

    @pytest.mark.parametrize("n", [1, 5])
    def test_it_is_scored_once(self, n):
        seen = []
        env = functions(a=lambda task, completion: seen.append(completion) or 1)
        group(env, ScriptedSampler(lambda p: Completion("x", stop_reason="length")), n=n)
        assert seen == ["x"] * n


def sometimes(task, completion):
    """Raises on ``raise``, hangs on ``hang``, else scores 0."""
    if completion == "raise":
        raise ValueError("bad luck")
    return waiting() if completion == "hang" else 0.0


async def waiting():
    await asyncio.Event().wait()


class TestScoreErrors:
    """NVIDIA-NeMo/RL#2207."""

    def rollouts(self, *completions, **options):
        options = {"scorer": InlineScorer(timeout=0.02), **options}
        env = functions(low=0.25 if options.pop("floor", False) else -1, a=sometimes)
        return group(env, ScriptedSampler(completions), n=len(completions), **options)

    def test_a_failure_is_no_zero(self):
        bad, zero = self.rollouts("raise", "x")
        assert (bad.status, bad.components, bad.valid) == ("error", {}, False)
        assert (zero.status, zero.components, zero.valid) == ("ok", {"a": 0.0}, True)
        assert bad.error == "a: ValueError('bad luck')"

    def test_a_timeout_is_told_from_an_error(self):
        statuses = [r.status for r in self.rollouts("hang", "raise", "x")]
        assert statuses == ["timeout", "error", "ok"]

    @pytest.mark.parametrize("completion", ["raise", "hang"])
    def test_raise_stops_with_task_and_cause(self, completion):
        with pytest.raises(ScoreError, match=r"task t0: got .* from a: .*on_score_error='mask'"):
            self.rollouts("x", completion, on_score_error="raise")

    @pytest.mark.parametrize("completion", ["raise", "hang"])
    def test_floor_gives_the_least_score_and_keeps_the_status(self, completion):
        (rollout,) = self.rollouts(completion, on_score_error="floor", floor=True)
        assert (rollout.components, rollout.reward, rollout.valid) == ({"a": 0.25}, 0.25, True)
        assert rollout.status == {"raise": "error", "hang": "timeout"}[completion]

    def test_floor_needs_a_floor(self):
        env = functions(a=sometimes, b=lambda t, c: 1)
        with pytest.raises(RolloutError, match=r"without a finite low \['a', 'b'\]"):
            group(env, ScriptedSampler(["raise"]), on_score_error="floor")

    def test_the_floor_is_an_exact_sum_after_gates(self):
        lows = {"a": 0.1, "b": 0.2, "c": 0.3, "d": -1.0}
        components = {name: Component(low=low, high=1) for name, low in lows.items()}
        components["d"] = Component(low=-1, high=1, gate=Gate("a", 0.5, otherwise=0.7))
        named = dict.fromkeys(lows, sometimes)
        env = mrgym.from_functions(TASKS, named, components=components)
        (rollout,) = group(env, ScriptedSampler(["raise"]), on_score_error="floor")
        assert rollout.raw_components == lows
        assert rollout.components == lows | {"d": 0.7}
        assert rollout.reward == math.fsum([0.1, 0.2, 0.3, 0.7])

    def test_a_broken_contract_always_stops(self):
        env = functions(a=lambda t, c: math.nan)
        with pytest.raises(mrgym.RewardContractError, match=r"task t0: got a=nan"):
            group(env, ScriptedSampler(["x"]))

    @pytest.mark.parametrize("turn", [0, 1, 2])
    def test_an_environment_that_fails_in_a_turn_is_a_status(self, turn):
        class Fragile(Guess):
            def respond(self, state, completion):
                if state.turn == turn + 1:
                    raise OSError("tool gone")
                return "go on"

        (rollout,) = group(Fragile(), ScriptedSampler(["0"] * 4))
        assert (rollout.status, rollout.error) == ("error", "respond: OSError('tool gone')")
        scores = [t.scores for t in rollout.turns]
        assert scores == [{"found": 0.0, "tries": 1.0}] * turn + [{}]

    def test_others_of_the_group_go_on(self):
        class Fragile(Guess):
            def respond(self, state, completion):
                return super().respond(state, completion) if completion != "boom" else 1 / 0

        rollouts = group(Fragile(), ScriptedSampler(["boom", "0", "1", "1"]), n=3)
        assert [(r.status, r.valid) for r in rollouts] == [("error", False), *[("ok", True)] * 2]


class TestEvaluation:
    """huggingface/trl#5811/#2959/#5790; #4458: plain means, no group to compare with."""

    @pytest.mark.parametrize("n", [1, 3])
    def test_components_have_means_of_their_own(self, n):
        env, sampler = Sums(), ScriptedSampler(lambda prompt: "7")
        means, rollouts = evaluate(env, sampler, env.task_source("eval"), PARAMS, n=n)
        assert (means["reward/right"], means["reward/length"], means["reward"]) == (0.5, -1.0, -0.5)
        assert (means["n"], means["failed"]) == (2 * n, 0)
        assert {r.advantage for r in rollouts} == {None}

    def test_failures_and_abstentions_are_no_zeros(self):
        """NVIDIA-NeMo/RL#2207."""
        named = {"a": sometimes, "b": lambda t, c: 1 if c == "x" else mrgym.ABSENT}
        components = {"a": Component(), "b": Component(optional=True)}
        env = mrgym.from_functions(TASKS, named, components=components)
        script = ScriptedSampler(["raise", "x", "y"])
        means, _ = evaluate(env, script, TASKS[:3], PARAMS, max_error_rate=0.5)
        assert (means["n"], means["failed"]) == (3, 1)
        assert (means["reward/a"], means["reward/b"], means["reward"]) == (0.0, 1.0, 0.5)

    @pytest.mark.parametrize(("ceiling", "said"), [(0.1, "1 failures in 1"), (1.0, "no scored")])
    def test_an_evaluation_that_failed_is_an_error(self, ceiling, said):
        env = functions(a=sometimes)
        with pytest.raises(ScoreError, match=said):
            evaluate(env, ScriptedSampler(["raise"]), TASKS[:1], PARAMS, max_error_rate=ceiling)


class TestErrorRate:
    def groups(self, bad, good):
        env = functions(a=sometimes)
        script = ScriptedSampler(["raise"] * bad + ["x"] * good)
        return [mrgym.run_group(env, script, TASKS[0], bad + good, PARAMS)]

    @pytest.mark.parametrize(("bad", "good", "rate"), [(0, 4, 0), (1, 3, 0.25), (4, 0, 1)])
    def test_failures_are_counted(self, bad, good, rate):
        assert check_error_rate(self.groups(bad, good), 1.0) == rate

    @pytest.mark.parametrize(("bad", "ceiling"), [(1, 0.0), (2, 0.15), (10, 0.5)])
    def test_too_many_stop_with_the_cause(self, bad, ceiling):
        said = rf"{bad} failures in 10 rollouts \({bad} x a: ValueError.*expected at most"
        with pytest.raises(ScoreError, match=said):
            check_error_rate(self.groups(bad, 10 - bad), ceiling)

    @pytest.mark.parametrize("ceiling", [0.0, 0.1])
    def test_exactly_the_ceiling_and_nothing_at_all_are_fine(self, ceiling):
        assert check_error_rate(self.groups(int(ceiling * 10), 10), ceiling) <= ceiling
        assert check_error_rate([], ceiling) == 0.0


class TestSamplersThatMiscount:
    @pytest.mark.parametrize(
        "answer", [[], [["1"]], [["1", "1", "1"]], [["1", "1"], ["1", "1"]], [[]]], ids=repr
    )
    def test_the_counts_are_named(self, answer):
        sampler = ScriptedSampler([])
        sampler.sample = lambda prompts, n, params: [[Completion(t) for t in g] for g in answer]
        with pytest.raises(RolloutError, match=r"sampler: got .*expected 1 with 2; mend the sampl"):
            group(Sums(), sampler, n=2)

    @pytest.mark.parametrize("error", [mrgym.SamplerError("down"), mrgym.SamplerError("full")])
    def test_a_sampler_that_is_down_stops_everything(self, error):
        """Tencent-Hunyuan/UniRL#214; awslabs/agentcore-rl-toolkit#122: no empty answer."""

        def down(prompt):
            raise error

        with pytest.raises(mrgym.SamplerError, match=str(error)):
            group(Sums(), ScriptedSampler(down))


class TestConcurrency:
    """huggingface/OpenEnv#194; #239; #619."""

    def test_64_episodes_share_no_state(self):
        env = Guess()
        turns = Counter()

        def answer(prompt):
            turns[prompt.task_id] += 1
            return str(len(prompt.messages) // 2)

        groups = mrgym.run_groups(env, ScriptedSampler(answer), TASKS, 8, PARAMS)
        for number, got in enumerate(groups):
            wanted = [str(i) for i in range(min(number + 2, 4))]
            assert [[t.completion for t in r.turns] for r in got.rollouts] == [wanted] * 8
            assert {r.components["tries"] for r in got.rollouts} == {len(wanted)}
            assert {r.components["found"] for r in got.rollouts} == {float(number < 3)}

    def test_threads_may_share_one_environment(self):
        env = Guess()

        def play(task):
            sampler = ScriptedSampler(lambda prompt: str(len(prompt.messages) // 2))
            return group(env, sampler, n=8, task=task)

        with ThreadPoolExecutor(8) as pool:
            together = [*pool.map(play, TASKS)]
        assert together == [play(task) for task in TASKS]
