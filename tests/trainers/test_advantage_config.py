"""The configuration of advantages, and weights by name."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import BaseModel, ValidationError

from mrgym import ConfigError, present_key, reward_key
from mrgym_trainers.advantages import (
    AdvantageConfig,
    compute_advantages,
)


def run(components: dict, groups=None, *, valid=None, lengths=None, preset="default", **options):
    """Compute advantages of components given by bare name, by default in one group."""
    batch = {reward_key(name): scores for name, scores in components.items()}
    groups = groups if groups is not None else [0] * len(next(iter(components.values())))
    config = AdvantageConfig.preset(preset, **options)
    return compute_advantages(batch, groups, config, valid, lengths)


def rows(*scores: tuple[float, ...]) -> dict[str, list[float]]:
    """Components c0, c1, ... from rows of scores, one row a rollout."""
    return {f"c{k}": list(column) for k, column in enumerate(zip(*scores, strict=True))}


# --- configuration -------------------------------------------------------------------------------


def test_defaults_are_the_specification():
    config = AdvantageConfig()
    assert config.estimator == "gdpo"
    assert (config.group_eps, config.batch_eps) == (1e-4, 1e-4)
    assert (config.baseline, config.scale) == ("mean", True)
    assert (config.whiten, config.whiten_over, config.missing) == ("rollout", "all", "abstain")
    assert config == AdvantageConfig.preset("default")


@pytest.mark.parametrize(
    ("key", "hint"), [("wieghts", "'weights'"), ("group_epsilon", "'group_eps'")]
)
def test_an_unknown_key_is_one_line_with_a_suggestion(key, hint):
    for build in (AdvantageConfig, lambda **kw: AdvantageConfig.preset("trl", **kw)):
        with pytest.raises(ConfigError) as caught:
            build(**{key: None})
        assert str(caught.value) == f"AdvantageConfig: unknown key {key!r}; did you mean {hint}?"


def test_an_unlike_key_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown key 'zzz'; known keys: \['allow_singletons'"):
        AdvantageConfig(zzz=1)


def test_a_nested_config_keeps_the_message():
    class Trainer(BaseModel):
        advantage: AdvantageConfig = AdvantageConfig()

    with pytest.raises(ValidationError, match="unknown key 'wieghts'; did you mean 'weights'"):
        Trainer(advantage={"wieghts": {}})
    assert Trainer(advantage={"whiten": "none"}).advantage.whiten == "none"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("whiten", "batch"),
        ("baseline", "median"),
        ("missing", "drop"),
        ("whiten_over", "some"),
        ("group_eps", -1e-4),
        ("batch_eps", float("nan")),
        ("scale", "maybe"),
        ("weights", {"a": float("inf")}),
        ("weights", {"a": "much"}),
    ],
)
def test_a_bad_value_names_field_and_value(field, value):
    with pytest.raises(ConfigError, match=rf"^AdvantageConfig: {field}.*: got "):
        AdvantageConfig(**{field: value})


def test_unknown_estimator_and_preset_suggest_the_near_one():
    with pytest.raises(ConfigError, match=r"got 'gdop', expected one of .*did you mean 'gdpo'"):
        AdvantageConfig(estimator="gdop")
    with pytest.raises(ConfigError, match=r"got 'nemo-rl', expected one of .*'nemo_rl'"):
        AdvantageConfig.preset("nemo-rl")


def test_the_config_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        AdvantageConfig().whiten = "none"


def test_estimators_imply_their_options():
    rloo = AdvantageConfig(estimator="rloo")
    assert (rloo.baseline, rloo.scale, rloo.whiten) == ("leave_one_out", False, "none")
    assert AdvantageConfig(estimator="dr_grpo").scale is False
    assert AdvantageConfig(estimator="grpo").whiten == "none"
    assert AdvantageConfig.preset("verl", estimator="grpo").whiten == "none"
    assert AdvantageConfig(estimator="grpo", whiten="rollout").whiten == "rollout"
    assert "whiten" not in AdvantageConfig(estimator="grpo").model_dump(exclude_unset=True)


@pytest.mark.parametrize(
    "options",
    [
        {"estimator": "rloo", "baseline": "mean"},
        {"estimator": "dr_grpo", "scale": True},
        {"estimator": "mo_grpo", "whiten": "rollout"},
    ],
)
def test_options_that_contradict_the_estimator_are_refused(options):
    with pytest.raises(ConfigError, match="for estimator"):
        AdvantageConfig(**options)


def test_overrides_win_over_a_preset():
    config = AdvantageConfig.preset("nemo_rl", baseline="leave_one_out", scale=False, batch_eps=1.0)
    assert (config.group_eps, config.batch_eps) == (1e-6, 1.0)
    assert (config.baseline, config.scale) == ("leave_one_out", False)


# --- weights -------------------------------------------------------------------------------------


def test_weights_go_by_name_not_by_position():
    """NVIDIA-NeMo/RL#2680: declared ('format', 'correct'), keys sorted the other way."""
    scores = {"format": [0, 1, 0], "correct": [1, 0, 0]}
    weights = {"correct": 2.0, "format": 1.0}
    result = run(scores, weights=weights)
    parts = result.by_component
    expected = 2 * parts["correct"] + parts["format"]
    assert result.before_whitening == pytest.approx(expected)
    wider = run({"aaa": [1, 1, 1], **scores}, weights={"aaa": 9.0, **weights})
    assert (wider.before_whitening == result.before_whitening).all()


@pytest.mark.parametrize("weights", [[2, 1], (2, 1), np.array([2, 1]), 1.0, "equal"])
def test_weights_without_names_are_refused(weights):
    with pytest.raises(ConfigError, match="expected a mapping by name"):
        AdvantageConfig(weights=weights)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"correct": 1, "fromat": 1}, r"unknown \['fromat'\], missing \['format'\].*'format'\?"),
        ({"correct": 1}, r"got \['correct'\], expected exactly \['correct', 'format'\]"),
        ({"correct": 1, "format": 1, "extra": 1}, r"unknown \['extra'\], missing \[\]"),
        ({}, r"missing \['correct', 'format'\]"),
    ],
)
def test_weights_cover_exactly_the_components(weights, message):
    with pytest.raises(ConfigError, match=message):
        run({"format": [0, 1], "correct": [1, 0]}, weights=weights)


def test_present_key_is_the_one_that_is_read():
    batch = {reward_key("a"): [1, 0, 7], present_key("a"): [1, 1, 0], reward_key("b"): [0, 1, 2]}
    assert compute_advantages(batch, [0] * 3).by_component["a"][2] == 0
