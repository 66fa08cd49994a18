"""Rollouts as one line of tokens, in which every prompt stands once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["TokenLine"]


@dataclass(frozen=True, slots=True)
class TokenLine:
    """B rollouts as C tokens in a line: the prompts, each once, then what follows in every rollout.

    Attention needs the rollouts as rows again, [B, T]; a place is a position among those B x T.

    Attributes:
        shape: B and T.
        input_ids_C: The tokens.
        positions_C: Their positions in their rollouts.
        places_C: Their places; those of a prompt in the first rollout that has it.
        sources_BT: Where in the line stands what belongs in a place; 0 for padding.
        predicting_M: Where in the line stands the token before each sampled one, rollout by
            rollout.
        prompts_PB: 1 where a rollout has a prompt, else 0.
        prompt_places: Places of the prompts' tokens among P rows of ``longest_prompt``.
        longest_prompt: Tokens of the longest prompt.
    """

    shape: tuple[int, int]
    input_ids_C: Tensor
    positions_C: Tensor
    places_C: Tensor
    sources_BT: Tensor
    predicting_M: Tensor
    prompts_PB: Tensor
    prompt_places: Tensor
    longest_prompt: int

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        following: Sequence[Sequence[int]],
        sampled: Sequence[Sequence[bool]],
        *,
        device: Any = "cpu",
    ) -> TokenLine:
        """Return the line of rollouts.

        Args:
            prompts: [B] token ids of each rollout's prompt, at least one.
            following: [B] token ids after it. Those from the last sampled one on are left out:
                they predict nothing.
            sampled: [B] which of those were sampled.
            device: Where the tensors go.
        """
        kept = [tokens[: _last(flags)] for tokens, flags in zip(following, sampled, strict=True)]
        width = max(len(p) + len(tokens) for p, tokens in zip(prompts, kept, strict=True))
        line = _Builder(width)
        numbers = line.add_prompts(prompts)
        for row, (number, tokens) in enumerate(zip(numbers, kept, strict=True)):
            line.add_row(row, number, tokens, sampled[row])
        return line.finished(numbers, device)


class _Builder:
    """A line in the making."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.places: list[int] = []
        self.sources: list[int] = []
        self.predicting: list[int] = []
        self.starts: list[int] = []
        self.lengths: list[int] = []

    def add_prompts(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Add every prompt once; return which one each row has."""
        numbers: dict[tuple[int, ...], int] = {}
        for row, prompt in enumerate(map(tuple, prompts)):
            if prompt not in numbers:
                numbers[prompt] = len(numbers)
                self.starts.append(len(self.ids))
                self.lengths.append(len(prompt))
                self._add(row, 0, prompt)
        return [numbers[tuple(prompt)] for prompt in prompts]

    def add_row(
        self, row: int, number: int, tokens: Sequence[int], sampled: Sequence[bool]
    ) -> None:
        """Add what follows the prompt in a row."""
        start, length, at = self.starts[number], self.lengths[number], len(self.ids)
        self._add(row, length, tokens)
        self.sources += range(start, start + length)
        self.sources += range(at, at + len(tokens))
        self.sources += [0] * (self.width - length - len(tokens))
        before = [start + length - 1, *range(at, at + len(tokens))]
        self.predicting += [place for place, flag in zip(before, sampled, strict=False) if flag]

    def _add(self, row: int, position: int, tokens: Sequence[int]) -> None:
        self.ids += tokens
        self.positions += range(position, position + len(tokens))
        place = row * self.width + position
        self.places += range(place, place + len(tokens))

    def finished(self, numbers: Sequence[int], device: Any) -> TokenLine:
        """Return the line."""
        longest = max(self.lengths)
        prompt_places = [
            number * longest + position
            for number, length in enumerate(self.lengths)
            for position in range(length)
        ]
        prompts_PB = torch.zeros(len(self.lengths), len(numbers), device=device)
        prompts_PB[list(numbers), list(range(len(numbers)))] = 1.0

        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        shape = (len(numbers), self.width)
        return TokenLine(
            shape,
            tensor(self.ids),
            tensor(self.positions),
            tensor(self.places),
            tensor(self.sources).view(shape),
            tensor(self.predicting),
            prompts_PB,
            tensor(prompt_places),
            longest,
        )


def _last(sampled: Sequence[bool]) -> int:
    """Return the position of the last true value, 0 if there is none."""
    return max((i for i, flag in enumerate(sampled) if flag), default=0)
