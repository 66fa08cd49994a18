"""A sharded policy computes what the whole one does, whatever way it makes its logits."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import Gemma2Config, Gemma2ForCausalLM, MixtralConfig, MixtralForCausalLM

from mrgym_trainers.gdpo.lora_config import LoRAConfig
from mrgym_trainers.gdpo.policy import Policy, load_policy
from mrgym_trainers.gdpo.sharding import shard
from mrgym_trainers.samplers import TransformersSampler

IDS_BT = torch.tensor([[3, 40, 70, 110, 200, 7], [9, 55, 130, 0, 0, 0], [8, 8, 8, 61, 1, 0]])
MASK_BT = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0], [0, 1, 1, 0]], dtype=torch.bool)
SMALL = {
    "vocab_size": 263, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture
def group():
    """A process group of this process alone; FSDP gathers and frees as with many."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def twice(model):
    """Return a model's output twice as large where it is given tokens, and not hidden states."""
    forward = model.forward

    def doubled(input_ids=None, inputs_embeds=None, **options):
        out = forward(input_ids=input_ids, inputs_embeds=inputs_embeds, **options)
        if input_ids is not None:
            out.logits = out.logits * 2
        return out

    model.forward = doubled
    return model


LOADED = {
    "rounded": {"dtype": "bfloat16"},
    "checkpointed": {"gradient_checkpointing": True},
    "adapter": {"lora": LoRAConfig(rank=4)},
    "compiled": {"compile_model": True},
}


def new_model(kind, build, tokenizer):
    match kind:
        case "tied":
            return build.gpt2(tokenizer)
        case "own":
            return Gemma2ForCausalLM(
                Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=3.0)
            ).eval()
        case "whole":
            return twice(build.model(tokenizer))
        case "experts":
            return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=8)).eval()
        case _:
            return build.model(tokenizer)


@pytest.fixture
def new_policy(request, build, small_model):
    """Makes the same policy every time."""
    if request.param == "adapter":
        pytest.importorskip("peft")

    def make():
        torch.manual_seed(0)
        if request.param in LOADED:
            return load_policy(small_model, device="cpu", **LOADED[request.param])
        tokenizer = build.tokenizer()
        return Policy(new_model(request.param, build, tokenizer), tokenizer, request.param)

    return make


KINDS = [
    pytest.param(kind, marks=[pytest.mark.slow] if kind == "compiled" else [])
    for kind in ("linear", "tied", "own", "whole", "experts", *LOADED)
]


def learn(policy, steps=3):
    """Return the log-probabilities before and after steps on them, and what they are now."""
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-3)
    seen = []
    for _ in range(steps):
        with torch.no_grad():  # must not leave weights behind that the step makes old
            seen += policy.logprobs(IDS_BT, 2, temperature=0.7, mask_BT=MASK_BT)
        logprobs_BT, entropy_BT = policy.logprobs(
            IDS_BT, 2, temperature=0.7, mask_BT=MASK_BT, entropy_grad=True
        )
        (logprobs_BT.sum() + 0.1 * entropy_BT.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(logprobs_BT.detach())
    return seen


@pytest.mark.parametrize("new_policy", KINDS, indirect=True)
def test_a_sharded_policy_learns_the_same(new_policy, group):
    alone, sharded = new_policy(), shard(new_policy(), 1)
    assert all(isinstance(p, DTensor) for p in sharded.model.parameters())
    for got, expected in zip(learn(sharded), learn(alone), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    names, weights = zip(*sharded.named_tensors(), strict=True)
    expected = dict(alone.named_tensors())
    assert [*names] == [*expected]
    for name, weight in zip(names, weights, strict=True):
        assert not isinstance(weight, DTensor)
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5)
    assert all(isinstance(p, DTensor) for p in sharded.model.parameters())


@pytest.mark.parametrize("new_policy", ["linear", "tied"], indirect=True)
def test_a_sampler_takes_gathered_weights(new_policy, group):
    policy = new_policy()
    model = copy.deepcopy(policy.model)
    for parameter in model.parameters():
        parameter.data.zero_()
    TransformersSampler(model, policy.tokenizer).update_weights(
        shard(new_policy(), 1).named_tensors(), 1
    )
    for name, tensor in policy.named_tensors():
        assert torch.equal(model.get_parameter(name), tensor)
