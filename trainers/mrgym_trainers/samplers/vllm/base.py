"""What both kinds of vLLM sampler share: prompts in, seeds, and completions out, as token ids."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mrgym.errors import SamplerError
from mrgym.sampler import Codec, Completion, Prompt, SamplingParams
from mrgym.seeding import mix, mix_many
from mrgym_trainers.samplers.codec import TokenizerCodec

__all__ = ["VLLMBase", "brief"]


class VLLMBase(ABC):
    """A sampler whose engine works on token ids.

    Args:
        tokenizer: The policy's tokenizer.
        stop_ids: Every token that ends a completion.
        seed: Seeds prompts and calls that bring no seed of their own.

    Attributes:
        codec: Encodes prompts.
        context_length: Most tokens of prompt and completion together.
    """

    context_length: int

    def __init__(self, tokenizer: Any, stop_ids: Iterable[int], *, seed: int) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = sorted(stop_ids)
        self._codec = TokenizerCodec(tokenizer, self._stop_ids)
        self.codec: Codec | None = self._codec
        self._seed, self._calls = seed, itertools.count()
        self._version = 0

    def sample(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams
    ) -> list[list[Completion]]:
        """Return ``n`` completions of every prompt, in order.

        Raises:
            SamplerError: If a prompt leaves no room for a completion, or the engine fails.
        """
        found = {(i, j): completion for i, j, completion in self.stream(prompts, n, params)}
        return [[found[i, j] for j in range(n)] for i in range(len(prompts))]

    @abstractmethod
    def stream(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams
    ) -> Iterator[tuple[int, int, Completion]]:
        """Yield prompt's position, completion's position and completion, as each is ready."""

    def _encode(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[list[int]]:
        ids = [prompt.token_ids or self._codec.start(prompt) for prompt in prompts]
        longest = max(map(len, ids), default=0)
        if longest + params.max_tokens > self.context_length:
            raise SamplerError(
                f"{type(self).__name__}: got a prompt of {longest} tokens and max_tokens="
                f"{params.max_tokens}, expected at most {self.context_length} together (the "
                "engine's context); shorten the prompts, lower max_tokens or raise "
                "vllm.max_model_len"
            )
        return ids

    def _seeds(self, prompts: Sequence[Prompt], n: int, params: SamplingParams) -> list[list[int]]:
        """Return a seed for each of ``n`` completions of every prompt."""
        call = next(self._calls)
        seed = params.seed if params.seed is not None else mix(self._seed, call)
        own = [mix(seed, i) if p.seed is None else p.seed for i, p in enumerate(prompts)]
        return [mix_many(n, prompt_seed) for prompt_seed in own]

    def _completion(
        self, tokens: Sequence[int], logprobs: Sequence[float], finish_reason: str | None
    ) -> Completion:
        if finish_reason not in ("stop", "length") or len(logprobs) != len(tokens):
            raise SamplerError(
                f"{type(self).__name__}: got a completion that ended with {finish_reason!r}, with "
                f"{len(logprobs)} log-probabilities for {len(tokens)} tokens, expected 'stop' or "
                "'length' and one a token; look at the engine's log"
            )
        return Completion(
            self._tokenizer.decode(tokens, skip_special_tokens=True),
            token_ids=tokens,
            sampler_logprobs=logprobs,
            stop_reason="length" if finish_reason == "length" else "stop",
            policy_version=self._version,
        )


def brief(error: BaseException) -> str:
    """Return kind and beginning of an error's message in one line."""
    return f"{type(error).__name__} ({' '.join(str(error).split())[:300]})"
