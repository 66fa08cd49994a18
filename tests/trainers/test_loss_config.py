"""The options of the loss: what is refused, and what ``auto`` decides."""

import pytest

from mrgym.errors import ConfigError
from mrgym_trainers.gdpo.config import GDPOConfig, LossConfig, load_config


def test_auto_corrects_every_sampler_but_the_trainers_own():
    assert LossConfig().mismatch == "auto"
    assert LossConfig().resolved(own_sampler=True).mismatch == "off"
    assert LossConfig().resolved(own_sampler=False).mismatch == "tis"
    for mismatch in ("off", "tis", "mask"):
        config = LossConfig(mismatch=mismatch, clip_high=0.3)
        assert config.resolved(own_sampler=True) == config.resolved(own_sampler=False) == config


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"dual_clip": 1.0}, "LossConfig: dual_clip: got 1.0, expected greater than 1"),
        ({"tis_cap": 0.5}, "LossConfig: tis_cap: got 0.5"),
        ({"mask_low": 1.1}, "LossConfig: mask_low: got 1.1"),
        ({"mask_high": 1.0}, "LossConfig: mask_high: got 1.0"),
        ({"kl_coef": -0.1}, "LossConfig: kl_coef: got -0.1"),
        ({"kl": "k4"}, "LossConfig: kl: got 'k4', expected 'k1', 'k2' or 'k3'"),
        ({"surrogate": "ppo"}, "LossConfig: surrogate: got 'ppo', expected 'clip' or 'cispo'"),
        ({"ratio": "row"}, "LossConfig: ratio: got 'row', expected 'token' or 'sequence'"),
        ({"mismatch": "on"}, "LossConfig: mismatch: got 'on', expected 'auto', 'tis'"),
        ({"surrogate": "cispo", "dual_clip": 3.0}, "LossConfig: dual_clip: got 3.0 with surrogate"),
    ],
)
def test_values_that_cannot_work_are_refused(keys, words):
    with pytest.raises(ConfigError) as caught:
        LossConfig(**keys)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


def test_the_defaults_are_those_of_the_numerics_page():
    config = LossConfig()
    assert (config.surrogate, config.ratio, config.aggregation) == ("clip", "token", "token_mean")
    assert (config.clip_low, config.clip_high, config.dual_clip) == (0.2, 0.28, None)
    assert (config.kl_coef, config.kl, config.entropy_coef) == (0.0, "k3", 0.0)
    assert (config.tis_cap, config.mask_low, config.mask_high) == (2.0, 0.5, 5.0)


def test_options_survive_the_way_to_a_file_and_back(tmp_path):
    loss = LossConfig(dual_clip=3.0, ratio="sequence", kl_coef=0.01, kl="k2", mismatch="mask")
    path = tmp_path / "config.yaml"
    for config in (GDPOConfig(loss=loss), GDPOConfig()):
        path.write_text(config.to_yaml())
        assert load_config(path).loss == config.loss
    assert load_config(path, ["loss.surrogate=cispo"]).loss.surrogate == "cispo"


def test_only_kl_and_entropy_reach_rollouts_without_advantage():
    assert not LossConfig(mismatch="mask", dual_clip=2.0).needs_every_rollout
    assert LossConfig(kl_coef=0.1).needs_every_rollout
    assert LossConfig(entropy_coef=0.1).needs_every_rollout
