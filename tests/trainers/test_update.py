"""One optimiser batch: what it computes, what it leaves out, and when it takes no step."""

import copy
import math

import pytest
import torch
from torch.optim import SGD

from mrgym.rollout import Rollout
from mrgym.sampler import SamplingParams
from mrgym_trainers.gdpo.policy import load_policy
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


@pytest.mark.parametrize("budget", [1, 30, 10_000])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_micro_batches_do_not_change_the_update(
    policy, small_model, rollouts, advantages, config, budget, aggregation
):
    loss = {"aggregation": aggregation, "constant_length": 10}
    weights, metrics = [], []
    for tokens in (64, budget):
        fresh = load_policy(small_model, device="cpu")
        optimizer = SGD(fresh.model.parameters(), lr=1.0)
        keys = config(micro_batch_tokens=tokens, loss=loss)
        metrics.append(update(fresh, optimizer, rollouts, advantages, VALID, keys))
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
    metrics = update(policy, optimizer, rollouts, advantages, VALID, config())
    assert metrics["loss/non_finite"] == 1.0
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
