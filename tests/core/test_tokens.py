"""Token ids from sampler to record: verbatim, with a mask and log-probabilities of one length."""

from __future__ import annotations

import pytest

import mrgym
from mrgym import RolloutError, SamplingParams, ScriptedSampler, Task
from mrgym.sampler import Completion

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


class TokenCodec:
    """Characters as ids; 1 begins, 0 both ends and pads, 2 separates turns."""

    def __init__(self):
        self.started = []

    def start(self, prompt):
        self.started.append(prompt.text)
        return [1, *map(ord, prompt.text + prompt.prefill)]

    def reply(self, prompt, answers):
        return [2, *(ord(c) for message in answers for c in message["content"]), 2]


class TokenSampler(ScriptedSampler):
    """Plays completions with token ids that differ from what encoding their text would give."""

    def __init__(self, *turns):
        self.codec = TokenCodec()
        self.prompts = []
        super().__init__([self.completion(text, i) for i, text in enumerate(turns)])

    def completion(self, text, version):
        ids = self.ids(text)
        logprobs = [-float(i + 1) for i in range(len(ids))]
        return Completion(text, token_ids=ids, sampler_logprobs=logprobs, policy_version=version)

    @staticmethod
    def ids(text):
        """One merged id for all the text, and the end (which is also the padding)."""
        return [1000 + len(text), 0]

    def sample(self, prompts, n, params):
        self.prompts.extend(prompts)
        return super().sample(prompts, n, params)


class TestTokens:
    """huggingface/trl#5224; #5242; stanford-cs336/assignment5-alignment#15."""

    @pytest.mark.parametrize("text", ["1", "99", "😀"])
    def test_sampled_ids_are_kept_verbatim(self, text):
        (rollout,) = group(Sums(), TokenSampler(text))
        assert rollout.prompt_token_ids == [1, *map(ord, "0 + 1?")]
        assert rollout.token_ids == [1000 + len(text), 0]
        assert rollout.sampler_logprobs == [-1.0, -2.0]

    @pytest.mark.parametrize("turns", [["1"], ["0", "1"], ["0", "9", "0", "9"]])
    def test_ids_mask_and_logprobs_have_one_length(self, turns):
        (rollout,) = group(Guess(), TokenSampler(*turns))
        lengths = (len(rollout.token_ids), len(rollout.loss_mask), len(rollout.sampler_logprobs))
        assert len({*lengths}) == 1
        assert rollout.completion_length == 2 * len(turns)

    def test_the_mask_is_true_only_where_tokens_were_sampled(self):
        """huggingface/trl#4975; NVIDIA-NeMo/RL#2176; mll-lab-nu/RAGEN#71."""
        (rollout,) = group(Guess(), TokenSampler("0", "1"))
        reply = [2, *map(ord, "higher"), 2]
        assert rollout.token_ids == [1001, 0, *reply, 1001, 0]
        assert rollout.loss_mask == [True] * 2 + [False] * len(reply) + [True] * 2
        assert rollout.sampler_logprobs == [-1, -2, *[0.0] * len(reply), -1, -2]

    def test_assistant_turns_of_the_prompt_are_not_learned(self):
        """huggingface/trl#4975; NVIDIA-NeMo/RL#2176; mll-lab-nu/RAGEN#71."""
        messages = [
            {"role": "user", "content": "0?"},
            {"role": "assistant", "content": "0"},
            {"role": "tool", "content": "x"},
        ]
        (rollout,) = group(Sums(), TokenSampler("1"), task=Task(messages, "1"))
        assert len(rollout.prompt_token_ids) > len("0?0x")
        assert rollout.token_ids == [1001, 0]
        assert rollout.loss_mask == [True, True]

    def test_the_end_token_counts_though_it_is_also_the_padding(self):
        """huggingface/trl#4970; #6357."""
        (rollout,) = group(Sums(), TokenSampler("1"))
        assert (rollout.token_ids[-1], rollout.loss_mask[-1]) == (0, True)

    def test_prompts_are_encoded_once_and_handed_on_as_ids(self):
        """vllm-project/vllm#27515; unslothai/unsloth#10312; huggingface/trl#3520: one BOS."""
        sampler = TokenSampler("0", "1")
        (rollout,) = group(Guess(), sampler)
        first, second = sampler.prompts
        assert sampler.codec.started == ["0 + 1?"]
        assert first.token_ids == rollout.prompt_token_ids
        assert second.token_ids == first.token_ids + rollout.token_ids[:-2]
        assert second.token_ids.count(1) == 1

    def test_no_tokens_at_all_is_still_one_scored_rollout(self):
        """verl-project/verl#6159: the reward belongs to the rollout, not to a last token."""
        (rollout,) = group(Sums(), ScriptedSampler([Completion("")]))
        assert (rollout.completion_length, rollout.loss_mask) == (0, [])
        assert rollout.components == {"right": 0.0, "length": 0.0}

    def test_the_prefill_belongs_to_the_prompt(self):
        env = Sums()
        env.prefill = "<think>"
        (rollout,) = group(env, TokenSampler("1"))
        assert rollout.prompt_token_ids == [1, *map(ord, "0 + 1?<think>")]

    def test_the_version_is_that_of_the_last_turn(self):
        (rollout,) = group(Guess(), TokenSampler("0", "0", "1"))
        assert rollout.policy_version == 2

    @pytest.mark.parametrize("logprobs", [[], [-1.0], [-1.0, -1.0, -1.0]])
    def test_a_missing_logprob_is_an_error_of_the_sampler(self, logprobs):
        sampler = TokenSampler()
        bad = Completion("1", token_ids=[5, 0], sampler_logprobs=logprobs)
        sampler.sample = lambda prompts, n, params: [[bad]]
        with pytest.raises(RolloutError, match=rf"got {len(logprobs)} log-probabilities for 2 tok"):
            group(Sums(), sampler)
