"""The tokenizer of the tiny policy: byte-level BPE, single digits, one token a tag."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

__all__ = ["EOS", "PAD", "TAGS", "VOCAB_SIZE", "train_tokenizer"]

PAD: Final = "<pad>"
EOS: Final = "<eos>"
TAGS: Final = ("<think>", "</think>", "<answer>", "</answer>")
VOCAB_SIZE: Final = 448
_MAX_LENGTH: Final = 512

# A digit stands alone; a space belongs to the word after it, and before a digit to nobody.
_PIECES: Final = r"\d| ?[^\s\d\p{P}\p{S}]+| ?[\p{P}\p{S}]|\s"


def train_tokenizer(corpus: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer learnt from texts that gives every text back exactly.

    Tags are tokens of their own but not special, so decoding keeps them; only ``<pad>`` and
    ``<eos>`` are special. No token is added around a text.
    """
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(corpus, _trainer())
    raw.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=raw,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        model_max_length=_MAX_LENGTH,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def _trainer() -> trainers.BpeTrainer:
    """Return the BPE trainer: all 256 bytes, then the merges that still fit beside the tags."""
    return trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(TAGS),
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
