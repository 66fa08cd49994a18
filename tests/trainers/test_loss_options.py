"""Every option of the loss: worked numbers, and gradients in float64."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from mrgym.errors import ConfigError
from mrgym_trainers.gdpo.config import LossConfig
from mrgym_trainers.gdpo.losses import (
    Denominator,
    aggregate,
    importance_ratio,
    kl_estimate,
    mismatch_metrics,
    mismatch_weight,
    policy_loss,
)

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")


def plain(**keys):
    return LossConfig(**{"mismatch": "off", **keys})


def doubles(rows):
    return torch.tensor(rows, dtype=torch.float64)


def tokens(ratios, advantages, *, sampler=None, **keys):
    """Loss and gradient of rows of tokens with these ratios, by policy log-probability.

    The policy gave every token probability 1/2; ``sampler`` are mismatch ratios.
    """
    ratios_BT = doubles(ratios)
    policy_BT = torch.full_like(ratios_BT, math.log(0.5)).requires_grad_()
    old_BT = policy_BT.detach() - ratios_BT.log()
    mask_BT = torch.ones_like(ratios_BT, dtype=torch.bool)
    step = Denominator(mask_BT.numel(), len(ratios))
    more = {} if sampler is None else {"sampler_logprobs_BT": old_BT - doubles(sampler).log()}
    loss, sums = policy_loss(
        policy_BT, old_BT, doubles(advantages), mask_BT, step, plain(**keys), **more
    )
    loss.backward()
    return float(loss.detach()), policy_BT.grad.tolist(), sums


@pytest.fixture
def batch():
    """Random rows with masked tokens, far enough from every bound for finite differences."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old_BT = -draw(5, 6).abs() - 0.1
    mask_BT = draw(5, 6) < 0.5
    mask_BT[:, 0] = True
    mask_BT[4] = False
    return {
        "policy_logprobs_BT": old_BT + 0.4 * draw(5, 6),
        "old_policy_logprobs_BT": old_BT,
        "advantages_B": draw(5),
        "mask_BT": mask_BT,
        "denominator": Denominator(int(mask_BT.sum()), 4),
        "sampler_logprobs_BT": old_BT + 0.6 * draw(5, 6),
        "reference_logprobs_BT": old_BT + 0.5 * draw(5, 6),
        "entropy_BT": draw(5, 6).abs(),
    }


def gradient(batch, config):
    leaf = batch["policy_logprobs_BT"].clone().requires_grad_()
    loss, _ = policy_loss(**{**batch, "policy_logprobs_BT": leaf}, config=config)
    loss.backward()
    return leaf.grad


def share(batch, config):
    """What a token's value is multiplied by on its way to the loss."""
    ones_BT = torch.ones_like(batch["old_policy_logprobs_BT"], requires_grad=True)
    aggregate(ones_BT, batch["mask_BT"], batch["denominator"], config).backward()
    return ones_BT.grad


# --- gradients by finite differences --------------------------------------------------------


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"dual_clip": 1.2},
        {"mismatch": "tis", "tis_cap": 1.3},
        {"mismatch": "mask", "mask_low": 0.7, "mask_high": 1.5},
        {"kl_coef": 0.3, "kl": "k1"},
        {"kl_coef": 0.3, "kl": "k2"},
        {"kl_coef": 0.3, "kl": "k3"},
        {"entropy_coef": 0.2},
        {"dual_clip": 1.2, "mismatch": "tis", "kl_coef": 0.1, "entropy_coef": 0.1},
    ],
    ids=lambda keys: "-".join(keys) or "clip",
)
def test_the_gradient_is_that_of_finite_differences(batch, aggregation, keys):
    config = plain(aggregation=aggregation, constant_length=9, **keys)

    def loss_of(policy_BT, entropy_BT):
        given = {**batch, "policy_logprobs_BT": policy_BT, "entropy_BT": entropy_BT}
        loss, _ = policy_loss(**given, config=config)
        return loss + 0.0 * entropy_BT.sum()

    leaves = [batch[name].requires_grad_() for name in ("policy_logprobs_BT", "entropy_BT")]
    assert gradcheck(loss_of, leaves)


# --- dual clip ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (4.0, -1.0, 3.0, 0.0),  # beyond c = 3: held at c A, no gradient
        (2.5, -1.0, 2.5, 2.5),  # between the bounds: plain
        (0.5, -1.0, 0.8, 0.0),  # the lower clip is still there
        (4.0, 1.0, -1.28, 0.0),  # positive advantages know only the clip
        (0.5, 1.0, -0.5, -0.5),
    ],
)
def test_the_dual_clip_bounds_the_loss_of_bad_tokens(ratio, advantage, loss, slope):
    got, slopes, sums = tokens([[ratio]], [advantage], dual_clip=3.0)
    assert got == pytest.approx(loss)
    assert slopes[0][0] == pytest.approx(slope)
    assert int(sums["dual_clipped"]) == int(ratio > 3 and advantage < 0)


# --- cispo ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "bounded"), [(1.0, 1.0), (1.5, 1.28), (0.5, 0.8), (0.9, 0.9)])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_weights_the_logprob_by_the_bounded_ratio(ratio, bounded, advantage):
    """Every token keeps its gradient: -bounded ratio x advantage, also beyond the bounds."""
    loss, slopes, sums = tokens([[ratio]], [advantage], surrogate="cispo")
    assert loss == pytest.approx(-bounded * advantage * math.log(0.5))
    assert slopes[0][0] == pytest.approx(-bounded * advantage)
    assert (int(sums["clipped_low"]), int(sums["clipped_high"])) == (ratio < 0.8, ratio > 1.28)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mismatch", ["off", "tis"])
def test_the_gradient_of_cispo_in_a_batch(batch, aggregation, mismatch):
    config = plain(surrogate="cispo", aggregation=aggregation, mismatch=mismatch, tis_cap=1.3)
    ratio_BT = (batch["policy_logprobs_BT"] - batch["old_policy_logprobs_BT"]).exp()
    weight_BT = (batch["old_policy_logprobs_BT"] - batch["sampler_logprobs_BT"]).exp()
    weight_BT = weight_BT.clamp(max=1.3) if mismatch == "tis" else torch.ones_like(weight_BT)
    expected_BT = -ratio_BT.clamp(0.8, 1.28) * weight_BT * batch["advantages_B"][:, None]
    expected_BT = expected_BT * share(batch, config)
    assert torch.allclose(gradient(batch, config), expected_BT, atol=1e-14)


def test_on_policy_cispo_and_clip_have_the_same_gradient(batch):
    batch["policy_logprobs_BT"] = batch["old_policy_logprobs_BT"]
    one, other = (gradient(batch, plain(surrogate=name)) for name in ("clip", "cispo"))
    assert torch.allclose(one, other, atol=1e-14)


# --- the ratio of a sequence ----------------------------------------------------------------


def sequence_loss(policy_BT, batch, config):
    """GSPO as it is written down: one ratio a rollout, differentiated as a whole."""
    total = 0.0
    for b in range(len(policy_BT)):
        mask = batch["mask_BT"][b]
        if not mask.any():
            continue
        ratio = (policy_BT[b] - batch["old_policy_logprobs_BT"][b])[mask].mean().exp()
        advantage = batch["advantages_B"][b]
        bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        value = torch.minimum(ratio * advantage, bounded * advantage)
        if config.dual_clip and advantage < 0:
            value = torch.maximum(value, config.dual_clip * advantage)
        length = int(mask.sum())
        total = (
            total
            - {
                "token_mean": value * length / batch["denominator"].tokens,
                "sequence_mean": value / batch["denominator"].rollouts,
                "constant": value * length / batch["denominator"].rollouts / config.constant_length,
            }[config.aggregation]
        )
    return total


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    "bounds",
    [
        {"clip_low": 0.02, "clip_high": 0.03},
        {"clip_low": 0.9, "clip_high": 9.0},
        {"clip_low": 0.9, "clip_high": 9.0, "dual_clip": 1.05},
    ],
    ids=["clipped", "free", "dual"],
)
def test_the_sequence_ratio_has_the_loss_and_gradient_of_gspo(batch, aggregation, bounds):
    config = plain(ratio="sequence", aggregation=aggregation, constant_length=9, **bounds)
    leaf = batch["policy_logprobs_BT"].clone().requires_grad_()
    expected = sequence_loss(leaf, batch, config)
    expected.backward()
    loss, _ = policy_loss(**batch, config=config)
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-12)
    assert torch.allclose(gradient(batch, config), leaf.grad, atol=1e-14)
    assert gradcheck(lambda x: sequence_loss(x, batch, config), [leaf])


def test_the_sequence_ratio_is_the_geometric_mean():
    """Ratios 2 and 1/2 make 1: no token is clipped, though each alone would be."""
    loss, slopes, sums = tokens([[2.0, 0.5]], [1.0], ratio="sequence")
    assert loss == pytest.approx(-1.0)
    assert slopes[0] == pytest.approx([-0.5, -0.5])
    assert int(sums["clipped_high"]) == 0
    loss, slopes, sums = tokens([[4.0, 1.0]], [1.0], ratio="sequence")
    assert loss == pytest.approx(-1.28)
    assert slopes[0] == [0.0, 0.0]
    assert int(sums["clipped_high"]) == 2


def test_weights_of_tokens_keep_their_meaning_under_a_sequence_ratio():
    """A token that the mismatch mask drops has no gradient; its neighbour keeps all of its own."""
    loss, slopes, _ = tokens(
        [[2.0, 0.5]], [1.0], ratio="sequence", mismatch="mask", sampler=[[9.0, 1.5]]
    )
    assert loss == pytest.approx(-0.75)
    assert slopes[0] == pytest.approx([0.0, -0.75])


def test_a_row_without_tokens_has_the_ratio_one():
    new_BT, old_BT = doubles([[-1.0, -2.0]]), doubles([[-3.0, -1.0]])
    for level in ("token", "sequence"):
        ratio_BT = importance_ratio(new_BT, old_BT, torch.zeros(1, 2, dtype=torch.bool), level)
        assert ratio_BT.tolist() == [[1.0, 1.0]]


# --- divergence from the reference ----------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [("k1", math.log(4), 1.0), ("k2", math.log(4) ** 2 / 2, math.log(4)),
     ("k3", 0.25 - 1 + math.log(4), 0.75)],
)  # fmt: skip
def test_kl_estimates_at_a_ratio_of_four(kind, value, slope):
    policy_BT = doubles([[math.log(0.8)]]).requires_grad_()
    estimate_BT = kl_estimate(policy_BT, doubles([[math.log(0.2)]]), torch.tensor([[True]]), kind)
    estimate_BT.sum().backward()
    assert float(estimate_BT.detach()) == pytest.approx(value)
    assert float(policy_BT.grad) == pytest.approx(slope)


def expectations(kind):
    """Of an estimate over a whole vocabulary: mean, mean gradient, and both true gradients."""
    generator = torch.Generator().manual_seed(0)
    logits, reference = torch.randn(2, 1, 7, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    policy, reference = logits.log_softmax(-1), reference.log_softmax(-1)
    every = torch.ones(1, 7, dtype=torch.bool)
    weights = policy.detach().exp()
    estimate = (weights * kl_estimate(policy, reference, every, kind)).sum()
    forward = (reference.exp() * (reference - policy)).sum()
    reverse = (policy.exp() * (policy - reference)).sum()
    parts = (estimate, reverse, forward)
    return [(float(x.detach()), *torch.autograd.grad(x, logits, retain_graph=True)) for x in parts]


def test_what_the_documentation_says_about_kl_estimates_as_losses():
    """In expectation over the policy's samples, exactly: k1 pulls nowhere, k2 and k3 do."""
    estimate, reverse, _ = expectations("k1")
    assert estimate[0] == pytest.approx(reverse[0])
    assert torch.allclose(estimate[1], torch.zeros(1, 7, dtype=torch.float64), atol=1e-14)
    estimate, reverse, _ = expectations("k2")
    assert torch.allclose(estimate[1], reverse[1], atol=1e-14)
    estimate, reverse, forward = expectations("k3")
    assert estimate[0] == pytest.approx(reverse[0])
    assert torch.allclose(estimate[1], forward[1], atol=1e-14)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_kl_term_adds_its_mean_to_the_loss(batch, kind):
    config = plain(kl_coef=0.3, kl=kind)
    without, _ = policy_loss(**batch, config=plain())
    loss, sums = policy_loss(**batch, config=config)
    mask_BT = batch["mask_BT"]
    delta = (batch["policy_logprobs_BT"] - batch["reference_logprobs_BT"])[mask_BT]
    values = {"k1": delta, "k2": delta**2 / 2, "k3": (-delta).exp() - 1 + delta}[kind]
    assert float(loss - without) == pytest.approx(0.3 * float(values.mean()))
    assert float(sums["kl_reference"]) == pytest.approx(float(values.sum()))
    assert float(sums["policy"]) == float(without)


def test_the_kl_term_reaches_rollouts_without_advantage(batch):
    batch["advantages_B"] = torch.zeros(5, dtype=torch.float64)
    assert gradient(batch, plain(kl_coef=0.3))[:4, 0].abs().min() > 1e-4


# --- entropy --------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_entropy_is_a_bonus(batch, aggregation):
    config = plain(entropy_coef=0.2, aggregation=aggregation)
    entropy_BT = batch["entropy_BT"].clone().requires_grad_()
    loss, _ = policy_loss(**{**batch, "entropy_BT": entropy_BT}, config=config)
    loss.backward()
    assert torch.allclose(entropy_BT.grad, -0.2 * share(batch, config), atol=1e-14)


# --- mismatch -------------------------------------------------------------------------------


def weights(ratios, **keys):
    ratios_BT = doubles([ratios])
    every = torch.ones_like(ratios_BT, dtype=torch.bool)
    return mismatch_weight(ratios_BT.log(), torch.zeros_like(ratios_BT), every, plain(**keys))


def test_tis_truncates_the_mismatch_ratio_from_above():
    assert weights([0.1, 1.0, 1.9, 3.0], mismatch="tis")[0].tolist() == pytest.approx(
        [0.1, 1.0, 1.9, 2.0]
    )


def test_the_mask_keeps_ratios_within_the_band_and_drops_the_rest():
    """As published: the ratio itself inside the band, 0 outside."""
    assert weights([0.49, 0.51, 1.0, 4.9, 5.1], mismatch="mask")[0].tolist() == pytest.approx(
        [0.0, 0.51, 1.0, 4.9, 0.0]
    )


def test_tokens_that_the_band_drops_stay_in_the_denominator():
    """The published objective divides by all tokens of the rollout."""
    loss, slopes, _ = tokens(
        [[1.0, 1.0, 1.0, 1.0]], [2.0], mismatch="mask", sampler=[[9.0, 1.0, 0.1, 2.0]]
    )
    assert loss == pytest.approx(-2.0 * (1 + 2) / 4)
    assert slopes[0] == pytest.approx([0.0, -0.5, 0.0, -1.0])


def test_tis_weights_the_surrogate_after_its_clip():
    loss, slopes, _ = tokens([[1.5, 1.0]], [1.0], mismatch="tis", sampler=[[0.5, 3.0]])
    assert loss == pytest.approx(-(0.5 * 1.28 + 2.0 * 1.0) / 2)
    assert slopes[0] == pytest.approx([0.0, -1.0])


@pytest.mark.parametrize("mismatch", ["tis", "mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_correction_is_inert_where_sampler_and_policy_agree(batch, mismatch, dtype):
    old_BT = batch["old_policy_logprobs_BT"].to(dtype)
    weight_BT = mismatch_weight(old_BT, old_BT, batch["mask_BT"], plain(mismatch=mismatch))
    assert torch.equal(weight_BT, torch.ones_like(old_BT))
    batch["sampler_logprobs_BT"] = batch["old_policy_logprobs_BT"]
    corrected, uncorrected = (gradient(batch, plain(mismatch=m)) for m in (mismatch, "off"))
    assert torch.equal(corrected, uncorrected)


def test_the_weight_carries_no_gradient(batch):
    """On policy the old log-probabilities are the policy's own; the weight must not move them."""
    policy_BT = batch["policy_logprobs_BT"].clone().requires_grad_()
    mask_BT = batch["mask_BT"]
    config = plain(mismatch="tis", tis_cap=50.0)
    weight_BT = mismatch_weight(policy_BT, batch["sampler_logprobs_BT"], mask_BT, config)
    assert not weight_BT.requires_grad
    assert weight_BT[mask_BT].std() > 0.1


def test_kl_and_entropy_are_not_weighted_by_the_mismatch(batch):
    batch["advantages_B"] = torch.zeros(5, dtype=torch.float64)
    keys = {"kl_coef": 0.3, "entropy_coef": 0.1}
    one, other = (
        policy_loss(**batch, config=plain(mismatch=m, **keys))[0] for m in ("off", "mask")
    )
    assert float(one) == float(other)


def test_mismatch_metrics_of_three_tokens():
    """Ratios 1, 4 and 1/8 and a masked one."""
    old_BT = doubles([[-1.0, -1.0, -1.0, math.nan]])
    sampler_BT = old_BT - doubles([[1.0, 4.0, 0.125, 1.0]]).log()
    mask_BT = torch.tensor([[True, True, True, False]])
    for mismatch, changed in (("off", 0), ("tis", 1), ("mask", 1)):
        sums, largest = mismatch_metrics(old_BT, sampler_BT, mask_BT, plain(mismatch=mismatch))
        assert float(sums["ratio"]) == pytest.approx(5.125)
        assert float(sums["abs"]) == pytest.approx(math.log(32))
        assert float(sums["kl"]) == pytest.approx(5.125 - 3 - math.log(0.5))
        assert float(sums["changed"]) == changed
        assert float(largest["abs"]) == pytest.approx(math.log(8))
        assert float(largest["ratio"]) == pytest.approx(4.0)


def test_nothing_counted_makes_no_ratio():
    nothing_BT = torch.zeros(1, 2, dtype=torch.bool)
    sums, largest = mismatch_metrics(
        doubles([[-1.0, -2.0]]), doubles([[-5.0, -1.0]]), nothing_BT, plain(mismatch="mask")
    )
    assert {float(value) for value in (*sums.values(), *largest.values())} == {0.0}


# --- what an option needs -------------------------------------------------------------------


def test_an_option_without_what_it_needs_is_refused(batch):
    missing = {
        "sampler_logprobs_BT": {"mismatch": "tis"},
        "reference_logprobs_BT": {"kl_coef": 0.1},
        "entropy_BT": {"entropy_coef": 0.1},
    }
    for name, keys in missing.items():
        with pytest.raises(ConfigError, match=name):
            policy_loss(**{**batch, name: None}, config=plain(**keys))


def test_an_undecided_correction_is_refused(batch):
    with pytest.raises(ConfigError, match="resolved"):
        policy_loss(**batch, config=LossConfig())
