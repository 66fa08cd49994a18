"""From rollouts to batches: names, presence, validity, and padded micro-batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mrgym
from mrgym.errors import RolloutError
from mrgym.rollout import Group, Rollout, Turn, run_groups
from mrgym.sampler import Completion, SamplingParams, ScriptedSampler
from mrgym_trainers.advantages import AdvantageConfig, compute_advantages
from mrgym_trainers.gdpo.batch import build_batch, micro_batches
from mrgym_trainers.gdpo.metrics import reward_metrics, rollout_metrics

DECLARED = mrgym.components(
    a=mrgym.Component(low=0, high=1), b=mrgym.Component(low=0, high=1, optional=True)
)
PARAMS = SamplingParams(8, 1.0)


def grouped(*rollouts):
    """Groups of rollouts by their group id, in order."""
    ids = dict.fromkeys(r.group for r in rollouts)
    return [Group(g, f"task-{g}", [r for r in rollouts if r.group == g]) for g in ids]


def draw(env, script, *, tasks=2, n=2, **options):
    return run_groups(
        env, ScriptedSampler(script), env.task_source("train")[:tasks], n, PARAMS, **options
    )


# --- scores ---------------------------------------------------------------------------------


def test_keys_come_from_the_shared_functions(make_rollout):
    batch = build_batch(grouped(make_rollout(), make_rollout()), DECLARED)
    assert set(batch) == {
        mrgym.reward_key("a"), mrgym.present_key("a"),
        mrgym.reward_key("b"), mrgym.present_key("b"),
        "group_ids", "valid", "completion_lengths",
    }  # fmt: skip
    assert batch[mrgym.reward_key("a")].dtype == torch.float64
    assert batch[mrgym.present_key("a")].dtype == torch.bool


def test_rows_keep_the_order_of_groups_and_rollouts(make_rollout):
    scores = [0.1, 0.2, 0.3, 0.4]
    rollouts = [
        make_rollout(tokens=range(i + 1), group=9 - i // 2, components={"a": a})
        for i, a in enumerate(scores)
    ]
    batch = build_batch(grouped(*rollouts), DECLARED)
    assert batch["reward/a"].tolist() == scores
    assert batch["group_ids"].tolist() == [9, 9, 8, 8]
    assert batch["completion_lengths"].tolist() == [1, 2, 3, 4]


def test_lengths_count_sampled_tokens_only(make_rollout):
    rollout = make_rollout(tokens=(7, 8, 9, 10), mask=(True, False, False, True))
    assert build_batch(grouped(rollout), DECLARED)["completion_lengths"].tolist() == [2]


def test_an_abstained_component_is_absent_and_not_zero(make_rollout):
    rollouts = [make_rollout(components={"a": 1.0}), make_rollout(components={"a": 0.5, "b": 0.0})]
    batch = build_batch(grouped(*rollouts), DECLARED)
    assert batch["present/b"].tolist() == [False, True]
    assert batch["reward/b"].tolist() == [0.0, 0.0]
    assert batch["present/a"].tolist() == [True, True]
    assert batch["valid"].tolist() == [True, True]


def test_an_invalid_rollout_is_masked_and_not_zero(make_rollout):
    """Case NVIDIA-NeMo/RL#2207: a crashed verifier is not a score of 0, and is counted."""
    crashed = make_rollout(components={}, status="error", error="boom")
    groups = grouped(make_rollout(), crashed)
    batch = build_batch(groups, DECLARED)
    assert batch["valid"].tolist() == [True, False]
    assert batch["present/a"].tolist() == [True, False]
    assert rollout_metrics(groups)["score/error_rate"] == 0.5
    means = reward_metrics(batch, {"a": 1.0, "b": 1.0})
    assert means["reward/a/mean"] == 1.0  # 0.5 if the crash were a zero
    assert means["reward/mean"] == 1.5


def test_a_floored_rollout_is_failed_and_still_valid(make_rollout):
    floored = make_rollout(components={"a": 0.0, "b": 0.0}, status="timeout")
    batch = build_batch(grouped(floored, make_rollout()), DECLARED)
    assert batch["valid"].tolist() == [True, True]
    assert rollout_metrics(grouped(floored))["score/timeout_rate"] == 1.0


def test_truncated_rollouts_are_masked_only_where_asked(make_rollout):
    cut = make_rollout(truncated=True, turns=[Turn("p", "c", "stop"), Turn("p", "c", "length")])
    out_of_turns = make_rollout(truncated=True, turns=[Turn("p", "c", "stop")])
    groups = grouped(cut, out_of_turns, make_rollout())
    assert build_batch(groups, DECLARED)["valid"].tolist() == [True, True, True]
    masked = build_batch(groups, DECLARED, mask_truncated=True)["valid"].tolist()
    assert masked == [False, True, True]


@pytest.mark.parametrize(
    "components", [{"b": 1.0}, {"a": 1.0, "c": 1.0}, {"a": 1.0, "b": 1.0, "c": 0.0}]
)
def test_one_rollout_with_other_components_is_an_error(make_rollout, components):
    """Case NVIDIA-NeMo/RL#2680; NovaSky-AI/SkyRL#2104: components equal the declared set."""
    groups = grouped(make_rollout(), make_rollout(components=components))
    with pytest.raises(RolloutError, match="a missing score is not a zero") as caught:
        build_batch(groups, DECLARED)
    assert str(sorted(components)) in str(caught.value)
    assert "['a', 'b']" in str(caught.value)


def test_no_components_at_all_are_an_error(make_rollout):
    """Case NVIDIA-NeMo/RL#2680: ``{}`` is refused where components are declared."""
    with pytest.raises(RolloutError, match=r"got components \[\]"):
        build_batch(grouped(make_rollout(components={})), DECLARED)


# --- the whole way, never with hand-made keys ------------------------------------------------


def test_single_turn_from_environment_to_advantages(envs):
    """Case NVIDIA-NeMo/RL#2680; #2681: producer and consumer of the keys agree."""
    env = envs.Letters()
    groups = draw(env, ["abc", "ABC", "abcdefghij", "a"])
    batch = build_batch(groups, env.components)
    out = compute_advantages(batch, batch["group_ids"], AdvantageConfig(group_eps=0.0))
    root = 0.5**0.5
    assert out.by_component["lower"].tolist() == pytest.approx([root, -root, 0.0, 0.0])
    assert out.by_component["brief"].tolist() == pytest.approx([0.0, 0.0, -root, root])


def test_multi_turn_from_environment_to_advantages(envs):
    """Case NVIDIA-NeMo/RL#2892; NVIDIA-NeMo/Gym#1664: components arrive on every path.

    Case NovaSky-AI/SkyRL#2104: turns reduce by the declared rule, ``long`` to a sum.
    """
    env = envs.Chat()
    first, second = ["ab", "abcd", "", "x"], ["C", "cd", "", "X"]
    groups = draw(env, [*first, *second])
    batch = build_batch(groups, env.components)
    assert batch["reward/long"].tolist() == [3.0, 6.0, 0.0, 2.0]
    assert batch["reward/lower"].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert batch["present/lower"].tolist() == [True, True, False, True]
    out = compute_advantages(batch, batch["group_ids"], AdvantageConfig(group_eps=0.0))
    root = 0.5**0.5
    assert out.by_component["long"].tolist() == pytest.approx([-root, root, -root, root])
    assert out.by_component["lower"].tolist() == pytest.approx([-root, root, 0.0, 0.0])


def test_a_failing_score_reaches_the_advantages_as_a_masked_row(envs):
    class Failing(envs.Letters):
        @mrgym.component(low=0, high=1)
        def picky(self, task, completion):
            if completion == "bad":
                raise ValueError("bad")
            return 1.0

    groups = draw(Failing(), ["abc", "bad", "ABC", "abcd"], tasks=1, n=4)
    batch = build_batch(groups, Failing.components)
    assert batch["valid"].tolist() == [True, False, True, True]
    out = compute_advantages(batch, batch["group_ids"], valid=batch["valid"])
    assert out.advantages[1] == 0.0
    assert out.advantages[[0, 2, 3]].abs().min() > 0.1


def test_extra_tensors_never_change_the_algorithm(make_rollout):
    """Case NVIDIA-NeMo/RL#3852: the algorithm comes from the configuration, not from keys."""
    rollouts = [make_rollout(components={"a": a, "b": a**2}) for a in (0.0, 0.3, 0.7, 1.0)]
    batch = build_batch(grouped(*rollouts), DECLARED)
    more = {
        **batch, "features": torch.randn(4, 7), "reward1": torch.randn(4),
        "rewards": torch.randn(4), "total_reward": torch.randn(4),
    }  # fmt: skip
    for estimator in ("gdpo", "grpo", "rloo"):
        config = AdvantageConfig(estimator=estimator, weights={"a": 1.0, "b": 0.1})
        plain = compute_advantages(batch, batch["group_ids"], config).advantages
        assert torch.equal(plain, compute_advantages(more, more["group_ids"], config).advantages)
        halved = AdvantageConfig(estimator=estimator, weights={"a": 1.0, "b": 5.0})
        assert not torch.allclose(
            plain, compute_advantages(more, more["group_ids"], halved).advantages
        )


def test_group_ids_that_are_unique_by_mistake_show(make_rollout):
    """Case rllm-org/rllm#776: singleton groups are an error, or show in ``groups/size_min``."""
    apart = build_batch(grouped(*(make_rollout(group=i) for i in range(4))), DECLARED)
    with pytest.raises(RolloutError, match="4 rollouts in as many groups"):
        compute_advantages(apart, apart["group_ids"])
    mixed = build_batch(grouped(*(make_rollout(group=i) for i in (0, 0, 1))), DECLARED)
    metrics = compute_advantages(mixed, mixed["group_ids"]).metrics()
    assert (metrics["groups/size_min"], metrics["groups/size_max"]) == (1.0, 2.0)


# --- metrics of scores ----------------------------------------------------------------------


def test_plain_and_weighted_sums_are_logged_apart(make_rollout):
    """Case huggingface/trl#5352; huggingface/trl#5353: components 1 and 0, weights .7 and .3."""
    batch = build_batch(grouped(make_rollout(components={"a": 1.0, "b": 0.0})), DECLARED)
    means = reward_metrics(batch, {"a": 0.7, "b": 0.3})
    assert (means["reward/mean"], means["reward_weighted/mean"]) == (1.0, 0.7)
    assert (means["reward/a/mean"], means["reward/b/mean"]) == (1.0, 0.0)


def test_means_are_over_rollouts_where_the_component_is_present(make_rollout):
    rollouts = [make_rollout(components={"a": 1.0}), make_rollout(components={"a": 0.0, "b": 0.8})]
    means = reward_metrics(build_batch(grouped(*rollouts), DECLARED), {"a": 1.0, "b": 1.0})
    assert (means["reward/b/mean"], means["present/b/frac"]) == (0.8, 0.5)
    assert means["reward/a/std"] == pytest.approx(0.5**0.5)
    assert means["reward/mean"] == pytest.approx(0.9)


def test_a_step_without_usable_rollouts_has_finite_metrics(make_rollout):
    groups = grouped(make_rollout(components={}, status="error"))
    metrics = reward_metrics(build_batch(groups, DECLARED), {"a": 1.0, "b": 1.0})
    assert all(value == value and abs(value) < 1e9 for value in metrics.values())


# --- micro-batches --------------------------------------------------------------------------


def shaped(shapes):
    """Rollouts of given (prompt, completion) lengths; token ids tell rows and positions apart."""
    out = []
    for i, (prompt, length) in enumerate(shapes):
        ids = [1000 * (i + 1) + t for t in range(prompt + length)]
        sampled = [t % 3 != 1 for t in range(length)]
        logprobs = [-float(t + 1) if ok else 0.0 for t, ok in enumerate(sampled)]
        out.append(Rollout("t", 0, i, prompt_token_ids=ids[:prompt], token_ids=ids[prompt:],
                           loss_mask=sampled, sampler_logprobs=logprobs))  # fmt: skip
    return out


SHAPES = st.lists(st.tuples(st.integers(1, 7), st.integers(0, 9)), min_size=1, max_size=12)


@given(SHAPES, st.integers(1, 60), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_every_wanted_row_is_in_one_micro_batch(shapes, budget, random):
    rows = [i for i in range(len(shapes)) if random.random() < 0.8]
    parts = micro_batches(shaped(shapes), rows, max_tokens=budget)
    assert sorted(row for part in parts for row in part.rows.tolist()) == rows


@given(SHAPES, st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_the_budget_holds_with_padding_unless_one_row_exceeds_it(shapes, budget):
    for part in micro_batches(shaped(shapes), range(len(shapes)), max_tokens=budget):
        assert part.input_ids_BT.numel() <= budget or len(part.rows) == 1


@given(SHAPES, st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_masks_and_logprobs_stand_at_their_tokens(shapes, budget):
    rollouts = shaped(shapes)
    for part in micro_batches(rollouts, range(len(shapes)), max_tokens=budget):
        tail_BT = part.input_ids_BT[:, part.first :]
        assert part.mask_BT.shape == part.sampler_logprobs_BT.shape == tail_BT.shape
        for b, row in enumerate(part.rows.tolist()):
            check_row(rollouts[row], part, tail_BT, b)


def check_row(rollout, part, tail_BT, b):
    chosen = tail_BT[b][part.mask_BT[b]].tolist()
    pairs = zip(rollout.token_ids, rollout.loss_mask, strict=True)
    assert chosen == [token for token, sampled in pairs if sampled]
    logprobs = part.sampler_logprobs_BT[b][part.mask_BT[b]].tolist()
    assert logprobs == [x for x in rollout.sampler_logprobs if x != 0.0]
    ids = [*rollout.prompt_token_ids, *rollout.token_ids]
    assert part.input_ids_BT[b, : len(ids)].tolist() == ids
    assert not part.input_ids_BT[b, len(ids) :].any()  # padding stands on the right


def test_rows_of_similar_length_go_together():
    rollouts = shaped([(1, 9), (1, 1), (1, 9), (1, 1)])
    parts = micro_batches(rollouts, range(4), max_tokens=20)
    assert [sorted(part.rows.tolist()) for part in parts] == [[1, 3], [0, 2]]


def test_a_rollout_without_tokens_wraps_nowhere():
    """Case verl-project/verl#6159: nothing is written at index -1 for an empty completion."""
    (part,) = micro_batches(shaped([(3, 0), (3, 2)]), [0, 1], max_tokens=99)
    empty = part.rows.tolist().index(0)
    assert part.mask_BT.sum(1)[empty] == 0
    (alone,) = micro_batches(shaped([(3, 0)]), [0], max_tokens=99)
    assert alone.mask_BT.shape == (1, 0)


def test_no_rows_make_no_micro_batch():
    assert micro_batches(shaped([(1, 1)]), [], max_tokens=9) == []


def test_a_completion_counts_every_sampled_token_and_no_other(envs):
    class Ids(ScriptedSampler):
        def sample(self, prompts, n, params):
            made = Completion("abc", token_ids=(4, 5, 6), sampler_logprobs=(-1.0, -2.0, -3.0))
            return [[made] * n for _ in prompts]

    env = envs.Letters()
    (group,) = run_groups(env, Ids([]), env.task_source("train")[:1], 2, PARAMS)
    (rollout, _) = group.rollouts
    assert (rollout.token_ids, rollout.loss_mask) == ([4, 5, 6], [True] * 3)
    assert rollout.sampler_logprobs == [-1.0, -2.0, -3.0]


def test_what_was_not_measured_has_no_mean(make_rollout):
    """A component that abstained everywhere is no zero in the metrics."""
    declared = mrgym.components(
        a=mrgym.Component(), b=mrgym.Component(low=1, high=2, optional=True)
    )
    groups = grouped(make_rollout(components={"a": 1.0}), make_rollout(components={"a": 0.0}))
    metrics = reward_metrics(build_batch(groups, declared), {"a": 1.0, "b": 1.0})
    assert metrics["reward/a/mean"] == 0.5
    assert "reward/b/mean" not in metrics
    assert metrics["present/b/frac"] == 0.0
