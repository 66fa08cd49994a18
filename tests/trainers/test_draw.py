"""Drawing a token from logits: the right frequencies, nothing impossible, nothing too rare."""

import numpy as np
import pytest
import torch

from mrgym.errors import SamplerError
from mrgym_trainers.samplers import draw
from mrgym_trainers.samplers.draw import draw_tokens, draw_uniforms

NEVER = -torch.inf
ALMOST_ONE = 1 - 2**-53


def uniforms(count, seed=0):
    return draw_uniforms(count, 1, torch.Generator().manual_seed(seed))[:, 0]


def drawn(logits, numbers, temperature=1.0):
    row = torch.as_tensor(logits).expand(len(numbers), -1)
    return draw_tokens(row, torch.as_tensor(numbers), temperature)[0]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_frequencies_are_the_tempered_softmax(temperature):
    count, logits = 200_000, torch.tensor([2.0, -1.0, NEVER, 0.5, -4.0, 1.9, 0.0])
    tokens = drawn(logits, uniforms(count), temperature)
    expected = count * (logits.double() / temperature).softmax(0)
    counts = torch.bincount(tokens, minlength=len(logits)).double()
    possible = expected > 0
    assert int(counts[~possible].sum()) == 0
    chi_square = float(((counts - expected) ** 2 / expected)[possible].sum())
    assert chi_square < 20.5  # five degrees of freedom: 1 in 1,000 by chance, and the seed is fixed


@pytest.mark.parametrize("vocabulary", [1, 2, 448, 5_000])
def test_the_token_is_the_first_whose_cumulated_mass_exceeds_the_number(vocabulary):
    rng = np.random.default_rng(vocabulary)
    logits = (3 * rng.standard_normal((64, vocabulary))).astype(np.float32)
    numbers = rng.random(64)
    mass = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True)).cumsum(1)
    expected = [
        int(np.searchsorted(row, number * row[-1], side="right"))
        for row, number in zip(mass, numbers, strict=True)
    ]
    tokens, _ = draw_tokens(torch.tensor(logits), torch.tensor(numbers), 1.0)
    assert tokens.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "logits",
    [
        [NEVER, 0.0, NEVER, 0.3, NEVER],
        [NEVER, NEVER, 0.0],
        [0.0, NEVER, NEVER],
        [0.0, -200.0, 0.7, -200.0],  # exp underflows to 0
    ],
)
def test_an_impossible_token_is_never_drawn(logits, dtype):
    """At the edges of the intervals too, and where rounding lifts a number to 1."""
    edges = torch.tensor(logits, dtype=torch.float64).softmax(0).cumsum(0)
    steps = torch.arange(-3, 4, dtype=torch.float64) * torch.finfo(dtype).eps
    around = (edges[:, None] + steps).flatten().clamp(0, 1)
    numbers = torch.cat([around, torch.tensor([0.0, ALMOST_ONE, 1.0]), uniforms(2_000)]).to(dtype)
    tokens = drawn(logits, numbers)
    possible = [i for i, logit in enumerate(logits) if logit > -100]
    assert set(tokens.tolist()) == set(possible)


def test_tokens_rarer_than_float32_can_tell_are_drawn():
    """A thousand tokens of 2^-40 behind a likely one: each has its own sliver of [0, 1)."""
    rare = 1_000
    logits = torch.cat([torch.zeros(1), torch.full((rare,), -40 * float(np.log(2)))])
    total = 1 + rare * 2**-40
    numbers = (1 + (torch.arange(rare, dtype=torch.float64) + 0.5) * 2**-40) / total
    off = drawn(logits, numbers) - torch.arange(1, rare + 1)
    assert int(off.abs().max()) <= 1  # the logit itself is rounded to float32
    in_float32 = drawn(logits, numbers.float())
    assert len(set(in_float32.tolist())) < rare / 100


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_tempered_softmax(temperature, dtype):
    logits = (4 * torch.randn(50, 300, generator=torch.Generator().manual_seed(0))).to(dtype)
    tokens, logprobs = draw_tokens(logits, uniforms(50), temperature)
    expected = (logits.double() / temperature).log_softmax(1).gather(1, tokens[:, None])[:, 0]
    assert logprobs.dtype == torch.float32
    assert torch.allclose(logprobs.double(), expected, atol=2e-6)


def test_greedy_is_the_likeliest_with_its_untempered_logprob():
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = draw_tokens(logits, uniforms(50), 0.0)
    assert torch.equal(tokens, logits.argmax(1))
    assert torch.allclose(logprobs, logits.log_softmax(1).amax(1), atol=2e-6)


def test_a_large_vocabulary_is_drawn_from_in_chunks(monkeypatch):
    logits, numbers = torch.randn(50, 300, generator=torch.Generator().manual_seed(0)), uniforms(50)
    whole = draw_tokens(logits, numbers, 1.0)
    sizes = []
    one = draw._draw
    monkeypatch.setattr(draw, "_MOST_ELEMENTS", 2_100)
    monkeypatch.setattr(draw, "_draw", lambda *a: sizes.append(len(a[0])) or one(*a))
    chunked = draw_tokens(logits, numbers, 1.0)
    assert sizes == [7] * 7 + [1]
    assert all(torch.equal(a, b) for a, b in zip(whole, chunked, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("broken", [[torch.nan, 0.0], [torch.inf, 0.0], [NEVER, NEVER]])
def test_no_distribution_is_an_error(broken, temperature):
    logits = torch.tensor([[0.0, 1.0], broken])
    with pytest.raises(SamplerError, match="got no distribution from the model"):
        draw_tokens(logits, uniforms(2), temperature)
