"""What the policy computes in and keeps: master weights, checkpointed layers, compilation."""

import copy

import pytest
import torch
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

from mrgym_trainers.gdpo.policy import Policy, load_policy

IDS_BT = torch.tensor([[3, 40, 70, 110, 200, 7], [9, 55, 130, 0, 0, 0], [8, 8, 8, 61, 1, 0]])


def weight_gradients(model, outputs):
    """Gradients of a fixed mixture of log-probabilities and entropies, by name."""
    generator = torch.Generator().manual_seed(0)
    mixture = sum((out * torch.randn(out.shape, generator=generator)).sum() for out in outputs)
    model.zero_grad()
    mixture.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# --- precision ------------------------------------------------------------------------------


def moved_by(policy, learning_rate):
    """The largest change of a weight set to 0.05, after a step of AdamW."""
    weight = policy.model.model.layers[0].mlp.up_proj.weight
    nn.init.constant_(weight, 0.05)
    before = weight.detach().clone()
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=learning_rate, weight_decay=0.0)
    policy.logprobs(IDS_BT, 2, temperature=1.0)[0].sum().backward()
    assert weight.grad.abs().max() > 1e-3
    optimizer.step()
    return (weight.detach().float() - before.float()).abs().max().item()


def test_master_weights_move_by_a_millionth_and_bfloat16_weights_do_not(small_model):
    """Case areal-project/AReaL#1634; workofart/ml-by-hand#85: no update may be rounded off."""
    master = load_policy(small_model, device="cpu", dtype="bfloat16")
    assert moved_by(master, 1e-6) == pytest.approx(1e-6, rel=0.05)
    pure = load_policy(small_model, device="cpu", dtype="bfloat16", master_weights=False)
    assert moved_by(pure, 1e-6) == 0.0


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_the_dtype_of_weights_does_not_depend_on_the_file(build, tmp_path, stored):
    tokenizer = build.tokenizer()
    build.model(tokenizer).to(stored).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    def dtypes(**options):
        policy = load_policy(str(tmp_path), device="cpu", **options)
        return {p.dtype for _, p in policy.named_tensors()}, policy.compute_dtype

    assert dtypes() == ({torch.float32}, torch.float32)
    assert dtypes(dtype="bfloat16") == ({torch.float32}, torch.bfloat16)
    assert dtypes(dtype="bfloat16", master_weights=False) == ({torch.bfloat16}, torch.bfloat16)


@pytest.mark.parametrize("master_weights", [True, False])
def test_bfloat16_computes_in_bfloat16_and_stays_near_float32(small_model, master_weights):
    exact = load_policy(small_model, device="cpu")
    rounded = load_policy(
        small_model, device="cpu", dtype="bfloat16", master_weights=master_weights
    )
    seen = []
    product = rounded.model.model.layers[0].mlp.up_proj
    product.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    got = rounded.logprobs(IDS_BT, 2, temperature=1.0)
    expected = exact.logprobs(IDS_BT, 2, temperature=1.0)
    assert seen == [torch.bfloat16]
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == torch.float32
        assert not torch.equal(one, other)
        assert torch.allclose(one, other, atol=0.15)
    found = weight_gradients(rounded.model, got[:1])
    wanted = weight_gradients(exact.model, expected[:1])
    for name, gradient in wanted.items():
        assert found[name].dtype == (torch.float32 if master_weights else torch.bfloat16)
        cosine = nn.functional.cosine_similarity(found[name].float().ravel(), gradient.ravel(), 0)
        assert cosine > 0.98, name


def test_float32_takes_no_autocast(policy):
    with policy.autocast():
        assert not torch.is_autocast_enabled("cpu")


def test_a_context_around_sampling_does_not_take_the_gradient_away(small_model):
    """Autocast keeps what it rounded; rounded without gradient, it must not be found again."""
    policy = load_policy(small_model, device="cpu", dtype="bfloat16")
    alone = weight_gradients(policy.model, policy.logprobs(IDS_BT, 2, temperature=1.0)[:1])
    with policy.autocast():
        assert torch.is_autocast_enabled("cpu")
        with torch.no_grad():
            assert policy.model(input_ids=IDS_BT).logits.dtype == torch.bfloat16
        after = weight_gradients(policy.model, policy.logprobs(IDS_BT, 2, temperature=1.0)[:1])
    assert after.keys() == alone.keys()
    assert all(torch.equal(after[name], alone[name]) for name in alone)


# --- gradient checkpointing and compilation -------------------------------------------------


def kept_by(policy):
    """Bytes kept for the backward pass, weights left out."""
    storages = {}
    weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = policy.logprobs(IDS_BT.repeat(4, 8), 2, temperature=1.0)
    return sum(storages.values()), outputs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpointing_computes_layers_again_and_keeps_less(small_model, dtype):
    options = {"device": "cpu", "dtype": dtype}
    plain = load_policy(small_model, **options)
    saving = load_policy(small_model, gradient_checkpointing=True, **options)
    calls = []
    saving.model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    saving.model.eval()
    (kept, expected), (kept_saving, got) = kept_by(plain), kept_by(saving)
    assert kept_saving < kept / 3
    assert torch.equal(got[0], expected[0])
    assert len(calls) == 1
    wanted = weight_gradients(plain.model, expected[:1])
    found = weight_gradients(saving.model, got[:1])
    assert len(calls) == 2
    for name, gradient in wanted.items():
        assert torch.allclose(found[name], gradient, atol=1e-6), name


def test_checkpointing_leaves_dropout_off_and_sampling_alone(build, tmp_path):
    """OPT has dropout and whole layers dropped in the layers themselves."""
    tokenizer = build.tokenizer()
    config = OPTConfig(
        vocab_size=len(tokenizer), hidden_size=32, ffn_dim=48, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, dropout=0.5, layerdrop=0.5,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    OPTForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    plain = load_policy(str(tmp_path), device="cpu")
    saving = load_policy(str(tmp_path), device="cpu", gradient_checkpointing=True)
    expected = plain.logprobs(IDS_BT, 2, temperature=1.0)[0]
    assert torch.allclose(saving.logprobs(IDS_BT, 2, temperature=1.0)[0], expected, atol=1e-5)
    with torch.no_grad():
        calls = []
        saving.model.model.decoder.layers[0].register_forward_hook(lambda *_: calls.append(1))
        one = saving.model.generate(IDS_BT[:, :3], do_sample=False, max_new_tokens=5)
        assert len(calls) == 5  # the key/value cache works
        other = plain.model.generate(IDS_BT[:, :3], do_sample=False, max_new_tokens=5)
    assert torch.equal(one, other)


def test_a_checkpointed_policy_is_saved_and_copied_as_any_other(small_model, tmp_path):
    saving = load_policy(small_model, device="cpu", gradient_checkpointing=True)
    expected = saving.logprobs(IDS_BT, 2, temperature=1.0)[0]
    twin = copy.deepcopy(saving.model)
    nn.init.zeros_(saving.model.model.layers[0].mlp.up_proj.weight)
    assert torch.equal(Policy(twin, None, "twin").logprobs(IDS_BT, 2, temperature=1.0)[0], expected)
    twin.save_pretrained(tmp_path)
    saving.tokenizer.save_pretrained(tmp_path)
    again = load_policy(str(tmp_path), device="cpu")
    assert torch.equal(again.logprobs(IDS_BT, 2, temperature=1.0)[0], expected)


def compiler_works():
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(3))
    except Exception as error:  # whatever a missing toolchain raises
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True, "dtype": "bfloat16"}])
def test_a_compiled_model_computes_the_same(small_model, options):
    reason = compiler_works()
    if reason:
        pytest.skip(f"torch.compile does not work here: {reason}")
    eager = load_policy(small_model, device="cpu", **options)
    compiled = load_policy(small_model, device="cpu", compile_model=True, **options)
    tolerance = 0.15 if options.get("dtype") == "bfloat16" else 1e-5
    for ids_BT in (IDS_BT, IDS_BT[:2, :5], IDS_BT.repeat(2, 3)):
        got = compiled.logprobs(ids_BT, 2, temperature=0.7)
        expected = eager.logprobs(ids_BT, 2, temperature=0.7)
        assert torch.allclose(got[0], expected[0], atol=tolerance)
        found = weight_gradients(compiled.model, got[:1])
        wanted = weight_gradients(eager.model, expected[:1])
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert (found[name] - gradient).abs().max() <= tolerance * 10, name
    names = [[name for name, _ in policy.named_tensors()] for policy in (compiled, eager)]
    assert names[0] == names[1]
