"""Prompts read once for all their rollouts: the same numbers, and when it is left alone."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    GemmaConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from mrgym_trainers.gdpo.batch import micro_batches
from mrgym_trainers.gdpo.line_attention import attending_to_rows
from mrgym_trainers.gdpo.policy import Policy, load_policy
from mrgym_trainers.gdpo.update import update

SMALL = {
    "vocab_size": 263, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
SIZES = {"vocab_size": 263, "hidden_size": 32}
SHARING = {
    "llama": LlamaConfig(**SMALL),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=False),
    "qwen2-tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "mistral": MistralConfig(**SMALL, sliding_window=16),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=2),
    "phi": PhiConfig(**SMALL),
    "gemma": GemmaConfig(**SMALL, head_dim=16),
    "granite": GraniteConfig(**SMALL, logits_scaling=4.0),
    "cohere": CohereConfig(**SMALL, logit_scale=0.25),
}
ALONE = {
    "capped-attention": Gemma2Config(**SMALL, head_dim=16, attn_implementation="eager"),
    "short-window": MistralConfig(**SMALL, sliding_window=4),
    "unknown-layers": Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]),
    "alibi": BloomConfig(**SIZES, n_layer=2, n_head=2),
    "no-attention": MambaConfig(**SIZES, num_hidden_layers=2),
    "eager": LlamaConfig(**SMALL, attn_implementation="eager"),
}


def new_model(config):
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](copy.deepcopy(config)).eval()
    for name, parameter in model.named_parameters():  # so that a missing bias would show
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture
def sharing(request, build):
    """A random model that can share prompts."""
    if request.param == "gpt2":
        return build.gpt2(build.tokenizer())
    return new_model(SHARING[request.param])


EVERY_SHARING = pytest.mark.parametrize("sharing", [*SHARING, "gpt2"], indirect=True)


@pytest.fixture
def batch(make_rollout):
    """Eight rollouts of three prompts; some tokens are not sampled, one rollout has just one."""
    prompts = [(5, 6, 90, 91, 92, 93), (200, 201, 202), (17, 18, 19, 20, 21, 22, 23)]
    tokens = [
        [40, 41, 42, 43, 44, 45, 46], [50, 51], [60], [70, 71, 72, 73],
        [80, 81, 82], [100, 101, 102, 103, 104], [110, 111, 112, 113], [120, 121, 122],
    ]  # fmt: skip
    rollouts = [make_rollout(prompts[i % 3], ids) for i, ids in enumerate(tokens)]
    rollouts[0].loss_mask = [True, True, False, False, True, True, False]
    rollouts[5].loss_mask = [False, True, True, True, True]
    (only,) = micro_batches(rollouts, range(8), max_tokens=999, share_up_to=99)
    assert only.line is not None
    return only


def in_rows(policy, batch, **options):
    """The same without sharing, by the path that the probe takes too."""
    return policy.logprobs(batch.input_ids_BT, batch.first, mask_BT=batch.mask_BT, **options)


def weight_gradients(model, outputs):
    """Gradients of a fixed mixture of log-probabilities and entropies, by name."""
    generator = torch.Generator().manual_seed(0)
    mixture = sum((out * torch.randn(out.shape, generator=generator)).sum() for out in outputs)
    model.zero_grad()
    mixture.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def positions_of(policy, compute):
    """How many positions went through the layers' products."""
    seen = []
    assert policy.shared_length > 0  # the model is tried now, and not below
    (module, *_) = [m for m in policy.model.modules() if type(m).__name__.endswith("MLP")]
    hook = module.register_forward_hook(lambda _, args, __: seen.append(args[0][..., 0].numel()))
    compute()
    hook.remove()
    return sum(seen)


# --- the same numbers -----------------------------------------------------------------------


@EVERY_SHARING
def test_values_and_all_gradients_are_those_of_padded_rows(sharing, batch):
    policy = Policy(sharing, None, "random")
    assert policy.shared_length >= 16
    options = {"temperature": 0.7, "entropy_grad": True}
    got, expected = policy.batch_logprobs(batch, **options), in_rows(policy, batch, **options)
    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    found, wanted = weight_gradients(sharing, got), weight_gradients(sharing, expected)
    assert found.keys() == wanted.keys()
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() < 1e-5 * max(largest, 1.0), name


@EVERY_SHARING
def test_bfloat16_differs_by_its_rounding_alone(sharing, batch):
    exact = Policy(sharing, None, "random")
    rounded = Policy(sharing, None, "random", compute_dtype=torch.bfloat16)
    assert rounded.shared_length >= 16
    got = rounded.batch_logprobs(batch, temperature=1.0)[:1]
    rows = in_rows(rounded, batch, temperature=1.0)[:1]
    expected = in_rows(exact, batch, temperature=1.0)[:1]
    noise = (rows[0] - expected[0]).abs().max()
    assert 0 < (got[0] - expected[0]).abs().max() < 2 * noise
    wanted = weight_gradients(sharing, expected)
    noisy, found = weight_gradients(sharing, rows), weight_gradients(sharing, got)
    for name, gradient in wanted.items():
        noise = (noisy[name] - gradient).norm() + 1e-3 * gradient.norm()
        assert (found[name] - gradient).norm() < 2 * noise, name


def test_every_prompt_is_read_once_and_padding_never(policy, batch):
    count = positions_of(policy, lambda: policy.batch_logprobs(batch, temperature=1.0))
    prompts, before_the_last_sampled = 6 + 3 + 7, 5 + 1 + 0 + 3 + 2 + 4 + 3 + 2
    assert count == prompts + before_the_last_sampled
    assert positions_of(policy, lambda: in_rows(policy, batch, temperature=1.0)) == 8 * 13


def kept_by(policy, compute):
    """Bytes kept for the backward pass, weights left out."""
    storages = {}
    weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = (storage, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = compute()
    assert outputs[0].requires_grad
    return sum(size for _, size in storages.values())


def test_less_is_kept_for_the_backward_pass(policy, batch):
    assert policy.shared_length > 0  # the model is tried now, and not below
    kept = kept_by(policy, lambda: policy.batch_logprobs(batch, temperature=1.0))
    assert kept < 0.7 * kept_by(policy, lambda: in_rows(policy, batch, temperature=1.0))


@pytest.mark.parametrize("changed", ["prompt", "completion"])
def test_rollouts_see_their_own_prompt_and_tokens_alone(policy, make_rollout, changed):
    def logprobs(first):
        others = [make_rollout((9, 8, 7, 6), (30 + i, 31, 32)) for i in range(2)]
        rollouts = [*first, *others]
        (part,) = micro_batches(rollouts, range(4), max_tokens=999, share_up_to=99)
        assert part.line is not None
        values_BT = policy.batch_logprobs(part, temperature=1.0)[0]
        return dict(zip(part.rows.tolist(), values_BT, strict=True))

    before = logprobs([make_rollout((5, 6, 7, 8), (40 + i, 41, 42)) for i in range(2)])
    prompts = [(5, 66, 7, 8)] * 2 if changed == "prompt" else [(5, 6, 7, 8)] * 2
    tokens = [(40, 41, 42) if changed == "prompt" else (40, 141, 42), (41, 41, 42)]
    after = logprobs([make_rollout(p, t) for p, t in zip(prompts, tokens, strict=True)])
    assert not torch.equal(after[0], before[0])
    assert torch.equal(after[1], before[1]) == (changed == "completion")
    assert all(torch.equal(after[row], before[row]) for row in (2, 3))


def test_nothing_sampled_gives_zeros_that_can_be_differentiated(policy, make_rollout):
    rollouts = [make_rollout(range(5, 12), (7, 8), mask=[False, False]) for _ in range(3)]
    (part,) = micro_batches(rollouts, range(3), max_tokens=99, share_up_to=99)
    assert part.line is not None
    logprobs_BT, entropy_BT = policy.batch_logprobs(part, temperature=1.0)
    assert logprobs_BT.eq(0).all()
    assert entropy_BT.eq(0).all()
    logprobs_BT.sum().backward()
    assert all(p.grad is None or p.grad.eq(0).all() for p in policy.model.parameters())


def test_no_gradient_is_kept_where_none_is_asked_for(policy, batch):
    with torch.no_grad():
        got = policy.batch_logprobs(batch, temperature=1.0)[0]
    assert not got.requires_grad
    assert torch.allclose(got, in_rows(policy, batch, temperature=1.0)[0], atol=1e-5)


# --- the update -----------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_an_update_is_the_same_with_and_without(small_model, make_rollout, small_config, budget):
    """Old log-probabilities, those of a reference, and two passes go the same way."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 9, (12,), generator=generator).tolist()
    rollouts = [
        make_rollout(range(9 + i % 3, 20 + i % 3), range(30 + i, 30 + i + n))
        for i, n in enumerate(lengths)
    ]
    advantages = torch.randn(12, generator=generator)
    weights, counts = [], []
    for share in (True, False):
        policy = load_policy(small_model, device="cpu")
        reference = Policy(copy.deepcopy(policy.model), None, "reference")
        nn.init.zeros_(reference.model.lm_head.weight)
        keys = small_config(
            share_prompts=share, micro_batch_tokens=budget, updates_per_step=2,
            max_grad_norm=1e9, loss={"kl_coef": 0.1, "entropy_coef": 0.1},
        )  # fmt: skip
        optimizer = torch.optim.SGD(policy.model.parameters(), lr=0.1)
        valid = torch.ones(12, dtype=torch.bool)

        def step(policy=policy, optimizer=optimizer, valid=valid, keys=keys, reference=reference):
            update(policy, optimizer, rollouts, advantages, valid, keys, reference=reference)

        counts.append(positions_of(policy, step))
        weights.append(dict(policy.model.named_parameters()))
    for name, weight in weights[0].items():
        assert torch.allclose(weight, weights[1][name], atol=1e-6, rtol=1e-4), name
    assert counts[0] < counts[1] if budget > 1 else counts[0] == counts[1]


# --- where it is left alone -----------------------------------------------------------------


def assert_left_alone(policy, batch):
    assert policy.shared_length < batch.line.shape[1]
    got = policy.batch_logprobs(batch, temperature=1.0)[0]
    expected = in_rows(policy, batch, temperature=1.0)[0]
    assert torch.equal(got, expected)
    got.sum().backward()


@pytest.mark.parametrize("name", ALONE)
def test_a_model_that_is_not_plain_attention_reads_padded_rows(name, batch):
    assert_left_alone(Policy(new_model(ALONE[name]), None, name), batch)


def test_a_model_that_mixes_tokens_in_its_own_way_is_found_out(policy, batch):
    """No name of a layer says so: the model is tried once."""
    layer = policy.model.model.layers[1]
    forward = layer.forward

    def mixing(hidden_states, **options):
        shifted = hidden_states.roll(1, dims=1)
        shifted[:, 0] = 0
        return forward(hidden_states + 0.1 * shifted, **options)

    layer.forward = mixing
    policy.model = policy.model
    assert_left_alone(policy, batch)


@pytest.mark.parametrize("option", ["gradient_checkpointing", "compile_model"])
def test_recomputed_and_compiled_layers_read_padded_rows(small_model, option):
    assert load_policy(small_model, device="cpu", **{option: True}).shared_length == 0


def test_a_model_run_whole_reads_padded_rows(policy, batch):
    forward = policy.model.forward

    def biased(input_ids=None, inputs_embeds=None, **options):
        out = forward(input_ids=input_ids, inputs_embeds=inputs_embeds, **options)
        if input_ids is not None:
            out.logits = out.logits + torch.arange(out.logits.shape[-1]) / 263
        return out

    policy.model.forward = biased
    policy.model = policy.model
    assert policy.output_kind == "whole"
    assert_left_alone(policy, batch)


def test_trying_a_model_leaves_no_trace(policy):
    state, grad = torch.get_rng_state(), torch.is_grad_enabled()
    policy.model.train()
    with torch.no_grad():
        assert policy.shared_length > 0
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled() == grad
    assert policy.model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in policy.model.parameters())
    assert policy.model.config._attn_implementation == "sdpa"


def test_another_model_is_tried_again(policy):
    assert policy.shared_length > 0
    policy.model = new_model(ALONE["eager"])
    assert policy.shared_length == 0


def test_an_error_within_leaves_the_models_attention_as_it_was(policy, batch):
    config = policy.model.config
    names = []

    def fail():
        with attending_to_rows(config, batch.line):
            names.append(config._attn_implementation)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert names != ["sdpa"]
    assert config._attn_implementation == "sdpa"
