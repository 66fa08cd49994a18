"""The clipped surrogate against a loop over tokens; masking and splitting of any loss."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrgym_trainers.gdpo.config import LossConfig
from mrgym_trainers.gdpo.losses import MAX_LOG_RATIO, Denominator, policy_loss

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
PLAIN = LossConfig(mismatch="off")


def plain(**keys):
    """Options without a correction of the sampler's log-probabilities."""
    return LossConfig(**{"mismatch": "off", **keys})


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
    loss, sums = policy_loss(
        new, torch.zeros(1, 1, dtype=torch.float64), torch.tensor([advantage]),
        torch.tensor([[True]]), Denominator(1, 1), plain(**keys),
    )  # fmt: skip
    loss.backward()
    return float(loss.detach()), float(new.grad), sums


# --- the clipped surrogate ------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("seed", range(4))
def test_loss_equals_a_loop_over_tokens(aggregation, seed):
    batch = random_batch(5, 7, seed)
    config = plain(aggregation=aggregation, constant_length=11)
    loss, sums = policy_loss(*batch, whole(batch[3]), config)
    assert float(loss) == pytest.approx(naive_loss(*batch, config), rel=1e-12)
    assert float(sums["policy"]) == float(loss)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "bound"),
    [
        (1.0, 2.0, -2.0, -2.0, None), (1.0, -2.0, 2.0, 2.0, None),  # inside: plain
        (1.2, 2.0, -2.4, -2.4, None), (0.9, -2.0, 1.8, 1.8, None),
        (1.5, 2.0, -2.56, 0.0, "high"),  # above 1.28 and better: held, no gradient
        (0.5, 2.0, -1.0, -1.0, None),  # below and worse: the way back stays open
        (0.5, -2.0, 1.6, 0.0, "low"),  # below 0.8 and better: held
        (1.5, -2.0, 3.0, 3.0, None),  # above and worse: the way back stays open
    ],
)  # fmt: skip
def test_clip_bounds_on_both_sides_and_both_signs(ratio, advantage, loss, slope, bound):
    got_loss, got_slope, sums = one_token(ratio, advantage)
    assert got_loss == pytest.approx(loss)
    assert got_slope == pytest.approx(slope)
    assert [int(sums["clipped_low"]), int(sums["clipped_high"])] == [
        bound == "low",
        bound == "high",
    ]


def test_the_two_clip_bounds_are_their_own():
    assert one_token(1.35, 1.0, clip_low=0.4, clip_high=0.3)[0] == pytest.approx(-1.3)
    assert one_token(0.5, -1.0, clip_low=0.4, clip_high=0.3)[0] == pytest.approx(0.6)
    assert one_token(0.65, -1.0, clip_low=0.4, clip_high=0.3)[0] == pytest.approx(0.65)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_on_policy_gradient_is_the_plain_policy_gradient(aggregation):
    _, old_BT, advantages_B, mask_BT = random_batch(4, 6)
    new_BT = old_BT.clone().requires_grad_()
    config = plain(aggregation=aggregation, constant_length=10)
    loss, _ = policy_loss(new_BT, old_BT, advantages_B, mask_BT, whole(mask_BT), config)
    loss.backward()
    share_BT = {
        "token_mean": torch.full((4, 1), 1 / float(mask_BT.sum())),
        "sequence_mean": 1 / (4 * mask_BT.sum(1, keepdim=True)),
        "constant": torch.full((4, 1), 1 / (4 * 10)),
    }[aggregation].double()
    expected_BT = -advantages_B[:, None] * share_BT * mask_BT
    assert torch.allclose(new_BT.grad, expected_BT, atol=1e-12)


def test_kl_is_the_k3_estimate_over_counted_tokens():
    new_BT, old_BT, advantages_B, mask_BT = random_batch(4, 6)
    _, sums = policy_loss(new_BT, old_BT, advantages_B, mask_BT, whole(mask_BT), PLAIN)
    delta = (new_BT - old_BT)[mask_BT]
    assert float(sums["kl"]) == pytest.approx(float((delta.exp() - 1 - delta).sum()))
    assert int(sums["tokens"]) == int(mask_BT.sum())


# --- any loss -------------------------------------------------------------------------------

OPTIONS = st.fixed_dictionaries(
    {
        "ratio": st.sampled_from(["token", "sequence"]),
        "aggregation": st.sampled_from(AGGREGATIONS),
        "constant_length": st.integers(1, 20),
        "kl_coef": st.sampled_from([0.0, 0.3]),
        "kl": st.sampled_from(["k1", "k2", "k3"]),
        "entropy_coef": st.sampled_from([0.0, 0.1]),
        "mismatch": st.sampled_from(["off", "tis", "mask"]),
        "clip_high": st.sampled_from([0.28, 0.0]),
    }
).flatmap(
    lambda keys: st.sampled_from(
        [{"surrogate": "clip"}, {"surrogate": "clip", "dual_clip": 1.2}, {"surrogate": "cispo"}]
    ).map(lambda more: LossConfig(**keys, **more))
)


def full_batch(rows, tokens, seed, *, spread=0.4):
    """Every tensor a loss may take, by name; some rows may have no token, none has no row."""
    generator = torch.Generator().manual_seed(seed)
    new_BT, old_BT, advantages_B, mask_BT = random_batch(rows, tokens, seed, spread=spread)
    mask_BT &= torch.rand(rows, 1, generator=generator) < 0.8
    noise = torch.randn(2, rows, tokens, generator=generator, dtype=torch.float64) * spread
    return {
        "policy_logprobs_BT": new_BT,
        "old_policy_logprobs_BT": old_BT,
        "advantages_B": advantages_B,
        "mask_BT": mask_BT,
        "sampler_logprobs_BT": old_BT + 2 * noise[0],
        "reference_logprobs_BT": old_BT + noise[1],
        "entropy_BT": torch.rand(rows, tokens, generator=generator, dtype=torch.float64),
    }


def loss_and_gradients(batch, denominator, config):
    """Loss, sums, and the gradients by policy log-probabilities and entropy."""
    leaves = {
        name: batch[name].detach().clone().requires_grad_()
        for name in ("policy_logprobs_BT", "entropy_BT")
    }
    loss, sums = policy_loss(**{**batch, **leaves}, denominator=denominator, config=config)
    loss.backward()
    zero = torch.zeros_like(batch["entropy_BT"])
    gradients = [zero if leaf.grad is None else leaf.grad for leaf in leaves.values()]
    return loss.detach(), sums, torch.stack(gradients)


@given(st.lists(st.integers(0, 3), min_size=6, max_size=6), OPTIONS, st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_shares_of_any_split_add_up_to_the_whole(parts, config, seed):
    """Loss, gradient and sums, whatever the options: one batch or micro-batches are the same."""
    batch = full_batch(6, 5, seed)
    step = whole(batch["mask_BT"])
    loss, sums, gradients = loss_and_gradients(batch, step, config)
    shares, added = torch.zeros_like(loss), dict.fromkeys(sums, 0.0)
    for part in set(parts):
        rows = [i for i, p in enumerate(parts) if p == part]
        some = {name: tensor[rows] for name, tensor in batch.items()}
        share, counted, of_part = loss_and_gradients(some, step, config)
        shares += share
        added = {name: added[name] + float(value) for name, value in counted.items()}
        assert torch.allclose(of_part, gradients[:, rows], atol=1e-12)
    assert float(shares) == pytest.approx(float(loss), abs=1e-12)
    assert added == pytest.approx({k: float(v) for k, v in sums.items()}, abs=1e-9)


@given(OPTIONS, st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_a_fully_masked_batch_gives_a_finite_zero(config, seed):
    """Case huggingface/trl#3248; unslothai/unsloth-zoo#1286: zero loss with gradient, no NaN."""
    batch = full_batch(3, 4, seed) | {"mask_BT": torch.zeros(3, 4, dtype=torch.bool)}
    loss, sums, gradients = loss_and_gradients(batch, Denominator(0, 0), config)
    assert float(loss) == 0.0
    assert not gradients.any()
    assert set(map(float, sums.values())) == {0.0}


def test_a_fully_masked_loss_can_be_differentiated():
    leaf = torch.zeros(2, 3, requires_grad=True)
    nothing_BT = torch.zeros(2, 3, dtype=torch.bool)
    loss, _ = policy_loss(leaf, leaf.detach(), torch.ones(2), nothing_BT, Denominator(0, 0), PLAIN)
    assert loss.requires_grad
    loss.backward()
    assert torch.equal(leaf.grad, torch.zeros(2, 3))


@given(OPTIONS, st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_a_row_without_tokens_adds_nothing(config, seed):
    """Case verl-project/verl#6159: nothing is read or written at index -1."""
    batch = full_batch(4, 5, seed)
    batch["mask_BT"][1] = False
    batch["mask_BT"][3] = False
    step = whole(batch["mask_BT"])
    loss, _, gradients = loss_and_gradients(batch, step, config)
    left = {name: tensor[[0, 2]] for name, tensor in batch.items()}
    without, _, of_left = loss_and_gradients(left, step, config)
    assert float(loss) == pytest.approx(float(without), abs=1e-12)
    assert not gradients[:, [1, 3]].any()
    assert torch.allclose(gradients[:, [0, 2]], of_left, atol=1e-12)


@given(OPTIONS, st.sampled_from([math.nan, math.inf, -math.inf, -1e4, 50.0, -50.0]))
@settings(max_examples=120, deadline=None)
def test_whatever_stands_at_masked_tokens_changes_nothing(config, value):
    batch = full_batch(4, 6, seed=1)
    step = whole(batch["mask_BT"])
    loss, sums, gradients = loss_and_gradients(batch, step, config)
    dirty = {
        name: tensor.masked_fill(~batch["mask_BT"], value) if tensor.shape == (4, 6) else tensor
        for name, tensor in batch.items()
    } | {"mask_BT": batch["mask_BT"]}
    same, same_sums, same_gradients = loss_and_gradients(dirty, step, config)
    assert float(same) == float(loss)
    assert same_sums == sums
    assert torch.equal(same_gradients, gradients)
    assert not gradients[:, ~batch["mask_BT"]].any()


@given(
    OPTIONS, st.sampled_from([50.0, -50.0, 1e30]), st.sampled_from([torch.float32, torch.float64])
)
@settings(max_examples=120, deadline=None)
def test_extreme_log_ratios_at_counted_tokens_stay_finite(config, shift, dtype):
    batch = full_batch(4, 6, seed=2)
    for name in ("old_policy_logprobs_BT", "sampler_logprobs_BT", "reference_logprobs_BT"):
        batch[name] = batch[name] + shift
        shift = -shift
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    loss, sums, gradients = loss_and_gradients(batch, whole(batch["mask_BT"]), config)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradients).all()
    assert all(map(math.isfinite, map(float, sums.values())))


def test_a_log_ratio_is_held_at_its_bound():
    """The documented one: exp(20), and no gradient beyond it."""
    loss, slope, _ = one_token(math.exp(MAX_LOG_RATIO + 1), -1.0)
    assert loss == pytest.approx(math.exp(20.0))
    assert slope == 0.0
    loss, slope, _ = one_token(math.exp(MAX_LOG_RATIO - 1), -1.0)
    assert (loss, slope) == pytest.approx((math.exp(19.0), math.exp(19.0)))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_masked_tokens_leave_the_denominator(aggregation):
    new_BT, old_BT, advantages_B, mask_BT = random_batch(4, 6)
    mask_BT[:, 4:] = False
    config = plain(aggregation=aggregation)
    long, _ = policy_loss(new_BT, old_BT, advantages_B, mask_BT, whole(mask_BT), config)
    cut = (new_BT[:, :4], old_BT[:, :4], advantages_B, mask_BT[:, :4])
    short, _ = policy_loss(*cut, whole(cut[3]), config)
    assert float(long) == pytest.approx(float(short), rel=1e-12)


def test_rows_without_advantage_give_nothing_and_keep_their_place_in_the_denominator():
    new_BT, old_BT, advantages_B, mask_BT = random_batch(4, 6)
    advantages_B[2:] = 0.0
    step = whole(mask_BT)
    everything, _ = policy_loss(new_BT, old_BT, advantages_B, mask_BT, step, PLAIN)
    some = (new_BT[:2], old_BT[:2], advantages_B[:2], mask_BT[:2])
    left, _ = policy_loss(*some, step, PLAIN)
    assert float(left) == pytest.approx(float(everything), rel=1e-12)
