"""What advantages are computed from: absence, validity, groups, signal, kinds of arrays."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from mrgym import ABSENT, RolloutError, reward_key
from mrgym_trainers.advantages import (
    ESTIMATORS,
    AdvantageConfig,
    AdvantageResult,
    compute_advantages,
)

PRESETS = ("default", "trl", "nemo_rl", "verl")
SCORES = {"a": [1.0, 0.0, 2.0, 0.5, 0.3, 0.9], "b": [3.0, 1.0, 1.0, 2.0, 2.0, 7.0]}
GROUPS = [4, 4, 4, 9, 9, 9]
WEIGHTS = {"a": 1.0, "b": 0.5}


def run(components: dict, groups=None, *, valid=None, lengths=None, preset="default", **options):
    """Compute advantages of components given by bare name, by default in one group."""
    batch = {reward_key(name): scores for name, scores in components.items()}
    groups = groups if groups is not None else [0] * len(next(iter(components.values())))
    config = AdvantageConfig.preset(preset, **options)
    return compute_advantages(batch, groups, config, valid, lengths)


def rows(*scores: tuple[float, ...]) -> dict[str, list[float]]:
    """Components c0, c1, ... from rows of scores, one row a rollout."""
    return {f"c{k}": list(column) for k, column in enumerate(zip(*scores, strict=True))}


# --- absence and validity ------------------------------------------------------------------------


def test_an_absent_score_is_left_out_of_its_component_only():
    """modelscope/ms-swift#8123."""
    scores = {"a": [1, 2, 3, 5, 0, 1, 1, 4], "b": [1, None, 0, 1, 1, 0, 0, 1]}
    groups = [0] * 4 + [1] * 4
    result = run(scores, groups)
    three = np.array([1.0, 0.0, 1.0])
    expected = (three - three.mean()) / (three.std(ddof=1) + 1e-4)
    assert result.by_component["b"][[0, 2, 3]] == pytest.approx(expected)
    assert result.by_component["b"][1] == 0
    assert result.before_whitening[1] == result.by_component["a"][1]
    full = run({**scores, "b": [1, 1, 0, 1, 1, 0, 0, 1]}, groups)
    assert (result.before_whitening[4:] == full.before_whitening[4:]).all()
    assert np.isfinite(result.advantages).all()


@pytest.mark.parametrize("absent", [None, ABSENT])
@pytest.mark.parametrize("preset", ["default", "trl"])
def test_a_rollout_without_any_score_has_no_advantage(absent, preset):
    """huggingface/trl#5775: as a 0 it would have the best advantage of the group."""
    scores = [absent, -0.2, -0.8, -0.5]
    result = run({"a": scores, "b": scores}, preset=preset)
    without = run({"a": scores[1:], "b": scores[1:]}, preset=preset)
    assert result.advantages[0] == 0
    assert (result.advantages[1:] == without.advantages).all()
    as_zero = run({"a": scores, "b": scores}, missing="zero")
    assert as_zero.advantages[0] == pytest.approx(1.07, abs=0.01)


def test_ways_to_say_absent_agree():
    listed = run({"a": [1, None, 0, 3], "b": [1, 2, 0, 1]})
    batch = {
        "reward/a": np.array([1.0, np.nan, 0.0, 3.0]),
        "present/a": [True, False, True, True],
        "reward/b": [1, 2, 0, 1],
    }
    masked = compute_advantages(batch, [0] * 4)
    as_nan = compute_advantages(
        {key: column for key, column in batch.items() if key != "present/a"},
        [0] * 4,
        AdvantageConfig(missing="nan"),
    )
    assert (listed.advantages == masked.advantages).all()
    assert (listed.advantages == as_nan.advantages).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e301])
@pytest.mark.parametrize("missing", ["abstain", "zero", "error"])
def test_a_nan_that_is_not_marked_is_an_error(value, missing):
    with pytest.raises(RolloutError, match=r"reward/b\[2\]: got .*present/b.*valid"):
        run({"a": [0, 1, 2], "b": [0, 1, value]}, missing=missing)


def test_missing_error_names_component_and_row():
    with pytest.raises(RolloutError, match=r"reward/b\[1\]: got no score"):
        run({"a": [0, 1, 2], "b": [0, None, 1]}, preset="verl", lengths=[1, 1, 1])


def test_a_failed_rollout_is_not_a_zero():
    """NVIDIA-NeMo/RL#2207: a crashed verifier leaves the statistics alone, whatever it left."""
    scores, valid = [1.0, np.nan, 0.0, 0.5], [True, False, True, True]
    result = run({"a": scores, "b": [1, None, 1, 0]}, valid=valid, preset="verl", lengths=[2] * 4)
    without = run({"a": [1.0, 0.0, 0.5], "b": [1, 1, 0]}, preset="verl", lengths=[2] * 3)
    assert result.advantages[1] == 0
    assert (result.advantages[[0, 2, 3]] == without.advantages).all()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_batch_with_nothing_usable_is_all_zero(preset):
    """huggingface/trl#3248."""
    result = run(SCORES, GROUPS, valid=[False] * 6, preset=preset, lengths=[3] * 6)
    assert (result.advantages == 0).all()
    assert not result.informative.any()
    assert all(np.isfinite(value) for value in result.metrics().values())


@pytest.mark.parametrize("mask", [[1, 0, 1], [2] * 6, [[True] * 6], [None] * 6])
def test_masks_are_checked(mask):
    with pytest.raises(RolloutError, match="valid"):
        run(SCORES, GROUPS, valid=mask)


# --- groups --------------------------------------------------------------------------------------


def test_ragged_interleaved_groups_of_arbitrary_ids():
    """radixark/miles#1325: segments by id; no reshape and no fall-through to one group."""
    groups = np.array([7, -3, 7, 10**12, -3, 7, 10**12, -3, 7])  # sizes 4, 3, 2
    scores = np.array([1.0, 5.0, 2.0, 0.0, 4.0, 0.0, 1.0, 4.5, 8.0])
    result = run({"a": scores, "b": scores**2}, groups)
    for group in np.unique(groups):
        rows_of = groups == group
        alone = run({"a": scores[rows_of], "b": scores[rows_of] ** 2})
        assert (result.before_whitening[rows_of] == alone.before_whitening).all()


def test_group_ids_unique_per_rollout_are_an_error():
    """rllm-org/rllm#776."""
    with pytest.raises(RolloutError, match=r"6 rollouts in as many groups.*allow_singletons"):
        run(SCORES, range(6))


@pytest.mark.parametrize("estimator", sorted({*ESTIMATORS} - {"lagrangian"}))  # needs constraints
def test_a_group_of_one_has_advantage_zero(estimator):
    """axolotl-ai-cloud/axolotl#3353: in evaluation 0, never NaN; the metric tells."""
    result = run(SCORES, range(6), estimator=estimator, allow_singletons=True)
    assert (result.advantages == 0).all()
    assert result.metrics()["groups/size_min"] == 1
    alone = run({"a": [3.0], "b": [1.0]}, estimator=estimator)
    assert list(alone.advantages) == [0]


def test_a_single_rollout_among_groups_is_kept_and_reported():
    result = run({"a": [0, 1, 5], "b": [1, 0, 2]}, [0, 0, 1], weights={"a": 1, "b": 0.5})
    assert result.before_whitening[2] == 0
    assert result.metrics()["groups/size_min"] == 1


@pytest.mark.parametrize("ids", [[0.0, 1.0], ["x", "y"], [[0, 0]], [True, False], [None, 1]])
def test_group_ids_are_integers(ids):
    with pytest.raises(RolloutError, match="group_ids"):
        run({"a": [0, 1]}, ids)


# --- which groups carry signal -------------------------------------------------------------------


def test_equal_sums_can_carry_signal():
    """NVIDIA-NeMo/RL#4158: the scalar sum of every rollout is 1, yet the group has a signal."""
    pairs = rows((1, 0), (0, 1), (1, 0), (1, 0))
    assert not run(pairs).informative.any()  # same std, same weight: they cancel
    triples = {"a": [1, 0, 1, 0], "b": [0, 1, 0, 0], "c": [0, 0, 0, 1]}
    for estimator in ("gdpo", "grpo"):
        assert run(triples, estimator=estimator).informative.all()
        assert run(pairs, estimator=estimator, weights={"c0": 1, "c1": 0.5}).informative.all()


def test_rollouts_of_equal_sum_differ_where_the_stds_do():
    scores = rows((1, 0), (0, 1), (1, 0), (1, 1))
    grpo, gdpo = run(scores, estimator="grpo").advantages, run(scores).advantages
    assert grpo[0] == grpo[1]
    assert abs(gdpo[0] - gdpo[1]) > 0.1


def test_the_whole_group_is_kept_or_dropped():
    scores = [0] + [0.95] * 7 + [0.5] * 8
    result = run({"a": scores, "b": scores}, [0] * 8 + [1] * 8)
    assert list(result.informative) == [True] * 8 + [False] * 8
    assert result.metrics()["advantage/frac_no_signal"] == 0.5


def test_no_filter_drops_what_another_estimator_learns_from():
    scores = rows((10, 0), (0, 1))  # cancels for gdpo, not for grpo
    assert not run(scores, group_eps=0.0).informative.any()
    assert run(scores, group_eps=0.0, estimator="grpo").informative.all()


def test_constant_half_scores_are_no_signal():
    """OpenRLHF/OpenRLHF#1270: the mean is inside (0, 1) all the same."""
    assert run({"a": [0.5] * 4}).metrics()["advantage/frac_no_signal"] == 1


def test_weightless_components_carry_no_signal():
    result = run({"a": [0, 1], "b": [1, 1]}, weights={"a": 0.0, "b": 1.0})
    assert not result.informative.any()


def test_metrics():
    scores = {"a": [0, 1, 1, 1, 2, 3], "b": [1, 1, 1, 0, 0, 1]}
    result = run(scores, [0, 0, 1, 1, 2, 2], valid=[1, 1, 1, 1, 1, 0])
    metrics = result.metrics()
    assert metrics["groups/count"] == 3
    assert (metrics["groups/size_min"], metrics["groups/size_max"]) == (2, 2)
    assert metrics["advantage/frac_constant/a"] == pytest.approx(2 / 3)
    assert metrics["advantage/frac_constant/b"] == pytest.approx(2 / 3)
    assert metrics["advantage/frac_no_signal"] == pytest.approx(1 / 3)
    assert metrics["advantage/abs_mean"] == pytest.approx(np.abs(result.advantages[:5]).mean())
    expected = np.std(result.by_component["a"][:5], ddof=1)
    assert metrics["advantage/std/a"] == pytest.approx(expected)


# --- batches and kinds of input ------------------------------------------------------------------


def test_other_keys_never_choose_the_algorithm():
    """NVIDIA-NeMo/RL#3852."""
    batch = {reward_key(name): scores for name, scores in SCORES.items()}
    config = AdvantageConfig(weights=WEIGHTS)
    plain = compute_advantages(batch, GROUPS, config)
    noisy = {**batch, "features": torch.zeros(2, 3), "reward1": [9] * 6, "reward": [1], 3: None}
    result = compute_advantages(noisy, GROUPS, config)
    assert isinstance(result.advantages, np.ndarray)  # nor the kind of the result
    assert (result.advantages == plain.advantages).all()


def test_a_batch_without_components_lists_the_keys_it_saw():
    """NVIDIA-NeMo/RL#2680: reward1 is not reward/<name>."""
    with pytest.raises(RolloutError, match=r"got keys \['features', 'reward1'\]"):
        compute_advantages({"reward1": [0, 1], "features": [1]}, [0, 0])


def test_a_mask_without_scores_is_an_error():
    with pytest.raises(RolloutError, match="'present/formt' without its scores"):
        compute_advantages({"reward/format": [0, 1], "present/formt": [1, 1]}, [0, 0])


@pytest.mark.parametrize(
    "column", [[1.0], 1.0, [[1.0, 2.0, 3.0]], ["1", "2", "3"], [1, 2, "x"], [[1], [1, 2], [3]]]
)
def test_columns_are_never_broadcast_nor_parsed(column):
    """huggingface/trl#6534: one value for many completions."""
    with pytest.raises(RolloutError, match=r"reward/b: got .* expected numbers of shape \[3\]"):
        compute_advantages({"reward/a": [1, 2, 3], "reward/b": column}, [0, 0, 0])


def test_an_empty_batch_is_an_error():
    with pytest.raises(RolloutError, match="got 0 rollouts"):
        compute_advantages({"reward/a": []}, [])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool]
)
def test_tensors_in_tensors_out(dtype):
    scores = torch.tensor([1, 0, 1, 1]).to(dtype)
    result = run({"a": scores, "b": [0.0, 1.0, 0.5, 0.25]}, [0, 0, 1, 1])
    listed = run({"a": [1, 0, 1, 1], "b": [0.0, 1.0, 0.5, 0.25]}, [0, 0, 1, 1])
    for tensor in (result.advantages, result.before_whitening, result.by_component["a"]):
        assert tensor.dtype == torch.float64
    assert result.informative.dtype == torch.bool
    assert (result.advantages.numpy() == listed.advantages).all()
    assert isinstance(listed.advantages, np.ndarray)
    assert listed.advantages.dtype == np.float64


def test_any_tensor_among_the_inputs_makes_the_result_a_tensor():
    result = run(SCORES, torch.tensor(GROUPS))
    assert isinstance(result.advantages, torch.Tensor)
    learned = torch.tensor(SCORES["a"], requires_grad=True)
    assert not run({"a": learned, "b": SCORES["b"]}, GROUPS).advantages.requires_grad


def test_inputs_are_left_alone():
    scores = np.array(SCORES["a"])
    groups = np.array([1, 0, 1, 0, 1, 0])
    run({"a": scores, "b": SCORES["b"]}, groups)
    assert list(scores) == SCORES["a"]
    assert list(groups) == [1, 0, 1, 0, 1, 0]


def test_the_result_can_be_pickled():
    result = pickle.loads(pickle.dumps(run(SCORES, GROUPS)))
    assert isinstance(result, AdvantageResult)
    assert result.metrics() == run(SCORES, GROUPS).metrics()


def test_the_module_does_not_import_torch():
    code = """
import importlib.machinery, sys, types
package = types.ModuleType("mrgym_trainers")  # without its __init__, which brings the trainer
package.__path__ = list(
    importlib.machinery.PathFinder.find_spec("mrgym_trainers").submodule_search_locations
)
sys.modules["mrgym_trainers"] = package
from mrgym_trainers.advantages import compute_advantages
assert compute_advantages({"reward/a": [0, 1], "reward/b": [1, 1]}, [0, 0]).advantages[1] > 0
assert "torch" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
