"""Sampling with Transformers: the same numbers as the policy, the same tokens as ``generate``."""

from contextlib import contextmanager

import msgspec
import pytest
import torch
from transformers import DynamicCache

from mrgym.errors import SamplerError
from mrgym.sampler import Sampler, SamplingParams
from mrgym_trainers.gdpo.policy import Policy
from mrgym_trainers.samplers import TransformersSampler, transformers

PROMPTS = ([5, 6, 7], [90, 91, 92, 93, 94, 95, 96], [200], [11, 12, 13], [44, 45, 46, 47])


@pytest.fixture
def sampler(policy):
    return TransformersSampler(policy.model, policy.tokenizer)


@pytest.fixture
def prompts(prompt_of):
    return [prompt_of(token_ids=ids) for ids in PROMPTS]


def flat(groups):
    return [list(c.token_ids) for group in groups for c in group]


def recomputed(policy, prompt, completion, temperature):
    ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
    with torch.no_grad():
        logprobs_BT, _ = policy.logprobs(ids, len(prompt.token_ids), temperature=temperature)
    return logprobs_BT[0].tolist()


# --- log-probabilities ----------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("max_rows", [256, 8])
def test_sampled_logprobs_are_the_policys_own(policy, prompts, temperature, max_rows, monkeypatch):
    """Case huggingface/trl#4159: at temperature 0.6 the first ratio is 1.

    Case huggingface/trl#4772; verl-project/verl#6527; NVIDIA-NeMo/RL#4039: sampler and trainer
    agree at unchanged weights, with padding, mixed prompts, and rows that stopped early.
    """
    compacted = []
    select = DynamicCache.batch_select_indices
    monkeypatch.setattr(
        DynamicCache,
        "batch_select_indices",
        lambda self, keep: compacted.append(len(keep)) or select(self, keep),
    )
    sampler = TransformersSampler(policy.model, policy.tokenizer, max_rows=max_rows)
    groups = sampler.sample(prompts, 4, SamplingParams(24, temperature))
    worst = 0.0
    for prompt, group in zip(prompts, groups, strict=True):
        assert len(group) == 4
        for completion in group:
            expected = recomputed(policy, prompt, completion, temperature)
            pairs = zip(completion.sampler_logprobs, expected, strict=True)
            worst = max(worst, *(abs(a - b) for a, b in pairs))
    assert worst < 1e-4
    assert compacted, "no row stopped early: the test covers too little"


def test_absolute_positions_start_after_the_padding(build, prompts):
    """GPT-2 sees where a token stands; padding on the left must not move it."""
    tokenizer = build.tokenizer()
    policy = Policy(build.gpt2(tokenizer), tokenizer, "gpt2")
    groups = TransformersSampler(policy.model, tokenizer).sample(prompts, 4, SamplingParams(12))
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            expected = recomputed(policy, prompt, completion, 1.0)
            assert list(completion.sampler_logprobs) == pytest.approx(expected, abs=1e-4)


def test_greedy_logprobs_are_those_without_temperature(policy, sampler, prompts):
    for prompt, (completion,) in zip(
        prompts, sampler.sample(prompts, 1, SamplingParams(8, 0.0)), strict=True
    ):
        expected = recomputed(policy, prompt, completion, 1.0)
        assert list(completion.sampler_logprobs) == pytest.approx(expected, abs=1e-4)


def test_sampling_runs_in_the_policys_autocast(policy, prompts):
    """In bfloat16 the logits differ by far more than the tolerance."""
    entered = []

    @contextmanager
    def autocast():
        entered.append(True)
        with torch.autocast("cpu", torch.bfloat16):
            yield

    sampler = TransformersSampler(policy.model, policy.tokenizer, max_rows=8, autocast=autocast)
    groups = sampler.sample(prompts, 4, SamplingParams(12, 1.0, seed=0))
    assert len(entered) == 3  # a context for 8 rows: weights are cast once and not every token
    assert not torch.is_autocast_enabled("cpu")

    def mean_gap():
        gaps = []
        for prompt, group in zip(prompts, groups, strict=True):
            for completion in group:
                expected = torch.tensor(recomputed(policy, prompt, completion, 1.0))
                gaps.append((torch.tensor(completion.sampler_logprobs) - expected).abs())
        return float(torch.cat(gaps).mean())

    outside = mean_gap()
    with torch.autocast("cpu", torch.bfloat16):
        inside = mean_gap()
    assert inside < 0.5 * outside


def test_frequencies_are_the_softmax(policy, prompt_of):
    n, temperature = 20_000, 0.6
    sampler = TransformersSampler(policy.model, policy.tokenizer, max_rows=n)
    prompt = prompt_of(token_ids=[5, 6, 7])
    (group,) = sampler.sample([prompt], n, SamplingParams(1, temperature, seed=1))
    drawn = torch.tensor([c.token_ids[0] for c in group])
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1]
    expected = n * (logits.double() / temperature).softmax(-1)
    counts = torch.bincount(drawn, minlength=len(expected)).double()
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    degrees = len(expected) - 1
    assert abs(chi_square - degrees) < 5 * (2 * degrees) ** 0.5
    wrong = n * logits.double().softmax(-1)  # the test can tell a temperature left out
    assert float(((counts - wrong) ** 2 / wrong).sum()) > 5 * degrees


# --- tokens ---------------------------------------------------------------------------------


def test_greedy_is_generate_without_sampling(policy, sampler, prompts):
    groups = sampler.sample(prompts, 2, SamplingParams(12, 0.0))
    for ids, (one, other) in zip(PROMPTS, groups, strict=True):
        whole = policy.model.generate(
            torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert list(one.token_ids) == whole[0, len(ids) :].tolist()
        assert one.token_ids == other.token_ids


def test_the_same_seed_gives_the_same_tokens(policy, prompts):
    def draw(seed):
        sampler = TransformersSampler(policy.model, policy.tokenizer, seed=seed)
        params = SamplingParams(8, 1.0)
        return [flat(sampler.sample(prompts, 3, params)) for _ in range(2)]

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)
    assert draw(0)[0] != draw(0)[1]


def test_a_seed_of_the_call_makes_it_repeatable(sampler, prompts):
    params = SamplingParams(8, 1.0, seed=3)
    assert flat(sampler.sample(prompts, 3, params)) == flat(sampler.sample(prompts, 3, params))


def test_sampling_and_torchs_own_random_numbers_do_not_meet(policy, prompts):
    def draw(seed):
        torch.manual_seed(seed)
        sampler = TransformersSampler(policy.model, policy.tokenizer, seed=0)
        return flat(sampler.sample(prompts, 3, SamplingParams(8, 1.0)))

    assert draw(1) == draw(2)
    before = torch.get_rng_state()
    draw_state = TransformersSampler(policy.model, policy.tokenizer)
    draw_state.sample(prompts, 3, SamplingParams(8, 1.0))
    assert torch.equal(torch.get_rng_state(), before)


def test_another_sampler_of_the_same_model_changes_nothing(policy, prompts):
    """What an evaluation between two steps is: a sampler of its own."""
    params = SamplingParams(8, 1.0)
    alone = TransformersSampler(policy.model, policy.tokenizer)
    expected = [flat(alone.sample(prompts, 3, params)) for _ in range(2)]
    training = TransformersSampler(policy.model, policy.tokenizer)
    got = [flat(training.sample(prompts, 3, params))]
    TransformersSampler(policy.model, policy.tokenizer, seed=9).sample(prompts, 5, params)
    got.append(flat(training.sample(prompts, 3, params)))
    assert got == expected


@pytest.mark.parametrize("compact_below", [0.0, 1.1])
def test_tokens_do_not_depend_on_when_stopped_rows_are_dropped(
    sampler, prompts, compact_below, monkeypatch
):
    params = SamplingParams(24, 1.0, seed=0)
    expected = flat(sampler.sample(prompts, 4, params))
    assert len({len(tokens) for tokens in expected}) > 3
    monkeypatch.setattr(transformers, "_COMPACT_BELOW", compact_below)
    assert flat(sampler.sample(prompts, 4, params)) == expected


@pytest.mark.parametrize("max_rows", [1, 3, 8, 64])
def test_no_more_rows_than_allowed_are_sampled_at_a_time(policy, prompts, max_rows, monkeypatch):
    rows = []
    forward = policy.model.forward
    sampler = TransformersSampler(policy.model, policy.tokenizer, max_rows=max_rows)
    monkeypatch.setattr(
        policy.model,
        "forward",
        lambda *, input_ids, **k: rows.append(len(input_ids)) or forward(input_ids=input_ids, **k),
    )
    groups = sampler.sample(prompts, 8, SamplingParams(4))
    assert max(rows) <= max_rows
    assert max(rows) > max_rows / 3 or max_rows == 64
    assert [len(group) for group in groups] == [8] * len(prompts)
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            expected = recomputed(policy, prompt, completion, 1.0)
            assert list(completion.sampler_logprobs) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("configured", [None, 1, [1, 50, 60]])
def test_stop_ids_are_the_models_and_the_tokenizers(build, prompts, configured):
    tokenizer = build.tokenizer()
    model = build.model(tokenizer)
    model.generation_config.eos_token_id = configured
    stops = {1, *(configured if isinstance(configured, list) else [])}
    groups = TransformersSampler(model, tokenizer).sample(prompts, 40, SamplingParams(40, 1.0))
    ended = [c for group in groups for c in group if c.stop_reason == "stop"]
    assert {c.token_ids[-1] for c in ended} == stops
    assert all(not stops & set(c.token_ids[:-1]) for group in groups for c in group)


def test_the_token_limit_is_the_stop_reason(sampler, prompts):
    groups = sampler.sample(prompts, 16, SamplingParams(5, 1.0))
    completions = [c for group in groups for c in group]
    cut = [c for c in completions if c.stop_reason == "length"]
    assert cut
    assert len(cut) < len(completions)
    assert {len(c.token_ids) for c in cut} == {5}
    assert all(c.truncated for c in cut)


def test_a_stop_token_at_the_limit_is_a_stop(build, prompt_of):
    tokenizer = build.tokenizer()
    model = build.model(tokenizer, ending=range(len(tokenizer)))  # every token ends
    (group,) = TransformersSampler(model, tokenizer).sample(
        [prompt_of(token_ids=[5])], 4, SamplingParams(1, 1.0)
    )
    assert {c.stop_reason for c in group} == {"stop"}
    assert {len(c.token_ids) for c in group} == {1}


@pytest.mark.parametrize("pad", ["<pad>", "<eos>"])
def test_the_final_eos_stays_in_the_tokens(build, prompts, pad):
    """Case huggingface/trl#4970; #6357: pad_token_id == eos_token_id keeps the final EOS."""
    tokenizer = build.tokenizer(pad=pad)
    assert (tokenizer.pad_token_id == tokenizer.eos_token_id) == (pad == "<eos>")
    model = build.model(tokenizer, ending=[1])
    with torch.no_grad():  # <eos> is likely, so that most completions end by it
        model.lm_head.weight[1] = model.lm_head.weight[100:110].mean(0) * 3
    groups = TransformersSampler(model, tokenizer).sample(prompts, 64, SamplingParams(40, 1.0))
    ended = [c for group in groups for c in group if c.stop_reason == "stop"]
    assert ended
    for completion in ended:
        assert completion.token_ids[-1] == tokenizer.eos_token_id
        assert completion.token_ids.count(1) == 1
        assert len(completion.sampler_logprobs) == len(completion.token_ids)
        assert "<eos>" not in completion.text


def test_text_is_the_decoded_tokens(policy, sampler, prompts):
    for group in sampler.sample(prompts, 4, SamplingParams(12, 1.0)):
        for completion in group:
            expected = policy.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            assert completion.text == expected


def test_a_prompt_of_text_is_encoded_here(policy, sampler, prompt_of):
    ids = policy.tokenizer("say the").input_ids
    params = SamplingParams(6, 0.0)
    (text,) = flat(sampler.sample([prompt_of("say the")], 1, params))
    (tokens,) = flat(sampler.sample([prompt_of(token_ids=ids)], 1, params))
    assert text == tokens


# --- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_k": 20}])
def test_a_cut_distribution_is_refused(sampler, prompts, options):
    with pytest.raises(SamplerError, match=next(iter(options))):
        sampler.sample(prompts, 1, SamplingParams(4, **options))


def test_a_prompt_that_leaves_no_room_is_refused(sampler, prompt_of):
    fits = prompt_of(token_ids=[5] * 250)
    assert len(flat(sampler.sample([fits], 1, SamplingParams(6)))[0]) <= 6
    with pytest.raises(SamplerError, match="prompt of 250 tokens and max_tokens=7, expected at"):
        sampler.sample([prompt_of(token_ids=[5]), fits], 1, SamplingParams(7))


def test_the_room_is_known_before_anything_is_sampled(build, sampler):
    assert sampler.context_length == 256
    model = build.gpt2(build.tokenizer())
    assert TransformersSampler(model, build.tokenizer()).context_length == 64


def test_a_text_that_leaves_no_room_is_refused_too(sampler, prompt_of):
    with pytest.raises(SamplerError, match="prompt of 251 tokens and max_tokens=6, expected at"):
        sampler.sample([prompt_of("x" * 251)], 1, SamplingParams(6))


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_weights_that_diverged_are_an_error_in_words(policy, sampler, prompts, temperature):
    policy.model.train()
    with torch.no_grad():
        policy.model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(SamplerError, match="the weights have diverged"):
        sampler.sample(prompts, 1, SamplingParams(4, temperature))
    assert policy.model.training


# --- weights --------------------------------------------------------------------------------


def test_the_version_arrives_with_the_completions(policy, sampler, prompts):
    params = SamplingParams(2)
    assert {c.policy_version for (c,) in sampler.sample(prompts, 1, params)} == {0}
    sampler.update_weights(policy.named_tensors(), 3)
    assert {c.policy_version for (c,) in sampler.sample(prompts, 1, params)} == {3}


def test_foreign_weights_are_copied(build, policy, sampler, prompts):
    other = Policy(build.model(policy.tokenizer, seed=5), policy.tokenizer, "other")
    params = SamplingParams(8, 0.0)
    expected = flat(TransformersSampler(other.model, policy.tokenizer).sample(prompts, 1, params))
    assert flat(sampler.sample(prompts, 1, params)) != expected
    sampler.update_weights(other.named_tensors(), 1)
    assert flat(sampler.sample(prompts, 1, params)) == expected
    with torch.no_grad():  # a copy: what becomes of the sender's tensors does not matter
        other.model.lm_head.weight.zero_()
    assert flat(sampler.sample(prompts, 1, params)) == expected


def test_a_tied_output_layer_follows_the_embedding(build, prompts):
    """Case vllm-project/vllm#51665: with tied embeddings lm_head follows."""
    tokenizer = build.tokenizer()
    own, other = (build.model(tokenizer, seed=s, tie_word_embeddings=True) for s in (0, 5))
    sampler, params = TransformersSampler(own, tokenizer), SamplingParams(8, 1.0, seed=0)
    sampler.update_weights(other.named_parameters(), 1)
    expected = TransformersSampler(other, tokenizer).sample(prompts, 2, params)
    assert flat(sampler.sample(prompts, 2, params)) == flat(expected)


def test_an_unknown_tensor_is_refused(policy, sampler):
    """Case vllm-project/vllm#51665: unmatched names raise."""
    with pytest.raises(SamplerError, match=r"unknown tensor 'model.extra'"):
        sampler.update_weights([("model.extra", torch.zeros(2))], 1)


def test_the_model_is_left_in_the_mode_it_was_in(policy, sampler, prompts):
    for training in (True, False):
        policy.model.train(training)
        sampler.sample(prompts, 1, SamplingParams(2))
        assert policy.model.training is training


def test_it_is_a_sampler(sampler):
    assert isinstance(sampler, Sampler)
    sampler.close()


def test_a_prompts_seed_repeats_whatever_is_sampled_beside_it(policy, prompt_of):
    """So a group's completions are the same on any number of ranks."""
    sampler = TransformersSampler(policy.model, policy.tokenizer, max_rows=8)
    prompts = [msgspec.structs.replace(prompt_of(token_ids=[20 + i, 30]), seed=i) for i in range(5)]
    params = SamplingParams(max_tokens=12)
    together = sampler.sample(prompts, 6, params)
    (alone,) = sampler.sample(prompts[3:4], 6, params)
    assert [c.token_ids for c in alone] == [c.token_ids for c in together[3]]
    split = TransformersSampler(policy.model, policy.tokenizer, max_rows=2)
    (parts,) = split.sample(prompts[3:4], 6, params)
    assert [c.token_ids for c in parts] == [c.token_ids for c in alone]
    other = sampler.sample([msgspec.structs.replace(prompts[3], seed=9)], 6, params)
    assert [c.token_ids for c in other[0]] != [c.token_ids for c in alone]


def test_completions_come_before_the_last_one_is_ready(policy, prompt_of):
    sampler = TransformersSampler(policy.model, policy.tokenizer)
    prompts = [prompt_of(token_ids=[20 + i]) for i in range(8)]
    params = SamplingParams(max_tokens=40, seed=1)
    order = [len(c.token_ids) for _, _, c in sampler.stream(prompts, 8, params)]
    assert order[0] < order[-1] == max(order)
    whole = sampler.sample(prompts, 8, params)
    assert sorted(len(c.token_ids) for group in whole for c in group) == sorted(order)
