"""Advantages by example: hand-computed values, estimators, whitening."""

from __future__ import annotations

import itertools
import logging

import numpy as np
import pytest
import torch

from mrgym import ConfigError, RolloutError, reward_key
from mrgym_trainers import advantages as module
from mrgym_trainers.advantages import (
    ESTIMATORS,
    AdvantageConfig,
    compute_advantages,
    register_estimator,
    weighted_sum,
)

EXACT = {"group_eps": 0.0, "batch_eps": 0.0}
PRESETS = ("default", "trl", "nemo_rl", "verl")
HALF = 0.5**0.5


def run(components: dict, groups=None, *, valid=None, lengths=None, preset="default", **options):
    """Compute advantages of components given by bare name, by default in one group."""
    batch = {reward_key(name): scores for name, scores in components.items()}
    groups = groups if groups is not None else [0] * len(next(iter(components.values())))
    config = AdvantageConfig.preset(preset, **options)
    return compute_advantages(batch, groups, config, valid, lengths)


def rows(*scores: tuple[float, ...]) -> dict[str, list[float]]:
    """Components c0, c1, ... from rows of scores, one row a rollout."""
    return {f"c{k}": list(column) for k, column in enumerate(zip(*scores, strict=True))}


# --- values of the specification -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "expected"), [((1, 1), 2 * HALF), ((1, -1), 0.0), ((1, 0), HALF)]
)
def test_two_rollouts_against_zeros_before_whitening(first, expected):
    other = tuple(0 for _ in first)
    result = run(rows(first, other), **EXACT)
    assert result.before_whitening == pytest.approx([expected, -expected], abs=1e-12)
    for k, score in enumerate(first):
        assert result.by_component[f"c{k}"] == pytest.approx([score * HALF, -score * HALF])


def test_opposite_components_cancel_only_in_the_sum():
    result = run(rows((1, -1), (0, 0)), **EXACT)
    assert np.abs(result.by_component["c1"]).min() > 0.7
    assert (result.before_whitening == 0).all()


def test_two_groups_before_and_after_whitening():
    result = run(rows((0, 0), (0, 1), (0, 0), (1, 1)), [0, 0, 1, 1])
    before = [-HALF, HALF, -2 * HALF, 2 * HALF]
    assert result.before_whitening == pytest.approx(before, abs=3e-4)
    assert result.advantages == pytest.approx([-0.548, 0.548, -1.095, 1.095], abs=1e-3)


@pytest.mark.parametrize("group", [[(0, 0), (1, 1)]])
def test_both_stages_are_exposed(group):
    result = run(rows(*group))
    assert np.abs(result.before_whitening) == pytest.approx([1.4142] * 2, abs=1e-3)
    assert np.abs(result.advantages) == pytest.approx([0.7071] * 2, abs=1e-3)


@pytest.mark.parametrize("group", [[(1, 0), (0, 1)], [(0, 1, 1), (1, 1, 0)]])
@pytest.mark.parametrize("preset", PRESETS)
def test_pure_trade_offs_cancel_exactly_at_equal_weights(group, preset):
    result = run(rows(*group), preset=preset, lengths=[3, 5])
    assert (result.before_whitening == 0).all()
    assert (result.advantages == 0).all()


@pytest.mark.parametrize("size", range(2, 17))
def test_trade_offs_of_any_size_are_exactly_zero_before_whitening(size):
    first = np.random.default_rng(size).choice([0.1, 0.7, 0.35], size)
    result = run({"a": first, "b": 1 - first, "c": [1.0] * size})
    assert (result.before_whitening == 0).all()


def test_pure_trade_off_with_unequal_weights():
    result = run(rows((1, 0), (0, 1)), weights={"c0": 1.0, "c1": 0.5}, **EXACT)
    assert result.before_whitening == pytest.approx([HALF / 2, -HALF / 2])
    assert result.advantages == pytest.approx([HALF, -HALF])


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
@pytest.mark.parametrize("preset", PRESETS)
def test_float32_rounding_noise_is_not_a_signal(kind, preset):
    first = kind([0.1, 0.3, 0.7, 0.6], dtype=np.float32 if kind is np.array else torch.float32)
    result = run({"a": first, "b": 1 - first}, [0] * 4, preset=preset, lengths=[1, 2, 3, 4])
    assert (np.asarray(result.advantages) == 0).all()
    assert not np.asarray(result.informative).any()


@pytest.mark.parametrize("offset", [0.0, 1e-3, 1e6])
def test_constant_sum_pairs_stay_near_zero_in_lists_of_float32_values(offset):
    first = [float(np.float32(x)) for x in (0.1, 0.3, 0.7, 0.6)]
    second = [float(np.float32(1) - np.float32(x)) + offset for x in first]
    assert np.abs(run({"a": first, "b": second}).advantages).max() < 5e-3


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6, 1e-4])
@pytest.mark.parametrize("score", [0.95, 0.1, 1 / 3, 1e9 + 0.1, -7.7])
@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("estimator", sorted({*ESTIMATORS} - {"lagrangian"}))  # needs constraints
def test_constant_group_is_exactly_zero(eps, score, size, estimator):
    result = run({"a": [score] * size}, estimator=estimator, group_eps=eps, batch_eps=eps)
    assert (result.advantages == 0).all()
    assert (result.before_whitening == 0).all()
    assert (result.by_component["a"] == 0).all()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("others", [[0.3] * 7, [0.3] * 6 + [0.3 + 1e-15], [0.3] * 6 + [0.3 + 1e-9]])
def test_leave_one_out_gives_no_thousands(preset, others):
    scores = {"a": [0.0, *others], "b": [0.0, 1.0] * 4}
    result = run(scores, preset=preset, baseline="leave_one_out", lengths=[4] * 8)
    assert np.abs(result.by_component["a"]).max() < 4
    assert np.abs(result.advantages).max() < 4
    assert result.by_component["a"][0] < 0


def test_leave_one_out_subtracts_the_mean_of_the_others():
    scores = [1.0, 4.0, 7.0, 2.0]
    result = run({"a": scores}, estimator="rloo")
    others = [np.mean(scores[:i] + scores[i + 1 :]) for i in range(4)]
    assert result.advantages == pytest.approx(np.array(scores) - others)
    scaled = run({"a": scores}, baseline="leave_one_out", group_eps=0.0)
    expected = (np.array(scores) - others) / np.std(scores, ddof=1)
    assert scaled.before_whitening == pytest.approx(expected)


def test_leave_one_out_with_the_std_of_the_others():
    scores = [1.0, 4.0, 7.0, 2.0]
    result = run({"a": scores}, preset="nemo_rl", baseline="leave_one_out", group_eps=0.0)
    others = [scores[:i] + scores[i + 1 :] for i in range(4)]
    expected = [(r - np.mean(o)) / np.std(o, ddof=1) for r, o in zip(scores, others, strict=True)]
    assert result.before_whitening == pytest.approx(expected)
    undivided = run({"a": [0.0] + [0.3] * 7}, preset="nemo_rl", baseline="leave_one_out")
    assert undivided.by_component["a"][0] == pytest.approx(-0.3)


def test_groups_of_one_value_each_have_no_advantage():
    result = run({"a": [0, 0, 0, 1, 1, 1]}, [0, 0, 0, 1, 1, 1])  # e.g. two identical prompts
    assert (result.advantages == 0).all()


def test_components_of_unequal_scale():
    """NVlabs/GDPO and redai-studio/Relax#277: the sum lets the long, wrong answer win."""
    scores = {"correct": [1, 1, 0, 0], "length": [0, 100, 200, 300]}
    gdpo, grpo = run(scores).advantages, run(scores, estimator="grpo").advantages
    assert (np.argmax(gdpo), np.argmax(grpo)) == (1, 3)
    assert gdpo[1] == pytest.approx(1.04, abs=0.01)
    assert grpo[3] == pytest.approx(1.16, abs=0.01)


def distinct_groups(estimator: str, size: int, components: int) -> int:
    """Count the advantage vectors (sorted, 6 digits) over all groups of binary scores."""
    kinds = np.array(list(itertools.product((0.0, 1.0), repeat=components)))
    chosen = list(itertools.combinations_with_replacement(range(len(kinds)), size))
    scores_PGK = kinds[np.array(chosen)]
    columns = {f"c{k}": scores_PGK[:, :, k].ravel() for k in range(components)}
    groups = np.repeat(np.arange(len(chosen)), size)
    before = run(columns, groups, estimator=estimator, group_eps=0.0).before_whitening
    values = np.sort(np.round(before.reshape(-1, size), 6) + 0.0, axis=1)
    return len(np.unique(values, axis=0))


@pytest.mark.parametrize(
    ("estimator", "counts"),
    [
        ("grpo", [2, 4, 7, 11, 16, 29, 46, 67, 121]),
        ("dr_grpo", [3, 6, 10, 15, 21, 36, 55, 78, 136]),
        ("gdpo", [3, 6, 14, 26, 38, 81, 145, 230, 497]),
    ],
)
def test_distinct_values_by_group_size(estimator, counts):
    sizes = (2, 3, 4, 5, 6, 8, 10, 12, 16)
    assert [distinct_groups(estimator, size, 2) for size in sizes] == counts


@pytest.mark.parametrize(
    ("estimator", "counts"),
    [
        ("grpo", [4, 7, 14, 23, 41]),
        ("dr_grpo", [4, 10, 20, 35, 56]),
        ("gdpo", [4, 14, 45, 127, 318]),
    ],
)
def test_distinct_values_by_number_of_components(estimator, counts):
    assert [distinct_groups(estimator, 4, k) for k in range(1, 6)] == counts


@pytest.mark.parametrize("scores", [[0.1] * 3, [1e8 + x for x in (0.1, 0.2, 0.3)]])
def test_variance_is_two_pass(scores):
    """NousResearch/atropos#481: E[x^2] - E[x]^2 goes negative or loses every digit here."""
    result = run({"a": scores}, group_eps=0.0)
    expected = np.zeros(3) if scores[0] == scores[2] else [-1, 0, 1]
    assert result.before_whitening == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("factor", [1e-300, 1e-160, 1e160, 1e299])
def test_extreme_spreads_neither_overflow_nor_vanish(factor):
    result = run({"a": [0.0, factor, 2 * factor]}, group_eps=0.0)
    assert result.before_whitening == pytest.approx([-1, 0, 1])


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("spread", [5e-324, 1e-308, 1e300])
def test_extreme_spreads_raise_no_floating_point_error(preset, baseline, spread):
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        result = run({"a": [0.0, spread, 0.0]}, preset=preset, baseline=baseline, lengths=[1] * 3)
        assert np.isfinite(result.advantages).all()
        assert all(np.isfinite(value) for value in result.metrics().values())


# --- estimators ----------------------------------------------------------------------------------

SCORES = {"a": [1.0, 0.0, 2.0, 0.5, 0.3, 0.9], "b": [3.0, 1.0, 1.0, 2.0, 2.0, 7.0]}
GROUPS = [4, 4, 4, 9, 9, 9]
WEIGHTS = {"a": 1.0, "b": 0.5}


def by_group(total: np.ndarray, formula) -> np.ndarray:
    return np.concatenate([formula(total[:3]), formula(total[3:])])


@pytest.mark.parametrize(
    ("estimator", "formula"),
    [
        ("grpo", lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-4)),
        ("dr_grpo", lambda r: r - r.mean()),
        ("rloo", lambda r: r - (r.sum() - r) / 2),
    ],
)
def test_estimators_of_the_sum(estimator, formula):
    total = np.array(SCORES["a"]) + 0.5 * np.array(SCORES["b"])
    result = run(SCORES, GROUPS, estimator=estimator, weights=WEIGHTS)
    assert result.advantages == pytest.approx(by_group(total, formula))
    assert (result.advantages == result.before_whitening).all()


def test_mo_grpo_is_gdpo_without_whitening():
    gdpo = run(SCORES, GROUPS, weights=WEIGHTS)
    mo_grpo = run(SCORES, GROUPS, weights=WEIGHTS, estimator="mo_grpo")
    assert (mo_grpo.advantages == gdpo.before_whitening).all()
    assert not np.allclose(mo_grpo.advantages, gdpo.advantages)


def test_gdpo_of_one_component_is_grpo_then_whitening():
    one = {"a": SCORES["a"]}
    gdpo = run(one, GROUPS)
    grpo = run(one, GROUPS, estimator="grpo", whiten="rollout")
    assert gdpo.advantages == pytest.approx(grpo.advantages, abs=1e-14)


def test_one_component_is_announced_exactly_once(caplog):
    module._say_single_component.cache_clear()
    with caplog.at_level(logging.WARNING, logger="mrgym"):
        for name in ("a", "other"):
            run({name: [0, 1]})
        run({"a": [0, 1]}, estimator="grpo")
    said = [record.getMessage() for record in caplog.records if record.name == "mrgym"]
    assert len(said) == 1
    assert "one component" in said[0]


@pytest.fixture
def registry():
    """The registry of estimators, put back as it was after the test."""
    before = dict(ESTIMATORS)
    yield ESTIMATORS
    ESTIMATORS.clear()
    ESTIMATORS.update(before)


def test_a_registered_function_plugs_in(registry):
    @register_estimator("best_of_sum")
    def best_of_sum(batch, config):
        total_B = weighted_sum(batch.scores_KB, batch.weights_K)
        best_P = batch.groups.reduce(np.maximum, total_B)
        return (total_B == batch.groups.spread(best_P)).astype(float)

    result = run(SCORES, [4, 9, 4, 9, 4, 9], estimator="best_of_sum", whiten="none")
    assert list(result.advantages) == [1, 0, 0, 0, 0, 1]
    with pytest.raises(ConfigError, match="'best_of_sum' is taken"):
        register_estimator("best_of_sum")


@pytest.mark.parametrize("bad", [np.zeros(2), np.zeros((4, 1)), np.full(4, np.nan)])
def test_a_registered_function_is_checked(monkeypatch, bad):
    monkeypatch.setitem(ESTIMATORS, "bad", lambda batch, config: bad)
    with pytest.raises(RolloutError, match="estimator 'bad'"):
        run({"a": [0, 1, 2, 3]}, estimator="bad")


def test_a_registered_function_cannot_reward_unusable_rollouts(monkeypatch):
    monkeypatch.setitem(ESTIMATORS, "ones", lambda batch, config: np.ones(4))
    scores = {"a": [0, None, 2, 3], "b": [0, None, 1, 1]}
    result = run(scores, valid=[0, 1, 1, 1], estimator="ones", whiten="none")
    assert list(result.advantages) == [0, 0, 1, 1]


@pytest.fixture
def given(monkeypatch):
    """An estimator whose result is the first component itself."""
    monkeypatch.setitem(ESTIMATORS, "given", lambda batch, config: batch.scores_KB[0])
    return "given"


# --- whitening -----------------------------------------------------------------------------------


def test_token_whitening_can_flip_a_sign_and_rollout_whitening_cannot(given):
    """verl-project/verl#6497."""
    combined, lengths = [1, -0.2, 0.2, -1], [1, 1, 1, 97]
    rollout = run({"a": combined}, estimator=given, lengths=lengths).advantages
    token = run({"a": combined}, estimator=given, lengths=lengths, whiten="token").advantages
    assert (np.sign(rollout) == np.sign(combined)).all()
    assert token[1] > 0


def test_whitening_figures(given):
    values = np.array([1.0, -0.2, 0.2, -1.3])
    result = run({"a": values}, estimator=given, batch_eps=1e-4)
    expected = (values - values.mean()) / (values.std(ddof=1) + 1e-4)
    assert result.advantages == pytest.approx(expected, abs=1e-14)
    rooted = run({"a": values}, estimator=given, batch_eps=1e-2, batch_eps_in_root=True)
    expected = (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-2)
    assert rooted.advantages == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("batch_eps", [0.0, 1e-4])
def test_whitening_of_equal_values_is_zero(given, batch_eps):
    result = run({"a": [0.1, 0.1, 0.1]}, estimator=given, batch_eps=batch_eps)
    assert (result.advantages == 0).all()
    noise = run({"a": [1e-13, -1e-13, 0.0]}, estimator=given, batch_eps=batch_eps)
    assert (noise.advantages == 0).all()


def test_groups_without_signal_inflate_the_rest_unless_left_out():
    """1 active group in 10: dividing by the std of all gives about sqrt(10) = 3.16 times."""
    scores = [0.0, 1.0] * 50 + [1.0] * 900
    groups = np.arange(1000) // 100
    everyone = run({"a": scores}, groups, batch_eps=0.0)
    informative = run({"a": scores}, groups, batch_eps=0.0, whiten_over="informative")
    ratio = everyone.advantages[:100] / informative.advantages[:100]
    assert ratio == pytest.approx(np.full(100, 10**0.5), rel=0.01)
    assert (informative.advantages[100:] == 0).all()
    assert everyone.advantages[100:] == pytest.approx(np.zeros(900), abs=1e-12)


def test_token_whitening_counts_each_token():
    lengths = np.array([1, 5, 2, 9, 3, 4])
    result = run(SCORES, GROUPS, whiten="token", lengths=lengths, batch_eps=0.0)
    each = np.repeat(result.before_whitening, lengths)
    expected = (result.before_whitening - each.mean()) / each.std(ddof=1)
    assert result.advantages == pytest.approx(expected)


def test_completions_without_tokens_are_finite_and_do_not_count():
    """verl-project/verl#6159: an empty response must not wrap around to another row."""
    lengths = [0, 5, 2, 9, 0, 4]
    result = run(SCORES, GROUPS, preset="verl", lengths=lengths)
    each = np.repeat(result.before_whitening, lengths)
    expected = (result.before_whitening - each.mean()) / np.sqrt(each.var(ddof=1) + 1e-8)
    assert result.advantages == pytest.approx(expected)
    assert (run(SCORES, GROUPS, preset="verl", lengths=[0] * 6).advantages == 0).all()


def test_token_whitening_needs_lengths():
    with pytest.raises(ConfigError, match="pass completion_lengths"):
        run(SCORES, GROUPS, whiten="token")


@pytest.mark.parametrize("lengths", [[1.5] * 6, [-1] * 6, [1, 2], [np.nan] * 6])
def test_lengths_are_token_counts(lengths):
    with pytest.raises(RolloutError, match="completion_lengths"):
        run(SCORES, GROUPS, whiten="token", lengths=lengths)
