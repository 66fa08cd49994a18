"""The probe after a weight sync: an engine that samples from something else stops the run."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from mrgym.errors import SamplerError
from mrgym.sampler import Completion
from mrgym_trainers.gdpo.config import GDPOConfig
from mrgym_trainers.gdpo.probe import LogprobProbe
from mrgym_trainers.samplers.transformers import TransformersSampler


@pytest.fixture
def probe_of(policy, prompt_of):
    """Makes a probe, and a sampler with weights of its own that were the policy's."""

    def make(**keys):
        sampler = TransformersSampler(copy.deepcopy(policy.model), policy.tokenizer)
        prompts = [prompt_of(token_ids=[20, 21, 22]), prompt_of(token_ids=[30, 31])]
        return LogprobProbe(policy, sampler, prompts, GDPOConfig(**keys)), sampler

    return make


def perturbed(model, scale=0.01):
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(
                torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * scale
            )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_equal_weights_pass(probe_of, temperature):
    probe, _ = probe_of(temperature=temperature)
    gap = probe.check(1)
    assert 0 <= gap["probe/gap_mean"] <= gap["probe/gap_max"] < 1e-4


def test_other_weights_stop_the_run_until_they_are_synced(probe_of, policy):
    probe, sampler = probe_of()
    perturbed(policy.model)
    with pytest.raises(
        SamplerError, match=r"weight sync 7: got log-probabilities .* at most 0.001 in float32"
    ):
        probe.check(7)
    sampler.update_weights(policy.named_tensors(), 8)
    assert probe.check(8)["probe/gap_max"] < 1e-4


def test_the_threshold_is_a_setting_and_wider_in_bfloat16(probe_of, policy):
    assert GDPOConfig().probe.limit("bfloat16") > GDPOConfig().probe.limit("float32")
    probe, _ = probe_of(probe={"threshold": 50.0})
    perturbed(policy.model)
    assert probe.check(1)["probe/gap_max"] > 1e-3


def test_no_number_is_no_agreement(probe_of, monkeypatch):
    probe, sampler = probe_of()

    def broken(prompts, n, params):
        return [[Completion("a", token_ids=[9], sampler_logprobs=[math.nan])] for _ in prompts]

    monkeypatch.setattr(sampler, "sample", broken)
    with pytest.raises(SamplerError, match="differ by up to nan"):
        probe.check(1)


def test_completions_are_fresh_each_time(probe_of, monkeypatch):
    probe, sampler = probe_of(probe={"completions": 6, "tokens": 5})
    asked = []
    sample = sampler.sample

    def watched(prompts, n, params):
        asked.append((len(prompts), params.max_tokens, params.seed))
        return sample(prompts, n, params)

    monkeypatch.setattr(sampler, "sample", watched)
    for version in range(4):
        probe.check(version)
    assert [call[:2] for call in asked] == [(6, 5)] * 4
    assert len({call[2] for call in asked}) == 4


def test_it_can_be_turned_off(probe_of, policy):
    probe, _ = probe_of(probe={"completions": 0})
    perturbed(policy.model)
    assert probe.check(1) == {}
