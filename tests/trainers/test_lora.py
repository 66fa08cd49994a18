"""Adapters: only they learn, the sampler gets merged weights, and a checkpoint holds them alone."""

from __future__ import annotations

import copy

import pytest
import torch

from mrgym.errors import ConfigError
from mrgym_trainers import GDPOTrainer
from mrgym_trainers.gdpo.lora import add_adapter, merged_tensors
from mrgym_trainers.gdpo.lora_config import LoRAConfig
from mrgym_trainers.gdpo.policy import load_policy

pytest.importorskip("peft", reason="peft is not installed: pip install 'mrgym[lora]'")


def moved(model):
    """Give the adapters of a model some values."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)


@pytest.fixture(params=["llama", "gpt2"])
def plain(request, build):
    tokenizer = build.tokenizer()
    return build.model(tokenizer) if request.param == "llama" else build.gpt2(tokenizer)


def logits(model):
    with torch.no_grad():
        return model(torch.arange(10, 30)[None]).logits


def test_an_adapter_begins_as_no_change_and_freezes_the_rest(plain):
    before = logits(plain)
    add_adapter(plain, LoRAConfig(rank=4))
    assert torch.equal(logits(plain), before)
    learning = {name for name, weight in plain.named_parameters() if weight.requires_grad}
    assert learning
    assert all(".lora_" in name for name in learning)


def test_merged_weights_are_a_plain_models_and_give_its_logits(plain):
    untouched = copy.deepcopy(plain)
    names = [name for name, _ in plain.named_parameters()]
    add_adapter(plain, LoRAConfig(rank=4))
    moved(plain)
    merged = dict(merged_tensors(plain))
    assert [*merged] == names
    assert not torch.allclose(logits(plain), logits(untouched), atol=1e-2)
    untouched.load_state_dict(merged, strict=False)
    assert torch.allclose(logits(plain), logits(untouched), atol=1e-5)
    again = dict(merged_tensors(plain))
    assert all(torch.equal(again[name], weight) for name, weight in merged.items())


def test_layers_are_chosen_by_name(build):
    model = build.model(build.tokenizer())
    add_adapter(model, LoRAConfig(target_modules=("q_proj", "v_proj")))
    adapted = {
        n.split(".lora_")[0].rpartition(".")[2]
        for n, _ in model.named_parameters()
        if ".lora_" in n
    }
    assert adapted == {"q_proj", "v_proj"}


def test_names_that_fit_no_layer_are_refused(build):
    with pytest.raises(ConfigError, match=r"lora.target_modules: got \('nothing',\)"):
        add_adapter(build.model(build.tokenizer()), LoRAConfig(target_modules=("nothing",)))


def test_dropout_is_refused():
    with pytest.raises(ConfigError, match="dropout"):
        LoRAConfig(dropout=0.1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_run_trains_adapters_alone_and_resumes(
    run, envs, small_config, read_metrics, tmp_path, temperature
):
    keys = {"lora": {"rank": 4}, "learning_rate": 1e-2, "temperature": temperature}
    done = run(envs.Letters(), steps=3, **keys)
    lines = read_metrics(done.folder)
    assert all(line["mismatch/max_abs"] < 1e-4 for line in lines)
    assert all(line["loss/grad_norm"] > 0 for line in lines)
    final = done.folder / "checkpoints" / "step_000003"
    files = {path.name for path in final.iterdir()}
    assert "adapter_model.safetensors" in files
    assert "model.safetensors" not in files
    peft = pytest.importorskip("peft")
    base = load_policy(done.trainer.config.model, device="cpu").model
    loaded = peft.PeftModel.from_pretrained(base, final)
    ids = torch.arange(10, 30)[None]
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, done.trainer.policy.model(ids).logits, atol=1e-5)
    half = run(envs.Letters(), out="half", steps=1, **keys)
    more = small_config(steps=3, **keys)
    resumed = GDPOTrainer(envs.Letters(), more, resume=half.folder)
    resumed.train()
    pairs = zip(resumed.policy.named_tensors(), done.trainer.policy.named_tensors(), strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)


def test_an_adapter_is_not_written_in_the_background(small_config):
    with pytest.raises(ConfigError, match="checkpoint_async: got true with lora"):
        small_config(lora={}, checkpoint_async=True)
