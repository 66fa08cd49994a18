"""Estimators beyond GDPO: worked figures, properties, state; and the metrics of a batch."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from mrgym import ConfigError, present_key, reward_key
from mrgym_trainers.advantages import ESTIMATORS as REGISTRY
from mrgym_trainers.advantages import AdvantageConfig, Constraint, Estimate, compute_advantages
from mrgym_trainers.gdpo.config import GDPOConfig, load_config

EXACT = {"group_eps": 0.0, "batch_eps": 0.0}
HALF = 0.5**0.5
SAFE = {"safe": {"at_least": 0.9}}


def run(components: dict, groups=None, *, valid=None, state=None, preset="default", **options):
    """Compute advantages of components given by bare name, by default in one group."""
    batch = {reward_key(name): scores for name, scores in components.items()}
    groups = groups if groups is not None else [0] * len(next(iter(components.values())))
    config = AdvantageConfig.preset(preset, **options)
    return compute_advantages(batch, groups, config, valid, state=state)


def held(components: dict, groups=None, *, state=None, **options):
    """The same with the Lagrangian estimator, ``safe`` constrained unless told otherwise."""
    options = {"constraints": SAFE, **options}
    return run(components, groups, state=state or {}, estimator="lagrangian", **options)


def random_batch(rng, groups=8, size=6, names=("a", "b", "c")) -> tuple[dict, np.ndarray]:
    scores = {name: rng.choice([0.0, 0.5, 1.0], groups * size) for name in names}
    return scores, np.repeat(rng.permutation(groups), size)


# --- DVAO ----------------------------------------------------------------------------------------


def test_dvao_worked_example():
    """std 1/sqrt2 and 3/sqrt2 give weights 1/4 and 3/4 on component advantages +-1/sqrt2."""
    result = run({"a": [1, 0], "b": [0, 3]}, estimator="dvao", **EXACT)
    assert result.before_whitening == pytest.approx([-HALF / 2, HALF / 2])
    assert (result.advantages == result.before_whitening).all()
    metrics = result.metrics()
    assert metrics["estimator/weight/a"] == pytest.approx(0.25)
    assert metrics["estimator/weight/b"] == pytest.approx(0.75)


def test_dvao_weights_enter_beside_the_std():
    """(3 * 1, 1 * 3) weighs both alike, so the trade-off cancels."""
    weights = {"a": 3.0, "b": 1.0}
    result = run({"a": [1, 0], "b": [0, 3]}, estimator="dvao", weights=weights, **EXACT)
    assert result.before_whitening == pytest.approx([0, 0], abs=1e-12)


def test_dvao_is_the_centred_sum_over_the_summed_std():
    rng = np.random.default_rng(0)
    scores, groups = random_batch(rng)
    weights = {"a": 1.0, "b": 0.5, "c": 2.0}
    got = run(scores, groups, estimator="dvao", weights=weights, **EXACT).before_whitening
    total = sum(weights[name] * scores[name] for name in scores)
    for group in np.unique(groups):
        rows = groups == group
        spread = sum(weights[n] * np.std(scores[n][rows], ddof=1) for n in scores)
        assert got[rows] == pytest.approx((total[rows] - total[rows].mean()) / spread)


def test_dvao_is_never_larger_than_grpo():
    """Proposition 2 of the paper: the summed std is at least the std of the sum."""
    scores, groups = random_batch(np.random.default_rng(1))
    dvao = run(scores, groups, estimator="dvao", **EXACT).advantages
    grpo = run(scores, groups, estimator="grpo", **EXACT).advantages
    assert (np.abs(dvao) <= np.abs(grpo) + 1e-12).all()
    assert (np.abs(dvao) < np.abs(grpo) - 0.1).any()


def test_dvao_ignores_constant_components_and_constant_groups():
    varied, groups = {"a": [1, 0, 5, 5]}, [0, 0, 1, 1]
    alone = run(varied, groups, estimator="dvao")
    beside = run({**varied, "b": [2, 2, 2, 2]}, groups, estimator="dvao")
    assert (beside.advantages == alone.advantages).all()
    assert list(beside.advantages[2:]) == [0, 0]
    assert "estimator/weight/a" not in run({"a": [1, 1]}, estimator="dvao").metrics()


@pytest.mark.parametrize("spread", [5e-324, 1e-300, 1e300])
def test_dvao_survives_extreme_spreads(spread):
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        result = run({"a": [0, spread], "b": [0, 1e300]}, estimator="dvao")
    assert np.isfinite(result.advantages).all()


def test_dvao_refuses_negative_weights():
    with pytest.raises(ConfigError, match=r"weights: got b=-1, expected no negative weight"):
        run({"a": [1, 0], "b": [0, 3]}, estimator="dvao", weights={"a": 1, "b": -1})


def test_dvao_is_nothing_without_the_std():
    with pytest.raises(ConfigError, match="scale: got False, expected True for estimator 'dvao'"):
        AdvantageConfig(estimator="dvao", scale=False)


# --- GD2PO ---------------------------------------------------------------------------------------

CORNERS = {"a": [1, 1, 0, 0], "b": [1, 0, 1, 0]}  # component advantages +-sqrt(3)/2
ROOT = 0.75**0.5


@pytest.mark.parametrize("min_agreement", [0.8, 1.0])
def test_gd2po_worked_example(min_agreement):
    """Two of four rollouts disagree: the others' +-sqrt3 is halved, then whitened by themselves."""
    result = run(CORNERS, estimator="gd2po", min_agreement=min_agreement, **EXACT)
    assert result.before_whitening == pytest.approx([ROOT, 0, 0, -ROOT])
    assert result.advantages == pytest.approx([HALF, 0, 0, -HALF])
    assert list(result.advantages[1:3]) == [0, 0]
    metrics = result.metrics()
    assert metrics["estimator/frac_conflict"] == metrics["estimator/frac_left_out"] == 0.5


@pytest.mark.parametrize(
    ("min_agreement", "left_out"), [(0.3, 0.0), (1 / 3, 0.5), (0.4, 0.5), (1.0, 0.5)]
)
def test_gd2po_keeps_rollouts_that_agree_enough(min_agreement, left_out):
    """With weights 1 and 1/2 the conflicting rollouts agree by (1 - 1/2) / (1 + 1/2) = 1/3."""
    options = {"weights": {"a": 1.0, "b": 0.5}, "min_agreement": min_agreement, **EXACT}
    result = run(CORNERS, estimator="gd2po", **options)
    assert result.metrics()["estimator/frac_left_out"] == left_out
    assert result.metrics()["estimator/frac_conflict"] == 0.5
    middle = 0.0 if left_out else ROOT / 2
    assert result.before_whitening[1] == pytest.approx(middle)
    assert result.before_whitening[0] == pytest.approx(1.5 * ROOT * (1 - left_out))


def test_gd2po_weighs_a_group_by_what_stays_of_it():
    """One group in full agreement, one with half of it left out; same sums before that."""
    scores = {"a": [1, 1, 0, 0] * 2, "b": [1, 1, 0, 0, 1, 0, 1, 0]}
    before = run(scores, [0] * 4 + [1] * 4, estimator="gd2po", **EXACT).before_whitening
    assert before == pytest.approx([2 * ROOT, 2 * ROOT, -2 * ROOT, -2 * ROOT, ROOT, 0, 0, -ROOT])


def test_gd2po_that_leaves_out_nothing_is_gdpo():
    scores, groups = random_batch(np.random.default_rng(2))
    gdpo = run(scores, groups)
    gd2po = run(scores, groups, estimator="gd2po", min_agreement=0.0)
    assert gd2po.advantages == pytest.approx(gdpo.advantages, abs=1e-12)
    assert run(scores, groups, estimator="gd2po").advantages != pytest.approx(gdpo.advantages)


def test_gd2po_with_nothing_left_is_zero():
    result = run({"a": [1, 0], "b": [0, 1]}, estimator="gd2po")
    assert list(result.advantages) == [0, 0]
    assert result.metrics()["estimator/frac_left_out"] == 1.0


def test_gd2po_counts_usable_rollouts_only():
    result = run(CORNERS, valid=[1, 1, 1, 0], estimator="gd2po", **EXACT)
    without = run(
        {name: scores[:3] for name, scores in CORNERS.items()}, estimator="gd2po", **EXACT
    )
    assert (result.advantages[:3] == without.advantages).all()


# --- Lagrangian ----------------------------------------------------------------------------------


def test_lagrangian_worked_example():
    """Z = +-1/sqrt2 for reward and -+1/sqrt2 for the constraint, held by 2: 1 - 2 = -1."""
    constraints = {"safe": {"at_least": 0.9, "start": 2.0, "learning_rate": 0.5}}
    result = held({"gain": [3, 1], "safe": [0, 1]}, constraints=constraints, **EXACT)
    assert result.advantages == pytest.approx([-HALF, HALF])
    assert result.state == pytest.approx({"multiplier/safe": 2.0 + 0.5 * (0.9 - 0.5)})
    metrics = result.metrics()
    assert metrics["estimator/multiplier/safe"] == 2.0
    assert metrics["estimator/satisfied/safe"] == 0.5


def test_lagrangian_reads_the_state_it_returned():
    scores = {"gain": [3, 1], "safe": [0, 1]}
    first = held(scores)
    second = held(scores, state=json.loads(json.dumps(first.state)))
    assert second.metrics()["estimator/multiplier/safe"] == first.state["multiplier/safe"]
    assert second.advantages[1] - first.advantages[1] == pytest.approx(0.04 * HALF, rel=1e-3)
    assert held(scores, state=first.state).state == second.state  # nothing changed in place


def test_lagrangian_cost_is_an_indicator():
    """Only reaching the bound counts, not by how much; a constraint's weight plays no part."""
    constraints = {"safe": {"at_least": 0.9, "satisfied_from": 0.5}}
    far = held({"gain": [3, 1, 2], "safe": [0.4, 7.0, 0.5]}, constraints=constraints)
    binary = held({"gain": [3, 1, 2], "safe": [0, 1, 1]}, weights={"gain": 1.0, "safe": 9.0})
    assert far.advantages == pytest.approx(binary.advantages)
    assert far.state == binary.state


def test_lagrangian_weighs_several_objectives_and_constraints():
    scores, groups = random_batch(np.random.default_rng(3), names=("a", "b", "c", "d"))
    constraints = {"b": {"at_least": 0.5, "start": 3.0}, "d": Constraint(at_least=0.5, start=0.25)}
    weights = dict.fromkeys("abcd", 2.0)
    result = held(scores, groups, constraints=constraints, weights=weights)
    plain = {name: scores[name] if name in "ac" else scores[name] >= 1 for name in scores}
    mo_grpo = run(
        plain, groups, estimator="mo_grpo", weights={"a": 2.0, "b": 3.0, "c": 2.0, "d": 0.25}
    )
    assert result.advantages == pytest.approx(mo_grpo.advantages)


def test_multipliers_stay_between_zero_and_their_limit():
    constraints = {"safe": {"at_least": 0.5, "learning_rate": 1.0, "limit": 1.2}}
    never, always = ({"gain": [0, 1], "safe": [s, s]} for s in (0, 1))
    assert held(never, constraints=constraints).state == {"multiplier/safe": 1.2}
    state = {"multiplier/safe": 0.3}
    assert held(always, constraints=constraints, state=state).state == {"multiplier/safe": 0.0}


def test_an_unmeasured_constraint_leaves_its_multiplier():
    batch = {reward_key("gain"): [0, 1], reward_key("safe"): [0, 0], present_key("safe"): [0, 0]}
    config = AdvantageConfig(estimator="lagrangian", constraints=SAFE)
    result = compute_advantages(batch, [0, 0], config, state={"multiplier/safe": 0.7})
    assert result.state == {"multiplier/safe": 0.7}
    assert "estimator/satisfied/safe" not in result.metrics()
    assert result.advantages[1] > 0.7


def test_lagrangian_is_the_same_bits_in_any_order_of_rollouts():
    rng = np.random.default_rng(4)
    scores, groups = random_batch(rng, names=("gain", "safe", "short"))
    rows = rng.permutation(len(groups))
    one = held(scores, groups)
    two = held({name: column[rows] for name, column in scores.items()}, groups[rows])
    assert (one.advantages[rows] == two.advantages).all()
    assert (one.state, one.metrics()) == (two.state, two.metrics())


def test_lagrangian_of_constant_groups_is_zero_and_still_moves_its_multiplier():
    result = held({"gain": [2, 2], "safe": [0, 0]})
    assert list(result.advantages) == [0, 0]
    assert result.state == pytest.approx({"multiplier/safe": 1.09})
    alone = held({"gain": [2, 3], "safe": [0, 1]}, [0, 1], allow_singletons=True)
    assert list(alone.advantages) == [0, 0]


def test_lagrangian_takes_tensors():
    columns = {"gain": torch.tensor([3.0, 1.0]), "safe": torch.tensor([0.0, 1.0])}
    result = held(columns)
    assert result.advantages.dtype == torch.float64
    assert all(type(value) is float for value in result.state.values())


def test_the_multiplier_brings_a_policy_to_the_share_asked_for():
    """A risky action pays, a careful one is safe; gradient bandit with the estimator's advantage.

    At equal weights the two cancel and GDPO has nothing to say: the multiplier enforces the 0.7.
    """
    rng = np.random.default_rng(5)
    constraints = {"safe": {"at_least": 0.7, "learning_rate": 0.3}}
    groups, logit, state, shares = np.repeat(np.arange(8), 8), -2.0, {}, []
    for _ in range(400):
        chance = 1 / (1 + np.exp(-logit))
        careful = (rng.random(64) < chance).astype(float)
        result = held(
            {"gain": 1 - careful, "safe": careful}, groups, constraints=constraints, state=state
        )
        state = result.state
        logit += 0.3 * np.mean(result.advantages * (careful - chance))
        shares.append(careful.mean())
    assert (run({"gain": 1 - careful, "safe": careful}, groups).advantages == 0).all()
    assert np.mean(shares[:10]) < 0.3
    assert np.mean(shares[200:]) == pytest.approx(0.7, abs=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"constraints": {"saef": {"at_least": 0.9}}}, r"got 'saef', expected one of .*'safe'\?"),
        (
            {"constraints": {"safe": {"at_least": 0.9}, "gain": {"at_least": 0.9}}},
            "one for every component",
        ),
        ({"constraints": {}}, "constraints: got none, expected at least one"),
        ({"constraints": None}, "constraints: got none, expected at least one"),
        ({"constraints": ["safe"]}, "constraints: got .* expected a mapping by name"),
        (
            {"constraints": {"safe": {"at_least": 1, "limt": 1}}},
            "unknown key 'limt'; did you mean 'limit'",
        ),
        ({"constraints": {"safe": {"at_least": 0}}}, "at_least: got 0, expected .*greater than 0"),
        ({"constraints": {"safe": {"at_least": 90}}}, "at_least: got 90, expected .*equal to 1"),
        ({"constraints": {"safe": 0.9}}, r"constraints.safe: got 0.9"),
        ({"constraints": {"safe": {}}}, "at_least"),
        ({"constraints": {"safe": {"at_least": 0.9, "start": 11.0}}}, "start: got 11, .*limit=10"),
        ({"constraints": {"safe": {"at_least": 1, "learning_rate": 0}}}, "learning_rate: got 0"),
        ({"state": {"multiplier/saef": 1.0}}, r"got multiplier/saef=1.0, expected numbers from 0"),
        ({"state": {"multiplier/safe": -1.0}}, "got multiplier/safe=-1.0"),
        ({"state": {"multiplier/safe": float("nan")}}, "got multiplier/safe=nan"),
    ],
)
def test_senseless_constraints_and_states_are_refused_in_words(options, message):
    with pytest.raises(ConfigError, match=message):
        held({"gain": [3, 1], "safe": [0, 1]}, **options)


def test_lagrangian_needs_a_state():
    with pytest.raises(ConfigError, match=r"got no state, .*pass state=\{\} with the first batch"):
        run({"gain": [3, 1], "safe": [0, 1]}, estimator="lagrangian", constraints=SAFE)


# --- configuration and registry ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"constraints": SAFE},
            "constraints: got .*'gdpo', which does not read it; .*'lagrangian'",
        ),
        ({"estimator": "dvao", "min_agreement": 0.5}, "min_agreement: got 0.5.*'gd2po'"),
        ({"estimator": "gd2po", "min_agreement": 1.5}, "min_agreement: got 1.5"),
    ],
)
def test_options_an_estimator_does_not_read_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        AdvantageConfig(**options)


def test_a_registered_estimator_may_read_any_option_and_keep_state(monkeypatch):
    def count(batch, config):
        seen = (batch.state or {}).get("seen", 0.0) + 1
        kept_B = batch.scores_KB[0] < 3
        return Estimate(batch.scores_KB[0], kept_B, {"seen": seen}, {"seen": seen})

    monkeypatch.setitem(REGISTRY, "count", count)
    config = AdvantageConfig(estimator="count", constraints=SAFE, min_agreement=0.5, **EXACT)
    batch, state = {reward_key("a"): [1.0, 2.0, 3.0]}, None
    for turn in (1.0, 2.0):
        result = compute_advantages(batch, [0, 0, 0], config, state=state)
        state = result.state
        assert result.metrics()["estimator/seen"] == state["seen"] == turn
    assert result.advantages == pytest.approx([-HALF, HALF, 0])


@pytest.mark.parametrize(
    "advantage",
    [
        {"estimator": "lagrangian", "constraints": {"safe": {"at_least": 0.9, "limit": 5.0}}},
        {"estimator": "gd2po", "min_agreement": 1.0, "weights": {"a": 2.0}},
        {"estimator": "dvao"},
    ],
)
def test_a_configuration_survives_yaml(tmp_path, advantage):
    config = GDPOConfig(advantage=advantage)
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(path) == config
    assert config.advantage.whiten == ("rollout" if advantage["estimator"] == "gd2po" else "none")


def test_a_constraint_can_be_given_on_the_command_line():
    overrides = ["estimator=lagrangian", "advantage.constraints.safe.at_least=0.9"]
    assert load_config(overrides=overrides).advantage.constraints == {
        "safe": Constraint(at_least=0.9)
    }


@pytest.mark.parametrize("estimator", ["gdpo", "grpo", "dvao", "gd2po"])
def test_estimators_without_state_return_none(estimator):
    scores = {"a": [1, 0], "b": [0, 3]}
    assert run(scores, estimator=estimator, state={"seen": 1.0}).state == {}


# --- metrics of a batch --------------------------------------------------------------------------


def test_correlations_are_pearsons_where_both_are_present():
    rng = np.random.default_rng(6)
    scores = {name: 1e3 + rng.normal(size=40) for name in ("b", "a", "c")}
    scores["c"] = scores["c"] + scores["a"]
    present = rng.random(40) < 0.7
    batch = {reward_key(name): column for name, column in scores.items()}
    result = compute_advantages(
        {**batch, present_key("c"): present}, np.arange(40) // 8, valid=[0, *[1] * 39]
    )
    metrics, usable = result.metrics(), np.arange(40) > 0
    both = usable & present
    expected = np.corrcoef(scores["a"][usable], scores["b"][usable])[0, 1]
    assert metrics["reward/corr/a/b"] == pytest.approx(expected)
    expected = np.corrcoef(scores["a"][both], scores["c"][both])[0, 1]
    assert metrics["reward/corr/a/c"] == pytest.approx(expected)
    within = [result.by_component[name][both] for name in ("a", "c")]
    assert metrics["reward/corr_within/a/c"] == pytest.approx(np.corrcoef(*within)[0, 1])
    assert not any(key.startswith(("reward/corr/c", "reward/corr/b/a")) for key in metrics)


def test_correlation_between_groups_is_told_from_the_one_within():
    """Easy tasks score high on both, but within a task the two are at odds."""
    scores = {"a": [0, 1, 10, 11], "b": [1, 0, 11, 10]}
    metrics = run(scores, [0, 0, 1, 1]).metrics()
    assert metrics["reward/corr/a/b"] > 0.9
    assert metrics["reward/corr_within/a/b"] == pytest.approx(-1)


def test_a_constant_component_has_no_correlation():
    metrics = run({"a": [0.1] * 3, "b": [0, 1, 2]}).metrics()
    assert not any(key.startswith("reward/corr") for key in metrics)
    assert not any(key.startswith("reward/corr") for key in run({"a": [0, 1]}).metrics())


def test_distinct_counts_values_before_whitening_of_usable_rollouts():
    scores = {"a": [1, 1, 0, 0] * 2, "b": [1, 0, 1, 0] * 2}
    groups = [0] * 4 + [1] * 4
    assert run(scores, groups).metrics()["advantage/distinct"] == 3
    two_to_one = {"a": 2.0, "b": 1.0}
    assert run(scores, groups, weights=two_to_one).metrics()["advantage/distinct"] == 4
    assert run(scores, groups, valid=[0] * 7 + [1]).metrics()["advantage/distinct"] == 1
