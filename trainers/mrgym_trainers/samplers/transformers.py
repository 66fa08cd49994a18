"""Sampling from a Transformers causal language model, on CPU or one GPU."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from mrgym.errors import SamplerError
from mrgym.sampler import Codec, Completion, Prompt, SamplingParams
from mrgym_trainers.samplers.codec import TokenizerCodec

__all__ = ["TransformersSampler"]

_COMPACT_BELOW = 0.75  # rows are dropped from the cache once this share is still running


@dataclass(slots=True)
class _Rows:
    """Completions in the making, one row each."""

    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    stopped: list[bool] = field(default_factory=list)


class TransformersSampler:
    """Samples with a key/value cache; prompts are read once and shared by their group.

    Args:
        model: The causal language model; the trainer's own object, so weights are always current.
        tokenizer: Its tokenizer.
        max_rows: Most completions sampled at a time.
        seed: Seeds sampling unless a call brings its own seed.
    """

    def __init__(self, model: Any, tokenizer: Any, *, max_rows: int = 256, seed: int = 0) -> None:
        self.model = model
        self._stop_ids = _stop_ids(model, tokenizer)
        self._codec = TokenizerCodec(tokenizer, self._stop_ids)
        self.codec: Codec | None = self._codec
        self._tokenizer = tokenizer
        self._max_rows = max_rows
        self._generator = torch.Generator(device=model.device).manual_seed(seed)
        self._version = 0
        # Transformers renamed the argument in release 5.
        named = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in named else "past_key_values"

    def sample(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams
    ) -> list[list[Completion]]:
        """Return ``n`` completions of every prompt, in order.

        The log-probability of a token is that of the distribution it was sampled from (after
        temperature; of the untempered one where ``temperature`` is 0).

        Raises:
            SamplerError: If a prompt leaves no room for a completion, or ``top_p``/``top_k`` is
                asked for.
        """
        ids = [prompt.token_ids or self._codec.start(prompt) for prompt in prompts]
        self._check(ids, params)
        if params.seed is not None:
            self._generator.manual_seed(params.seed)
        per_call = max(1, self._max_rows // n)
        # Prompts of similar length go together, so that little is spent on padding.
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        out: list[list[Completion]] = [[] for _ in ids]
        was_training = self.model.training
        self.model.eval()
        for at in range(0, len(order), per_call):
            part = order[at : at + per_call]
            groups = self._sample_groups([ids[i] for i in part], n, params)
            for i, group in zip(part, groups, strict=True):
                out[i] = group
        self.model.train(was_training)
        return out

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy weights that are not the model's own tensors already, and take the version."""
        own = dict(self.model.named_parameters())
        for name, tensor in named_tensors:
            if name not in own:
                raise SamplerError(
                    f"update_weights: got unknown tensor {name!r}, expected the model's own names; "
                    "send the policy that was loaded here"
                )
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].data.copy_(tensor)
        self._version = version

    def close(self) -> None:
        """Nothing to free: the model belongs to the caller."""

    def _check(self, ids: Sequence[list[int]], params: SamplingParams) -> None:
        if params.top_p != 1.0 or params.top_k != 0:
            raise SamplerError(
                f"TransformersSampler: got top_p={params.top_p}, top_k={params.top_k}, expected "
                "the full distribution; leave them out"
            )
        room = getattr(self.model.config, "max_position_embeddings", None)
        longest = max(map(len, ids), default=0)
        if room is not None and longest + params.max_tokens > room:
            raise SamplerError(
                f"TransformersSampler: got a prompt of {longest} tokens and max_tokens="
                f"{params.max_tokens}, expected at most {room} together (the model's context); "
                "shorten the prompts or lower max_tokens"
            )

    @torch.no_grad()
    def _sample_groups(
        self, ids: Sequence[list[int]], n: int, params: SamplingParams
    ) -> list[list[Completion]]:
        rows = self._decode_loop(ids, n, params)
        completions = [self._completion(*row) for row in zip(*_columns(rows), strict=True)]
        return [completions[i * n : (i + 1) * n] for i in range(len(ids))]

    def _decode_loop(self, ids: Sequence[list[int]], n: int, params: SamplingParams) -> _Rows:
        """Read the prompts, then sample a token a row until all rows have stopped."""
        logits_BV, cache, mask_BT = self._read_prompts(ids, n)
        count = len(ids) * n
        rows = _Rows([[] for _ in range(count)], [[] for _ in range(count)], [False] * count)
        live_B = torch.arange(count, device=mask_BT.device)
        for position in range(params.max_tokens):
            tokens_B, logprobs_B = self._draw(logits_BV, params.temperature)
            running_B = self._record(rows, live_B, tokens_B, logprobs_B)
            if position + 1 == params.max_tokens or not running_B.any():
                break
            if running_B.float().mean() < _COMPACT_BELOW:
                keep = running_B.nonzero().squeeze(1)
                cache.batch_select_indices(keep)
                live_B, tokens_B, mask_BT = live_B[keep], tokens_B[keep], mask_BT[keep]
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(mask_BT), 1)], dim=1)
            logits_BV = self._forward(tokens_B[:, None], mask_BT, cache)
        return rows

    def _read_prompts(
        self, ids: Sequence[list[int]], n: int
    ) -> tuple[Tensor, DynamicCache, Tensor]:
        longest = max(map(len, ids))
        padded = [[0] * (longest - len(row)) + row for row in ids]
        device = self.model.device
        input_ids_PT = torch.tensor(padded, device=device)
        lengths = torch.tensor([len(row) for row in ids], device=device)
        mask_PT = (torch.arange(longest, device=device) >= longest - lengths[:, None]).long()
        cache = DynamicCache()
        logits_PV = self._forward(input_ids_PT, mask_PT, cache)
        cache.batch_repeat_interleave(n)
        return logits_PV.repeat_interleave(n, 0), cache, mask_PT.repeat_interleave(n, 0)

    def _forward(self, input_ids_BT: Tensor, mask_BT: Tensor, cache: DynamicCache) -> Tensor:
        """Return the logits after the last of the given tokens, in float32."""
        positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)[:, -input_ids_BT.shape[1] :]
        out = self.model(
            input_ids=input_ids_BT,
            # Without padding the mask says nothing, and attention is faster without it.
            attention_mask=None if bool(mask_BT.all()) else mask_BT,
            position_ids=positions_BT,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: cache},
        )
        logits: Tensor = out.logits[:, -1].float()
        return logits

    def _draw(self, logits_BV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return a sampled token a row, and its log-probability."""
        if temperature == 0.0:
            logprobs_BV = logits_BV.log_softmax(-1)
            tokens_B = logits_BV.argmax(-1)
        else:
            logprobs_BV = (logits_BV / temperature).log_softmax(-1)
            tokens_B = self._multinomial(logprobs_BV.exp())
        return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]

    def _multinomial(self, probabilities_BV: Tensor) -> Tensor:
        try:
            return torch.multinomial(probabilities_BV, 1, generator=self._generator)[:, 0]
        except RuntimeError as error:  # how torch refuses NaN
            raise SamplerError(
                f"TransformersSampler: got no distribution from the model ({error}), expected "
                "finite logits; the weights have diverged, try a lower learning_rate"
            ) from error

    def _record(self, rows: _Rows, live_B: Tensor, tokens_B: Tensor, logprobs_B: Tensor) -> Tensor:
        """Append a token to every running row and return which rows still run."""
        running = []
        for row, token, logprob in zip(
            live_B.tolist(), tokens_B.tolist(), logprobs_B.tolist(), strict=True
        ):
            if not rows.stopped[row]:
                rows.tokens[row].append(token)
                rows.logprobs[row].append(logprob)
                rows.stopped[row] = token in self._stop_ids
            running.append(not rows.stopped[row])
        return torch.tensor(running, device=live_B.device)

    def _completion(self, tokens: list[int], logprobs: list[float], stopped: bool) -> Completion:
        return Completion(
            self._tokenizer.decode(tokens, skip_special_tokens=True),
            token_ids=tokens,
            sampler_logprobs=logprobs,
            stop_reason="stop" if stopped else "length",
            policy_version=self._version,
        )


def _columns(rows: _Rows) -> tuple[list[list[int]], list[list[float]], list[bool]]:
    return rows.tokens, rows.logprobs, rows.stopped


def _stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return every id that ends a completion: the tokenizer's and the generation config's."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in (*ids, tokenizer.eos_token_id) if i is not None)
