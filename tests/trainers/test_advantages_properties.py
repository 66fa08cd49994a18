"""Advantages by property: order, ranks, units, masks and absence, over random ragged batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mrgym import present_key, reward_key
from mrgym_trainers.advantages import AdvantageConfig, AdvantageResult, compute_advantages
from mrgym_trainers.group_stats import Groups, exact_sums

NAMES = ("correct", "format", "length")
CONFIGS = [
    AdvantageConfig(),
    AdvantageConfig(whiten_over="informative", baseline="leave_one_out"),
    AdvantageConfig(estimator="mo_grpo", group_eps=0.0),
    AdvantageConfig(estimator="grpo"),
    AdvantageConfig(estimator="rloo"),
    AdvantageConfig(estimator="dr_grpo", whiten="token"),
    AdvantageConfig(estimator="dvao"),
    AdvantageConfig(estimator="gd2po", min_agreement=1.0),
    AdvantageConfig.preset("trl"),
    AdvantageConfig.preset("nemo_rl", baseline="leave_one_out"),
    AdvantageConfig.preset("verl", missing="abstain"),
]

scores = st.one_of(
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0.1, 0.3, 0.95, 1 / 3]),
    st.floats(-1e3, 1e3, allow_nan=False, allow_subnormal=False),
    st.integers(0, 300).map(float),
)


class Batch:
    """Columns of a batch, so that rows can be taken and columns replaced."""

    def __init__(self, columns: dict[str, np.ndarray], groups, valid, lengths) -> None:
        self.columns, self.groups, self.valid, self.lengths = columns, groups, valid, lengths

    def __repr__(self) -> str:
        return f"Batch({self.columns}, {self.groups}, {self.valid}, {self.lengths})"

    def take(self, rows: np.ndarray) -> Batch:
        columns = {key: column[rows] for key, column in self.columns.items()}
        return Batch(columns, self.groups[rows], self.valid[rows], self.lengths[rows])

    def put(self, **changes: np.ndarray) -> Batch:
        columns = {**self.columns, **{reward_key(name): new for name, new in changes.items()}}
        return Batch(columns, self.groups, self.valid, self.lengths)

    def run(self, config: AdvantageConfig) -> AdvantageResult:
        return compute_advantages(self.columns, self.groups, config, self.valid, self.lengths)


@st.composite
def batches(draw, absent: bool = True, elements=scores) -> Batch:
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5).filter(lambda s: max(s) > 1))
    ids = draw(st.lists(st.integers(-99, 99), min_size=5, max_size=5, unique=True))
    groups = np.repeat(ids[: len(sizes)], sizes)
    count = len(groups)
    names = NAMES[: draw(st.integers(1, 3))]

    def column(strategy, dtype):
        return np.array(draw(st.lists(strategy, min_size=count, max_size=count)), dtype=dtype)

    columns = {reward_key(name): column(elements, float) for name in names}
    if absent:
        columns.update({present_key(name): column(st.booleans(), bool) for name in names})
    valid = column(st.sampled_from([True, True, True, False]), bool)
    return Batch(columns, groups, valid, column(st.integers(0, 50), int))


def same_bits(first: AdvantageResult, second: AdvantageResult, rows=slice(None)) -> None:
    """Check that the second result is the first one, reordered by ``rows``, to the bit."""
    for field in ("advantages", "before_whitening", "informative"):
        np.testing.assert_array_equal(getattr(first, field)[rows], getattr(second, field))
    for name, values in first.by_component.items():
        np.testing.assert_array_equal(values[rows], second.by_component[name])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@settings(max_examples=24, deadline=None)
@given(batch=batches(), data=st.data())
def test_order_of_rollouts_does_not_show_in_any_bit(config, batch, data):
    rows = np.array(data.draw(st.permutations(range(len(batch.groups)))))
    one, two = batch.run(config), batch.take(rows).run(config)
    same_bits(one, two, rows)
    assert one.metrics() == two.metrics()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@settings(max_examples=12, deadline=None)
@given(batch=batches(), data=st.data())
def test_names_of_groups_do_not_show_in_any_bit(config, batch, data):
    old = np.unique(batch.groups)
    new = np.array(data.draw(st.permutations(range(len(old))))) * 10**9
    renamed = Batch(
        batch.columns, new[np.searchsorted(old, batch.groups)], batch.valid, batch.lengths
    )
    same_bits(batch.run(config), renamed.run(config))


@settings(max_examples=60, deadline=None)
@given(batch=batches(), data=st.data())
def test_order_of_components_does_not_show_in_any_bit(batch, data):
    keys = data.draw(st.permutations(list(batch.columns)))
    shuffled = Batch({k: batch.columns[k] for k in keys}, batch.groups, batch.valid, batch.lengths)
    names = [key.removeprefix("reward/") for key in keys if key.startswith("reward/")]
    weights = {name: 0.1 + len(name) for name in sorted(names)}
    reordered = {name: weights[name] for name in names}
    same_bits(
        batch.run(AdvantageConfig(weights=weights)),
        shuffled.run(AdvantageConfig(weights=reordered)),
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@settings(max_examples=10, deadline=None)
@given(batch=batches(), data=st.data())
def test_number_of_ranks_does_not_show_in_any_bit(ranks, config, batch, data):
    """Rollouts land on ranks anyhow, the last rank may be empty; all are gathered rank by rank."""
    count = len(batch.groups)
    place = st.integers(0, max(ranks - 2, 0))
    rank = np.array(data.draw(st.lists(place, min_size=count, max_size=count)))
    gathered = np.concatenate([np.flatnonzero(rank == r) for r in range(ranks)])
    same_bits(batch.run(config), batch.take(gathered).run(config), gathered)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@settings(max_examples=24, deadline=None)
@given(batch=batches())
def test_a_masked_rollout_is_as_good_as_removed(config, batch):
    kept = np.flatnonzero(batch.valid)
    assume(len(kept) > 1)
    config = config.model_copy(update={"allow_singletons": True})
    masked, removed = batch.run(config), batch.take(kept).run(config)
    same_bits(masked, removed, kept)
    assert (masked.advantages[~batch.valid] == 0).all()
    assert (masked.before_whitening[~batch.valid] == 0).all()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@settings(max_examples=24, deadline=None)
@given(batch=batches(), junk=st.sampled_from([0.0, -1e9, math.nan, math.inf]))
def test_what_stands_in_for_an_absent_score_does_not_matter(config, batch, junk):
    names = [key.removeprefix("reward/") for key in batch.columns if key.startswith("reward/")]
    changed = {
        name: np.where(
            batch.columns[present_key(name)] & batch.valid, batch.columns[reward_key(name)], junk
        )
        for name in names
    }
    result = batch.run(config)
    same_bits(result, batch.put(**changed).run(config))
    if config.missing != "zero":
        for name in names:
            absent = ~batch.columns[present_key(name)]
            assert (result.by_component[name][absent] == 0).all()


@settings(max_examples=60, deadline=None)
@given(batch=batches(), data=st.data())
def test_one_abstention_leaves_other_groups_and_components_alone(batch, data):
    name = NAMES[0]
    row = data.draw(st.integers(0, len(batch.groups) - 1))
    present = batch.columns[present_key(name)].copy()
    present[row] = False
    columns = {**batch.columns, present_key(name): present}
    changed = Batch(columns, batch.groups, batch.valid, batch.lengths)
    before, after = batch.run(AdvantageConfig()), changed.run(AdvantageConfig())
    elsewhere = batch.groups != batch.groups[row]
    for field in ("before_whitening", "informative"):
        one, two = getattr(before, field), getattr(after, field)
        np.testing.assert_array_equal(one[elsewhere], two[elsewhere])
    for other in before.by_component.keys() - {name}:
        np.testing.assert_array_equal(before.by_component[other], after.by_component[other])


units = st.integers(0, 40).map(lambda n: n / 8)


@settings(max_examples=100, deadline=None)
@given(
    batch=batches(elements=units),
    factor=st.floats(0.01, 1e4),
    shift=st.floats(-100, 100),
    baseline=st.sampled_from(["mean", "leave_one_out"]),
)
def test_unit_and_origin_of_a_component_do_not_matter(batch, factor, shift, baseline):
    config = AdvantageConfig(group_eps=0.0, baseline=baseline)
    moved = batch.put(correct=batch.columns["reward/correct"] * factor + shift)
    one, two = batch.run(config), moved.run(config)
    np.testing.assert_allclose(two.before_whitening, one.before_whitening, atol=1e-7)
    np.testing.assert_allclose(two.advantages, one.advantages, atol=1e-3)


@settings(max_examples=60, deadline=None)
@given(batch=batches(elements=units), factor=st.floats(1, 1e4), shift=st.floats(-100, 100))
def test_units_matter_by_no_more_than_eps(batch, factor, shift):
    config = AdvantageConfig()
    moved = batch.put(correct=batch.columns["reward/correct"] * factor + shift)
    one, two = batch.run(config), moved.run(config)
    # eps moves an advantage by the factor eps / std; stds here are above 1/20, advantages below 3.
    np.testing.assert_allclose(two.before_whitening, one.before_whitening, atol=3 * 20 * 1e-4)


@settings(max_examples=60, deadline=None)
@given(batch=batches(), value=scores)
def test_a_constant_component_changes_nothing(batch, value):
    constant = np.full(len(batch.groups), value)
    with_it = batch.put(zzz=constant).run(AdvantageConfig())
    anywhere = batch.valid & np.any(
        [column for key, column in batch.columns.items() if key.startswith("present/")], axis=0
    )
    assert (with_it.by_component["zzz"] == 0).all()
    before = batch.run(AdvantageConfig()).before_whitening
    np.testing.assert_array_equal(with_it.before_whitening[anywhere], before[anywhere])


@settings(max_examples=60, deadline=None)
@given(batch=batches(absent=False))
def test_advantages_of_a_group_sum_to_zero(batch):
    result = batch.run(AdvantageConfig())
    for group in np.unique(batch.groups):
        assert abs(result.before_whitening[batch.groups == group].sum()) < 1e-10


def reference(batch: Batch) -> tuple[list[float], list[float]]:
    """GDPO written out rollout by rollout, as the specification states it."""
    names = [key.removeprefix("reward/") for key in batch.columns if key.startswith("reward/")]
    count = len(batch.groups)
    present = {n: batch.columns[present_key(n)] & batch.valid for n in names}
    before = [0.0] * count
    for name in names:
        values = batch.columns[reward_key(name)]
        for i in range(count):
            peers = [
                float(values[j])
                for j in range(count)
                if batch.groups[j] == batch.groups[i] and present[name][j]
            ]
            if present[name][i] and len(peers) > 1 and max(peers) > min(peers):
                mean, std = spread(peers)
                before[i] += (float(values[i]) - mean) / (std + 1e-4)
    usable = [any(present[name][i] for name in names) for i in range(count)]
    if max(map(abs, before)) <= 1e-12:
        return before, [0.0] * count
    mean, std = spread([a for a, use in zip(before, usable, strict=True) if use])
    return before, [
        (a - mean) / (std + 1e-4) if u else 0.0 for a, u in zip(before, usable, strict=True)
    ]


def spread(values: list[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
    return mean, variance**0.5


@settings(max_examples=100, deadline=None)
@given(batch=batches())
def test_equals_the_written_out_reference(batch):
    result = batch.run(AdvantageConfig())
    before, after = reference(batch)
    np.testing.assert_allclose(result.before_whitening, before, atol=1e-9)
    np.testing.assert_allclose(result.advantages, after, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.floats(-1, 1), min_size=1, max_size=60), data=st.data())
def test_sums_are_exact_enough_and_blind_to_order(values, data):
    start = np.zeros(1, dtype=np.int64)
    shuffled = data.draw(st.permutations(values))
    for longest in (len(values), 2**26):  # slices for short and for long segments
        total = exact_sums(np.array(values), start, longest)[0]
        assert total == exact_sums(np.array(shuffled), start, longest)[0]
        assert math.isclose(total, math.fsum(values), rel_tol=1e-15, abs_tol=1e-21)


def test_long_sums_are_exact_enough_and_blind_to_order():
    rng = np.random.default_rng(0)
    values = rng.uniform(0.5, 1.0, 2**17)
    start = np.zeros(1, dtype=np.int64)
    totals = [exact_sums(rng.permutation(values), start, len(values))[0] for _ in range(20)]
    assert set(totals) == {math.fsum(values)}


def test_order_does_not_show_in_a_batch_of_long_groups():
    rng = np.random.default_rng(0)
    count = 40_000
    groups = rng.integers(0, 2, count)
    columns = {reward_key(n): rng.normal(size=count) * 10.0**k for k, n in enumerate(NAMES)}
    batch = Batch(columns, groups, rng.random(count) > 0.1, rng.integers(0, 9, count))
    rows = rng.permutation(count)
    for config in CONFIGS:
        same_bits(batch.run(config), batch.take(rows).run(config), rows)


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=40))
def test_groups_sort_and_restore(ids):
    groups = Groups.from_ids(np.array(ids))
    rows = np.arange(len(ids))
    np.testing.assert_array_equal(groups.restore(rows[groups.order_B]), rows)
    assert sorted(groups.sizes_P) == sorted(ids.count(i) for i in set(ids))
    sizes = groups.restore(groups.spread(groups.sizes_P))
    assert list(sizes) == [ids.count(i) for i in ids]
