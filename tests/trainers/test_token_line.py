"""Micro-batches whose prompts are read once: the line, the order of rows, and when it pays."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrgym.rollout import Rollout
from mrgym_trainers.gdpo.batch import micro_batches


def sharing(shapes):
    """Rollouts of given (number of the prompt, tokens after it); prompts are 3 to 7 long."""
    out = []
    for i, (number, length) in enumerate(shapes):
        prompt = [500 + 20 * number + t for t in range(3 + 2 * (number % 3))]
        tokens = [1000 * (i + 1) + t for t in range(length)]
        sampled = [t % 3 != 1 for t in range(length)]
        out.append(Rollout("t", 0, i, prompt_token_ids=prompt, token_ids=tokens,
                           loss_mask=sampled, sampler_logprobs=[-1.0] * length))  # fmt: skip
    return out


GROUPED = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=14)


@given(GROUPED, st.integers(1, 90))
@settings(max_examples=80, deadline=None)
def test_a_line_holds_every_prompt_once_and_gives_the_rows_back(shapes, budget):
    rollouts = sharing(shapes)
    parts = micro_batches(rollouts, range(len(shapes)), max_tokens=budget, share_up_to=99)
    assert sorted(row for part in parts for row in part.rows.tolist()) == [*range(len(shapes))]
    for part in parts:
        assert part.input_ids_BT.numel() <= budget or len(part.rows) == 1
        if part.line is not None:
            check_line([rollouts[row] for row in part.rows.tolist()], part)


def check_line(rollouts, part):
    line, predicting = part.line, []
    inputs = [max((t for t, s in enumerate(r.loss_mask) if s), default=0) for r in rollouts]
    lengths = [len(r.prompt_token_ids) + n for r, n in zip(rollouts, inputs, strict=True)]
    assert line.shape == (len(rollouts), max(lengths))
    prompts = {tuple(r.prompt_token_ids) for r in rollouts}
    assert len(line.input_ids_C) == sum(map(len, prompts)) + sum(inputs)
    for rollout, length, sources_T in zip(rollouts, lengths, line.sources_BT, strict=True):
        ids = [*rollout.prompt_token_ids, *rollout.token_ids]
        assert line.input_ids_C[sources_T[:length]].tolist() == ids[:length]
        assert line.positions_C[sources_T[:length]].tolist() == [*range(length)]
        start = len(rollout.prompt_token_ids) - 1
        predicting += [sources_T[start + t] for t, s in enumerate(rollout.loss_mask) if s]
    assert line.predicting_M.tolist() == predicting
    assert torch.equal(line.sources_BT.flatten()[line.places_C], torch.arange(len(line.places_C)))


def test_rollouts_of_one_prompt_go_together_where_that_computes_less():
    shapes = [(0, 4), (3, 4), (0, 6), (3, 6), (0, 8), (3, 8)]
    rollouts = sharing(shapes)
    apart = micro_batches(rollouts, range(6), max_tokens=40)
    assert [part.rows.tolist() for part in apart] == [[0, 1, 2, 3], [4, 5]]
    assert all(part.line is None for part in apart)
    together = micro_batches(rollouts, range(6), max_tokens=40, share_up_to=99)
    assert [sorted(part.rows.tolist()) for part in together] == [[0, 2, 4], [1, 3, 5]]
    assert all(part.line is not None for part in together)


def test_long_rollouts_of_mixed_lengths_stay_with_those_of_their_length():
    """A prompt of three tokens is not worth the padding of attention."""
    rollouts = sharing([(0, 10), (0, 100), (3, 10), (3, 100)])
    parts = micro_batches(rollouts, range(4), max_tokens=210, share_up_to=999)
    assert [sorted(part.rows.tolist()) for part in parts] == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("shapes", "longest"),
    [
        ([(0, 4), (1, 2), (2, 1)], 99),  # nothing shared, little padding
        ([(0, 90), (0, 90)], 99),  # prompts of 3 before completions of 90
        ([(2, 4), (2, 4), (2, 4)], 10),  # longer than the model can share
    ],
)
def test_nothing_is_shared_where_it_would_not_pay_or_be_right(shapes, longest):
    (part,) = micro_batches(
        sharing(shapes), range(len(shapes)), max_tokens=999, share_up_to=longest
    )
    assert part.line is None
