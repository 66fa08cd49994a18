"""Checkpoints on disk: whole or not at all, which are kept, and disks that are full."""

import errno
import json
import logging
import os
import subprocess
import sys
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

from mrgym.errors import ConfigError
from mrgym_trainers import GDPOTrainer
from mrgym_trainers.gdpo import checkpoint as checkpoint_module
from mrgym_trainers.gdpo import checkpoint_tensors
from mrgym_trainers.gdpo.checkpoint import (
    MANIFEST,
    SaveError,
    TrainerRecord,
    remove,
    step_folder,
    take_snapshot,
    verify,
    write_checkpoint,
)
from mrgym_trainers.gdpo.checkpoint_tensors import load_tensors, trainer_tensors
from mrgym_trainers.gdpo.keeper import BEST, stored_steps
from mrgym_trainers.gdpo.policy import Policy, load_policy
from mrgym_trainers.gdpo.ranks import Ranks
from mrgym_trainers.gdpo.resume import open_run
from mrgym_trainers.gdpo.run_state import RunState
from mrgym_trainers.gdpo.update import make_optimizer


def links(root):
    return os.readlink(root / BEST)


@pytest.fixture
def stepped(policy, small_config):
    """A policy and its optimiser after a step."""
    optimizer = make_optimizer(policy, small_config(weight_decay=0.1))
    for weight in policy.model.parameters():
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    return policy, optimizer


def snapshot_of(policy, optimizer, *, copy=False):
    return take_snapshot(policy, optimizer, TrainerRecord(RunState(step=1), {}), None, copy=copy)


# --- weights and optimiser ------------------------------------------------------------------


def test_weights_and_optimiser_come_back_bit_for_bit(stepped, small_model, small_config, tmp_path):
    policy, optimizer = stepped
    write_checkpoint(tmp_path / "step_000001", snapshot_of(policy, optimizer), policy)
    fresh = load_policy(small_model, device="cpu")
    other = make_optimizer(fresh, small_config(weight_decay=0.1))
    load_tensors(tmp_path / "step_000001" / "state" / "tensors", fresh, other, Ranks())
    one, two = trainer_tensors(policy.model, optimizer), trainer_tensors(fresh.model, other)
    assert one["model"].keys() == two["model"].keys()
    for name, weight in one["model"].items():
        assert torch.equal(weight, two["model"][name])
    for name, state in one["optimizer"].items():
        assert state.keys() == two["optimizer"][name].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, tensor in state.items():
            assert torch.equal(tensor, two["optimizer"][name][key]), (name, key)


def test_an_optimiser_without_a_step_stays_without_one(policy, small_model, small_config, tmp_path):
    """Asking torch for its state would take a step, which bias correction counts."""
    optimizer = make_optimizer(policy, small_config())
    write_checkpoint(tmp_path / "step_000000", snapshot_of(policy, optimizer), policy)
    assert not optimizer.state
    fresh = load_policy(small_model, device="cpu")
    other = make_optimizer(fresh, small_config())
    load_tensors(tmp_path / "step_000000" / "state" / "tensors", fresh, other, Ranks())
    assert not other.state


def test_a_weight_without_state_gets_none(policy, small_model, small_config, tmp_path):
    optimizer = make_optimizer(policy, small_config())
    named = dict(policy.model.named_parameters())
    unused = next(iter(named))
    for name, weight in named.items():
        weight.grad = None if name == unused else torch.ones_like(weight)
    optimizer.step()
    write_checkpoint(tmp_path / "step_000001", snapshot_of(policy, optimizer), policy)
    fresh = load_policy(small_model, device="cpu")
    other = make_optimizer(fresh, small_config())
    load_tensors(tmp_path / "step_000001" / "state" / "tensors", fresh, other, Ranks())
    assert {n for n, w in fresh.model.named_parameters() if w not in other.state} == {unused}


def test_tied_weights_are_written_once_and_load(build, tmp_path):
    tokenizer = build.tokenizer()
    model = build.model(tokenizer, tie_word_embeddings=True)
    policy = Policy(model, tokenizer, "tied")
    snapshot = snapshot_of(policy, torch.optim.AdamW(model.parameters()), copy=True)
    assert "lm_head.weight" not in snapshot.weights
    write_checkpoint(tmp_path / "step_000001", snapshot, policy)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "step_000001", dtype=torch.float32)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_a_copied_snapshot_does_not_follow_training(stepped):
    policy, optimizer = stepped
    snapshot = snapshot_of(policy, optimizer, copy=True)
    before = {name: weight.clone() for name, weight in snapshot.weights.items()}
    steps = [float(s["step"]) for s in snapshot.tensors["optimizer"].values()]
    optimizer.step()
    assert all(torch.equal(before[name], weight) for name, weight in snapshot.weights.items())
    assert [float(s["step"]) for s in snapshot.tensors["optimizer"].values()] == steps


def test_weights_of_another_shape_are_refused_in_a_line(stepped, build, small_config, tmp_path):
    policy, optimizer = stepped
    write_checkpoint(tmp_path / "step_000001", snapshot_of(policy, optimizer), policy)
    tokenizer = build.tokenizer()
    other = Policy(build.gpt2(tokenizer), tokenizer, "gpt2")
    with pytest.raises(ConfigError, match="got weights that do not fit the model") as refused:
        load_tensors(
            tmp_path / "step_000001" / "state" / "tensors",
            other, make_optimizer(other, small_config()), Ranks(),
        )  # fmt: skip
    assert "\n" not in str(refused.value)


# --- whole or not at all --------------------------------------------------------------------


def test_the_manifest_lists_every_file(run, envs):
    folder = step_folder(run(envs.Letters()).folder / "checkpoints", 2)
    manifest = verify(folder)
    held = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert manifest.files.keys() == held - {MANIFEST}
    assert {"model.safetensors", "tokenizer.json", "state/run.json"} <= manifest.files.keys()
    assert (manifest.step, manifest.resumable, manifest.ranks) == (2, True, 1)
    assert not list(folder.parent.glob("*.partial"))


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def alter(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [remove, truncate, alter])
def test_a_damaged_checkpoint_is_never_loaded(run, envs, caplog, damage):
    """Whichever file it is; the one before is taken, and with none left the run is refused."""
    done = run(envs.Letters(), checkpoint_every=1)
    root = done.folder / "checkpoints"
    files = [MANIFEST, *verify(step_folder(root, 2)).files]
    for name in files:
        path = step_folder(root, 2) / name
        data = path.read_bytes()
        damage(path)
        with pytest.raises(ConfigError, match=r"expected a complete checkpoint|schema"):
            verify(step_folder(root, 2))
        assert open_run(done.folder).checkpoint == step_folder(root, 1), name
        path.write_bytes(data)
    assert open_run(done.folder).checkpoint == step_folder(root, 2)
    for step in (1, 2):
        damage(step_folder(root, step) / "state" / "run.json")
    with pytest.raises(ConfigError, match=r"got no good checkpoint \(.*state/run.json"):
        GDPOTrainer(envs.Letters(), resume=done.folder)
    assert "passing over" in caplog.text


def test_an_unknown_schema_is_refused(run, envs):
    folder = step_folder(run(envs.Letters()).folder / "checkpoints", 2)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "schema": 99}))
    with pytest.raises(ConfigError, match="got checkpoint schema 99, expected 1"):
        verify(folder)


# --- which are kept -------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 3, 4, 5]), (1, [5]), (2, [4, 5])])
def test_the_last_checkpoints_are_kept(run, envs, keep, left):
    done = run(envs.Letters(), steps=5, checkpoint_every=1, checkpoint_keep=keep)
    assert stored_steps(done.folder / "checkpoints") == left
    assert not (done.folder / "checkpoints" / BEST).exists()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("metric", ["reward/lower", "reward", "reward_weighted"])
def test_the_best_checkpoint_is_kept_as_well(run, envs, read_metrics, metric, background):
    done = run(
        envs.Letters(), steps=6, eval_every=1, eval_tasks=16, checkpoint_best=metric,
        checkpoint_keep=1, learning_rate=5e-3, checkpoint_async=background,
    )  # fmt: skip
    lines = [line for line in read_metrics(done.folder, "eval") if line["mode"] == "sampled"]
    weights = done.trainer.weights
    values = [
        sum(w * line[f"reward/{n}"] for n, w in weights.items())
        if metric == "reward_weighted"
        else line[metric]
        for line in lines
    ]
    best = values.index(max(values))
    root = done.folder / "checkpoints"
    assert links(root) == f"step_{best:06d}"
    assert stored_steps(root) == sorted({best, 6})
    AutoModelForCausalLM.from_pretrained(root / BEST)


def test_the_best_so_far_is_known_after_a_resume(run, envs, small_config, tmp_path):
    keys = {
        "eval_every": 1, "eval_tasks": 16, "checkpoint_best": "reward/lower", "checkpoint_keep": 1,
        "learning_rate": 5e-3, "lr_schedule": "constant",
    }  # fmt: skip
    whole = run(envs.Letters(), out="whole", steps=6, **keys)
    done = run(envs.Letters(), steps=3, **keys)
    GDPOTrainer(envs.Letters(), small_config(steps=6, **keys), resume=done.folder).train()
    roots = [folder / "checkpoints" for folder in (whole.folder, done.folder)]
    assert links(roots[0]) == links(roots[1])
    assert stored_steps(roots[0]) == stored_steps(roots[1])


def test_an_unknown_metric_is_refused_before_anything_runs(envs, small_config):
    with pytest.raises(ConfigError, match=r"checkpoint_best: got 'reward/lowr'.*did you mean"):
        GDPOTrainer(envs.Letters(), small_config(checkpoint_best="reward/lowr"))


# --- beside training ------------------------------------------------------------------------


def test_async_writes_what_was_when_it_was_asked(run, envs, monkeypatch):
    threads = []
    real = checkpoint_module._export

    def watched(*args):
        threads.append(threading.current_thread().name)
        return real(*args)

    monkeypatch.setattr(checkpoint_module, "_export", watched)
    keys = {"steps": 4, "checkpoint_every": 1, "checkpoint_keep": 0}
    plain = run(envs.Letters(), out="plain", **keys)
    beside = run(envs.Letters(), out="beside", checkpoint_async=True, **keys)
    assert ["mrgym-checkpoint" in name for name in threads] == [False] * 4 + [True] * 4
    for step in range(1, 5):
        folders = [step_folder(r.folder / "checkpoints", step) for r in (plain, beside)]
        models = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in folders]
        pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_an_error_of_the_thread_surfaces(run, envs, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(checkpoint_module, "_export", broken)
    with pytest.raises(ZeroDivisionError, match="boom"):
        run(envs.Letters(), steps=3, checkpoint_every=1, checkpoint_async=True)


# --- full disks -----------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("place", ["export", "tensors", "manifest"])
def test_a_full_disk_does_not_end_the_run(run, envs, monkeypatch, caplog, place, background):
    full = OSError(errno.ENOSPC, "No space left on device")
    owner, name = {
        "export": (checkpoint_module, "_export"),
        "tensors": (checkpoint_tensors.FileSystemWriter, "write_data"),
        "manifest": (checkpoint_module, "write_synced"),
    }[place]
    real, calls = getattr(owner, name), []

    def limited(*args, **options):
        calls.append(args)
        if len(calls) in (2, 3):
            if place == "export":  # in the middle: some of it is there already
                real(*args, **options)
            raise full
        return real(*args, **options)

    monkeypatch.setattr(owner, name, limited)
    with caplog.at_level(logging.ERROR):
        done = run(
            envs.Letters(), steps=5, checkpoint_every=1, checkpoint_keep=1,
            checkpoint_async=background,
        )  # fmt: skip
    assert done.summary["status"] == "finished"
    root = done.folder / "checkpoints"
    assert stored_steps(root) == [5]
    assert not list(root.glob("*.partial"))
    assert caplog.text.count("got No space left on device, expected to write it") == 2
    lines = [json.loads(line) for line in (done.folder / "metrics.jsonl").read_text().splitlines()]
    failed = [line for line in lines if "checkpoint/failed" in line]
    assert [(line["kind"], line["step"], line["checkpoint/failed"]) for line in failed] == [
        ("checkpoint", 2, 1.0), ("checkpoint", 3, 1.0),
    ]  # fmt: skip


def test_the_last_good_checkpoint_survives_a_full_disk(run, envs, monkeypatch):
    real, calls = checkpoint_module._export, []

    def limited(*args):
        calls.append(args)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(checkpoint_module, "_export", limited)
    done = run(envs.Letters(), steps=4, checkpoint_every=1, checkpoint_keep=1)
    assert (done.summary["status"], done.summary["steps"]) == ("finished", 4)
    assert stored_steps(done.folder / "checkpoints") == [1]
    assert open_run(done.folder).record.run.step == 1


LIMITED = """
import resource, sys
from pathlib import Path
import torch
from mrgym_trainers.gdpo.checkpoint import *
from mrgym_trainers.gdpo.policy import load_policy
from mrgym_trainers.gdpo.run_state import RunState

policy = load_policy(sys.argv[1], device="cpu")
optimizer = torch.optim.AdamW(policy.model.parameters())
for weight in policy.model.parameters():
    weight.grad = torch.ones_like(weight)
optimizer.step()
for limit in map(int, sys.argv[2:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    snapshot = take_snapshot(policy, optimizer, TrainerRecord(RunState(step=1), {}), None)
    try:
        write_checkpoint(Path("step_000001"), snapshot, policy)
        print("written")
    except SaveError as error:
        print(error)
"""


def test_files_the_system_refuses_leave_nothing_behind(small_model, tmp_path):
    """A real refusal in the middle of a file: of the export, then of the trainer's own state."""
    size = (os.stat(os.path.join(small_model, "model.safetensors"))).st_size
    limits = [size // 2, size + 4096, 100 * size]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, small_model, *map(str, limits)], cwd=tmp_path,
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert (first.endswith("File too large (os error 27)"), second) == (True, "File too large")
    assert third == "written"
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    verify(tmp_path / "step_000001")


def test_ctrl_c_inside_torchs_writer_is_no_failed_checkpoint(stepped, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    policy, optimizer = stepped
    monkeypatch.setattr(checkpoint_tensors.FileSystemWriter, "write_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "step_000001", snapshot_of(policy, optimizer), policy)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_write_keeps_the_checkpoint_that_is_there(stepped, tmp_path, monkeypatch):
    policy, optimizer = stepped
    folder = tmp_path / "step_000001"
    write_checkpoint(folder, snapshot_of(policy, optimizer), policy)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "write_synced", full)
    with pytest.raises(SaveError, match="No space left on device"):
        write_checkpoint(folder, snapshot_of(policy, optimizer), policy)
    assert verify(folder).step == 1


def test_a_folder_that_cannot_be_written_is_an_error_before_the_first_step(
    envs, small_config, tmp_path, monkeypatch
):
    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("mrgym_trainers.gdpo.run_folder.tempfile.TemporaryFile", read_only)
    with pytest.raises(ConfigError, match=r"got Read-only file system, expected a folder to write"):
        GDPOTrainer(envs.Letters(), small_config(), out=tmp_path / "run")
