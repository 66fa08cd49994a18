"""One optimiser batch: what it computes, what it leaves out, and when it takes no step."""

import copy
import math
from pathlib import Path

import pytest
import torch
from torch.optim import SGD

from mrgym.errors import ConfigError
from mrgym.rollout import Rollout
from mrgym.sampler import SamplingParams
from mrgym_trainers.gdpo.config import LossConfig
from mrgym_trainers.gdpo.policy import Policy, load_policy
from mrgym_trainers.gdpo.update import learning_rate_factor, make_optimizer, update
from mrgym_trainers.samplers import TransformersSampler

CLOSE = {"atol": 1e-6, "rtol": 1e-4}


@pytest.fixture
def config(small_config):
    """Configurations whose gradient is not clipped."""
    return lambda **keys: small_config(**{"max_grad_norm": 1e9, **keys})


@pytest.fixture
def rollouts(policy, prompt_of):
    """Sampled rollouts of mixed lengths."""
    sampler = TransformersSampler(policy.model, policy.tokenizer, seed=1)
    prompts = [prompt_of(token_ids=ids) for ids in ([5, 6], [90, 91, 92, 93], [200, 201, 202])]
    groups = sampler.sample(prompts, 4, SamplingParams(10, 1.0))
    return [
        Rollout("t", g, i, prompt_token_ids=p.token_ids, token_ids=list(c.token_ids),
                loss_mask=[True] * len(c.token_ids), sampler_logprobs=list(c.sampler_logprobs))
        for g, (p, group) in enumerate(zip(prompts, groups, strict=True))
        for i, c in enumerate(group)
    ]  # fmt: skip


@pytest.fixture
def advantages():
    drawn = torch.randn(12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    drawn[::3] = 0.0
    return drawn


@pytest.fixture
def reference(build, policy):
    """A policy of other weights."""
    return Policy(build.model(policy.tokenizer, seed=5), policy.tokenizer, "reference")


VALID = torch.ones(12, dtype=torch.bool)


def logprobs_of(model, rollout, temperature=1.0):
    """Log-probabilities of the tokens after the prompt, without padding or any shortcut."""
    ids = torch.tensor([rollout.prompt_token_ids + rollout.token_ids])
    logits = model(input_ids=ids).logits[0, :-1].float() / temperature
    chosen = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return chosen[len(rollout.prompt_token_ids) - 1 :]


def naive_loss(model, rollouts, advantages, old, *, valid=VALID, low=0.2, high=0.28):
    """The token-mean clipped surrogate of a whole step, a rollout at a time, nothing skipped."""
    total, tokens = 0.0, 0
    for i, rollout in enumerate(rollouts):
        if not valid[i]:
            continue
        mask = torch.tensor(rollout.loss_mask)
        ratio = (logprobs_of(model, rollout) - old[i]).exp()[mask]
        advantage = float(advantages[i])
        bounded = ratio.clamp(1 - low, 1 + high)
        total = total - torch.minimum(ratio * advantage, bounded * advantage).sum()
        tokens += int(mask.sum())
    return total / tokens


def naive_steps(model, rollouts, advantages, *, passes, lr, valid=VALID):
    """Plain gradient descent on :func:`naive_loss`, old log-probabilities fixed at the start."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        old = [logprobs_of(model, rollout) for rollout in rollouts]
    for _ in range(passes):
        model.zero_grad()
        naive_loss(model, rollouts, advantages, old, valid=valid).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad
    return model


def assert_same_weights(one, other, **tolerance):
    pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
    for (name, a), (_, b) in pairs:
        assert torch.allclose(a, b, **(tolerance or CLOSE)), name


def snapshot(policy):
    return {name: tensor.detach().clone() for name, tensor in policy.named_tensors()}


def changed(policy, before):
    return [
        name for name, tensor in policy.named_tensors() if not torch.equal(tensor, before[name])
    ]


# --- the gradient ---------------------------------------------------------------------------


def test_the_step_is_the_naive_one_though_rows_are_skipped(policy, rollouts, advantages, config):
    """Rows without advantage are left out and change nothing: the same gradient to 1e-6."""
    expected = naive_steps(policy.model, rollouts, advantages, passes=1, lr=1.0)
    optimizer = SGD(policy.model.parameters(), lr=1.0)
    metrics = update(policy, optimizer, rollouts, advantages, VALID, config())
    assert metrics["loss/kept_frac"] == pytest.approx(8 / 12)
    assert_same_weights(policy.model, expected)


def test_invalid_rows_leave_loss_and_denominator(policy, rollouts, advantages, config):
    valid = VALID.clone()
    valid[[1, 4, 6]] = False
    expected = naive_steps(policy.model, rollouts, advantages, passes=1, lr=1.0, valid=valid)
    optimizer = SGD(policy.model.parameters(), lr=1.0)
    update(policy, optimizer, rollouts, advantages, valid, config())
    assert_same_weights(policy.model, expected)


def test_tokens_of_the_environment_leave_loss_and_denominator(policy, rollouts, advantages, config):
    for rollout in rollouts:
        rollout.loss_mask = [t % 3 != 1 for t in range(len(rollout.token_ids))]
    expected = naive_steps(policy.model, rollouts, advantages, passes=1, lr=1.0)
    optimizer = SGD(policy.model.parameters(), lr=1.0)
    update(policy, optimizer, rollouts, advantages, VALID, config())
    assert_same_weights(policy.model, expected)


def test_the_final_eos_keeps_its_loss_where_it_is_the_filler_too(policy, make_rollout, config):
    """Case huggingface/trl#4970; #6357: pad == eos, and shorter rows are filled with it."""
    policy.tokenizer.pad_token = policy.tokenizer.eos_token
    rollouts = [
        make_rollout(prompt, tokens, logprobs=[-1.0] * len(tokens))
        for prompt, tokens in (((0, 6), (7, 0)), ((5,), (9, 8, 7, 6, 0)), ((0, 5, 6), (0,)))
    ]
    advantages, valid = torch.tensor([1.0, -0.5, 2.0]), torch.ones(3, dtype=torch.bool)
    expected = naive_steps(policy.model, rollouts, advantages, passes=1, lr=1.0, valid=valid)
    optimizer = SGD(policy.model.parameters(), lr=1.0)
    metrics = update(policy, optimizer, rollouts, advantages, valid, config())
    assert metrics["loss/tokens"] == 8
    assert_same_weights(policy.model, expected)


@pytest.mark.parametrize("budget", [1, 30, 10_000])
@pytest.mark.parametrize(
    "loss",
    [
        {},
        {"aggregation": "sequence_mean", "ratio": "sequence", "mismatch": "mask"},
        {"aggregation": "constant", "constant_length": 10, "surrogate": "cispo"},
        {"kl_coef": 0.2, "entropy_coef": 0.1, "mismatch": "tis", "dual_clip": 3.0},
    ],
    ids=["clip", "gspo", "cispo", "regularised"],
)
def test_micro_batches_do_not_change_the_update(
    small_model, reference, rollouts, advantages, config, budget, loss
):
    weights, metrics = [], []
    for tokens in (64, budget):
        fresh = load_policy(small_model, device="cpu")
        optimizer = SGD(fresh.model.parameters(), lr=1.0)
        keys = config(micro_batch_tokens=tokens, loss=loss)
        metrics.append(
            update(fresh, optimizer, rollouts, advantages, VALID, keys, reference=reference)
        )
        weights.append(fresh.model)
    assert_same_weights(*weights)
    assert metrics[0] == pytest.approx(metrics[1], abs=1e-5)


def test_the_gradient_norm_is_clipped_and_logged_unclipped(policy, rollouts, advantages, config):
    before = snapshot(policy)
    optimizer = SGD(policy.model.parameters(), lr=1.0)
    keys = config(max_grad_norm=1e-3)
    metrics = update(policy, optimizer, rollouts, advantages, VALID, keys)
    after = snapshot(policy)
    moved = sum(float((after[name] - before[name]).pow(2).sum()) for name in before) ** 0.5
    assert moved == pytest.approx(1e-3, rel=1e-2)
    assert metrics["loss/grad_norm"] > 0.01


# --- several passes -------------------------------------------------------------------------


def test_later_passes_keep_the_old_logprobs_of_the_first(policy, rollouts, advantages, config):
    expected = naive_steps(policy.model, rollouts, advantages, passes=3, lr=0.3)
    optimizer = SGD(policy.model.parameters(), lr=0.3)
    update(policy, optimizer, rollouts, advantages, VALID, config(updates_per_step=3))
    assert_same_weights(policy.model, expected, atol=2e-5, rtol=1e-3)


def test_the_ratio_leaves_one_in_the_second_pass(policy, rollouts, advantages, config):
    optimizer = SGD(policy.model.parameters(), lr=0.5)
    once = update(policy, optimizer, rollouts, advantages, VALID, config())
    assert (once["loss/approx_kl"], once["loss/clip_frac"]) == (0.0, 0.0)
    twice = update(policy, optimizer, rollouts, advantages, VALID, config(updates_per_step=2))
    assert twice["loss/approx_kl"] > 1e-6


def test_without_a_step_between_the_ratio_stays_one(policy, rollouts, advantages, config):
    optimizer = SGD(policy.model.parameters(), lr=0.0)
    metrics = update(policy, optimizer, rollouts, advantages, VALID, config(updates_per_step=3))
    assert metrics["loss/approx_kl"] == pytest.approx(0.0, abs=1e-9)


def test_the_mismatch_is_measured_before_the_update(policy, rollouts, advantages, config):
    """Case huggingface/trl#4772; verl-project/verl#6527: |dlogp| mean and max, every step."""
    optimizer = SGD(policy.model.parameters(), lr=1.0)
    metrics = update(policy, optimizer, rollouts, advantages, VALID, config(updates_per_step=4))
    assert metrics["mismatch/max_abs"] < 1e-4
    assert abs(metrics["mismatch/kl"]) < 1e-6
    late = update(policy, optimizer, rollouts, advantages, VALID, config())
    assert late["mismatch/max_abs"] > 1e-2


def test_the_temperature_of_sampling_is_that_of_the_loss(policy, prompt_of, config):
    """Case huggingface/trl#4159: temperature 0.6, first ratio about 1."""
    sampler = TransformersSampler(policy.model, policy.tokenizer)
    (group,) = sampler.sample([prompt_of(token_ids=[5, 6])], 12, SamplingParams(8, 0.6))
    rollouts = [
        Rollout("t", 0, i, prompt_token_ids=[5, 6], token_ids=list(c.token_ids),
                loss_mask=[True] * len(c.token_ids), sampler_logprobs=list(c.sampler_logprobs))
        for i, c in enumerate(group)
    ]  # fmt: skip
    optimizer, ones = SGD(policy.model.parameters(), lr=0.0), torch.ones(12)
    same = update(policy, optimizer, rollouts, ones, VALID, config(temperature=0.6))
    assert same["mismatch/max_abs"] < 1e-4
    assert (same["loss/approx_kl"], same["loss/clip_frac"]) == (0.0, 0.0)
    other = update(policy, optimizer, rollouts, ones, VALID, config(temperature=1.0))
    assert other["mismatch/max_abs"] > 1e-2


def test_dropout_does_not_enter_the_update(build, policy, rollouts, advantages, config):
    """With dropout the ratio would not start at 1; the sampler has none either."""
    noisy = build.model(policy.tokenizer, attention_dropout=0.5)
    noisy.load_state_dict(policy.model.state_dict())
    policy.model = noisy.train()
    optimizer = SGD(noisy.parameters(), lr=0.0)
    metrics = update(policy, optimizer, rollouts, advantages, VALID, config(updates_per_step=2))
    assert metrics["mismatch/max_abs"] < 1e-4
    assert metrics["loss/approx_kl"] == pytest.approx(0.0, abs=1e-9)


# --- options of the loss --------------------------------------------------------------------


def entropy_of(model, rollout):
    ids = torch.tensor([rollout.prompt_token_ids + rollout.token_ids])
    rows = model(input_ids=ids).logits[0, len(rollout.prompt_token_ids) - 1 : -1].log_softmax(-1)
    return -(rows.exp() * rows).sum(-1)


def test_kl_and_entropy_reach_the_rollouts_without_advantage(policy, reference, rollouts, config):
    """No advantage anywhere: the step is that of the two terms alone, over every rollout."""
    keys = config(loss={"kl_coef": 0.5, "entropy_coef": 0.2})
    expected = copy.deepcopy(policy.model)
    total = 0.0
    for rollout in rollouts:
        with torch.no_grad():
            reference_logprobs = logprobs_of(reference.model, rollout)
        delta = logprobs_of(expected, rollout) - reference_logprobs
        total = (
            total + (0.5 * ((-delta).exp() - 1 + delta) - 0.2 * entropy_of(expected, rollout)).sum()
        )
    (total / sum(map(len, (r.token_ids for r in rollouts)))).backward()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter -= 0.1 * parameter.grad
    before = {name: tensor.clone() for name, tensor in reference.named_tensors()}
    optimizer = SGD(policy.model.parameters(), lr=0.1)
    metrics = update(policy, optimizer, rollouts, torch.zeros(12), VALID, keys, reference=reference)
    assert_same_weights(policy.model, expected)
    assert (metrics["loss/kept_frac"], metrics["loss/skipped"]) == (1.0, 0.0)
    assert metrics["loss/policy"] == 0.0
    assert metrics["loss/kl_reference"] > 0.1
    assert changed(reference, before) == []
    assert all(tensor.grad is None for _, tensor in reference.named_tensors())


def test_the_divergence_from_oneself_is_zero(policy, small_model, rollouts, advantages, config):
    same = load_policy(small_model, device="cpu")
    keys = config(loss={"kl_coef": 0.5})
    optimizer = SGD(policy.model.parameters(), lr=1.0)
    metrics = update(policy, optimizer, rollouts, advantages, VALID, keys, reference=same)
    assert metrics["loss/kl_reference"] == pytest.approx(0.0, abs=1e-9)
    metrics = update(policy, optimizer, rollouts, advantages, VALID, keys, reference=same)
    assert metrics["loss/kl_reference"] > 1e-3


def test_kl_without_a_reference_is_refused(policy, rollouts, advantages, config):
    optimizer = SGD(policy.model.parameters(), lr=1.0)
    with pytest.raises(ConfigError, match=r"kl_coef.*reference"):
        update(policy, optimizer, rollouts, advantages, VALID, config(loss={"kl_coef": 0.1}))


def test_the_correction_changes_nothing_for_the_policys_own_samples(
    small_model, rollouts, advantages, config
):
    policies = [load_policy(small_model, device="cpu") for _ in range(3)]
    for policy, mismatch in zip(policies, ("off", "tis", "mask"), strict=True):
        optimizer = SGD(policy.model.parameters(), lr=1.0)
        keys = config(loss={"mismatch": mismatch})
        metrics = update(policy, optimizer, rollouts, advantages, VALID, keys)
        assert metrics["mismatch/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert_same_weights(policies[0].model, policies[1].model)
    assert_same_weights(policies[0].model, policies[2].model)


def test_a_mismatch_is_corrected_token_by_token(policy, rollouts, advantages, config):
    """Mismatch ratios of 1.5, 3 and 1 in turn: weights of 1.5, 2 and 1."""
    expected = copy.deepcopy(policy.model)
    total = 0.0
    for i, rollout in enumerate(rollouts):
        ratios = torch.tensor([(1.5, 3.0, 1.0)[t % 3] for t in range(len(rollout.token_ids))])
        sampler = torch.tensor(rollout.sampler_logprobs) - ratios.log()
        rollout.sampler_logprobs = sampler.tolist()
        weights = ratios.clamp(max=2.0)
        total = total - float(advantages[i]) * (weights * logprobs_of(expected, rollout)).sum()
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    (total / tokens).backward()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter -= parameter.grad
    optimizer = SGD(policy.model.parameters(), lr=1.0)
    auto = LossConfig().resolved(own_sampler=False)
    metrics = update(policy, optimizer, rollouts, advantages, VALID, config(), loss_config=auto)
    assert_same_weights(policy.model, expected, atol=1e-5, rtol=1e-3)
    assert metrics["mismatch/ratio_max"] == pytest.approx(3.0, rel=1e-4)
    lengths = [len(rollout.token_ids) for i, rollout in enumerate(rollouts) if advantages[i]]
    beyond, half = (sum((n + more) // 3 for n in lengths) for more in (1, 2))
    assert metrics["mismatch/truncated_frac"] == pytest.approx(beyond / sum(lengths))
    mean = (beyond * math.log(3) + half * math.log(1.5)) / sum(lengths)
    assert metrics["mismatch/mean_abs"] == pytest.approx(mean, rel=1e-4)


def test_metrics_go_with_the_options(policy, reference, rollouts, advantages, config):
    def keys_of(**loss):
        optimizer = SGD(policy.model.parameters(), lr=0.0)
        keys = config(loss=loss)
        return set(
            update(policy, optimizer, rollouts, advantages, VALID, keys, reference=reference)
        )

    always = keys_of()
    assert always == {
        "loss/policy", "loss/clip_frac", "loss/clip_low_frac", "loss/clip_high_frac",
        "loss/approx_kl", "loss/entropy", "loss/grad_norm", "loss/tokens", "loss/kept_frac",
        "loss/skipped", "loss/non_finite", "mismatch/kl", "mismatch/mean_abs", "mismatch/max_abs",
        "mismatch/ratio_mean", "mismatch/ratio_max",
    }  # fmt: skip
    assert keys_of(kl_coef=0.1) - always == {"loss/kl_reference"}
    assert keys_of(dual_clip=2.0) - always == {"loss/dual_clip_frac"}
    assert keys_of(mismatch="tis") - always == {"mismatch/truncated_frac"}
    assert keys_of(mismatch="mask") - always == {"mismatch/masked_frac"}


def test_every_metric_of_an_update_is_documented(policy, reference, rollouts, advantages, config):
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for loss in ({"kl_coef": 0.1, "dual_clip": 2.0, "mismatch": "tis"}, {"mismatch": "mask"}):
        optimizer = SGD(policy.model.parameters(), lr=0.0)
        metrics = update(
            policy, optimizer, rollouts, advantages, VALID, config(loss=loss), reference=reference
        )
        assert [name for name in metrics if f"`{name}`" not in text] == []


def test_both_clip_bounds_are_counted(policy, rollouts, advantages, config):
    optimizer = SGD(policy.model.parameters(), lr=1.0)
    keys = config(updates_per_step=3, loss={"clip_low": 0.01, "clip_high": 0.01})
    metrics = update(policy, optimizer, rollouts, advantages, VALID, keys)
    low, high = metrics["loss/clip_low_frac"], metrics["loss/clip_high_frac"]
    assert low > 0
    assert high > 0
    assert metrics["loss/clip_frac"] == pytest.approx(low + high)


# --- steps that are not taken ---------------------------------------------------------------


def test_without_signal_there_is_no_step_and_it_is_counted(policy, rollouts, config):
    """AdamW would move the weights by its momentum alone."""
    optimizer = make_optimizer(policy, config())
    update(policy, optimizer, rollouts, torch.randn(12), VALID, config())
    before, state = snapshot(policy), copy.deepcopy(optimizer.state_dict()["state"])
    metrics = update(policy, optimizer, rollouts, torch.zeros(12), VALID, config())
    assert metrics["loss/skipped"] == 1.0
    assert changed(policy, before) == []
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[i]["step"], state[i]["step"]) for i in state)


def test_with_signal_the_step_is_not_counted_as_skipped(policy, rollouts, advantages, config):
    optimizer = make_optimizer(policy, config())
    metrics = update(policy, optimizer, rollouts, advantages, VALID, config())
    assert (metrics["loss/skipped"], metrics["loss/non_finite"]) == (0.0, 0.0)


def test_a_fully_masked_step_is_skipped_and_counted(policy, rollouts, advantages, config):
    """Case huggingface/trl#3248; unslothai/unsloth-zoo#1286: nothing usable in the whole step."""
    before = snapshot(policy)
    optimizer = make_optimizer(policy, config())
    metrics = update(policy, optimizer, rollouts, advantages, ~VALID, config())
    assert (metrics["loss/skipped"], metrics["loss/policy"]) == (1.0, 0.0)
    assert changed(policy, before) == []


def test_a_rollout_without_tokens_is_left_out(policy, rollouts, advantages, config):
    """Case verl-project/verl#6159: a response with zero valid tokens."""
    empty = Rollout("t", 9, 0, prompt_token_ids=[5, 6])
    optimizer = SGD(policy.model.parameters(), lr=1.0)
    expected = naive_steps(policy.model, rollouts, advantages, passes=1, lr=1.0)
    with_empty = torch.cat([advantages, torch.tensor([3.0])])
    update(policy, optimizer, [*rollouts, empty], with_empty, torch.ones(13) > 0, config())
    assert_same_weights(policy.model, expected)


def test_a_gradient_that_is_not_finite_takes_no_step(policy, rollouts, advantages, config):
    optimizer = make_optimizer(policy, config())
    hook = policy.model.lm_head.weight.register_hook(lambda grad: grad * torch.nan)
    before = snapshot(policy)
    keys = config(updates_per_step=2)
    metrics = update(policy, optimizer, rollouts, advantages, VALID, keys)
    assert metrics["loss/non_finite"] == 2.0
    assert changed(policy, before) == []
    hook.remove()
    metrics = update(policy, optimizer, rollouts, advantages, VALID, config())
    assert metrics["loss/non_finite"] == 0.0
    assert all(torch.isfinite(tensor).all() for _, tensor in policy.named_tensors())
    assert changed(policy, before)


def test_metrics_are_finite_even_where_the_loss_is_not(policy, rollouts, advantages, config):
    """metrics.jsonl is strict JSON: a NaN loss must not end the run in an encoding error."""
    policy.model.lm_head.register_forward_hook(lambda _, __, logits: logits * torch.nan)
    optimizer = make_optimizer(policy, config())
    metrics = update(policy, optimizer, rollouts, advantages, VALID, config())
    assert metrics["loss/non_finite"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values())


# --- optimiser and schedule -----------------------------------------------------------------


def test_weights_change_at_a_learning_rate_of_a_millionth(policy, rollouts, advantages, config):
    """Case areal-project/AReaL#1634; workofart/ml-by-hand#85: bf16 weights would stay put."""
    before = snapshot(policy)
    assert {tensor.dtype for tensor in before.values()} == {torch.float32}
    optimizer = make_optimizer(policy, config(learning_rate=1e-6))
    update(policy, optimizer, rollouts, advantages, VALID, config(learning_rate=1e-6))
    assert set(changed(policy, before)) == set(before)
    moved = (snapshot(policy)["lm_head.weight"] - before["lm_head.weight"]).abs().max()
    assert 0.5e-6 < float(moved) < 2e-6


def test_a_weight_of_a_twentieth_feels_an_update_of_a_millionth(
    policy, rollouts, advantages, config
):
    """In bfloat16 the step to the next number at 0.05 is 2.4e-4: nothing would ever change."""
    with torch.no_grad():
        policy.model.lm_head.weight.fill_(0.05)
        policy.model.model.norm.weight.fill_(0.05)
    optimizer = make_optimizer(policy, config(learning_rate=1e-6))
    update(policy, optimizer, rollouts, advantages, VALID, config(learning_rate=1e-6))
    moved = policy.model.lm_head.weight.detach() - 0.05
    assert float((moved.abs() > 0.5e-6).float().mean()) > 0.5
    assert float(moved.abs().max()) < 2e-6


def test_the_optimizer_is_the_configured_one(policy, config):
    keys = {"learning_rate": 3e-4, "adam_betas": (0.8, 0.95), "weight_decay": 0.1}
    (group,) = make_optimizer(policy, config(**keys)).param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (3e-4, (0.8, 0.95), 0.1)


@pytest.mark.parametrize(
    ("schedule", "halfway"), [("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)]
)
def test_the_learning_rate_goes_from_its_peak_to_its_end(config, schedule, halfway):
    keys = config(steps=100, lr_schedule=schedule, lr_end=0.1)
    factors = [learning_rate_factor(step, keys) for step in range(101)]
    assert factors[0] == pytest.approx(1.0)
    assert factors[50] == pytest.approx(halfway)
    assert factors[100] == pytest.approx(1.0 if schedule == "constant" else 0.1)
    assert factors == sorted(factors, reverse=True)


def test_cosine_is_slow_at_both_ends(config):
    keys = config(steps=100, lr_schedule="cosine", lr_end=0.0)
    assert learning_rate_factor(25, keys) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    linear = config(steps=100, lr_schedule="linear", lr_end=0.0)
    assert learning_rate_factor(25, linear) == pytest.approx(0.75)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_warm_up_grows_to_the_peak_and_decay_starts_there(config, schedule):
    keys = config(steps=20, warmup_steps=4, lr_schedule=schedule, lr_end=0.5)
    factors = [learning_rate_factor(step, keys) for step in range(20)]
    assert factors[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert min(factors[4:]) >= 0.5


def test_a_warm_up_longer_than_the_run_never_divides_by_zero(config):
    keys = config(steps=2, warmup_steps=5)
    assert [learning_rate_factor(step, keys) for step in (0, 1)] == [0.2, 0.4]
    assert learning_rate_factor(5, keys) == pytest.approx(1.0)
