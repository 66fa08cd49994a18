"""The clipped surrogate against a loop over tokens, and what masking does to it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrgym_trainers.gdpo.config import LossConfig
from mrgym_trainers.gdpo.loss import Denominator, clipped_loss

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")


def random_batch(rows, tokens, seed=0, *, spread=0.4):
    """Old and new log-probabilities, advantages and a mask with at least one token a row."""
    generator = torch.Generator().manual_seed(seed)
    old_BT = -torch.rand(rows, tokens, generator=generator, dtype=torch.float64) * 5
    new_BT = old_BT + spread * torch.randn(rows, tokens, generator=generator, dtype=torch.float64)
    advantages_B = torch.randn(rows, generator=generator, dtype=torch.float64)
    mask_BT = torch.rand(rows, tokens, generator=generator) < 0.7
    mask_BT[:, 0] = True
    return new_BT, old_BT, advantages_B, mask_BT


def whole(mask_BT):
    """The denominator of a step that consists of these rows."""
    return Denominator(int(mask_BT.sum()), int(mask_BT.any(1).sum()))


def naive_loss(new_BT, old_BT, advantages_B, mask_BT, config):
    """The same by the textbook, a token at a time."""
    rows = []
    for b in range(len(new_BT)):
        terms = []
        for t in range(new_BT.shape[1]):
            if mask_BT[b, t]:
                ratio = math.exp(float(new_BT[b, t] - old_BT[b, t]))
                bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
                advantage = float(advantages_B[b])
                terms.append(-min(ratio * advantage, bounded * advantage))
        rows.append(terms)
    rows = [terms for terms in rows if terms]
    if config.aggregation == "token_mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if config.aggregation == "sequence_mean":
        return sum(sum(terms) / len(terms) for terms in rows) / len(rows)
    return sum(map(sum, rows)) / (len(rows) * config.constant_length)


def one_token(ratio, advantage, **keys):
    """Loss and its derivative by the new log-probability, for one token."""
    new = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    loss, sums = clipped_loss(
        new, torch.zeros(1, 1, dtype=torch.float64), torch.tensor([advantage]),
        torch.tensor([[True]]), Denominator(1, 1), LossConfig(**keys),
    )  # fmt: skip
    loss.backward()
    return float(loss.detach()), float(new.grad), sums


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("seed", range(4))
def test_loss_equals_a_loop_over_tokens(aggregation, seed):
    batch = random_batch(5, 7, seed)
    config = LossConfig(aggregation=aggregation, constant_length=11)
    loss, _ = clipped_loss(*batch, whole(batch[3]), config)
    assert float(loss) == pytest.approx(naive_loss(*batch, config), rel=1e-12)


@given(
    st.lists(st.integers(0, 3), min_size=6, max_size=6),
    st.sampled_from(AGGREGATIONS),
    st.integers(0, 10**6),
)
@settings(max_examples=80, deadline=None)
def test_shares_of_any_split_add_up_to_the_whole(parts, aggregation, seed):
    new_BT, old_BT, advantages_B, mask_BT = random_batch(6, 5, seed)
    config, step = LossConfig(aggregation=aggregation), whole(mask_BT)
    loss, sums = clipped_loss(new_BT, old_BT, advantages_B, mask_BT, step, config)
    shares, added = 0.0, dict.fromkeys(sums, 0.0)
    for part in set(parts):
        rows = [i for i, p in enumerate(parts) if p == part]
        share, some = clipped_loss(
            new_BT[rows], old_BT[rows], advantages_B[rows], mask_BT[rows], step, config
        )
        shares += float(share)
        added = {name: added[name] + value for name, value in some.items()}
    assert shares == pytest.approx(float(loss), abs=1e-12)
    assert added == pytest.approx(sums, abs=1e-9)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0), (1.0, -2.0, 2.0, 2.0),  # inside: plain
        (1.2, 2.0, -2.4, -2.4), (0.9, -2.0, 1.8, 1.8),
        (1.5, 2.0, -2.56, 0.0),  # above 1.28 and better: held, no gradient
        (0.5, 2.0, -1.0, -1.0),  # below and worse: the way back stays open
        (0.5, -2.0, 1.6, 0.0),  # below 0.8 and better: held
        (1.5, -2.0, 3.0, 3.0),  # above and worse: the way back stays open
    ],
)  # fmt: skip
def test_clip_bounds_on_both_sides_and_both_signs(ratio, advantage, loss, slope):
    got_loss, got_slope, sums = one_token(ratio, advantage)
    assert got_loss == pytest.approx(loss)
    assert got_slope == pytest.approx(slope)
    assert sums["clipped"] == float(slope == 0.0)


def test_the_two_clip_bounds_are_their_own():
    assert one_token(1.35, 1.0, clip_low=0.4, clip_high=0.3)[0] == pytest.approx(-1.3)
    assert one_token(0.5, -1.0, clip_low=0.4, clip_high=0.3)[0] == pytest.approx(0.6)
    assert one_token(0.65, -1.0, clip_low=0.4, clip_high=0.3)[0] == pytest.approx(0.65)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_on_policy_gradient_is_the_plain_policy_gradient(aggregation):
    _, old_BT, advantages_B, mask_BT = random_batch(4, 6)
    new_BT = old_BT.clone().requires_grad_()
    config = LossConfig(aggregation=aggregation, constant_length=10)
    loss, _ = clipped_loss(new_BT, old_BT, advantages_B, mask_BT, whole(mask_BT), config)
    loss.backward()
    share_BT = {
        "token_mean": torch.full((4, 1), 1 / float(mask_BT.sum())),
        "sequence_mean": 1 / (4 * mask_BT.sum(1, keepdim=True)),
        "constant": torch.full((4, 1), 1 / (4 * 10)),
    }[aggregation].double()
    expected_BT = -advantages_B[:, None] * share_BT * mask_BT
    assert torch.allclose(new_BT.grad, expected_BT, atol=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_fully_masked_batch_gives_a_finite_zero(aggregation):
    """Case huggingface/trl#3248; unslothai/unsloth-zoo#1286: zero loss with gradient, no NaN."""
    new_BT, old_BT, advantages_B, _ = random_batch(3, 4)
    new_BT.requires_grad_()
    nothing_BT = torch.zeros(3, 4, dtype=torch.bool)
    config = LossConfig(aggregation=aggregation)
    loss, sums = clipped_loss(new_BT, old_BT, advantages_B, nothing_BT, Denominator(0, 0), config)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert torch.equal(new_BT.grad, torch.zeros(3, 4, dtype=torch.float64))
    assert sums == {"clipped": 0.0, "tokens": 0.0, "kl": 0.0}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_masked_tokens_leave_the_denominator(aggregation):
    new_BT, old_BT, advantages_B, mask_BT = random_batch(4, 6)
    mask_BT[:, 4:] = False
    config = LossConfig(aggregation=aggregation)
    long, _ = clipped_loss(new_BT, old_BT, advantages_B, mask_BT, whole(mask_BT), config)
    cut = (new_BT[:, :4], old_BT[:, :4], advantages_B, mask_BT[:, :4])
    short, _ = clipped_loss(*cut, whole(cut[3]), config)
    assert float(long) == pytest.approx(float(short), rel=1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -1e4])
def test_whatever_stands_at_masked_tokens_changes_nothing(value):
    new_BT, old_BT, advantages_B, mask_BT = random_batch(4, 6)
    expected, sums = clipped_loss(
        new_BT, old_BT, advantages_B, mask_BT, whole(mask_BT), LossConfig()
    )
    dirty_BT = new_BT.masked_fill(~mask_BT, value).requires_grad_()
    loss, dirty_sums = clipped_loss(
        dirty_BT, old_BT.masked_fill(~mask_BT, value), advantages_B, mask_BT, whole(mask_BT),
        LossConfig(),
    )  # fmt: skip
    loss.backward()
    assert float(loss.detach()) == float(expected)
    assert dirty_sums == sums
    assert torch.isfinite(dirty_BT.grad).all()
    assert not dirty_BT.grad[~mask_BT].any()


def test_rows_without_advantage_give_nothing_and_keep_their_place_in_the_denominator():
    new_BT, old_BT, advantages_B, mask_BT = random_batch(4, 6)
    advantages_B[2:] = 0.0
    step = whole(mask_BT)
    everything, _ = clipped_loss(new_BT, old_BT, advantages_B, mask_BT, step, LossConfig())
    some = (new_BT[:2], old_BT[:2], advantages_B[:2], mask_BT[:2])
    left, _ = clipped_loss(*some, step, LossConfig())
    assert float(left) == pytest.approx(float(everything), rel=1e-12)


def test_kl_is_the_k3_estimate_over_counted_tokens():
    new_BT, old_BT, advantages_B, mask_BT = random_batch(4, 6)
    _, sums = clipped_loss(new_BT, old_BT, advantages_B, mask_BT, whole(mask_BT), LossConfig())
    delta = (new_BT - old_BT)[mask_BT]
    assert sums["kl"] == pytest.approx(float((delta.exp() - 1 - delta).sum()))
    assert sums["tokens"] == float(mask_BT.sum())
