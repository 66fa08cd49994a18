"""TRL's own GRPOTrainer, trained through the adapter: same scores, same advantages."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch starts its threads

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("trl", reason="needs trl (make test-peers)")

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import mrgym
from mrgym.adapters import trl as mrgym_trl
from mrgym.errors import RewardDefinitionError, RolloutError, SamplerError
from mrgym_envs.math_multi_reward import MathMultiReward
from mrgym_trainers.advantages import AdvantageConfig, compute_advantages
from mrgym_trainers.tiny_policy import tiny_policy_path

PROMPTS, GROUP = 4, 4
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


class Watched(GRPOTrainer):
    """Keeps what every generation scored, and the advantages made of it."""

    def __init__(self, *args, **kwargs):
        self.seen = []
        super().__init__(*args, **kwargs)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.seen.append(
            SimpleNamespace(
                mode="train" if self.model.training else "eval",
                ids=[row["task_id"] for row in inputs],
                splits=[row["split"] for row in inputs],
                completions=completions,
                completion_ids=completion_ids_list,
            )
        )
        return rewards

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.seen[-1].advantages = output["advantages"].double().numpy()
        self.seen[-1].tool_mask = output.get("tool_mask")
        return output


@pytest.fixture
def tokenizer():
    return PreTrainedTokenizerFast.from_pretrained(tiny_policy_path())


def train(env, tokenizer, folder, *, functions=None, weights=None, chat=False, steps=2, **options):
    """Train the packaged policy on ``env`` and return the trainer."""
    arguments = {
        "max_completion_length": 40,
        "eval_strategy": "no",
        **{k: options.pop(k) for k in [*options] if k in GRPOConfig.__dataclass_fields__},
    }
    trainer = Watched(
        AutoModelForCausalLM.from_pretrained(tiny_policy_path(), dtype=torch.float32),
        reward_funcs=mrgym_trl.reward_functions(env) if functions is None else functions,
        args=GRPOConfig(
            output_dir=str(folder),
            max_steps=steps,
            logging_steps=1,
            per_device_train_batch_size=PROMPTS * GROUP,
            per_device_eval_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            learning_rate=1e-4,
            multi_objective_aggregation="normalize_then_sum",
            reward_weights=mrgym_trl.reward_weights(env, weights),
            report_to="none",
            save_strategy="no",
            bf16=False,
            use_cpu=True,
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=mrgym_trl.dataset(env, "train", chat=chat),
        eval_dataset=mrgym_trl.dataset(env, "eval", chat=chat).select(range(PROMPTS)),
        processing_class=tokenizer,
        **options,
    )
    trainer.train()
    return trainer


def own_components(env, seen):
    tasks = [
        env.task_source(split).by_id(i) for i, split in zip(seen.ids, seen.splits, strict=True)
    ]
    texts = [c if isinstance(c, str) else c[0]["content"] for c in seen.completions]
    return [r.components for r in mrgym.score_completions(env, tasks, texts)]


def check_against_ours(trainer, env, weights, own=own_components):
    """Every generation: logged means and advantages are what mrgym makes of the same texts."""
    names = [*env._declared()]
    generations = [seen for seen in trainer.seen if seen.mode == "train"]
    logged = [line for line in trainer.state.log_history if f"rewards/{names[0]}/mean" in line]
    assert len(generations) == len(logged) == trainer.state.global_step
    for seen, line in zip(generations, logged, strict=True):
        rows = own(env, seen)
        batch = {}
        for name in names:
            present = [name in row for row in rows]
            scores = [row.get(name, 0.0) for row in rows]
            batch[mrgym.reward_key(name)] = scores
            batch[f"present/{name}"] = present
            mean = np.mean([s for s, p in zip(scores, present, strict=True) if p])
            assert line[f"rewards/{name}/mean"] == pytest.approx(mean, abs=1e-6)
        config = AdvantageConfig.preset("trl", weights=weights)
        ours = compute_advantages(batch, np.arange(len(rows)) // GROUP, config)
        np.testing.assert_allclose(seen.advantages, ours.advantages, atol=1e-5)
    assert any(np.abs(seen.advantages).max() > 0.1 for seen in generations)


def test_the_dataset_holds_the_tasks():
    env = mrgym.make("math_multi_reward", train_count=5)
    rows = mrgym_trl.dataset(env, "train")
    task = env.task_source("train")[2]
    assert rows.column_names == ["prompt", "task_id", "split", "answer"]
    assert len(rows) == 5
    assert rows[2] == {
        "prompt": env.plain_prompt(task),
        "task_id": task.id,
        "split": "train",
        "answer": task.answer,
    }
    chat = mrgym_trl.dataset("math_multi_reward", "eval", chat=True)
    assert chat[0]["prompt"][0]["role"] == "user"
    assert env.instruction in chat[0]["prompt"][0]["content"]
    held_out = [task.id for task in env.task_source("eval")]
    assert chat["task_id"][:] == held_out


def test_an_answer_that_json_does_not_know_is_text_in_the_dataset():
    tasks = [mrgym.Task(f"when {i}", datetime.date(2000, 1, i)) for i in (1, 2)]
    rows = mrgym_trl.dataset(Guess(tasks=tasks, eval_tasks=[mrgym.Task("other")]))
    assert rows["answer"][:] == ['"2000-01-01"', '"2000-01-02"']


def test_prompts_without_such_a_form_are_refused():
    prefilled = mrgym.make("math_multi_reward", prefill_think=True)
    with pytest.raises(RewardDefinitionError, match=r"begin with '<think>'.*pass chat=False"):
        mrgym_trl.dataset(prefilled, chat=True)
    assert mrgym_trl.dataset(prefilled)[0]["prompt"].endswith("\n<think>")
    system = {"role": "system", "content": "s"}
    tasks = [mrgym.Task([system, {"role": "user", "content": c}], c) for c in "abc"]
    talk = Guess(tasks=tasks)
    with pytest.raises(RewardDefinitionError, match=r"got chat messages in task .*pass chat=True"):
        mrgym_trl.dataset(talk)
    assert mrgym_trl.dataset(talk, chat=True)[0]["prompt"][0] == system


def test_math_multi_reward_trains_with_our_numbers(tokenizer, tmp_path):
    env = mrgym.make("math_multi_reward")
    weights = {"correctness": 1.0, "format": 0.5, "integer": 0.25}
    trainer = train(
        env, tokenizer, tmp_path, weights=weights, steps=3, eval_strategy="steps", eval_steps=3
    )
    check_against_ours(trainer, env, weights)
    evaluated = [seen for seen in trainer.seen if seen.mode == "eval"]
    line = next(line for line in trainer.state.log_history if "eval_loss" in line)
    assert {split for seen in evaluated for split in seen.splits} == {"eval"}
    rows = [row for seen in evaluated for row in own_components(env, seen)]
    for name in weights:
        mean = np.mean([row[name] for row in rows])
        assert line[f"eval_rewards/{name}/mean"] == pytest.approx(mean, abs=1e-6)


def test_each_completion_is_scored_once_in_training(tokenizer, tmp_path):
    class Counted(MathMultiReward):
        calls = 0

        @mrgym.component(low=0, high=1)
        def integer(self, task, completion):
            type(self).calls += 1
            return super().integer(task, completion)

    train(Counted(), tokenizer, tmp_path, steps=2)
    assert Counted.calls == 2 * PROMPTS * GROUP


class Abstaining(MathMultiReward):
    """Has an optional component, and fails on some completions."""

    @mrgym.component(low=0, high=100, optional=True)
    def answer_length(self, task, completion):
        answer = self.answer(completion)
        return len(answer) if len(completion) % 3 else mrgym.ABSENT

    @mrgym.component(low=0, high=1)
    def integer(self, task, completion):
        if len(completion) % 5 == 0:
            raise ValueError("cannot be read")
        return super().integer(task, completion)


@pytest.mark.parametrize("chat", [False, True])
def test_absent_and_failed_scores_are_left_out_alike(tokenizer, tmp_path, chat):
    env = Abstaining()
    tokenizer.chat_template = TEMPLATE if chat else None
    trainer = train(
        env,
        tokenizer,
        tmp_path,
        functions=mrgym_trl.reward_functions(env, max_error_rate=1.0),
        weights={"answer_length": 0.1},
        chat=chat,
    )
    rows = [row for seen in trainer.seen for row in own_components(env, seen)]
    assert any(row and "answer_length" not in row for row in rows)
    assert any(not row for row in rows)
    check_against_ours(trainer, env, env._declared().weights | {"answer_length": 0.1})
    assert all(0 < line["mrgym/frac_failed"] < 1 for line in trainer.state.log_history[:2])


RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "content": {"content": "text"},
    },
}
"""How a tokenizer says that thinking is to be taken out of the text."""


def test_thinking_that_trl_takes_out_is_refused_or_put_back(tokenizer, tmp_path):
    env = mrgym.make("math_multi_reward")
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSES
    with pytest.raises(RolloutError, match=r"reasoning_content.*pass tokenizer="):
        train(env, tokenizer, tmp_path, chat=True)
    functions = mrgym_trl.reward_functions(env, tokenizer=tokenizer)
    trainer = train(env, tokenizer, tmp_path, functions=functions, chat=True)

    def own(env, seen):
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in seen.completion_ids]
        return own_components(env, SimpleNamespace(**{**vars(seen), "completions": texts}))

    check_against_ours(trainer, env, env._declared().weights, own)


class Guess(mrgym.MultiTurnEnv):
    """Up to three attempts; says whether more digits are wanted."""

    max_turns = 3

    def tasks(self, split):
        first = 0 if split == "train" else 40
        return [mrgym.Task(f"{i} + 1 =\n", str(i + 1)) for i in range(first, first + 40)]

    def respond(self, state, completion):
        return None if len(completion) % 3 == 0 else "Again."

    @mrgym.component(low=0, high=1, reduce="last")
    def wide(self, state, completion):
        return min(len(set(completion)), 20) / 20

    @mrgym.component(low=0, high=3, reduce="sum")
    def turns(self, state, completion):
        return 1

    @mrgym.component(low=0, high=1, reduce="mean", optional=True)
    def digits(self, state, completion):
        found = [c.isdigit() for c in completion]
        return sum(found) / len(found) if found else mrgym.ABSENT


def turns_of(tokenizer, ids, mask):
    """Cut the tokens of a rollout into what the policy said, turn by turn."""
    turns, sampled_before = [], False
    for token, sampled in zip(ids, mask, strict=False):
        if sampled and not sampled_before:
            turns.append([])
        if sampled:
            turns[-1].append(token)
        sampled_before = bool(sampled)
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    return [
        mrgym.Completion(
            tokenizer.decode(turn, skip_special_tokens=True),
            stop_reason="stop" if turn[-1] in ends else "length",
        )
        for turn in turns
    ]


@pytest.mark.parametrize("chat", [False, True])
def test_several_turns_train_with_our_numbers(tokenizer, tmp_path, chat):
    env = Guess()
    tokenizer.chat_template = TEMPLATE if chat else None
    trainer = train(
        env,
        tokenizer,
        tmp_path,
        chat=chat,
        rollout_func=mrgym_trl.rollout_function(env),
        max_completion_length=32,
    )

    def own(env, seen):
        tasks = [env.task_source("train").by_id(i) for i in seen.ids]
        rows = zip(seen.completion_ids, seen.tool_mask.tolist(), strict=True)
        said = [turns_of(tokenizer, ids, mask) for ids, mask in rows]
        assert {len(turns) for turns in said} > {1}
        return [r.components for r in mrgym.score_completions(env, tasks, said)]

    check_against_ours(trainer, env, env._declared().weights, own)


def test_a_conversation_that_outgrows_the_model_is_refused(tokenizer, tmp_path):
    env = Guess()
    with pytest.raises(SamplerError, match=r"got a conversation of .* tokens"):
        train(
            env,
            tokenizer,
            tmp_path,
            rollout_func=mrgym_trl.rollout_function(env),
            max_completion_length=4096,
        )


def test_several_turns_without_the_rollout_function_are_refused(tokenizer, tmp_path):
    with pytest.raises(RolloutError, match="up to 3, expected whole rollouts"):
        train(Guess(), tokenizer, tmp_path)


@pytest.mark.slow
def test_the_example_trains(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "trl_grpo.py"
    command = [sys.executable, example, "--steps", "3", "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    shown = [line.split() for line in done.stdout.splitlines() if "->" in line]
    assert [words[0] for words in shown] == ["correctness", "format", "integer"]
    assert all(0 <= float(number) <= 1 for words in shown for number in (words[1], words[3]))
