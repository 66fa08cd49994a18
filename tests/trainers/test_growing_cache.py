"""The sampler's cache gives the numbers of the cache it stands for, whatever is done to it."""

import pytest
import torch
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

from mrgym.sampler import SamplingParams
from mrgym_trainers.gdpo.policy import Policy
from mrgym_trainers.samplers import TransformersSampler
from mrgym_trainers.samplers.cache import GrowingLayer, growing_cache


def sliding_window(tokenizer):
    """Attention over the last five tokens only, fewer key heads than query heads."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.2, sliding_window=5, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


@pytest.fixture(params=["llama", "gpt2", "sliding_window", "eager"])
def model(request, build):
    tokenizer = build.tokenizer()
    if request.param == "sliding_window":
        return sliding_window(tokenizer)
    if request.param == "eager":
        return build.model(tokenizer, attn_implementation="eager")
    return (build.gpt2 if request.param == "gpt2" else build.model)(tokenizer)


def read(model, ids_BT, cache):
    name = TransformersSampler(model, FakeTokenizer())._cache_argument
    with torch.no_grad():
        return model(input_ids=ids_BT, use_cache=True, **{name: cache}).logits[:, -1]


class FakeTokenizer:
    """Just enough to construct a sampler."""

    eos_token_id, bos_token_id, chat_template = 1, None, None

    def __call__(self, text, **_):
        return self

    input_ids = (5,)


def test_repeating_growing_and_selecting_give_the_same_logits(model):
    ids = torch.arange(5, 5 + 3 * 30).view(3, 30)
    caches = growing_cache(model.config), DynamicCache(config=model.config)
    expected = None
    for got in caches:
        logits = [read(model, ids[:, :4], got)]
        got.batch_repeat_interleave(2)
        rows = torch.tensor([0, 0, 1, 1, 2, 2])
        logits += [read(model, ids[rows, t : t + 1], got) for t in range(4, 12)]
        got.batch_select_indices(torch.tensor([0, 3, 4]))
        logits += [read(model, ids[:, t : t + 1], got) for t in range(12, 20)]
        got.batch_select_indices(torch.tensor([2]))
        logits += [read(model, ids[2:, t : t + 1], got) for t in range(20, 30)]
        assert got.get_seq_length() == 30
        if expected is not None:
            for a, b in zip(logits, expected, strict=True):
                assert torch.allclose(a, b, atol=1e-5)
        expected = logits


def test_most_tokens_are_written_into_room_that_is_there(build):
    model = build.model(build.tokenizer())
    cache = growing_cache(model.config)
    addresses = []
    for token in range(40):
        read(model, torch.full((2, 1), token + 5), cache)
        addresses.append(cache.layers[0].keys.data_ptr())
    assert all(isinstance(layer, GrowingLayer) for layer in cache.layers)
    assert 3 < len(set(addresses)) < 25
    layer = cache.layers[0]
    stored = layer._buffers[0].shape[2]
    assert 40 <= stored <= 40 * 9 / 8 + 2


def test_sampling_with_a_sliding_window_gives_the_policys_logprobs(build, prompt_of):
    tokenizer = build.tokenizer()
    policy = Policy(sliding_window(tokenizer), tokenizer, "sliding")
    prompts = [prompt_of(token_ids=ids) for ids in ([5, 6], [90, 91, 92, 93, 94, 95, 96, 97])]
    groups = TransformersSampler(policy.model, tokenizer).sample(prompts, 8, SamplingParams(20))
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
            with torch.no_grad():
                logprobs = policy.logprobs(ids, len(prompt.token_ids), temperature=1.0)[0][0]
            assert list(completion.sampler_logprobs) == pytest.approx(logprobs.tolist(), abs=1e-4)
