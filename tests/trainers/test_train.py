"""Whole runs of a second: what they leave behind, repeat, refuse, and how they end."""

import json
import logging
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import mrgym
from mrgym.errors import ConfigError, RewardContractError, SamplerError, ScoreError, TaskError
from mrgym.wire import read_rollouts
from mrgym_trainers import GDPOConfig, GDPOTrainer, advantages
from mrgym_trainers.advantages import AdvantageConfig, compute_advantages
from mrgym_trainers.gdpo import train as train_module
from mrgym_trainers.gdpo.config import load_config
from mrgym_trainers.gdpo.control import shuffled_scores
from mrgym_trainers.gdpo.update import update
from mrgym_trainers.samplers.transformers import TransformersSampler

SUMMARY_KEYS = {"env", "model", "seed", "steps", "wall_s", "completions", "eval"}


def scores_of(folder, step):
    return [
        (r.task_id, r.token_ids, r.sampler_logprobs, r.components)
        for r in read_rollouts(folder / "rollouts" / f"step_{step:06d}.jsonl")
    ]


# --- what a run leaves ----------------------------------------------------------------------


def test_a_run_folder_is_complete(run, envs, read_metrics):
    done = run(envs.Letters(), steps=3, checkpoint_every=2, rollouts_every=2)
    names = sorted(str(p.relative_to(done.folder)) for p in done.folder.rglob("*step_*"))
    assert [n for n in names if n.startswith("checkpoints") and n.count("/") == 1] == [
        "checkpoints/step_000002", "checkpoints/step_000003",
    ]  # fmt: skip
    assert [n for n in names if n.startswith("rollouts")] == [
        f"rollouts/step_{step:06d}.jsonl" for step in (1, 2, 3)
    ]
    assert not list(done.folder.rglob("*.partial"))
    assert [line["step"] for line in read_metrics(done.folder)] == [1, 2, 3]
    assert load_config(done.folder / "config.yaml").steps == 3


def test_the_checkpoint_is_the_trained_model_for_transformers(run, envs):
    done = run(envs.Letters())
    folder = done.folder / "checkpoints" / "step_000002"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for (name, saved), (_, own) in zip(
        model.named_parameters(), done.trainer.policy.named_tensors(), strict=True
    ):
        assert torch.equal(saved, own), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("say the").input_ids == done.trainer.policy.tokenizer("say the").input_ids


def test_a_checkpoint_is_a_model_to_start_from(run, envs):
    first = run(envs.Letters())
    again = run(envs.Letters(), out="more", model=str(first.folder / "checkpoints" / "step_000002"))
    assert again.summary["eval"]["start"] == first.summary["eval"]["end"]


def test_the_summary_has_the_documented_keys(run, envs):
    done = run(envs.Letters(), seed=3)
    stored = json.loads((done.folder / "summary.json").read_text())
    assert stored == done.summary
    assert stored.keys() >= SUMMARY_KEYS
    assert (stored["env"], stored["seed"], stored["steps"]) == ("Letters", 3, 2)
    assert (stored["completions"], stored["status"]) == (2 * 2 * 4, "finished")
    for moment in ("start", "end"):
        assert stored["eval"][moment].keys() == {"reward/lower", "reward/brief", "reward"}
        means = stored["eval"][moment]
        assert means["reward"] == pytest.approx(means["reward/lower"] + means["reward/brief"])


def test_every_component_and_both_sums_are_logged(run, envs, read_metrics):
    """Case huggingface/trl#5352; huggingface/trl#5353: plain and weighted sum, apart."""
    done = run(envs.Letters(), weights={"lower": 2.0})
    for line in read_metrics(done.folder):
        lower, brief = line["reward/lower/mean"], line["reward/brief/mean"]
        assert line["reward/mean"] == pytest.approx(lower + brief)
        assert line["reward_weighted/mean"] == pytest.approx(2.0 * lower + 0.5 * brief)
        for name in ("lower", "brief"):
            assert line[f"reward/{name}/std"] > 0
            assert 0 <= line[f"advantage/frac_constant/{name}"] <= 1
    assert done.summary["weights"] == {"lower": 2.0, "brief": 0.5}


def test_the_first_on_policy_step_logs_more_than_a_loss_of_zero(run, envs, read_metrics):
    """Case huggingface/trl#3452; #2703; huggingface/open-r1#239.

    On policy the loss is about 0 by construction: norm, advantage and rewards show the signal.
    """
    line = read_metrics(run(envs.Letters()).folder)[0]
    assert abs(line["loss/policy"]) < 0.5  # longer rollouts weigh more
    assert line["loss/grad_norm"] > 1e-3
    assert line["advantage/abs_mean"] > 0.3
    assert line["loss/approx_kl"] == 0.0
    assert line["mismatch/max_abs"] < 1e-4
    assert {"time/sample_s", "time/score_s", "time/update_s", "time/step_s", "lr"} <= line.keys()


def test_stored_rollouts_carry_scores_tokens_and_advantages(run, envs):
    done = run(envs.Letters())
    rollouts = list(read_rollouts(done.folder / "rollouts" / "step_000001.jsonl"))
    assert len(rollouts) == 8
    assert sum(r.advantage for r in rollouts) == pytest.approx(0.0, abs=1e-3)
    for r in rollouts:
        assert r.step == 1
        assert r.components.keys() == r.component_advantages.keys() == {"lower", "brief"}
        assert r.reward == math.fsum(r.components.values())
        assert len(r.token_ids) == len(r.loss_mask) == len(r.sampler_logprobs) > 0


def test_groups_and_weights_are_counted_over_the_run(run, envs):
    done = run(envs.Letters(), rollouts_every=1, steps=3)
    for step in (1, 2, 3):
        rollouts = list(read_rollouts(done.folder / "rollouts" / f"step_{step:06d}.jsonl"))
        assert {r.group for r in rollouts} == {2 * step - 2, 2 * step - 1}
        assert {r.policy_version for r in rollouts} == {step - 1}


def test_the_logged_learning_rate_is_the_optimizers(run, envs, read_metrics, monkeypatch):
    used = []

    def watched(policy, optimizer, *args, **options):
        used.append(optimizer.param_groups[0]["lr"])
        return update(policy, optimizer, *args, **options)

    monkeypatch.setattr(train_module, "update", watched)
    done = run(envs.Letters(), steps=4, warmup_steps=2, lr_schedule="linear", lr_end=0.0)
    assert used == pytest.approx([0.5e-3, 1e-3, 1e-3, 0.5e-3])
    assert [line["lr"] for line in read_metrics(done.folder)] == used


def test_masked_truncated_rollouts_enter_no_statistics(run, envs, read_metrics):
    done = run(envs.Letters(), steps=1, group_size=8, loss={"truncated": "mask"})
    rollouts = list(read_rollouts(done.folder / "rollouts" / "step_000001.jsonl"))
    kept = [r for r in rollouts if not r.truncated]
    assert 0 < len(kept) < len(rollouts)
    assert {r.advantage for r in rollouts if r.truncated} == {0.0}
    columns = {f"reward/{name}": [r.components[name] for r in kept] for name in ("lower", "brief")}
    expected = compute_advantages(
        columns, [r.group for r in kept], AdvantageConfig(weights={"lower": 1.0, "brief": 0.5})
    )
    assert [r.advantage for r in kept] == pytest.approx(list(expected.advantages), abs=1e-9)
    lower = sum(columns["reward/lower"]) / len(kept)
    assert read_metrics(done.folder)[0]["reward/lower/mean"] == pytest.approx(lower)


def test_a_gpt2_with_dropout_trains_as_it_samples(build, run, envs, read_metrics, tmp_path):
    tokenizer = build.tokenizer()
    build.gpt2(tokenizer).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    done = run(envs.Letters(), model=str(tmp_path / "gpt2"))
    assert all(line["mismatch/max_abs"] < 1e-4 for line in read_metrics(done.folder))


def test_nothing_is_written_without_a_folder(envs, small_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    summary = GDPOTrainer(envs.Letters(), small_config()).train()
    assert summary["status"] == "finished"
    assert list(tmp_path.iterdir()) == []


def test_every_task_comes_once_before_any_comes_twice(run, envs):
    done = run(envs.Letters(), steps=4, prompts_per_step=8, group_size=2, rollouts_every=1)
    drawn = [scores_of(done.folder, step)[::2] for step in (1, 2, 3, 4)]
    epochs = [[row[0] for row in drawn[i] + drawn[i + 1]] for i in (0, 2)]
    assert [len(set(epoch)) for epoch in epochs] == [16, 16]
    assert epochs[0] != epochs[1]


def test_evaluations_stand_apart_from_training(run, envs, read_metrics):
    """Case huggingface/trl#5811/#2959/#5790; #4458: one completion a task, no group statistics."""
    done = run(envs.Letters(), steps=4, eval_every=2, eval_tasks=5)
    lines = read_metrics(done.folder, "eval")
    assert [(line["step"], line["mode"]) for line in lines] == [
        (step, mode) for step in (0, 2, 4) for mode in ("sampled", "greedy")
    ]
    for line in lines:
        assert (line["n"], line["failed"]) == (5, 0)
        assert not [key for key in line if "advantage" in key or key.startswith("loss")]
    assert done.summary["completions"] == 4 * 8


# --- the same again -------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_run(run, envs, read_metrics):
    first, second = (run(envs.Letters(), out=out, seed=5) for out in ("a", "b"))
    for kind in ("train", "eval"):
        one, other = (read_metrics(r.folder, kind, times=False) for r in (first, second))
        assert one == other
    assert scores_of(first.folder, 2) == scores_of(second.folder, 2)
    third = run(envs.Letters(), out="c", seed=6)
    assert scores_of(first.folder, 1) != scores_of(third.folder, 1)


def test_evaluations_in_between_change_no_training_step(run, envs, read_metrics):
    often = run(envs.Letters(), out="often", steps=3, eval_every=1, eval_tasks=3)
    never = run(envs.Letters(), out="never", steps=3, eval_every=99)
    assert read_metrics(often.folder, times=False) == read_metrics(never.folder, times=False)


def test_gdpo_and_grpo_differ_in_the_estimator_alone(run, envs):
    gdpo, grpo = (run(envs.Letters(), out=e, estimator=e) for e in ("gdpo", "grpo"))
    configs = [yaml.safe_load((r.folder / "config.yaml").read_text()) for r in (gdpo, grpo)]
    differing = {key for key in configs[0] if configs[0][key] != configs[1][key]}
    assert differing == {"advantage"}
    assert scores_of(gdpo.folder, 1) == scores_of(grpo.folder, 1)
    assert scores_of(gdpo.folder, 2) != scores_of(grpo.folder, 2)
    assert gdpo.summary["eval"]["start"] == grpo.summary["eval"]["start"]
    assert (gdpo.summary["estimator"], grpo.summary["estimator"]) == ("gdpo", "grpo")


def test_rewards_change_what_is_learned(run, envs):
    """Weights reach the update: the same rollouts, other advantages, other weights after."""
    one, other = (
        run(envs.Letters(), out=str(w), weights={"lower": w, "brief": 1.0}) for w in (1.0, -1.0)
    )
    assert scores_of(one.folder, 1) == scores_of(other.folder, 1)
    pairs = zip(one.trainer.policy.named_tensors(), other.trainer.policy.named_tensors())  # noqa: B905
    assert any(not torch.equal(a, b) for (_, a), (_, b) in pairs)


# --- environments of every kind -------------------------------------------------------------


def test_a_multi_turn_environment_trains(run, envs, read_metrics):
    """Case NVIDIA-NeMo/RL#2892; NVIDIA-NeMo/Gym#1664: components arrive on the multi-turn path."""
    done = run(envs.Chat(), steps=3, prompts_per_step=4, rollouts_every=1)
    lines = read_metrics(done.folder)
    assert all(line["reward/long/std"] > 0 for line in lines)
    assert all(line["mismatch/max_abs"] < 1e-4 for line in lines)
    files = sorted((done.folder / "rollouts").iterdir())
    rollouts = [rollout for file in files for rollout in read_rollouts(file)]
    assert {len(r.turns) for r in rollouts} == {1, 2}
    assert any(not all(r.loss_mask) for r in rollouts)
    assert done.summary["completions"] > 3 * 16


def test_an_environment_written_by_hand_trains(run, envs, read_metrics):
    done = run(envs.Stepwise(), steps=2, prompts_per_step=4, group_size=8, eval_tasks=8)
    assert done.summary["env"] == "Stepwise"
    assert all(line["reward/short/std"] > 0 for line in read_metrics(done.folder))
    assert {"reward/digit", "reward/short", "reward"} == done.summary["eval"]["end"].keys()
    seeds = {r.task_id for r in read_rollouts(done.folder / "rollouts" / "step_000001.jsonl")}
    assert len(seeds) == 4


def test_one_component_trains_and_says_so_once(run, envs, caplog):
    advantages._say_single_component.cache_clear()
    with caplog.at_level(logging.WARNING, logger="mrgym"):
        done = run(envs.One(), steps=3)
    assert done.summary["status"] == "finished"
    said = [r.message for r in caplog.records if "got one component" in r.message]
    assert len(said) == 1
    assert "runs as grpo followed by whitening" in said[0]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "dr_grpo", "mo_grpo"])
def test_every_estimator_trains(run, envs, estimator):
    assert run(envs.Letters(), estimator=estimator).summary["status"] == "finished"


@pytest.mark.parametrize(
    "keys",
    [
        {"loss": {"aggregation": "sequence_mean", "truncated": "mask"}},
        {"loss": {"aggregation": "constant", "constant_length": 8}},
        {"advantage": {"whiten": "token"}}, {"updates_per_step": 3}, {"sample_rows": 3},
        {"micro_batch_tokens": 1}, {"lr_schedule": "constant", "warmup_steps": 1},
    ],
)  # fmt: skip
def test_every_way_to_update_trains(run, envs, keys):
    done = run(envs.Letters(), **keys)
    assert done.summary["status"] == "finished"
    assert all(torch.isfinite(t).all() for _, t in done.trainer.policy.named_tensors())


def test_scores_may_be_computed_by_worker_processes(run, read_metrics):
    keys = {"eval_tasks": 8, "max_completion_tokens": 4}
    inline = run("math_multi_reward", out="inline", **keys)
    workers = run("math_multi_reward", out="workers", scoring="workers", **keys)
    one, other = (read_metrics(r.folder, times=False) for r in (inline, workers))
    assert one == other


def test_the_bundled_policy_is_the_default(tmp_path):
    config = GDPOConfig(steps=2, prompts_per_step=4, group_size=4, eval_tasks=8)
    summary = GDPOTrainer("math_multi_reward", config, out=tmp_path / "run").train()
    assert (summary["env"], summary["model"]) == ("math_multi_reward", "tiny")
    assert summary["eval_greedy"]["start"]["reward/format"] > 0.5


# --- scoring that fails ---------------------------------------------------------------------


class Failing(mrgym.SingleTurnEnv):
    """Raises on the completions that ``fails`` picks, in training only where asked."""

    def __init__(self, fails, error=ValueError):
        super().__init__()
        self.calls, self.fails, self.error = 0, fails, error

    def tasks(self, split):
        return [mrgym.Task(prompt=f"{split} {i:03d}: say ", answer=split) for i in range(16)]

    @mrgym.component(low=0, high=1)
    def score(self, task, completion):
        self.calls += task.answer == "train"
        if self.fails(self.calls, task, completion):
            raise self.error("boom")
        return sum(c.islower() for c in completion) / max(len(completion), 1)

    @mrgym.component(low=0, high=1)
    def other(self, task, completion):
        return float(len(completion) > 4)


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def test_scoring_that_always_fails_stops_the_run_with_counts(run, tmp_path):
    with pytest.raises(ScoreError, match=r"got 4 failures in 4 rollouts \(4 x score: ValueError"):
        run(Failing(lambda calls, task, text: True))
    assert summary_of(tmp_path / "run")["status"] == "failed"
    assert summary_of(tmp_path / "run")["steps"] == 0


def test_scoring_that_fails_in_training_stops_the_run_and_keeps_what_was_done(run, tmp_path):
    env = Failing(lambda calls, task, text: calls > 8)
    with pytest.raises(ScoreError, match=r"got 8 failures in 8 rollouts .*expected at most 10%"):
        run(env, steps=5)
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("failed", 1)
    assert (tmp_path / "run" / "checkpoints" / "step_000001" / "model.safetensors").is_file()


def test_mask_trains_on_the_rest_and_counts_the_failures(run, read_metrics):
    """Case NVIDIA-NeMo/RL#2207: invalid is apart from a real 0 and counted."""
    env = Failing(lambda calls, task, text: calls % 4 == 1 and task.answer == "train")
    done = run(env, on_score_error="mask", max_error_rate=0.5)
    assert [line["score/error_rate"] for line in read_metrics(done.folder)] == [0.25, 0.25]
    rollouts = list(read_rollouts(done.folder / "rollouts" / "step_000001.jsonl"))
    failed = [r for r in rollouts if r.status == "error"]
    assert [(r.advantage, r.components) for r in failed] == [(0.0, {})] * 2
    assert any(abs(r.advantage) > 0.1 for r in rollouts if r.status == "ok")


def test_floor_gives_the_least_scores_and_trains(run):
    env = Failing(lambda calls, task, text: calls % 4 == 1 and task.answer == "train")
    done = run(env, on_score_error="floor", max_error_rate=0.5)
    rollouts = list(read_rollouts(done.folder / "rollouts" / "step_000001.jsonl"))
    failed = [r.components for r in rollouts if r.status == "error"]
    assert failed == [{"score": 0.0, "other": 0.0}] * 2


def test_raise_stops_at_the_first_failure(run, tmp_path):
    env = Failing(lambda calls, task, text: calls == 3)
    with pytest.raises(ScoreError, match=r"ValueError.*on_score_error='mask'"):
        run(env, on_score_error="raise")
    assert summary_of(tmp_path / "run")["status"] == "failed"


def test_a_step_of_which_nothing_is_usable_is_skipped_and_counted(run, read_metrics):
    env = Failing(lambda calls, task, text: 0 < calls <= 8)
    lines = read_metrics(run(env, max_error_rate=1.0).folder)
    assert [line["loss/skipped"] for line in lines] == [1.0, 0.0]


def test_a_broken_score_is_no_failed_score(run, tmp_path):
    env = Failing(lambda calls, task, text: calls == 3, error=RewardContractError)
    with pytest.raises(RewardContractError, match="boom"):
        run(env)
    assert summary_of(tmp_path / "run")["status"] == "failed"


def test_a_sampler_that_fails_gives_no_empty_completions(run, envs, tmp_path, monkeypatch):
    """Case Tencent-Hunyuan/UniRL#214; awslabs/agentcore-rl-toolkit#122: raised, not scored 0."""

    def broken(self, *_):
        raise SamplerError("engine: got a crash, expected completions; restart it")

    for name in ("sample", "stream"):
        monkeypatch.setattr(TransformersSampler, name, broken, raising=False)
    with pytest.raises(SamplerError, match="restart it"):
        run(envs.Letters())
    assert summary_of(tmp_path / "run")["completions"] == 0


def test_tasks_that_stand_in_both_splits_are_refused(envs, small_config):
    class Overlap(envs.Letters):
        def tasks(self, split):
            return [mrgym.Task(prompt="same"), mrgym.Task(prompt=split)]

    with pytest.raises(TaskError, match="1 eval tasks that stand in"):
        GDPOTrainer(Overlap(), small_config())


def test_a_wrong_argument_of_the_environment_is_refused(small_config):
    with pytest.raises(mrgym.RegistryError, match=r"signedd.*did you mean 'signed'"):
        GDPOTrainer("math_multi_reward", small_config(), env_kwargs={"signedd": True})


# --- controls -------------------------------------------------------------------------------


def test_the_control_permutes_whole_rows():
    rows = 40
    batch = {
        "reward/a": torch.arange(rows).double(), "present/a": torch.arange(rows) % 3 == 0,
        "reward/b": torch.arange(rows).double() * 10, "present/b": torch.arange(rows) % 2 == 0,
        "valid": torch.ones(rows, dtype=torch.bool), "group_ids": torch.arange(rows) // 4,
        "completion_lengths": torch.arange(rows),
    }  # fmt: skip
    mixed = shuffled_scores(batch, torch.Generator().manual_seed(0))
    order = mixed["reward/a"].long()
    assert sorted(order.tolist()) == list(range(rows))
    assert order.tolist() != list(range(rows))
    for key in ("reward/b", "present/a", "present/b"):
        assert torch.equal(mixed[key], batch[key][order]), key
    for key in ("valid", "group_ids", "completion_lengths"):
        assert torch.equal(mixed[key], batch[key]), key


def test_the_control_gives_no_score_of_a_failed_rollout_away():
    valid = torch.arange(40) % 4 != 0
    batch = {"reward/a": valid.double(), "present/a": valid, "valid": valid}
    mixed = shuffled_scores(batch, torch.Generator().manual_seed(0))
    assert torch.equal(mixed["present/a"], valid)


def test_the_control_keeps_the_means_of_a_step(run, envs, read_metrics):
    plain = run(envs.Letters(), out="plain")
    control = run(envs.Letters(), out="control", shuffle_rewards=True)
    one, other = (read_metrics(r.folder)[0] for r in (plain, control))
    assert scores_of(plain.folder, 1) == scores_of(control.folder, 1)
    for key in ("reward/mean", "reward/lower/mean", "reward/brief/std"):
        assert one[key] == pytest.approx(other[key])
    advantages_of = [
        [r.advantage for r in read_rollouts(run.folder / "rollouts" / "step_000001.jsonl")]
        for run in (plain, control)
    ]
    assert advantages_of[0] != advantages_of[1]


# --- interruption ---------------------------------------------------------------------------


def test_ctrl_c_leaves_checkpoint_and_summary(run, tmp_path, read_metrics):
    env = Failing(lambda calls, task, text: calls == 12, error=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        run(env, steps=50)
    folder = tmp_path / "run"
    summary = summary_of(folder)
    assert (summary["status"], summary["steps"]) == ("interrupted", 1)
    assert summary["eval"]["start"] == summary["eval"]["end"]
    AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "step_000001")
    assert len(read_metrics(folder)) == 1


def test_ctrl_c_in_the_first_evaluation_leaves_a_summary_too(run, tmp_path):
    env = Failing(lambda calls, task, text: task.answer == "eval", error=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        run(env)
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["steps"], summary["eval"]) == ("interrupted", 0, {})
    assert (tmp_path / "run" / "checkpoints" / "step_000000").is_dir()


MY_ENVS = """
import mrgym


class Letters(mrgym.SingleTurnEnv):
    def tasks(self, split):
        return [mrgym.Task(prompt=f"{split} {i:03d}: say ") for i in range(16)]

    @mrgym.component(low=0, high=1)
    def lower(self, task, completion):
        return sum(c.islower() for c in completion) / max(len(completion), 1)

    @mrgym.component(low=-1, high=0)
    def brief(self, task, completion):
        return -min(len(completion), 10) / 10
"""


@pytest.mark.parametrize(
    ("sent", "code", "said", "status"),
    [
        (signal.SIGINT, 1, "interrupted: checkpoint and summary are in run", "interrupted"),
        (signal.SIGTERM, 75, "go on with: mrgym train --resume run", "stopped"),
    ],
)
def test_a_real_signal_ends_mrgym_train_in_order(small_model, tmp_path, sent, code, said, status):
    (tmp_path / "my_envs.py").write_text(MY_ENVS)
    command = [
        sys.executable, "-c", "from mrgym.cli import main; main()", "train", "my_envs:Letters",
        "--out", "run", "--model", small_model, "steps=100000", "prompts_per_step=2",
        "group_size=4", "max_completion_tokens=8", "eval_tasks=4", "device=cpu",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_for_steps(tmp_path / "run" / "metrics.jsonl", process, steps=3)
        process.send_signal(sent)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code
    assert "Traceback" not in err
    assert said in err
    summary = summary_of(tmp_path / "run")
    assert summary["status"] == status
    assert summary["steps"] >= 3
    AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / "checkpoints" / f"step_{summary['steps']:06d}"
    )
    assert (tmp_path / "run" / "report.html").is_file()


def wait_for_steps(path, process, steps):
    """Wait until a run has logged some steps."""
    for _ in range(1200):
        if path.is_file() and path.read_text().count('"kind": "train"') >= steps:
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    raise AssertionError("the run logged no step")


# --- odd input ------------------------------------------------------------------------------


def test_unlimited_evaluation_takes_the_tasks_there_are(run, envs, read_metrics):
    done = run(envs.Letters(), eval_tasks=10_000)
    assert read_metrics(done.folder, "eval")[0]["n"] == 16


def test_more_prompts_than_tasks_come_round_again(run, envs):
    done = run(envs.Letters(), steps=1, prompts_per_step=20, group_size=2)
    ids = [row[0] for row in scores_of(done.folder, 1)[::2]]
    assert (len(ids), len(set(ids))) == (20, 16)


def test_a_weight_of_an_unknown_component_is_refused_before_the_model_is_loaded(envs):
    config = GDPOConfig(model="/no/such/model", weights={"nope": 1.0})
    with pytest.raises(ConfigError, match="nope"):
        GDPOTrainer(envs.Letters(), config)


def test_a_reference_with_other_tokens_is_refused(run, envs, build, tmp_path):
    """Its log-probabilities would be of other words, and the KL term a number without meaning."""
    other = build.tokenizer(bos=True)
    other.add_tokens(["<extra>"])
    folder = tmp_path / "other"
    build.model(other).save_pretrained(folder)
    other.save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"reference_model: got .* with another vocabulary"):
        run(envs.Letters(), loss={"kl_coef": 0.1}, reference_model=str(folder))
