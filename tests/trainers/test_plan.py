"""The arithmetic of a dry run, against models that are really built."""

import math

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
)

from mrgym.errors import ConfigError, RegistryError
from mrgym_trainers import GDPOConfig
from mrgym_trainers.gdpo.memory_plan import GIB, Load, activation_bytes, plan_memory
from mrgym_trainers.gdpo.model_shape import ModelShape, find_shape
from mrgym_trainers.gdpo.plan import Prompts, plan_batch, plan_run, warnings_of
from mrgym_trainers.gdpo.policy import load_policy

SIZES = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
QWEN_1_5B = {
    "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960,
    "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
    "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip


def counted(model):
    return sum(parameter.numel() for parameter in model.parameters())


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_the_policy_in_the_package_has_as_many_parameters_as_reckoned():
    shape, source = find_shape("tiny")
    assert shape.parameters == counted(load_policy("tiny", device="cpu").model)
    assert source == "config"


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, tie_word_embeddings=True),
        LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
        LlamaConfig(**SIZES, head_dim=32),
        MistralConfig(**SIZES),
        Qwen2Config(**SIZES, tie_word_embeddings=True),
        Qwen2Config(**SIZES, tie_word_embeddings=False),
        Qwen3Config(**SIZES, head_dim=24),
        Qwen3Config(**SIZES, head_dim=24, attention_bias=True),
        GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=500),
    ],
    ids=lambda config: config.model_type,
)
def test_parameters_are_those_of_the_model_that_is_built(config):
    shape, model = ModelShape.of(config), on_meta(config)
    assert shape.parameters == counted(model)
    body = model.model.layers if hasattr(model, "model") else model.transformer.h
    assert shape.layer_parameters == counted(body[0])


def test_a_model_that_is_not_here_is_known_by_its_description_or_not_at_all():
    shape, why = find_shape("nobody/has-this-model")
    assert shape is None
    assert "downloads nothing" in why
    shape, source = find_shape("nobody/has-this-model", QWEN_1_5B)
    assert (shape.parameters, source) == (1_543_714_304, "recipe")
    assert shape.parameters == counted(on_meta(Qwen2Config(**QWEN_1_5B)))


@pytest.mark.parametrize("model", ["./absent", "/absent/model"])
def test_a_folder_without_a_model_is_an_error(model):
    with pytest.raises(ConfigError, match="expected a Hugging Face model folder"):
        find_shape(model, QWEN_1_5B)


def test_a_description_of_an_unknown_kind_is_an_error():
    with pytest.raises(ConfigError, match="model_shape: got"):
        find_shape("nobody/has-this-model", {"model_type": "no-such-type"})


def kept_for_backward(model, input_ids, dtype):
    """Bytes of everything autograd keeps, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        alive.append(tensor)
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    cast = torch.autocast("cpu", torch.bfloat16, enabled=dtype != model.dtype, cache_enabled=False)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), cast:
        model.model(input_ids=input_ids, use_cache=False)
    return sum(kept.values())


@pytest.mark.parametrize(
    ("dtype", "master"), [("float32", True), ("bfloat16", True), ("bfloat16", False)]
)
@pytest.mark.parametrize("kind", [(LlamaConfig, LlamaForCausalLM), (Qwen2Config, Qwen2ForCausalLM)])
def test_activations_are_what_autograd_keeps(kind, dtype, master):
    new_config, new_model = kind
    compute = getattr(torch, dtype)
    stored = torch.float32 if master else compute
    rows, length, sizes = 4, 64, []
    for layers in (2, 4):
        config = new_config(**{**SIZES, "num_hidden_layers": layers})
        model = new_model(config).to(stored)
        sizes.append(kept_for_backward(model, torch.zeros(rows, length, dtype=int), compute))
    shape = ModelShape.of(config)
    a_layer = (
        rows * length * activation_bytes(shape, GDPOConfig(dtype=dtype, master_weights=master))
    )
    if stored != compute:  # rounded weights
        a_layer += 2 * shape.layer_parameters
    assert (sizes[1] - sizes[0]) / 2 == pytest.approx(a_layer, rel=0.02)


def plan(*, ranks=1, gpu_gib=80.0, longest=512, **keys):
    config = GDPOConfig(**{"model": "nobody/has-this-model", "dtype": "bfloat16", **keys})
    shape, _ = find_shape("nobody/has-this-model", QWEN_1_5B)
    batch = plan_batch(config, Prompts(longest, "given"), ranks)
    gpu = int(gpu_gib * GIB)
    load = Load(ranks, batch.rank_rollouts, batch.sequence, batch.micro_rows, gpu)
    memory = plan_memory(shape, config, load)
    return batch, memory, [*warnings_of(config, batch, shape, memory, gpu_gib)]


def test_batch_arithmetic():
    batch, _, _ = plan(
        ranks=3, prompts_per_step=16, group_size=8, steps=10, updates_per_step=2,
        max_completion_tokens=488, micro_batch_tokens=4096,
    )  # fmt: skip
    assert (batch.rollouts, batch.optimiser_steps, batch.sequence) == (128, 20, 1000)
    assert (batch.tokens, batch.completion_tokens) == (128_000, 128 * 488)
    assert (batch.rank_groups, batch.rank_rollouts, batch.rank_tokens) == (6, 48, 48_000)
    assert (batch.micro_rows, batch.micro_batches) == (4, 12)


def test_memory_of_weights_gradients_and_optimiser():
    parameters = 1_543_714_304
    _, memory, _ = plan()
    assert [*memory.kept.values()] == [4 * parameters, 4 * parameters, 8 * parameters]
    _, memory, _ = plan(ranks=8)
    assert memory.kept["gradients"] == parameters // 2
    assert "gathered layers" in memory.learning
    _, memory, _ = plan(master_weights=False)
    assert sum(memory.kept.values()) == 8 * parameters
    _, memory, _ = plan(loss={"kl_coef": 0.1})
    assert memory.kept["reference policy"] == 2 * parameters


def test_checkpointing_keeps_one_layer_and_the_stream_between_layers():
    full, lean = (
        plan(gradient_checkpointing=on)[1].learning["activations"] for on in (False, True)
    )
    tokens, layers = 4096 // 768 * 768, 28
    assert lean == full // layers + layers * tokens * 1536 * 4


def test_the_cache_of_the_engine():
    batch, memory, warned = plan(sampler="vllm", vllm={"kv_cache_gib": 1.0, "max_num_seqs": 64})
    assert memory.kv_token == 2 * 28 * 2 * 128 * 2
    assert memory.kv_needed == 64 * batch.sequence * memory.kv_token
    assert memory.kv_room == GIB
    fitting = GIB // (batch.sequence * memory.kv_token)
    (line,) = (line for line in warned if line.startswith("vllm: got room"))
    assert f"for {fitting} completions" in line
    assert not any("vllm: got room" in line for line in plan(sampler="vllm")[2])


def test_an_engine_that_does_not_sleep_takes_its_share_while_learning():
    awake, asleep = (plan(sampler="vllm", vllm={"sleep": on})[1] for on in (False, True))
    share = awake.sampling["vLLM's share"]
    assert share == 40 * GIB
    assert awake.learning_peak == asleep.learning_peak + share
    assert plan(sampler="vllm", vllm={"servers": ["http://a:1"]})[1].sampling == {}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"warmup_steps": 20, "steps": 20}, "warmup_steps: got 20 of 20"),
        ({"checkpoint_every": 30, "steps": 20}, "checkpoint_every: got 30 of 20"),
        ({"ranks": 3}, "prompts_per_step: got 16 for 3 ranks"),
        ({"sample_rows": 30}, "sample_rows: got 30, which group_size 8"),
        ({"micro_batch_tokens": 100}, "micro_batch_tokens: got 100"),
        ({"max_completion_tokens": 40_000}, "the model's context: got 32768"),
        ({"sampler": "vllm", "vllm": {"max_model_len": 600}}, "vllm.max_model_len: got 600"),
        ({"sampler": "vllm", "vllm": {"tensor_parallel_size": 5}}, "divisor of the model's 12"),
        ({"gpu_gib": 16.0}, "GiB while learning, expected at most 16"),
    ],
)
def test_what_will_not_go_well_is_said(keys, words):
    *_, warned = plan(**keys)
    assert any(words in line for line in warned), warned
    *_, quiet = plan()
    assert not any(words in line for line in quiet)


def test_a_run_on_the_policy_in_the_package_is_known_to_the_last_token():
    found = plan_run("math_multi_reward", GDPOConfig(device="cpu", weights={"format": 0.5}))
    assert found.weights == {"correctness": 1.0, "format": 0.5, "integer": 1.0}
    assert "of 256 training prompts" in found.prompts.source
    assert found.batch.sequence == found.prompts.longest + 36
    assert (found.batch.train_tasks, found.batch.eval_tasks) == (4096, 512)
    assert math.isclose(found.batch.epochs, 250 * 32 / 4096)
    assert found.warnings == found.notes == []


def test_wrong_names_and_numbers_are_errors():
    with pytest.raises(ConfigError, match="did you mean 'format'"):
        plan_run("math_multi_reward", GDPOConfig(weights={"formt": 1.0}))
    with pytest.raises(RegistryError, match="math_length"):
        plan_run("math_lenth", GDPOConfig())
    with pytest.raises(ConfigError, match="ranks=0"):
        plan_run("math_multi_reward", GDPOConfig(), ranks=0)


def test_tasks_that_cannot_be_loaded_are_noted(tmp_path):
    found = plan_run(
        "math_multi_reward", GDPOConfig(), env_kwargs={"tasks": str(tmp_path / "absent.jsonl")}
    )
    assert found.batch.train_tasks is None
    assert any("absent.jsonl" in note for note in found.notes)
