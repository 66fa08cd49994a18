"""Going on with a run: bit for bit as if nothing had happened, and never with another run."""

import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

import mrgym
from mrgym.errors import ConfigError
from mrgym.wire import read_rollouts
from mrgym_trainers import GDPOTrainer
from mrgym_trainers.gdpo import train as train_module
from mrgym_trainers.gdpo.checkpoint import MANIFEST, read_record, step_folder, verify
from mrgym_trainers.gdpo.draw import TaskOrder
from mrgym_trainers.gdpo.keeper import stored_steps
from mrgym_trainers.gdpo.resume import open_run
from mrgym_trainers.gdpo.stopping import STOPPED_EXIT_CODE, Stopping

EVERY_STEP = {"steps": 6, "checkpoint_every": 1, "checkpoint_keep": 0, "rollouts_every": 1}


class StoppedError(Exception):
    """Ends a run in the middle."""


@pytest.fixture
def stop_after(monkeypatch):
    """Makes training end by an exception in the update of the step after the given one."""
    real = train_module.update

    def arrange(step):
        calls = iter(range(1, 1000))

        def update(*args, **options):
            if next(calls) > step:
                raise StoppedError
            return real(*args, **options)

        monkeypatch.setattr(train_module, "update", update)
        return lambda: monkeypatch.setattr(train_module, "update", real)

    return arrange


@pytest.fixture
def halves(run, small_config, tmp_path, stop_after):
    """Trains a run that breaks after a step and resumes it; returns the second trainer."""

    def train(env, *, after, out="halves", resumed_env=None, more=None, **keys):
        mend = stop_after(after)
        with pytest.raises(StoppedError):
            run(env, out=out, **keys)
        mend()
        config = small_config(**{**keys, **(more or {})})
        again = env if resumed_env is None else resumed_env
        trainer = GDPOTrainer(again, config, resume=tmp_path / out)
        trainer.train()
        return trainer

    return train


def untimed(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "speed/", "memory/")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]


def tokens(folder):
    files = sorted((folder / "rollouts").iterdir())
    return [
        (r.task_id, r.group, r.policy_version, r.token_ids, r.sampler_logprobs, r.advantage)
        for file in files
        for r in read_rollouts(file)
    ]


def tensors(checkpoint):
    """Everything that torch's reader finds in a checkpoint, by name."""
    from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state = {}
    _load_state_dict(
        state,
        storage_reader=FileSystemReader(checkpoint / "state" / "tensors"),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    flat = {}

    def walk(value, name):
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{name}.{key}")
        else:
            flat[name] = value

    walk(state, "")
    return flat


def assert_same_run(one, other, step):
    assert untimed(one) == untimed(other)
    assert tokens(one) == tokens(other)
    first, second = (tensors(step_folder(f / "checkpoints", step)) for f in (one, other))
    assert first.keys() == second.keys()
    assert any(name.startswith(".optimizer.") for name in first)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    states = [
        json.loads((step_folder(f / "checkpoints", step) / "state/rank_00000.json").read_text())
        for f in (one, other)
    ]
    assert states[0] == states[1]


# --- the same run ---------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 4])
def test_a_resumed_run_is_the_uninterrupted_one(run, envs, halves, tmp_path, after):
    keys = {**EVERY_STEP, "weight_decay": 0.1, "eval_every": 2, "lr_end": 0.0}
    run(envs.Letters(), out="whole", **keys)
    halves(envs.Letters(), after=after, **keys)
    assert_same_run(tmp_path / "whole", tmp_path / "halves", 6)
    summaries = [
        json.loads((tmp_path / f / "summary.json").read_text()) for f in ("whole", "halves")
    ]
    for summary in summaries:
        summary.pop("wall_s")
    assert summaries[0] == summaries[1]


@pytest.mark.parametrize(
    "keys",
    [
        {"shuffle_rewards": True},
        {"dynamic_sampling": True, "group_size": 2},
        {"updates_per_step": 2, "loss": {"kl_coef": 0.1}},
        {"estimator": "lagrangian", "advantage": {"constraints": {"lower": {"at_least": 0.9}}}},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "master_weights": False},
        {"checkpoint_async": True},
    ],
    ids=lambda keys: "-".join(map(str, keys)),
)
def test_every_state_of_a_run_is_kept(run, envs, halves, tmp_path, keys):
    keys = {**EVERY_STEP, "steps": 4, "checkpoint_every": 2, **keys}
    run(envs.Letters(), out="whole", **keys)
    halves(envs.Letters(), after=3, **keys)
    assert_same_run(tmp_path / "whole", tmp_path / "halves", 4)


def test_the_estimators_state_goes_on(run, envs, halves, tmp_path):
    keys = {
        **EVERY_STEP, "estimator": "lagrangian",
        "advantage": {"constraints": {"lower": {"at_least": 0.9}}},
    }  # fmt: skip
    trainer = halves(envs.Letters(), after=3, **keys)
    third, sixth = (
        read_record(step_folder(tmp_path / "halves" / "checkpoints", s)).run for s in (3, 6)
    )
    assert third.estimator.keys() == sixth.estimator.keys() != set()
    assert third.estimator != sixth.estimator
    assert sixth.estimator == trainer._estimator_state


class Counting(mrgym.SingleTurnEnv):
    """Scores by how often it was asked, and draws from every global generator."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def tasks(self, split):
        return [mrgym.Task(prompt=f"{split} {i:03d}: say ") for i in range(16)]

    @mrgym.component(low=0, high=1)
    def odd(self, task, completion):
        self.asked += 1
        return (self.asked * 7919 % 101) / 101

    @mrgym.component(low=0, high=3)
    def noise(self, task, completion):
        return random.random() + float(np.random.random()) + float(torch.rand(()))


class Remembering(Counting):
    def get_state(self):
        return {"asked": self.asked}

    def set_state(self, state):
        self.asked = state["asked"]


def test_environment_state_and_global_generators_go_on(run, halves, tmp_path):
    keys = {**EVERY_STEP, "steps": 4}
    run(Remembering(), out="whole", **keys)
    halves(Remembering(), resumed_env=Remembering(), after=2, **keys)
    assert_same_run(tmp_path / "whole", tmp_path / "halves", 4)


def test_an_environment_state_without_a_json_form_is_refused(run):
    class Odd(Remembering):
        def get_state(self):
            return object()

    with pytest.raises(ConfigError, match=r"Odd: get_state: got a value without a JSON form"):
        run(Odd())


def test_no_task_is_skipped_or_repeated(run, envs, halves, tmp_path):
    keys = {**EVERY_STEP, "steps": 6, "prompts_per_step": 5, "group_size": 2}
    halves(envs.Letters(), after=4, **keys)
    drawn = [row[0] for row in tokens(tmp_path / "halves")[::2]]
    order = TaskOrder(envs.Letters().task_source("train"), 0)
    assert drawn == [order.next().id for _ in range(30)]
    assert [row[1] for row in tokens(tmp_path / "halves")[::2]] == list(range(30))


def test_a_run_may_be_made_longer(run, envs, small_config, tmp_path, read_metrics):
    run(envs.Letters(), steps=2, lr_schedule="constant")
    run(envs.Letters(), out="long", steps=4, lr_schedule="constant")
    GDPOTrainer(
        envs.Letters(), small_config(steps=4, lr_schedule="constant"), resume=tmp_path / "run"
    ).train()
    one, other = (read_metrics(tmp_path / f, times=False) for f in ("run", "long"))
    assert one == other
    assert open_run(tmp_path / "run").config.steps == 4


def test_resuming_a_finished_run_changes_nothing(run, envs, tmp_path):
    done = run(envs.Letters())
    before = (done.folder / "metrics.jsonl").read_bytes()
    summary = GDPOTrainer(envs.Letters(), resume=done.folder).train()
    assert (done.folder / "metrics.jsonl").read_bytes() == before
    assert summary["status"] == "finished"
    assert summary["eval"] == done.summary["eval"]
    assert summary["wall_s"] >= done.summary["wall_s"]


def test_an_interrupted_evaluation_is_made_up_for(run, envs, small_config, tmp_path, monkeypatch):
    keys = {**EVERY_STEP, "steps": 4, "eval_every": 2}
    run(envs.Letters(), out="whole", **keys)
    real = GDPOTrainer._evaluate

    def interrupted(self, sampler, view, *, step):
        if step == 2:
            raise KeyboardInterrupt
        return real(self, sampler, view, step=step)

    monkeypatch.setattr(GDPOTrainer, "_evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(envs.Letters(), out="halves", **keys)
    monkeypatch.undo()
    GDPOTrainer(envs.Letters(), small_config(**keys), resume=tmp_path / "halves").train()
    assert_same_run(tmp_path / "whole", tmp_path / "halves", 4)


def test_weights_of_an_interrupted_update_are_kept_but_not_resumed_from(
    run, envs, tmp_path, monkeypatch, caplog
):
    real = torch.optim.AdamW.step
    calls = iter(range(1, 100))

    def torn(self, *args, **options):
        if next(calls) == 4:
            raise KeyboardInterrupt
        return real(self, *args, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", torch.optim.Optimizer.profile_hook_step(torn))
    with pytest.raises(KeyboardInterrupt):
        run(envs.Letters(), steps=6, checkpoint_every=2)
    root = tmp_path / "run" / "checkpoints"
    assert stored_steps(root) == [2, 3]
    assert not verify(step_folder(root, 3)).resumable
    assert open_run(tmp_path / "run").checkpoint == step_folder(root, 2)
    assert "interrupted in an update" in caplog.text
    monkeypatch.undo()
    GDPOTrainer(envs.Letters(), resume=tmp_path / "run").train()
    run(envs.Letters(), out="whole", steps=6, checkpoint_every=2)
    assert_same_run(tmp_path / "whole", tmp_path / "run", 6)
    assert stored_steps(root) == [4, 6]


def test_a_run_without_a_checkpoint_begins_again(run, envs, small_config, tmp_path, caplog):
    whole = run(envs.Letters(), out="whole")
    folder = tmp_path / "killed"
    folder.mkdir()
    (folder / "config.yaml").write_bytes((whole.folder / "config.yaml").read_bytes())
    (folder / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n{"kind":')
    (folder / "checkpoints" / "step_000001.partial").mkdir(parents=True)
    GDPOTrainer(envs.Letters(), resume=folder).train()
    assert untimed(folder) == untimed(whole.folder)
    assert "got no checkpoint, so the run begins again at step 0" in caplog.text
    assert stored_steps(folder / "checkpoints") == [2]
    assert not list(folder.rglob("*.partial"))


# --- another run ----------------------------------------------------------------------------


class Wider(mrgym.SingleTurnEnv):
    """As Letters, with another range."""

    def tasks(self, split):
        return [mrgym.Task(prompt=f"{split} {i:03d}: say ") for i in range(16)]

    @mrgym.component(low=0, high=2)
    def lower(self, task, completion):
        return sum(c.islower() for c in completion) / max(len(completion), 1)

    @mrgym.component(low=-1, high=0, weight=0.5)
    def brief(self, task, completion):
        return -min(len(completion), 10) / 10


class Third(Wider):
    @mrgym.component(low=0, high=1)
    def third(self, task, completion):
        return 0.5


class Fewer(Wider):
    def tasks(self, split):
        return [mrgym.Task(prompt=f"{split} {i:03d}: say ") for i in range(15)]


@pytest.mark.parametrize(
    ("env", "keys", "told", "dropped"),
    [
        ("Wider", {"seed": 4}, "seed = 4, not 0", "random states, the position in the tasks"),
        ("Wider", {"estimator": "grpo"}, "advantage.estimator = 'grpo', not 'gdpo'",
         "the estimator's state"),
        ("Wider", {"weights": {"brief": 2.0}}, "advantage.weights.brief = 2.0, not 0.5",
         "the estimator's state"),
        ("Wider", {"learning_rate": 2e-3}, "learning_rate = 0.002, not 0.001",
         "nothing, but as another run"),
        ("Fewer", {}, "tasks = '15 tasks of hash", "the position in the tasks"),
        ("Third", {}, "components.third = 'low=0, high=1", "the estimator's state"),
        ("Letters", {}, "components.lower = 'low=0, high=1, ", "the environment's state"),
        ("Chat", {}, "env = 'Chat', not 'Wider'", "the environment's state"),
    ],
)  # fmt: skip
def test_another_run_is_refused_and_named(
    run, envs, small_config, tmp_path, caplog, env, keys, told, dropped
):
    run(Wider())
    other = {"Wider": Wider, "Third": Third, "Fewer": Fewer}.get(env) or getattr(envs, env)
    config = small_config(steps=3, **keys)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError) as refused:
        GDPOTrainer(other(), config, resume=tmp_path / "run")
    message = str(refused.value)
    assert "\n" not in message
    assert told in message
    assert "expected the run of step_000002; change it back, or pass --force" in message
    assert dropped in message
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    with caplog.at_level(logging.WARNING):
        trainer = GDPOTrainer(other(), config, resume=tmp_path / "run", force=True)
    assert "--force drops" in caplog.text
    assert dropped in caplog.text
    assert trainer.train()["steps"] == 3


def test_another_model_is_refused_and_with_force_starts_from_its_own_weights(
    run, envs, build, small_config, tmp_path, caplog
):
    run(envs.Letters())
    tokenizer = build.tokenizer()
    build.gpt2(tokenizer).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    config = small_config(model=str(tmp_path / "gpt2"), steps=3)
    with pytest.raises(ConfigError, match=r"weights = .*; model = .*drops weights and optimiser"):
        GDPOTrainer(envs.Letters(), config, resume=tmp_path / "run")
    trainer = GDPOTrainer(envs.Letters(), config, resume=tmp_path / "run", force=True)
    assert "--force drops weights and optimiser state" in caplog.text
    assert trainer.train()["steps"] == 3


def test_arguments_of_the_environment_are_compared(small_config, tmp_path):
    keys = {"eval_tasks": 8, "max_completion_tokens": 4}
    given = {"env_kwargs": {"signed": True}}
    GDPOTrainer("math_multi_reward", small_config(**keys), out=tmp_path / "run", **given).train()
    with pytest.raises(ConfigError, match=r"env_args.signed = nothing, not True"):
        GDPOTrainer("math_multi_reward", resume=tmp_path / "run")
    again = GDPOTrainer("math_multi_reward", resume=tmp_path / "run", **given)
    assert again.train()["status"] == "finished"


def test_what_changes_no_step_may_differ(run, envs, small_config, tmp_path):
    run(envs.Letters())
    config = small_config(
        steps=3, eval_every=7, eval_tasks=3, rollouts_every=1, checkpoint_every=1,
        checkpoint_keep=5, checkpoint_async=True, time_limit=60.0,
    )  # fmt: skip
    assert GDPOTrainer(envs.Letters(), config, resume=tmp_path / "run").train()["steps"] == 3


def test_fewer_steps_than_are_done_are_refused(run, envs, small_config, tmp_path):
    run(envs.Letters(), steps=3)
    with pytest.raises(ConfigError, match="got steps=2, expected at least the 3"):
        GDPOTrainer(envs.Letters(), small_config(steps=2), resume=tmp_path / "run")


def test_an_earlier_checkpoint_is_resumed_by_force_alone(run, envs, small_config, tmp_path, caplog):
    done = run(envs.Letters(), **EVERY_STEP)
    third = step_folder(done.folder / "checkpoints", 3)
    with pytest.raises(ConfigError, match=r"checkpoints of steps \[4, 5, 6\] after it"):
        GDPOTrainer(envs.Letters(), resume=third)
    run(envs.Letters(), out="whole", **EVERY_STEP)
    GDPOTrainer(envs.Letters(), resume=third, force=True).train()
    assert "--force drops later checkpoints" in caplog.text
    assert_same_run(tmp_path / "whole", done.folder, 6)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"out": "elsewhere"}, "got another run folder elsewhere, expected the same"),
        ({"overwrite": True}, "got overwrite as well"),
    ],
)
def test_options_that_contradict_resume_are_refused(run, envs, options, told):
    done = run(envs.Letters())
    with pytest.raises(ConfigError, match=told):
        GDPOTrainer(envs.Letters(), resume=done.folder, **options)


def test_a_folder_that_holds_no_run_is_refused(envs, tmp_path):
    with pytest.raises(ConfigError, match=r"got no config.yaml there, expected a run folder"):
        GDPOTrainer(envs.Letters(), resume=tmp_path)


def test_metrics_that_are_shorter_than_the_checkpoint_says_are_refused(run, envs):
    done = run(envs.Letters())
    os.truncate(done.folder / "metrics.jsonl", 10)
    with pytest.raises(ConfigError, match=r"metrics.jsonl: got 10 bytes, expected at least"):
        GDPOTrainer(envs.Letters(), resume=done.folder).train()


# --- stopping in time -----------------------------------------------------------------------


def test_a_request_stops_after_the_step_and_can_be_gone_on_from(
    run, envs, small_config, tmp_path, monkeypatch
):
    keys = {**EVERY_STEP, "checkpoint_every": 0, "eval_every": 3}
    run(envs.Letters(), out="whole", **keys)
    trainer = GDPOTrainer(envs.Letters(), small_config(**keys), out=tmp_path / "halves")
    real = train_module.update

    def asked(*args, **options):
        if trainer._steps_done == 2:
            trainer.recovery.stopping.request("SIGTERM")
        return real(*args, **options)

    monkeypatch.setattr(train_module, "update", asked)
    summary = trainer.train()
    assert (summary["status"], summary["steps"]) == ("stopped", 3)
    assert [line["step"] for line in untimed(tmp_path / "halves")][-1] == 3
    assert untimed(tmp_path / "halves")[-1]["kind"] == "train"  # evaluated when it goes on
    monkeypatch.undo()
    GDPOTrainer(envs.Letters(), small_config(**keys), resume=tmp_path / "halves").train()
    assert_same_run(tmp_path / "whole", tmp_path / "halves", 6)


def test_the_time_limit_leaves_time_for_a_step_and_a_save(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("mrgym_trainers.gdpo.stopping.time.monotonic", lambda: now[0])
    stopping = Stopping(1.0)
    now[0] += 20
    stopping.begin()
    seen = []
    for seconds in (5, 10, 5, 5):
        seen.append(stopping.due())
        now[0] += seconds
    assert seen == [False] * 4
    assert stopping.due()  # 45 s, and the longest step took 10: 65 s are more than there are
    assert stopping.reason == "time limit of 1 min"
    assert not Stopping().due()


def test_a_time_limit_that_is_up_stops_before_the_first_step(run, envs):
    done = run(envs.Letters(), time_limit=1e-6)
    assert (done.summary["status"], done.summary["steps"]) == ("stopped", 0)


# --- the command line -----------------------------------------------------------------------

MY_ENV = """
import mrgym


class Letters(mrgym.SingleTurnEnv):
    def __init__(self, size=16, **options):
        super().__init__(**options)
        self.size = size

    def tasks(self, split):
        return [mrgym.Task(prompt=f"{split} {i:03d}: say ") for i in range(self.size)]

    @mrgym.component(low=0, high=1)
    def lower(self, task, completion):
        return sum(c.islower() for c in completion) / max(len(completion), 1)

    @mrgym.component(low=-1, high=0)
    def brief(self, task, completion):
        return -min(len(completion), 10) / 10
"""


@pytest.fixture
def command(small_model, tmp_path):
    """Runs ``mrgym train`` in a folder with an environment of its own."""
    (tmp_path / "my_env.py").write_text(MY_ENV)

    def start(*args):
        code = "from mrgym.cli import main; main()"
        return subprocess.Popen(
            [sys.executable, "-c", code, "train", *map(str, args)], cwd=tmp_path, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        )  # fmt: skip

    def run(*args):
        process = start(*args)
        out, err = process.communicate(timeout=180)
        return process.returncode, out, err

    run.start = start
    run.quick = (
        f"model={small_model}", "device=cpu", "prompts_per_step=2", "group_size=4",
        "max_completion_tokens=8", "eval_tasks=4", "learning_rate=1e-3",
    )  # fmt: skip
    return run


@pytest.mark.slow
def test_the_command_stops_by_its_own_code_and_goes_on(command, tmp_path):
    args = ("my_env:Letters", "-e", "size=12", "--out", "run", *command.quick)
    code, _, err = command(*args, "steps=4", "time_limit=1e-6")
    assert code == STOPPED_EXIT_CODE
    assert "stopped (time limit of 1e-06 min) after step 0" in err
    assert "go on with: mrgym train --resume run" in err
    code, out, err = command("--resume", "run", "time_limit=null", "--json")
    assert (code, json.loads(out)["status"]) == (0, "finished"), err
    code, out, err = command("--resume", "run", "seed=1", "steps=6")
    assert code == 2
    assert re.search(
        r"error: resume run: got seed = 1, not 0, expected the run of step_000004", err
    )
    code, _, err = command("my_env:Letters", "-e", "size=13", "--resume", "run")
    assert code == 2
    assert "env_args.size = 13, not 12" in err
    code, out, err = command("--resume", "run", "--force", "seed=1", "steps=5", "--json")
    assert (code, json.loads(out)["steps"]) == (0, 5), err
    assert "--force drops" in err


# --- killed at any moment -------------------------------------------------------------------

KILLED = textwrap.dedent(
    """
    import json, os, random, signal, sys, time
    import torch

    torch.set_num_threads(1)
    from mrgym_trainers import GDPOConfig, GDPOTrainer
    from mrgym_trainers.gdpo import checkpoint
    from my_env import Letters

    model = sys.argv[1]
    config = GDPOConfig(
        model=model, device="cpu", steps=12, prompts_per_step=2, group_size=4,
        max_completion_tokens=8, eval_tasks=4, learning_rate=1e-3, checkpoint_every=2,
        rollouts_every=1, eval_every=5,
    )

    def child(work):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                work()
                code = 0
            finally:
                os._exit(code)
        return pid

    def ended(pid):
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def begin(folder):
        return lambda: GDPOTrainer(Letters(), config, out=folder).train()

    def go_on(folder):
        return lambda: GDPOTrainer(Letters(), config, resume=folder).train()

    def killed_while_saving(folder, at):
        real, files = checkpoint._sync, []

        def dying(path):
            files.append(path)
            if len(files) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(path)

        checkpoint._sync = dying
        GDPOTrainer(Letters(), config, out=folder).train()

    start = time.monotonic()
    assert ended(child(begin("whole"))) == 0
    whole = time.monotonic() - start
    rng = random.Random(7)
    report = []
    for i in range(10):
        pid = child(begin(f"killed-{i}"))
        time.sleep(rng.uniform(0.05, 0.95) * whole)
        os.kill(pid, signal.SIGKILL)
        first, kills = ended(pid), 1
        if not os.path.exists(f"killed-{i}/config.yaml"):
            os.system(f"rm -r killed-{i}")
            assert ended(child(begin(f"killed-{i}"))) == 0
        elif i % 2:  # killed once more
            pid = child(go_on(f"killed-{i}"))
            time.sleep(rng.uniform(0.05, 0.95) * whole)
            os.kill(pid, signal.SIGKILL)
            kills += ended(pid) == -signal.SIGKILL
            assert ended(child(go_on(f"killed-{i}"))) == 0
        else:
            assert ended(child(go_on(f"killed-{i}"))) == 0
        report.append([f"killed-{i}", first])
    for at in (3, 9, 14, 25, 31):
        folder = f"saving-{at}"
        pid = child(lambda: killed_while_saving(folder, at))
        first = ended(pid)
        partial = [n for n in os.listdir(f"{folder}/checkpoints") if n.endswith(".partial")]
        assert partial, folder
        assert ended(child(go_on(folder))) == 0
        report.append([folder, first])
    print(json.dumps(report))
    """
)


@pytest.mark.slow
def test_killed_at_random_moments_the_run_is_the_uninterrupted_one(small_model, tmp_path):
    """Parameters, optimiser, metrics and tokens, bit for bit; killed while saving as well."""
    (tmp_path / "my_env.py").write_text(MY_ENV)
    (tmp_path / "killed.py").write_text(KILLED)
    done = subprocess.run(
        [sys.executable, "killed.py", small_model], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}, timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert sum(code == -signal.SIGKILL for _, code in report[:10]) >= 7
    assert all(code == -signal.SIGKILL for _, code in report[10:])
    for folder, _ in report:
        assert_same_run(tmp_path / "whole", tmp_path / folder, 12)
        assert stored_steps(tmp_path / folder / "checkpoints") == [10, 12]
        assert not list((tmp_path / folder).rglob("*.partial"))
        assert json.loads((tmp_path / folder / "summary.json").read_text())["steps"] == 12
    assert (tmp_path / "whole" / "checkpoints" / "step_000012" / MANIFEST).is_file()
