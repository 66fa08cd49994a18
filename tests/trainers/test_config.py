"""The configuration: what it takes, what it refuses, and in which words."""

import re

import pytest
import yaml

import mrgym
from mrgym.errors import ConfigError, RewardDefinitionError
from mrgym_trainers import GDPOConfig, GDPOTrainer
from mrgym_trainers.advantages import AdvantageConfig
from mrgym_trainers.gdpo.config import LossConfig, load_config
from mrgym_trainers.gdpo.policy import load_policy
from mrgym_trainers.gdpo.run_folder import RunFolder

TINY_ONLY = {
    "learning_rate": (2e-4, 1e-6), "max_completion_tokens": (36, 256), "steps": (250, 200),
    "prompts_per_step": (32, 16), "eval_tasks": (512, 128),
}  # fmt: skip


def refused(match, make):
    with pytest.raises(ConfigError, match=match) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- defaults -------------------------------------------------------------------------------


def test_defaults_are_gdpo_on_the_bundled_policy():
    config = GDPOConfig()
    assert (config.model, config.advantage) == ("tiny", AdvantageConfig(estimator="gdpo"))
    assert (config.loss.clip_low, config.loss.clip_high) == (0.2, 0.28)
    assert (config.group_size, config.updates_per_step, config.temperature) == (8, 1, 1.0)
    assert config.dtype == "float32"


@pytest.mark.parametrize("key", TINY_ONLY)
def test_tiny_defaults_are_filled_only_where_the_model_is_tiny(key):
    tiny, other = TINY_ONLY[key]
    assert getattr(GDPOConfig(), key) == tiny
    assert getattr(GDPOConfig(model="tiny"), key) == tiny
    assert getattr(GDPOConfig(model="some/model"), key) == other


@pytest.mark.parametrize("key", TINY_ONLY)
def test_a_key_that_is_given_wins_over_the_tiny_defaults(key):
    assert getattr(GDPOConfig(**{key: 7}), key) == 7


def test_a_config_cannot_be_changed_after_it_was_checked():
    with pytest.raises(ValueError, match="frozen"):
        GDPOConfig().steps = 3


# --- unknown keys and bad values ------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"learning_rat": 1e-4}, "GDPOConfig: unknown key 'learning_rat'; did you mean"),
        ({"loss": {"clip_hi": 0.3}}, "LossConfig: unknown key 'clip_hi'; did you mean 'clip_high'"),
        (
            {"advantage": {"whitten": "none"}},
            "AdvantageConfig: unknown key 'whitten'; did you mean 'whiten'",
        ),
        ({"zzz": 1}, "GDPOConfig: unknown key 'zzz'; known keys: .*'steps'"),
        ({"estimator": "gdppo"}, "AdvantageConfig: estimator: got 'gdppo'.*did you mean 'gdpo'"),
    ],
)
def test_an_unknown_key_is_an_error_with_a_suggestion(keys, words):
    refused(words, lambda: GDPOConfig(**keys))


@pytest.mark.parametrize("override", ["loss.clip_hi=0.3", "advantage.whitten=none", "step=3"])
def test_an_unknown_key_in_an_override_is_an_error_with_a_suggestion(override):
    refused("unknown key.*did you mean", lambda: load_config(overrides=[override]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", 0), ("steps", 2.5), ("learning_rate", -1.0), ("learning_rate", float("nan")),
        ("learning_rate", float("inf")), ("temperature", 0.0), ("lr_end", 1.5), ("seed", -1),
        ("lr_schedule", "cosinus"), ("max_error_rate", 1.01), ("dtype", "float16"),
        ("loss", "clip"), ("advantage", "gdpo"), ("on_score_error", "ignore"), ("model", 5),
        ("updates_per_step", 0), ("score_timeout", 0),
    ],
)  # fmt: skip
def test_a_value_that_cannot_work_is_refused_by_name(key, value):
    message = refused(f"GDPOConfig: {key}", lambda: GDPOConfig(**{key: value}))
    assert f"got {value!r}" in message


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"clip_low": 1.0}, "LossConfig: clip_low: got 1.0, expected less than 1"),
        ({"clip_high": -0.1}, "LossConfig: clip_high: got -0.1, expected"),
        ({"aggregation": "mean"}, "LossConfig: aggregation: got 'mean', expected 'token_mean'"),
        ({"constant_length": 0}, "LossConfig: constant_length: got 0"),
    ],
)
def test_a_loss_that_cannot_work_is_refused_by_name(keys, words):
    refused(words, lambda: GDPOConfig(loss=keys))
    refused(words, lambda: LossConfig(**keys))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"sampler": "vllm", "vllm": {"max_model_len": 256}, "max_completion_tokens": 256},
            "vllm.max_model_len: got 256, expected more than max_completion_tokens=256",
        ),
        ({"reference_model": "other"}, "reference_model: got 'other' with loss.kl_coef=0"),
    ],
)
def test_keys_that_do_not_go_together_are_refused_by_name(keys, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        GDPOConfig(**keys)


def test_a_constraint_on_an_unknown_component_is_refused_before_anything_is_loaded(envs):
    advantage = {"estimator": "lagrangian", "constraints": {"brif": {"at_least": 0.5}}}
    config = GDPOConfig(model="no/such/model", advantage=advantage)
    with pytest.raises(ConfigError, match=r"constraints: got 'brif', .* did you mean"):
        GDPOTrainer(envs.Letters(), config)


@pytest.mark.parametrize("betas", [[0.9], [0.9, 1.0], [-0.1, 0.9], 0.9])
def test_betas_that_cannot_work_are_refused(betas):
    refused("GDPOConfig: adam_betas", lambda: GDPOConfig(adam_betas=betas))


def test_a_group_of_one_is_refused_with_the_reason():
    """Case axolotl-ai-cloud/axolotl#3353: G=1 is a configuration error in training."""
    message = refused("group_size: got 1", lambda: GDPOConfig(group_size=1))
    assert "expected at least 2" in message
    assert "nothing to compare with" in message
    refused("group_size: got 1", lambda: load_config(overrides=["group_size=1"]))
    refused("group_size", lambda: GDPOConfig(group_size=0))


# --- shorthands -----------------------------------------------------------------------------


def test_shorthands_stand_for_the_keys_of_advantage():
    config = GDPOConfig(estimator="grpo", weights={"format": 0.5}, advantage={"group_eps": 1e-6})
    assert config.advantage == AdvantageConfig(
        estimator="grpo", weights={"format": 0.5}, group_eps=1e-6
    )


def test_shorthands_go_with_an_advantage_config_object():
    config = GDPOConfig(estimator="rloo", advantage=AdvantageConfig(group_eps=1e-6))
    assert (config.advantage.estimator, config.advantage.group_eps) == ("rloo", 1e-6)
    assert config.advantage.whiten == "none"  # what rloo implies, not the default object's


@pytest.mark.parametrize(
    ("key", "value"), [("estimator", "grpo"), ("weights", {"correctness": 1.0})]
)
def test_a_shorthand_clashes_with_the_same_key_of_advantage(key, value):
    words = rf"got \['{key}'\] both at the top and under 'advantage'"
    refused(words, lambda: GDPOConfig(**{key: value, "advantage": {key: value}}))
    given = AdvantageConfig(**{key: value})
    refused(words, lambda: GDPOConfig(**{key: value, "advantage": given}))


@pytest.mark.parametrize("advantage", [None, "gdpo", 3, ["estimator"]])
def test_a_shorthand_beside_an_advantage_that_is_no_mapping_is_refused_in_words(advantage):
    refused("advantage", lambda: GDPOConfig(estimator="grpo", advantage=advantage))


@pytest.mark.parametrize("weights", [[2.0, 1.0], (2.0, 1.0), 2.0])
def test_weights_go_by_name_only(weights):
    """Case NVIDIA-NeMo/RL#2680 (ordering thread): a list of weights has no names, so none count."""
    refused("weights: got .*expected a mapping by name", lambda: GDPOConfig(weights=weights))
    refused(
        "weights: got .*expected a mapping by name",
        lambda: GDPOConfig(advantage={"weights": weights}),
    )


# --- overrides ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("steps=50", 50), ("learning_rate=1e-4", 1e-4), ("learning_rate=0.5", 0.5),
        ("shuffle_rewards=true", True), ("shuffle_rewards=no", False),
        ("adam_betas=[0.8, 0.95]", (0.8, 0.95)), ("model=a/b", "a/b"), ("model='a=b'", "a=b"),
        ("lr_schedule=linear", "linear"), (" steps =50", 50),
    ],
)  # fmt: skip
def test_an_override_is_a_yaml_value(override, value):
    key = override.partition("=")[0].strip()
    assert getattr(load_config(overrides=[override]), key) == value


def test_overrides_reach_nested_keys():
    config = load_config(
        overrides=[
            "advantage.weights.format=5e-1", "advantage.weights.correctness=2",
            "loss.clip_high=0.3", "loss.truncated=mask", "estimator=grpo",
        ]
    )  # fmt: skip
    assert config.advantage.weights == {"format": 0.5, "correctness": 2.0}
    assert config.advantage.estimator == "grpo"
    assert config.loss == LossConfig(clip_high=0.3, truncated="mask")


def test_a_shorthand_takes_nested_overrides_too():
    assert load_config(overrides=["weights.format=0.5"]).advantage.weights == {"format": 0.5}


@pytest.mark.parametrize("override", ["steps", "=5", ""])
def test_an_override_without_key_or_value_is_refused(override):
    refused("expected key=value", lambda: load_config(overrides=[override]))


@pytest.mark.parametrize("override", ["adam_betas=[0.9", "loss={a"])
def test_an_override_that_is_no_yaml_is_refused(override):
    refused("expected a YAML value", lambda: load_config(overrides=[override]))


def test_the_file_loses_against_keys_and_keys_against_overrides(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("steps: 1\nseed: 1\ngroup_size: 3\nloss: {clip_low: 0.1, clip_high: 0.1}\n")
    config = load_config(path, ["steps=3", "loss.clip_high=0.3"], steps=2, seed=2, model=None)
    assert (config.steps, config.seed, config.group_size, config.model) == (3, 2, 3, "tiny")
    assert config.loss == LossConfig(clip_low=0.1, clip_high=0.3)


# --- files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"- steps: 5\n", "got list, expected a mapping of keys"),
        (b"just words\n", "got str, expected a mapping"),
        (b"1: 2\n", "expected a mapping of keys"),
        (b"steps: [1\n", "got no valid YAML"),
        (b"steps: \xff\n", "got no valid YAML"),
        (b"a: !!python/object:os.system x\n", "got no valid YAML"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused_by_name(tmp_path, content, words):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    assert str(path) in refused(words, lambda: load_config(path))


def test_a_missing_file_is_refused_by_name(tmp_path):
    refused("absent.yaml: got no file", lambda: load_config(tmp_path / "absent.yaml"))
    refused("got no file", lambda: load_config(tmp_path))


def test_an_empty_file_means_the_defaults(tmp_path):
    (tmp_path / "run.yaml").write_text("# nothing yet\n")
    assert load_config(tmp_path / "run.yaml") == GDPOConfig()


@pytest.mark.parametrize(
    "keys",
    [
        {}, {"estimator": "grpo"}, {"estimator": "rloo"}, {"estimator": "dr_grpo"},
        {"model": "a/b", "weights": {"a": 0.1}, "learning_rate": 1e-6, "adam_betas": (0.5, 0.6)},
        {"advantage": AdvantageConfig.preset("verl"), "loss": {"truncated": "mask"}},
    ],
)  # fmt: skip
def test_a_config_survives_yaml(tmp_path, keys):
    (tmp_path / "c.yaml").write_text(GDPOConfig(**keys).to_yaml())
    assert load_config(tmp_path / "c.yaml").model_dump() == GDPOConfig(**keys).model_dump()


@pytest.mark.parametrize("estimator", ["gdpo", "grpo"])
def test_the_config_of_a_run_folder_can_be_loaded_again(envs, small_config, tmp_path, estimator):
    trainer = GDPOTrainer(envs.Letters(), small_config(estimator=estimator), out=tmp_path / "run")
    trainer.folder.write_config(trainer._resolved(), trainer.env_name)
    loaded = load_config(tmp_path / "run" / "config.yaml")
    assert loaded.model_dump() == trainer._resolved().model_dump()
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["env"] == "Letters"


# --- weights against an environment ---------------------------------------------------------


def test_unknown_weights_name_both_sets_and_the_nearest(envs, small_config):
    config = small_config(weights={"lowr": 2.0, "brief": 1.0})
    message = refused("did you mean 'lower'", lambda: GDPOTrainer(envs.Letters(), config))
    assert "['lowr', 'brief']" in message
    assert "['lower', 'brief']" in message
    assert "Letters" in message


def test_weights_left_out_are_the_environments_own(envs, small_config):
    weights = GDPOTrainer(envs.Letters(), small_config(weights={"lower": 3.0})).weights
    assert weights == {"lower": 3.0, "brief": 0.5}
    assert GDPOTrainer(envs.Letters(), small_config()).weights == {"lower": 1.0, "brief": 0.5}


def test_a_new_component_shifts_no_other_weight(envs, small_config):
    """Case NVIDIA-NeMo/RL#2680 (ordering thread): weights are looked up by name."""

    class More(envs.Letters):
        @mrgym.component(low=0, high=1)
        def aaa(self, task, completion):
            return 0.0

    before = GDPOTrainer(envs.Letters(), small_config(weights={"brief": 7.0})).weights
    after = GDPOTrainer(More(), small_config(weights={"brief": 7.0})).weights
    assert after == {**before, "aaa": 1.0}


def test_what_is_no_environment_is_refused_with_the_way_out(envs, small_config):
    import gymnasium as gym

    wrapped = gym.wrappers.TimeLimit(envs.Letters(), 5)
    refused("got TimeLimit.*unwrap it", lambda: GDPOTrainer(wrapped, small_config()))
    refused("got object", lambda: GDPOTrainer(object(), small_config()))


def test_a_component_with_a_slash_cannot_be_declared():
    """Metric names are built from components; ``reward/a/mean`` must mean one thing."""
    with pytest.raises(RewardDefinitionError, match="a/mean"):
        mrgym.components(**{"a/mean": mrgym.Component()})


# --- model folders --------------------------------------------------------------------------


def test_an_empty_folder_is_no_model(tmp_path):
    message = refused("without config.json", lambda: load_policy(str(tmp_path)))
    assert "save_pretrained" in message


def test_a_folder_of_something_else_is_no_model(tmp_path):
    (tmp_path / "model.gguf").write_text("x")
    refused(re.escape("['model.gguf']"), lambda: load_policy(str(tmp_path)))


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "model.safetensors").write_text("x")
    refused("got a file", lambda: load_policy(str(tmp_path / "model.safetensors")))


@pytest.mark.parametrize("name", ["/no/such/model", "./no_such_model", "a/b/c"])
def test_a_missing_path_is_told_from_a_hub_id(name):
    refused("got no such folder", lambda: load_policy(name))


def test_a_folder_without_weights_is_no_model(small_model, tmp_path):
    copy_of(small_model, tmp_path, without="model.safetensors")
    refused("expected a causal language model", lambda: load_policy(str(tmp_path)))


def test_a_folder_with_broken_files_is_no_model(small_model, tmp_path):
    copy_of(small_model, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor")
    refused("expected a causal language model", lambda: load_policy(str(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    refused("expected a causal language model", lambda: load_policy(str(tmp_path)))


def test_a_folder_without_tokenizer_is_no_model(small_model, tmp_path):
    copy_of(small_model, tmp_path, without="tokenizer")
    refused("with its tokenizer", lambda: load_policy(str(tmp_path)))


@pytest.mark.parametrize("device", ["cpuu", "meta:x", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(small_model, device):
    refused(f"device: got '{device}'", lambda: load_policy(small_model, device=device))


def copy_of(source, target, without=""):
    from pathlib import Path

    for path in Path(source).iterdir():
        if not without or not path.name.startswith(without):
            (target / path.name).write_bytes(path.read_bytes())


# --- run folders ----------------------------------------------------------------------------


def test_a_folder_that_holds_a_run_is_refused(envs, small_config, tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    message = refused(
        "already holds a run", lambda: GDPOTrainer(envs.Letters(), small_config(), out=tmp_path)
    )
    assert "summary.json" in message
    assert "--overwrite" in message
    assert (tmp_path / "summary.json").read_text() == "{}"


def test_overwriting_removes_a_run_and_nothing_else(tmp_path):
    own = ("config.yaml", "metrics.jsonl", "summary.json", "report.html")
    for name in (*own, "notes.md", "data/kept.txt", "rollouts/step_9.jsonl", "checkpoints/x/y"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("old")
    RunFolder(tmp_path, overwrite=True)
    left = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert left == ["data/kept.txt", "metrics.jsonl", "notes.md"]
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_folder_with_unrelated_files_takes_a_run(tmp_path):
    (tmp_path / "notes.md").write_text("mine")
    RunFolder(tmp_path)
    assert (tmp_path / "notes.md").read_text() == "mine"


def test_a_file_is_no_run_folder(tmp_path):
    (tmp_path / "run").write_text("x")
    refused("got a file, expected a folder", lambda: RunFolder(tmp_path / "run"))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    refused("expected a folder to write to", lambda: RunFolder(tmp_path / "file" / "run"))


def test_a_run_that_cannot_start_leaves_no_folder_behind(envs, small_config, tmp_path):
    with pytest.raises(ConfigError):
        GDPOTrainer(envs.Letters(), small_config(weights={"x": 1.0}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_runs_config_can_be_rerun_with_another_estimator(tmp_path):
    """What an estimator implies is not written down, so it does not outlive the estimator."""
    path = tmp_path / "config.yaml"
    path.write_text("env: e\n" + GDPOConfig(weights={"a": 1.0}).to_yaml())
    again = load_config(path, ["estimator=grpo", "weights.a=0.5"])
    assert again.advantage.whiten == "none"
    assert again.advantage.weights == {"a": 0.5}
    assert load_config(path, ["estimator=rloo"]).advantage.baseline == "leave_one_out"
