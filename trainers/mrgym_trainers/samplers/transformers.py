"""Sampling from a Transformers causal language model, on CPU or one GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from mrgym.errors import SamplerError
from mrgym.sampler import Codec, Completion, Prompt, SamplingParams
from mrgym_trainers.samplers.cache import growing_cache
from mrgym_trainers.samplers.codec import TokenizerCodec, stop_ids
from mrgym_trainers.samplers.draw import draw_tokens, draw_uniforms

__all__ = ["TransformersSampler"]

_COMPACT_BELOW = 0.75  # rows are dropped from the cache once this share is still running


@dataclass(slots=True)
class _Rows:
    """Completions in the making, one row each."""

    prompt_length: int
    """Columns of the prompts, with the padding before them."""
    padding_B: Tensor
    uniforms_BT: Tensor
    tokens_BT: Tensor
    logprobs_BT: Tensor
    lengths_B: Tensor
    running_B: Tensor
    live_B: Tensor
    """Rows that the cache still holds; some of them may have stopped."""

    @classmethod
    def of(cls, prompt_length: int, padding_B: Tensor, uniforms_BT: Tensor) -> _Rows:
        """Return rows without a token yet."""
        lengths_B = torch.zeros_like(padding_B)
        tokens_BT = padding_B.new_zeros(uniforms_BT.shape)
        return cls(
            prompt_length,
            padding_B,
            uniforms_BT,
            tokens_BT,
            tokens_BT.float(),
            lengths_B,
            torch.ones_like(padding_B, dtype=torch.bool),
            torch.arange(len(padding_B), device=padding_B.device),
        )

    def record(self, position: int, tokens_B: Tensor, logprobs_B: Tensor, stop_B: Tensor) -> Tensor:
        """Append a token to every running row and return which live rows run on."""
        live_B = self.live_B
        # What is written behind a stopped row's end is cut off by its length.
        self.tokens_BT[live_B, position] = tokens_B
        self.logprobs_BT[live_B, position] = logprobs_B
        running_B = self.running_B[live_B]
        self.lengths_B[live_B] += running_B
        running_B &= ~torch.isin(tokens_B, stop_B)
        self.running_B[live_B] = running_B
        return running_B


class TransformersSampler:
    """Samples with a key/value cache; prompts are read once and shared by their group.

    Args:
        model: The causal language model; the trainer's own object, so weights are always current.
        tokenizer: Its tokenizer.
        max_rows: Most completions sampled at a time.
        seed: Seeds sampling unless a call brings its own seed.
        autocast: Makes the context the policy's forward passes run in, where they have one:
            sampling in another precision would sample from another policy.

    Attributes:
        context_length: Most tokens of prompt and completion together, where the model has a limit.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_rows: int = 256,
        seed: int = 0,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model = model
        ends = stop_ids(model, tokenizer)
        self._stop_B = torch.tensor(sorted(ends), dtype=torch.long, device=model.device)
        self._codec = TokenizerCodec(tokenizer, ends)
        self.codec: Codec | None = self._codec
        self._tokenizer = tokenizer
        self.context_length: int | None = getattr(model.config, "max_position_embeddings", None)
        self._max_rows = max_rows
        self._autocast = autocast
        self._generator = torch.Generator(device=model.device).manual_seed(seed)
        self._own_generator = torch.Generator(device=model.device)  # of prompts with a seed
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
            SamplerError: If a prompt leaves no room for a completion, ``top_p``/``top_k`` is
                asked for, or the model gives no distribution.
        """
        found = {(i, j): completion for i, j, completion in self.stream(prompts, n, params)}
        return [[found[i, j] for j in range(n)] for i in range(len(prompts))]

    def stream(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams
    ) -> Iterator[tuple[int, int, Completion]]:
        """Yield prompt's position, completion's position and completion, soon after each stops.

        Raises:
            SamplerError: As :meth:`sample`.
        """
        ids = [prompt.token_ids or self._codec.start(prompt) for prompt in prompts]
        self._check(ids, params)
        if params.seed is not None:
            self._generator.manual_seed(params.seed)
        was_training = self.model.training
        self.model.eval()
        try:
            for part, first, count in self._parts([len(row) for row in ids], n):
                uniforms_BT = self._uniforms([prompts[i].seed for i in part], first, count, params)
                for row, completion in self._sample_rows(
                    [ids[i] for i in part], uniforms_BT, params
                ):
                    yield part[row // count], first + row % count, completion
        finally:
            self.model.train(was_training)

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

    def _parts(self, lengths: Sequence[int], n: int) -> Iterator[tuple[list[int], int, int]]:
        """Yield prompts to sample together, and first and number of the completions of each.

        They are ``max_rows`` completions at most.
        """
        # Prompts of similar length go together, so that little is spent on padding.
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        together = max(1, self._max_rows // n)
        for at in range(0, len(order), together):
            for done in range(0, n, self._max_rows):
                yield order[at : at + together], done, min(self._max_rows, n - done)

    def _uniforms(
        self, seeds: Sequence[int | None], first: int, count: int, params: SamplingParams
    ) -> Tensor:
        """Return random numbers for ``count`` completions of each prompt, from ``first`` on."""
        parts = []
        for seed in seeds:
            if seed is None:
                parts.append(draw_uniforms(count, params.max_tokens, self._generator))
            else:
                own = self._own_generator.manual_seed(seed)
                parts.append(draw_uniforms(first + count, params.max_tokens, own)[first:])
        return torch.cat(parts)

    def _check(self, ids: Sequence[list[int]], params: SamplingParams) -> None:
        if params.top_p != 1.0 or params.top_k != 0:
            raise SamplerError(
                f"TransformersSampler: got top_p={params.top_p}, top_k={params.top_k}, expected "
                "the full distribution; leave them out"
            )
        room = self.context_length
        longest = max(map(len, ids), default=0)
        if room is not None and longest + params.max_tokens > room:
            raise SamplerError(
                f"TransformersSampler: got a prompt of {longest} tokens and max_tokens="
                f"{params.max_tokens}, expected at most {room} together (the model's context); "
                "shorten the prompts or lower max_tokens"
            )

    @torch.no_grad()
    def _sample_rows(
        self, ids: Sequence[list[int]], uniforms_BT: Tensor, params: SamplingParams
    ) -> Iterator[tuple[int, Completion]]:
        """Yield completions with their row; prompt i of n has the rows from i * B / n on."""
        with self._autocast():
            for rows, stopped_B in self._decode_loop(ids, uniforms_BT, params):
                yield from zip(stopped_B.tolist(), self._completions(rows, stopped_B), strict=True)

    def _decode_loop(
        self, ids: Sequence[list[int]], uniforms_BT: Tensor, params: SamplingParams
    ) -> Iterator[tuple[_Rows, Tensor]]:
        """Read the prompts, then sample a token a row until all rows have stopped.

        Yields:
            The records, and rows that have stopped since the last time.
        """
        cache = growing_cache(self.model.config)
        logits_BV, rows = self._read_prompts(ids, uniforms_BT, cache)
        for position in range(params.max_tokens):
            uniforms_B = rows.uniforms_BT[rows.live_B, position]
            tokens_B, logprobs_B = draw_tokens(logits_BV, uniforms_B, params.temperature)
            running_B = rows.record(position, tokens_B, logprobs_B, self._stop_B)
            running = int(running_B.sum())
            if position + 1 == params.max_tokens or not running:
                break
            if running < _COMPACT_BELOW * len(running_B):
                yield rows, rows.live_B[~running_B]
                keep = running_B.nonzero().squeeze(1)
                cache.batch_select_indices(keep)
                rows.live_B, tokens_B = rows.live_B[keep], tokens_B[keep]
            logits_BV = self._read_tokens(tokens_B, position, rows, cache)
        yield rows, rows.live_B

    def _read_prompts(
        self, ids: Sequence[list[int]], uniforms_BT: Tensor, cache: DynamicCache
    ) -> tuple[Tensor, _Rows]:
        """Return the logits after the prompts, one row a completion, and the rows' records."""
        longest, device = max(map(len, ids)), self.model.device
        padded_PT = torch.tensor([[0] * (longest - len(row)) + row for row in ids], device=device)
        padding_P = torch.tensor([longest - len(row) for row in ids], device=device)
        columns_T = torch.arange(longest, device=device)
        mask_PT = (columns_T >= padding_P[:, None]).long()
        positions_PT = (columns_T - padding_P[:, None]).clamp(min=0)
        logits_PV = self._forward(padded_PT, mask_PT, positions_PT, cache)
        n = len(uniforms_BT) // len(ids)
        cache.batch_repeat_interleave(n)
        rows = _Rows.of(longest, padding_P.repeat_interleave(n), uniforms_BT)
        return logits_PV.repeat_interleave(n, 0), rows

    def _read_tokens(
        self, tokens_B: Tensor, position: int, rows: _Rows, cache: DynamicCache
    ) -> Tensor:
        """Return the logits after the token that was just drawn, of the live rows."""
        padding_B = rows.padding_B[rows.live_B]
        length = rows.prompt_length + position + 1
        columns_T = torch.arange(length, device=tokens_B.device)
        mask_BT = (columns_T >= padding_B[:, None]).long()
        positions_BT = (length - 1 - padding_B)[:, None]
        return self._forward(tokens_B[:, None], mask_BT, positions_BT, cache)

    def _forward(
        self, input_ids_BT: Tensor, mask_BT: Tensor, positions_BT: Tensor, cache: DynamicCache
    ) -> Tensor:
        """Return the logits after the last of the given tokens."""
        out = self.model(
            input_ids=input_ids_BT,
            # Without padding the mask says nothing, and attention is faster without it.
            attention_mask=None if bool(mask_BT[:, 0].all()) else mask_BT,
            position_ids=positions_BT,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: cache},
        )
        logits_BV: Tensor = out.logits[:, -1]
        return logits_BV

    def _completions(self, rows: _Rows, chosen_B: Tensor) -> list[Completion]:
        """Return records as completions; tensors become lists here and nowhere before."""
        columns = (rows.tokens_BT, rows.logprobs_BT, rows.lengths_B, rows.running_B)
        return [
            Completion(
                self._tokenizer.decode(tokens[:length], skip_special_tokens=True),
                token_ids=tokens[:length],
                sampler_logprobs=logprobs[:length],
                stop_reason="length" if running else "stop",
                policy_version=self._version,
            )
            for tokens, logprobs, length, running in zip(
                *(column[chosen_B].tolist() for column in columns), strict=True
            )
        ]
