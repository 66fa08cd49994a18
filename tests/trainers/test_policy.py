"""The policy's log-probabilities against the whole softmax, and loading."""

import pytest
import torch

from mrgym_trainers.gdpo.policy import load_policy

IDS_BT = torch.tensor([[3, 40, 70, 110, 200, 7], [9, 55, 130, 0, 0, 0], [8, 8, 8, 61, 1, 0]])


def naive_logits(policy, ids_BT, temperature):
    """Logits of every position, one unpadded row at a time, in float64 after the model."""
    rows = []
    for row in ids_BT:
        with torch.no_grad():
            rows.append(policy.model(input_ids=row[None]).logits[0].double() / temperature)
    return torch.stack(rows)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("first", [1, 2, 5])
def test_logprobs_equal_the_whole_softmax(policy, temperature, first):
    """Case huggingface/trl#5349; NVIDIA-NeMo/RL#3124; #4222: equal to the naive ones to 1e-5."""
    got_BT, entropy_BT = policy.logprobs(IDS_BT, first, temperature=temperature)
    softmax_BTV = naive_logits(policy, IDS_BT, temperature).log_softmax(-1)[:, first - 1 : -1]
    expected_BT = softmax_BTV.gather(2, IDS_BT[:, first:, None]).squeeze(2)
    assert got_BT.shape == entropy_BT.shape == (3, 6 - first)
    assert got_BT.dtype == torch.float32
    assert torch.allclose(got_BT.double(), expected_BT, atol=1e-5)
    entropy = -(softmax_BTV.exp() * softmax_BTV).sum(-1)
    assert torch.allclose(entropy_BT.double(), entropy, atol=1e-5)


def test_padding_on_the_right_changes_nothing_before_it(policy):
    alone_BT, _ = policy.logprobs(IDS_BT[1:2, :3], 1, temperature=1.0)
    for filler in (0, 1, 77):
        padded = torch.cat([IDS_BT[1:2, :3], torch.full((1, 5), filler)], dim=1)
        got_BT, _ = policy.logprobs(padded, 1, temperature=1.0)
        assert torch.allclose(got_BT[:, :2], alone_BT, atol=1e-5)


def test_a_completion_without_tokens_has_no_logprobs(policy):
    logprobs_BT, entropy_BT = policy.logprobs(IDS_BT, 6, temperature=1.0)
    assert logprobs_BT.shape == entropy_BT.shape == (3, 0)


def test_the_gradient_is_that_of_the_whole_softmax(policy):
    weights_BT = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))

    def gradients(logprobs_BT):
        policy.model.zero_grad()
        (logprobs_BT * weights_BT).sum().backward()
        return {n: p.grad.clone() for n, p in policy.model.named_parameters()}

    got = gradients(policy.logprobs(IDS_BT, 2, temperature=0.7)[0])
    logits_BTV = policy.model(input_ids=IDS_BT).logits / 0.7
    chosen_BT = logits_BTV.log_softmax(-1)[:, 1:-1].gather(2, IDS_BT[:, 2:, None]).squeeze(2)
    expected = gradients(chosen_BT)
    for name, gradient in expected.items():
        assert torch.allclose(got[name], gradient, atol=1e-5), name
        assert gradient.abs().max() > 1e-4, name


def test_the_output_layer_sees_completion_positions_only(policy):
    """Case huggingface/trl#5349: no logits for the prompt, whatever the size of the vocabulary."""
    seen = []
    policy.model.lm_head.register_forward_hook(lambda _, args, __: seen.append(args[0].shape))
    policy.logprobs(IDS_BT, 4, temperature=1.0)
    assert seen == [(3, 2, 32)]


def test_entropy_stays_finite_where_a_token_is_impossible(policy):
    def forbid(_, __, logits):
        logits = logits.clone()
        logits[..., 250:] = -torch.inf
        return logits

    policy.model.lm_head.register_forward_hook(forbid)
    _, entropy_BT = policy.logprobs(IDS_BT, 1, temperature=1.0)
    assert torch.isfinite(entropy_BT).all()
    assert (entropy_BT > 0).all()


def test_entropy_carries_no_gradient(policy):
    logprobs_BT, entropy_BT = policy.logprobs(IDS_BT, 1, temperature=1.0)
    assert logprobs_BT.requires_grad
    assert not entropy_BT.requires_grad


# --- loading --------------------------------------------------------------------------------


def test_weights_are_float32_whatever_the_file_holds(build, tmp_path):
    """Case areal-project/AReaL#1634; workofart/ml-by-hand#85: float32 weights by default."""
    tokenizer = build.tokenizer()
    build.model(tokenizer).to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert {p.dtype for _, p in load_policy(str(tmp_path)).named_tensors()} == {torch.float32}
    halved = load_policy(str(tmp_path), dtype="bfloat16")
    assert {p.dtype for _, p in halved.named_tensors()} == {torch.bfloat16}


def test_a_saved_policy_loads_the_same(policy, small_model):
    again = load_policy(small_model, device="cpu")
    for (name, one), (_, other) in zip(policy.named_tensors(), again.named_tensors(), strict=True):
        assert torch.equal(one, other), name
    assert again.device == torch.device("cpu")
    text = "The cat\nsat on  12 mats. "
    assert again.tokenizer.decode(again.tokenizer(text).input_ids) == text
