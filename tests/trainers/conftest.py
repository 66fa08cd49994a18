"""What the trainer's tests share: a small random policy, small environments, hand-made rollouts."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch starts its threads

import json
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import mrgym
from mrgym.rollout import Rollout
from mrgym.sampler import Prompt
from mrgym_trainers import GDPOConfig, GDPOTrainer
from mrgym_trainers.gdpo.policy import load_policy

SPECIAL = ("<pad>", "<eos>", "<bos>")
MERGES = (("a", "b"), ("t", "h"), ("th", "e"))
ENDING = [1, *range(100, 164)]  # <eos> and 64 letters end a completion, so lengths vary


def new_tokenizer(*, bos=False, template=None, pad="<pad>"):
    """Byte-level BPE of three merges; with ``bos`` it puts <bos> before every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet, "ab", "th", "the"])}
    raw = Tokenizer(models.BPE(vocab, list(MERGES)))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    if bos:
        raw.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])]
        )
    names = {"bos_token": "<bos>"} if bos else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<eos>", pad_token=pad, **names
    )
    tokenizer.chat_template = template
    return tokenizer


def new_model(tokenizer, *, seed=0, ending=ENDING, **options):
    """An untrained Llama of two layers whose distributions are far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.2, bos_token_id=None, eos_token_id=1, pad_token_id=0, **options,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = list(ending)
    model.generation_config.bos_token_id = None
    return model.eval()


def new_gpt2(tokenizer, *, seed=0, ending=ENDING):
    """An untrained GPT-2: absolute positions, tied embeddings, and dropout by default."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=64,
        initializer_range=0.3, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.generation_config.eos_token_id = list(ending)
    return model.eval()


class Letters(mrgym.SingleTurnEnv):
    """Two scores that a random policy meets by chance; no score depends on the task."""

    def tasks(self, split):
        return [mrgym.Task(prompt=f"{split} {i:03d}: say ") for i in range(16)]

    @mrgym.component(low=0, high=1)
    def lower(self, task, completion):
        return sum(c.islower() for c in completion) / max(len(completion), 1)

    @mrgym.component(low=-1, high=0, weight=0.5)
    def brief(self, task, completion):
        return -min(len(completion), 10) / 10


class Chat(mrgym.MultiTurnEnv):
    """Asks a second time, then ends; ``long`` adds up over the turns and ``first`` may abstain."""

    max_turns = 3

    def tasks(self, split):
        return [mrgym.Task(prompt=f"{split} {i:03d}? ") for i in range(16)]

    def respond(self, state, completion):
        return "and then?" if state.turn < 2 else None

    @mrgym.component(low=0, high=20, reduce="sum")
    def long(self, state, completion):
        return min(len(completion), 10)

    @mrgym.component(low=0, high=1, optional=True)
    def lower(self, state, completion):
        return completion[:1].islower() if completion else mrgym.ABSENT


class Stepwise(mrgym.MultiRewardEnv[str, str]):
    """Written by hand against ``reset`` and ``step``: say a digit, twice."""

    components = mrgym.components(
        digit=mrgym.Component(low=0, high=2, reduce="sum"),
        short=mrgym.Component(low=-1, high=0, reduce="mean"),
    )

    def __init__(self):
        self.observation_space = mrgym.spaces.TextSpace()
        self.action_space = mrgym.spaces.TextSpace()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        return f"{self.np_random.integers(10**6)}: ", {}

    def step(self, action):
        self.turn += 1
        scores = {"digit": any(c.isdigit() for c in action), "short": -(len(action) > 3)}
        return self.emit("more: ", scores, terminated=self.turn == 2)


class One(Letters):
    """A single component."""

    brief = None


@pytest.fixture
def envs():
    """The environment classes above, by name."""
    return SimpleNamespace(Letters=Letters, Chat=Chat, Stepwise=Stepwise, One=One)


@pytest.fixture(scope="session")
def build():
    """Functions that build tokenizers and models of other shapes."""
    return SimpleNamespace(tokenizer=new_tokenizer, model=new_model, gpt2=new_gpt2)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """The folder of the small random policy."""
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = new_tokenizer()
    new_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def policy(small_model):
    """The small random policy, freshly loaded."""
    return load_policy(small_model, device="cpu")


@pytest.fixture
def small_config(small_model):
    """Makes a configuration of a run of a second; keys override it."""

    def make(**keys):
        defaults = {
            "model": small_model, "device": "cpu", "steps": 2, "prompts_per_step": 2,
            "group_size": 4, "max_completion_tokens": 8, "eval_tasks": 4, "learning_rate": 1e-3,
        }  # fmt: skip
        return GDPOConfig(**{**defaults, **keys})

    return make


@pytest.fixture
def run(small_config, tmp_path):
    """Trains and returns trainer, summary and folder; keys go to the configuration."""

    def train(env, *, out="run", **keys):
        trainer = GDPOTrainer(env, small_config(**keys), out=tmp_path / out)
        summary = trainer.train()
        return SimpleNamespace(trainer=trainer, summary=summary, folder=tmp_path / out)

    return train


@pytest.fixture
def read_metrics():
    """Reads the lines of a kind from ``metrics.jsonl``; anything but strict JSON fails."""

    def refuse(constant):
        raise AssertionError(f"metrics.jsonl holds {constant}")

    def read(folder, kind="train", *, times=True):
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
        found = [line for line in lines if line["kind"] == kind]
        if times:
            return found
        return [
            {k: v for k, v in line.items() if not k.startswith(("time/", "speed/", "memory/"))}
            for line in found
        ]

    return read


@pytest.fixture
def make_rollout():
    """Makes a scored rollout of given tokens."""

    def make(prompt=(5, 6), tokens=(7, 8, 9), *, mask=None, logprobs=None, group=0, **fields):
        fields.setdefault("components", {"a": 1.0, "b": 0.5})
        return Rollout(
            f"task-{group}", group, 0, prompt_token_ids=list(prompt), token_ids=list(tokens),
            loss_mask=list(mask) if mask is not None else [True] * len(tokens),
            sampler_logprobs=list(logprobs) if logprobs is not None else [-1.0] * len(tokens),
            **fields,
        )  # fmt: skip

    return make


@pytest.fixture
def prompt_of():
    """Makes a prompt of text, or of token ids."""

    def make(text="", token_ids=(), *, prefill=""):
        messages = [{"role": "user", "content": text}]
        return Prompt(text, messages, prefill, token_ids=list(token_ids), task_id=text)

    return make
