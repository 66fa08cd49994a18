"""The policy's log-probabilities against the whole softmax, for many models, and loading."""

import copy
import logging

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    PhiConfig,
    Qwen2Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from mrgym.errors import ConfigError
from mrgym_trainers.gdpo.policy import Policy, load_policy

IDS_BT = torch.tensor([[3, 40, 70, 110, 200, 7], [9, 55, 130, 0, 0, 0], [8, 8, 8, 61, 1, 0]])
MASK_BT = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0], [0, 1, 1, 0]], dtype=torch.bool)

SMALL = {
    "vocab_size": 263, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "llama": (LlamaConfig(**SMALL), "linear"),
    "qwen2": (Qwen2Config(**SMALL, tie_word_embeddings=False), "linear"),
    "qwen2-tied": (Qwen2Config(**SMALL, tie_word_embeddings=True), "linear"),
    "phi": (PhiConfig(**SMALL), "linear"),
    "mixtral": (MixtralConfig(**SMALL, num_local_experts=2), "linear"),
    "opt": (
        OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=16, dropout=0.5, layerdrop=0.5),
        "linear",
    ),
    "gemma2": (Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=3.0), "own"),
    "gemma2-plain": (Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=None), "linear"),
    "granite": (GraniteConfig(**SMALL, logits_scaling=4.0), "own"),
    "granite-plain": (GraniteConfig(**SMALL, logits_scaling=1.0), "linear"),
    "cohere": (CohereConfig(**SMALL, logit_scale=0.25), "own"),
}


def new_family(name):
    torch.manual_seed(0)
    config = FAMILIES[name][0]
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](copy.deepcopy(config)).eval()
    for name, parameter in model.named_parameters():  # so that a missing bias would show
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture
def family(request, build):
    """A random model of a family, and the way its logits are made."""
    if request.param == "gpt2":
        return build.gpt2(build.tokenizer()), "linear"
    return new_family(request.param), FAMILIES[request.param][1]


EVERY_FAMILY = pytest.mark.parametrize("family", [*FAMILIES, "gpt2"], indirect=True)


def whole_softmax(model, ids_BT, first, temperature):
    """Log-probabilities and entropies from the model's own logits of everything."""
    logprobs_BTV = (model(input_ids=ids_BT).logits.float() / temperature).log_softmax(-1)
    logprobs_BTV = logprobs_BTV[:, first - 1 : -1]
    chosen_BT = logprobs_BTV.gather(2, ids_BT[:, first:, None]).squeeze(2)
    return chosen_BT, -(logprobs_BTV.exp() * logprobs_BTV).sum(-1)


def weight_gradients(model, outputs):
    """Gradients of a fixed mixture of log-probabilities and entropies, by name."""
    generator = torch.Generator().manual_seed(0)
    mixture = sum((out * torch.randn(out.shape, generator=generator)).sum() for out in outputs)
    model.zero_grad()
    mixture.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# --- families -------------------------------------------------------------------------------


@EVERY_FAMILY
@pytest.mark.parametrize("mask_BT", [None, MASK_BT])
def test_values_and_all_gradients_equal_the_whole_softmax(family, mask_BT):
    """Case huggingface/trl#5349; NVIDIA-NeMo/RL#3124; #4222: equal to the naive ones to 1e-5."""
    model, kind = family
    policy = Policy(model, None, "random")
    assert policy.output_kind == kind
    got = policy.logprobs(IDS_BT, 2, temperature=0.7, mask_BT=mask_BT, entropy_grad=True)
    mask = torch.ones(3, 4) if mask_BT is None else mask_BT
    expected = [out * mask for out in whole_softmax(model, IDS_BT, 2, 0.7)]
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == torch.float32
        assert torch.allclose(one, other, atol=1e-5)
    found, wanted = weight_gradients(model, got), weight_gradients(model, expected)
    assert found.keys() == wanted.keys()
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() < 1e-5 * max(largest, 1.0), name


@EVERY_FAMILY
def test_a_model_that_is_not_linear_at_the_end_is_announced_once(family, caplog):
    model, kind = family
    with caplog.at_level(logging.WARNING, logger="mrgym"):
        policy = Policy(model, None, "random")
        policy.logprobs(IDS_BT, 2, temperature=1.0)
        policy.logprobs(IDS_BT, 2, temperature=1.0)
    assert len(caplog.records) == (kind != "linear")


# Transformers 5 holds the experts of a layer in one tensor, and stores them apart.
@pytest.mark.parametrize(
    "family", [*(name for name in FAMILIES if name != "mixtral"), "gpt2"], indirect=True
)
def test_names_are_those_of_checkpoints_and_tied_weights_come_once(family, tmp_path):
    model, _ = family
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = set(file.keys())
    names = [name for name, _ in Policy(model, None, "random").named_tensors()]
    assert sorted(names) == sorted(stored)


class Odd(nn.Module):
    """A head that is no linear layer, though it has a weight."""

    def __init__(self, head):
        super().__init__()
        self.weight = head.weight

    def forward(self, hidden):
        return torch.sinh(nn.functional.linear(hidden, self.weight) / 4)


def test_a_head_that_is_no_linear_layer_is_taken_as_it_is():
    model = new_family("llama")
    model.lm_head = Odd(model.lm_head)
    policy = Policy(model, None, "odd")
    assert policy.output_kind == "own"
    got = policy.logprobs(IDS_BT, 2, temperature=0.7)[0]
    assert torch.allclose(got, whole_softmax(model, IDS_BT, 2, 0.7)[0], atol=1e-5)


def test_a_model_that_looks_at_the_tokens_again_is_run_whole(caplog):
    """Its logits cannot be had from hidden states, so the whole model is asked."""
    model = new_family("llama")
    forward = model.forward

    def biased(input_ids=None, inputs_embeds=None, **options):
        out = forward(input_ids=input_ids, inputs_embeds=inputs_embeds, **options)
        if input_ids is not None:
            out.logits = out.logits + torch.arange(263) / 263
        return out

    model.forward = biased
    policy = Policy(model, None, "biased")
    assert policy.output_kind == "whole"
    got = policy.logprobs(IDS_BT, 2, temperature=0.7, mask_BT=MASK_BT, entropy_grad=True)
    expected = [out * MASK_BT for out in whole_softmax(model, IDS_BT, 2, 0.7)]
    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    found, wanted = weight_gradients(model, got), weight_gradients(model, expected)
    for name, gradient in wanted.items():
        assert torch.allclose(found[name], gradient, atol=1e-4), name


def test_finding_the_output_layer_changes_no_mode_and_draws_no_random_number():
    model = new_family("opt").train()
    model.model.decoder.layers[0].eval()
    modes, state = [m.training for m in model.modules()], torch.get_rng_state()
    Policy(model, None, "random")
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)


# --- log-probabilities ----------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("first", [1, 2, 5])
def test_logprobs_of_padded_rows_equal_those_of_rows_alone(policy, temperature, first):
    got_BT, entropy_BT = policy.logprobs(IDS_BT, first, temperature=temperature)
    assert got_BT.shape == entropy_BT.shape == (3, 6 - first)
    for row, ids in enumerate(IDS_BT):
        expected = whole_softmax(policy.model, ids[None], first, temperature)
        assert torch.allclose(got_BT[row], expected[0], atol=1e-5)
        assert torch.allclose(entropy_BT[row], expected[1], atol=1e-5)


def test_padding_on_the_right_changes_nothing_before_it(policy):
    alone_BT, _ = policy.logprobs(IDS_BT[1:2, :3], 1, temperature=1.0)
    for filler in (0, 1, 77):
        padded = torch.cat([IDS_BT[1:2, :3], torch.full((1, 5), filler)], dim=1)
        got_BT, _ = policy.logprobs(padded, 1, temperature=1.0)
        assert torch.allclose(got_BT[:, :2], alone_BT, atol=1e-5)


def test_a_completion_without_tokens_has_no_logprobs(policy):
    logprobs_BT, entropy_BT = policy.logprobs(IDS_BT, 6, temperature=1.0)
    assert logprobs_BT.shape == entropy_BT.shape == (3, 0)


@EVERY_FAMILY
def test_nothing_wanted_gives_zeros_that_can_be_differentiated(family):
    policy = Policy(family[0], None, "random")
    nothing = torch.zeros(3, 4, dtype=torch.bool)
    logprobs_BT, entropy_BT = policy.logprobs(IDS_BT, 2, temperature=1.0, mask_BT=nothing)
    assert logprobs_BT.eq(0).all()
    assert entropy_BT.eq(0).all()
    logprobs_BT.sum().backward()
    assert all(p.grad is None or p.grad.eq(0).all() for p in policy.model.parameters())


def test_the_output_layer_sees_wanted_positions_only(policy):
    """Case huggingface/trl#5349: no logits for the prompt, whatever the size of the vocabulary."""
    seen = []
    policy.model.lm_head.register_forward_hook(lambda _, args, __: seen.append(args[0].shape))
    policy.logprobs(IDS_BT, 2, temperature=1.0, mask_BT=MASK_BT)
    assert sum(rows for _, rows, _ in seen) == int(MASK_BT.sum())


def test_a_hook_on_the_output_layer_is_obeyed(policy):
    def forbid(_, __, logits):
        logits = logits.clone()
        logits[..., 250:] = -torch.inf
        return logits

    before = policy.logprobs(IDS_BT, 1, temperature=1.0)[0]
    hook = policy.model.lm_head.register_forward_hook(forbid)
    after, entropy_BT = policy.logprobs(IDS_BT, 1, temperature=1.0)
    assert (after > before).all()  # what the forbidden tokens had goes to the others
    assert torch.isfinite(entropy_BT).all()
    assert (entropy_BT > 0).all()
    hook.remove()
    assert torch.equal(policy.logprobs(IDS_BT, 1, temperature=1.0)[0], before)


def test_entropy_carries_a_gradient_only_when_asked(policy):
    logprobs_BT, entropy_BT = policy.logprobs(IDS_BT, 1, temperature=1.0)
    assert logprobs_BT.requires_grad
    assert not entropy_BT.requires_grad
    assert policy.logprobs(IDS_BT, 1, temperature=1.0, entropy_grad=True)[1].requires_grad


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere", "gpt2"], indirect=True)
def test_every_way_to_logits_computes_in_bfloat16(family):
    exact = Policy(family[0], None, "random")
    rounded = Policy(family[0], None, "random", compute_dtype=torch.bfloat16)
    expected = exact.logprobs(IDS_BT, 2, temperature=1.0)
    wanted = weight_gradients(exact.model, expected[:1])
    got = rounded.logprobs(IDS_BT, 2, temperature=1.0)
    found = weight_gradients(rounded.model, got[:1])
    assert got[0].dtype == torch.float32
    assert 0 < (got[0] - expected[0]).abs().max() < 0.15
    for name, gradient in wanted.items():
        largest = gradient.abs().max()
        assert (found[name] - gradient).abs().max() <= 0.1 * max(largest, 1.0), name


# --- loading --------------------------------------------------------------------------------


def test_a_tokenizer_larger_than_the_model_is_refused(build, tmp_path):
    tokenizer = build.tokenizer()
    build.model(tokenizer).save_pretrained(tmp_path)
    rows = len(tokenizer)
    tokenizer.add_tokens(["<one>", "<more>"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"tokenizer of {rows + 2} tokens and {rows} embeddings"):
        load_policy(str(tmp_path), device="cpu")


def test_more_embeddings_than_tokens_are_fine(build, tmp_path):
    tokenizer = build.tokenizer()
    model = build.model(tokenizer)
    model.resize_token_embeddings(len(tokenizer) + 9)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), device="cpu")
    assert policy.logprobs(IDS_BT, 2, temperature=1.0)[0].shape == (3, 4)


def test_a_saved_policy_loads_the_same(policy, small_model):
    again = load_policy(small_model, device="cpu")
    for (name, one), (_, other) in zip(policy.named_tensors(), again.named_tensors(), strict=True):
        assert torch.equal(one, other), name
    assert again.device == torch.device("cpu")
    text = "The cat\nsat on  12 mats. "
    assert again.tokenizer.decode(again.tokenizer(text).input_ids) == text
