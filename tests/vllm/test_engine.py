"""A real vLLM engine beside the policy: same log-probabilities, whatever became of the weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from msgspec import structs

from mrgym.errors import ConfigError, SamplerError
from mrgym.sampler import Prompt, SamplingParams
from mrgym_trainers.gdpo.config import GDPOConfig
from mrgym_trainers.gdpo.probe import LogprobProbe
from mrgym_trainers.samplers.vllm.engine import VLLMSampler
from mrgym_trainers.samplers.vllm.settings import VLLMConfig

pytestmark = pytest.mark.vllm

SMALL = VLLMConfig(kv_cache_gib=0.25)


@pytest.fixture(scope="module")
def rig(make_rig):
    rig = make_rig(partial(VLLMSampler, config=SMALL, seed=1))
    yield rig
    rig.sampler.close()


def ids_of(group):
    return [completion.token_ids for completion in group]


# --- the same distribution ------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_log_probabilities_are_the_policys_before_any_sync(rig, prompts, temperature):
    """Case huggingface/trl#4159: the engine's are of the tempered distribution, as the loss's."""
    rig.perturb(scale=0.0)
    rig.sync()
    assert rig.gap(prompts, temperature=temperature) < 1e-4


def test_log_probabilities_are_the_policys_after_each_of_three_updates(rig, prompts):
    for _ in range(3):
        rig.learn(prompts)
        stale = rig.gap(prompts)
        rig.sync()
        fresh = rig.gap(prompts)
        assert fresh < 1e-4
        assert stale > 100 * fresh


def test_the_output_layer_follows_a_tied_embedding(rig, prompts):
    """Case vllm-project/vllm#51665, with nothing but the embedding changed."""
    assert rig.policy.model.config.tie_word_embeddings
    rig.perturb({"model.embed_tokens.weight"}, scale=0.02)
    assert rig.gap(prompts) > 1e-2
    rig.sync()
    assert rig.gap(prompts) < 1e-4


def test_what_was_read_with_old_weights_is_forgotten(rig, prompt_of):
    """vLLM keeps what it read in blocks of up to 128 tokens, computed with the old weights."""
    long = [prompt_of((i * 7) % 400 for i in range(300))]
    assert rig.gap(long) < 1e-4
    rig.perturb(scale=0.01)
    rig.sync()
    assert rig.gap(long) < 1e-4


def test_completions_carry_the_version_of_their_weights(rig, prompts):
    rig.sync()
    (group,) = rig.sampler.sample(prompts[:1], 2, SamplingParams(max_tokens=4))
    assert {c.policy_version for c in group} == {rig.version}


# --- tokens ---------------------------------------------------------------------------------


def test_ids_come_back_verbatim_and_one_log_probability_each(rig, prompts):
    sampled = rig.sampler.sample(prompts, 4, SamplingParams(max_tokens=24, seed=5))
    for group in sampled:
        for c in group:
            assert len(c.token_ids) == len(c.sampler_logprobs) > 0
            assert c == rig.policy.tokenizer.decode(c.token_ids, skip_special_tokens=True)
            ended = c.token_ids[-1] == rig.policy.tokenizer.eos_token_id
            assert c.stop_reason == ("stop" if ended else "length")
            assert rig.policy.tokenizer.eos_token_id not in c.token_ids[:-1]


def test_every_stop_id_ends_a_completion(rig, prompts, monkeypatch):
    first = rig.sampler.sample(prompts, 1, SamplingParams(max_tokens=12, temperature=0.0))
    extra = first[0][0].token_ids[3]
    monkeypatch.setattr(rig.sampler, "_stop_ids", [rig.policy.tokenizer.eos_token_id, extra])
    (group,) = rig.sampler.sample(prompts[:1], 1, SamplingParams(max_tokens=12, temperature=0.0))
    cut = first[0][0].token_ids.index(extra) + 1
    assert group[0].token_ids == first[0][0].token_ids[:cut]
    assert group[0].stop_reason == "stop"


def test_a_seed_repeats_a_call_and_another_does_not(rig, prompts):
    params = partial(SamplingParams, max_tokens=16)
    one, same, other = (rig.sampler.sample(prompts, 4, params(seed=seed)) for seed in (7, 7, 8))
    assert [ids_of(g) for g in one] == [ids_of(g) for g in same]
    assert [ids_of(g) for g in one] != [ids_of(g) for g in other]
    assert len({c.token_ids for group in one for c in group}) > 24  # nor do completions repeat


def test_a_prompts_seed_repeats_whatever_is_sampled_beside_it(rig, prompts):
    params = SamplingParams(max_tokens=16)
    seeded = [structs.replace(prompt, seed=40 + i) for i, prompt in enumerate(prompts)]
    together = rig.sampler.sample(seeded, 2, params)
    (alone,) = rig.sampler.sample(seeded[5:6], 2, params)
    assert ids_of(alone) == ids_of(together[5])
    other = structs.replace(seeded[5], seed=4)
    assert ids_of(rig.sampler.sample([other], 2, params)[0]) != ids_of(alone)


def test_unseeded_calls_differ(rig, prompts):
    unseeded = SamplingParams(max_tokens=16)
    first, second = (rig.sampler.sample(prompts, 2, unseeded) for _ in range(2))
    assert [ids_of(g) for g in first] != [ids_of(g) for g in second]


def test_many_prompts_at_once_keep_their_seeds(rig, prompt_of):
    """More prompt tokens than one engine step takes: none may be read in pieces on CPU."""
    many = [prompt_of((i + j) % 400 for j in range(60)) for i in range(80)]
    sampled = rig.sampler.sample(many, 2, SamplingParams(max_tokens=4, seed=1))
    assert len(sampled) == 80


def test_a_reader_that_stops_early_leaves_no_request_behind(rig, prompts):
    stream = rig.sampler.stream(prompts, 4, SamplingParams(max_tokens=200))
    next(stream)
    stream.close()
    assert not rig.sampler._llm.llm_engine.has_unfinished_requests()
    assert rig.gap(prompts) < 1e-4


# --- what is refused ------------------------------------------------------------------------


def test_a_prompt_beyond_the_context_is_refused_before_anything_is_sampled(rig, prompt_of):
    with pytest.raises(SamplerError, match=r"prompt of 500 tokens .* expected at most 512"):
        rig.sampler.sample([prompt_of([5] * 500)], 1, SamplingParams(max_tokens=20))


def test_an_unknown_tensor_is_refused(make_rig, rig):
    with pytest.raises(SamplerError, match="nonsense"):
        rig.sampler.update_weights([("model.nonsense.weight", torch.ones(2))], 99)


def test_an_engine_that_dies_is_one_clear_error(rig, prompts):
    """Case Tencent-Hunyuan/UniRL#214; huggingface/trl#6797: its client would wait for ever."""
    for child in psutil.Process().children(recursive=True):
        if "VLLM::" in " ".join(child.cmdline()):
            child.kill()
    with pytest.raises(SamplerError, match="its log above says why"):
        rig.sampler.sample(prompts, 2, SamplingParams(max_tokens=8))
    rig.sampler.close()


# --- engines that are wrong -----------------------------------------------------------------


def test_a_sync_without_some_tensors_is_refused_and_the_probe_finds_a_stale_head(
    make_rig, prompts, monkeypatch
):
    """With the refresh of tied heads taken out, the probe must stop the run."""
    import vllm

    monkeypatch.syspath_prepend(Path(__file__).parent)  # which the engine's processes inherit
    monkeypatch.setattr(vllm, "LLM", partial(vllm.LLM, worker_extension_cls="stale_head.Extension"))
    rig = make_rig(partial(VLLMSampler, config=SMALL))
    try:
        config = GDPOConfig(sampler="vllm")
        encoded = [rig.sampler.codec.start(prompt) for prompt in prompts]
        asked = [Prompt("", [], token_ids=ids) for ids in encoded]
        probe = LogprobProbe(rig.policy, rig.sampler, asked, config)
        assert probe.check(0)["probe/gap_max"] < 1e-4
        rig.perturb({"model.embed_tokens.weight"}, scale=0.02)
        rig.sync()
        with pytest.raises(SamplerError, match="weight sync 1: got log-probabilities that differ"):
            probe.check(1)
        tensors = [*rig.policy.named_tensors()]
        with pytest.raises(SamplerError, match=r"no values for \['model.norm.weight'\]"):
            rig.sampler.update_weights([t for t in tensors if t[0] != "model.norm.weight"], 2)
    finally:
        rig.sampler.close()


def test_an_engine_without_room_names_what_to_lower(tiny, load):
    """Case: out of memory while starting."""
    config = VLLMConfig(kv_cache_gib=100_000)
    with pytest.raises(ConfigError, match=r"lower vllm\.kv_cache_gib"):
        VLLMSampler(tiny, load().tokenizer, [1], config=config)


# --- on a GPU -------------------------------------------------------------------------------


@pytest.mark.gpu
def test_after_sleep_the_engine_has_the_synced_weights(make_rig, prompts):
    """Case huggingface/trl#5312; #5313; #5355: not those it was started from."""
    rig = make_rig(partial(VLLMSampler, config=VLLMConfig(kv_cache_gib=1.0)))
    try:
        rig.perturb(scale=0.02)
        before = torch.cuda.mem_get_info()[0]
        rig.sampler.rest()
        assert torch.cuda.mem_get_info()[0] > before
        with pytest.raises(SamplerError, match="while asleep"):
            rig.sampler.sample(prompts, 1, SamplingParams(max_tokens=4))
        rig.sync()
        assert rig.gap(prompts) < 1e-2
    finally:
        rig.sampler.close()
