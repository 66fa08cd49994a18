"""Builds the tiny policy: ``python -m mrgym_trainers.tiny_policy.build --out DIR [--seed 0]``.

A Llama of 0.4 million parameters learns, supervised, from imperfect demonstrations of easy word
problems of the ``train`` split (:mod:`.demonstrations`). The result is a start for reinforcement
learning, not an end: it knows the answers better than it gives them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mrgym_envs.math_multi_reward.generator import DIFFICULTIES, generate
from mrgym_trainers.tiny_policy.demonstrations import Demonstration, demonstrations
from mrgym_trainers.tiny_policy.tokenizer import EOS, train_tokenizer

__all__ = ["WarmUp", "build", "main", "new_model", "new_tokenizer", "warm_up"]

_LOG: Final = logging.getLogger(__name__)
_IGNORED: Final = -100  # the label that the loss of Transformers leaves out
_LOG_EVERY: Final = 50


@dataclass(frozen=True)
class WarmUp:
    """The supervised warm-up.

    Attributes:
        steps: Optimiser updates.
        batch: Demonstrations an update; none is used twice.
        learning_rate: Peak rate, reached after ``ramp`` steps, then a cosine down to zero.
        ramp: Steps of linear growth of the rate.
    """

    steps: int = 1000
    batch: int = 64
    learning_rate: float = 3e-3
    ramp: int = 30

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        grown = min(1.0, (step + 1) / self.ramp)
        return self.learning_rate * grown * 0.5 * (1 + math.cos(math.pi * step / self.steps))


def build(out: pathlib.Path, *, seed: int = 0, warm_up_plan: WarmUp | None = None) -> None:
    """Write the policy of a seed into a folder; one machine gives the same bytes every time."""
    plan = warm_up_plan or WarmUp()
    examples = list(demonstrations(seed=seed, count=plan.steps * plan.batch))
    tokenizer = new_tokenizer(examples)
    model = new_model(tokenizer, seed=seed)
    warm_up(model, tokenizer, examples, plan)
    _save(model, tokenizer, out)


def new_tokenizer(examples: Sequence[Demonstration]) -> PreTrainedTokenizerFast:
    """Return a tokenizer for demonstrations, with some words of the harder problems."""
    texts = [text for e in examples[:8000] for text in (e.prompt, e.completion)]
    for difficulty in DIFFICULTIES[1:]:
        problems = generate(split="train", difficulty=difficulty, seed=0, count=500)
        texts += [problem.question for problem in problems]
    return train_tokenizer(texts)


def new_model(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> LlamaForCausalLM:
    """Return an untrained model; 3 heads of 32 suit every attention kernel of vLLM."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.06,  # so narrow a model learns arithmetic much later with 0.02
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def warm_up(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[Demonstration],
    plan: WarmUp,
) -> None:
    """Train the model in place on completions; the loss leaves prompts out."""
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step, (ids_BT, labels_BT) in enumerate(_batches(tokenizer, examples, plan.batch)):
        for group in optimiser.param_groups:
            group["lr"] = plan.rate_at(step)
        loss = model(input_ids=ids_BT, labels=labels_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if step % _LOG_EVERY == 0 or step == plan.steps - 1:
            _LOG.info("step %d/%d: loss %.3f", step, plan.steps, loss.item())


def _batches(
    tokenizer: PreTrainedTokenizerFast, examples: Sequence[Demonstration], size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield token ids and labels, padded on the right, so that causal attention needs no mask."""
    prompts = tokenizer([e.prompt for e in examples])["input_ids"]
    completions = tokenizer([e.completion + EOS for e in examples])["input_ids"]
    rows = zip(prompts, completions, strict=True)
    while batch := list(itertools.islice(rows, size)):
        ids = [torch.tensor(prompt + completion) for prompt, completion in batch]
        labels = [torch.tensor([_IGNORED] * len(p) + completion) for p, completion in batch]
        yield _padded(ids, tokenizer.pad_token_id), _padded(labels, _IGNORED)


def _padded(rows: list[torch.Tensor], value: int) -> torch.Tensor:
    """Return rows of different lengths as one matrix."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def _save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: pathlib.Path) -> None:
    """Write the files of a Hugging Face checkpoint."""
    model.generation_config.do_sample = True
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    # Transformers 5 writes a class name that Transformers 4 does not know; both know this one.
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Build the policy from the command line."""
    parser = argparse.ArgumentParser(description="Build the tiny policy.")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    build(arguments.out, seed=arguments.seed)


if __name__ == "__main__":
    main()
