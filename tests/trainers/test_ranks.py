"""Many ranks: the same run as one, whatever they have to do, and a clean end when one dies."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from mrgym.errors import ConfigError, RankError, RewardContractError, TaskError
from mrgym.rollout import Group
from mrgym.wire import read_rollouts
from mrgym_trainers.gdpo.batch import micro_batches
from mrgym_trainers.gdpo.exchange import _decode, _encode
from mrgym_trainers.gdpo.ranks import Ranks, cut, start_ranks
from mrgym_trainers.gdpo.shares import idle_rollout, in_step, own_rows
from mrgym_trainers.tiny_policy import tiny_policy_path

SCRIPT = Path(__file__).with_name("ranks") / "train.py"
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
UNEQUAL = ("time/", "speed/", "memory/", "mismatch/")


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def environment(rank, world, port):
    """Return the variables of a rank, as torchrun or Slurm sets them; none for one rank."""
    base = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    base |= {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    if world == 1:
        return base
    numbers = (str(rank), str(world), str(rank), "127.0.0.1", port)
    return base | dict(zip(VARIABLES, numbers, strict=True))


@pytest.fixture
def start(tmp_path):
    """Starts ranks and returns their processes; what is left of them ends with the test."""
    processes = []

    def begin(world, *arguments, **options):
        port = free_port()
        processes.extend(
            subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                env=environment(rank, world, port),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
                **options,
            )
            for rank in range(world)
        )
        return processes[-world:]

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def config(model, **keys):
    defaults = {
        "model": model, "device": "cpu", "steps": 3, "prompts_per_step": 3, "group_size": 4,
        "max_completion_tokens": 8, "eval_tasks": 3, "learning_rate": 1e-4, "rollouts_every": 1,
        "micro_batch_tokens": 64, "ranks_timeout": 120,
    }  # fmt: skip
    return defaults | keys


@pytest.fixture
def cases(small_model, build, tmp_path):
    """Runs by name; 3 prompts a step are uneven on 2 ranks and leave one of 4 empty."""
    tied = str(tmp_path / "tied")
    tokenizer = build.tokenizer()
    build.gpt2(tokenizer).save_pretrained(tied)
    tokenizer.save_pretrained(tied)
    everything = {
        "loss": {"kl_coef": 0.1, "entropy_coef": 0.01, "aggregation": "sequence_mean"},
        "updates_per_step": 2,
        "gradient_checkpointing": True,
    }
    adapter = {"adapter": {"env": "Letters", "config": config(small_model, lora={"rank": 4})}}
    return (adapter if find_spec("peft") else {}) | {
        "plain": {"env": "Letters", "config": config(small_model)},
        "turns": {"env": "Chat", "config": config(small_model, **everything)},
        "refills": {"env": "Seldom", "config": config(small_model, dynamic_sampling=True)},
        "no signal": {"env": "Equal", "config": config(small_model)},
        "tied": {"env": "Letters", "config": config(tied, shuffle_rewards=True)},
    }


def read(folder, name, world):
    """Return what a run left behind."""
    run = folder / name
    steps = [[*read_rollouts(path)] for path in sorted((run / "rollouts").iterdir())]
    histories = [json.loads((folder / f"{name}-{r}.json").read_text()) for r in range(world)]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    [path] = (run / "checkpoints" / "step_000003").glob("*model.safetensors")
    weights = load_file(path)
    return SimpleNamespace(steps=steps, histories=histories, lines=lines, weights=weights)


def finish(processes, timeout=170):
    ended = time.monotonic() + timeout
    outputs = [p.communicate(timeout=max(ended - time.monotonic(), 1)) for p in processes]
    return [(p.returncode, out, err) for p, (out, err) in zip(processes, outputs, strict=True)]


def columns(steps, *names):
    return [[[getattr(r, name) for name in names] for r in rollouts] for rollouts in steps]


def assert_same_run(one, many):
    """Tokens, scores and advantages bit for bit; losses and weights up to the order of sums."""
    exact = ("task_id", "group", "token_ids", "components", "answer", "advantage")
    assert columns(many.steps, *exact) == columns(one.steps, *exact)
    for history in many.histories:
        assert [line.keys() - times(line) for line in history] == [
            line.keys() - times(line) for line in one.lines
        ]
        for line, expected in zip(history, one.lines, strict=True):
            assert unequal(line, expected) == {}
    assert many.weights.keys() == one.weights.keys()
    for name, tensor in one.weights.items():
        got, expected = learned(name, many.weights[name]), learned(name, tensor)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def learned(name, weight):
    """Return a weight without biases of keys: softmax cancels them, and Adam follows rounding."""
    if name.endswith("attn.c_attn.bias"):
        query, _, value = weight.chunk(3)
        return torch.cat([query, value])
    return weight


def times(line):
    return {key for key in line if key.startswith("time/")}


def unequal(line, expected):
    """Return the metrics that differ by more than 1e-6 (relative, where they are large)."""
    return {
        key: (line[key], value)
        for key, value in expected.items()
        if not key.startswith(UNEQUAL)
        and isinstance(value, float)
        and not math.isclose(line[key], value, rel_tol=1e-6, abs_tol=1e-6)
    }


@pytest.mark.slow
@pytest.mark.parametrize(("world", "names"), [(2, None), (4, ("plain", "turns"))])
def test_ranks_make_the_run_of_one(world, names, cases, start, tmp_path):
    chosen = {name: case for name, case in cases.items() if names is None or name in names}
    for count in (1, world):
        processes = start(count, SCRIPT, tmp_path / str(count), json.dumps(chosen))
        for code, _, err in finish(processes):
            assert code == 0, err
    for name in chosen:
        one, many = (read(tmp_path / str(n), name, n) for n in (1, world))
        assert_same_run(one, many)
        if name != "adapter":
            begun = load_file(Path(chosen[name]["config"]["model"], "model.safetensors"))
            change = max(float((t - begun[key]).abs().max()) for key, t in many.weights.items())
            assert change == 0.0 if name == "no signal" else change > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("env", ["Ending", "Hanging", "Faulty"])
def test_a_rank_that_dies_ends_the_run_of_all(env, small_model, start, tmp_path):
    case = {"run": {"env": env, "config": config(small_model, prompts_per_step=4)}}
    case["run"]["config"]["ranks_timeout"] = 20
    first, last = start(2, SCRIPT, tmp_path / "out", json.dumps(case))
    [(code, _, err)] = finish([first], timeout=120)
    assert code == 3, err
    if env == "Faulty":  # both end with the one's error
        assert "RewardContractError: rank 1: Faulty" in err
        [(code, _, err)] = finish([last])
        assert code == 3, err
        return
    assert "RankError: rank 0 of 2, gathering" in err
    assert "within 20 s; a rank has died or hangs" in err
    assert json.loads((tmp_path / "out/run/summary.json").read_text())["status"] == "failed"
    last.kill()
    assert last.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_the_command_runs_under_torchrun(small_model, start, tmp_path):
    settings = [f"{k}={v}" for k, v in config(small_model, steps=1, eval_tasks=2).items()]
    command = ["train", "math_multi_reward", *settings, "--json"]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    [(code, out, err)] = finish(start(1, *launcher, "-m", "mrgym", *command))
    assert code == 0, err
    [line] = [line for line in out.splitlines() if line.startswith("{")]  # one rank speaks
    assert json.loads(line)["status"] == "finished"
    [folder] = (tmp_path / "runs").iterdir()  # although its name tells the time
    assert (folder / "report.html").is_file()
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in metrics] == ["eval", "eval", "train"] + [
        "eval"
    ] * 2


@pytest.mark.slow
def test_a_signal_to_torchrun_and_all_its_ranks_ends_them_after_a_step(start, tmp_path):
    settings = [f"{k}={v}" for k, v in config("tiny", steps=100_000).items()]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = ["-m", "mrgym", "train", "math_multi_reward", "--out", "run", *settings]
    [process] = start(1, *launcher, *command, start_new_session=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    for _ in range(1200):
        if metrics.is_file() and metrics.read_text().count('"train"') >= 3:
            break
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)  # torchrun hands it on, so each rank gets two
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.count("stopped (SIGTERM) after step") == 1, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert (tmp_path / "run" / "checkpoints" / f"step_{summary['steps']:06d}").is_dir()


@pytest.mark.slow
def test_one_rank_goes_on_with_the_run_of_two(start, tmp_path):
    settings = [
        f"{key}={value}"
        for key, value in config(
            "tiny", lr_schedule="constant", max_completion_tokens=36, learning_rate=1e-3
        ).items()
    ]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    train = ["-m", "mrgym", "train"]
    begin = [*train, "math_multi_reward", *settings, "--json", "--out"]
    commands = (
        [*launcher, *begin, tmp_path / "resumed", "steps=2"],
        [*train, "--resume", tmp_path / "resumed", "steps=4", "--json"],
        [*begin, tmp_path / "whole", "steps=4"],
    )
    for command in commands:
        [(code, _, err)] = finish(start(1, *command))
        assert code == 0, err
    whole, resumed = (tmp_path / name for name in ("whole", "resumed"))
    for step in (1, 2, 3, 4):
        name = f"rollouts/step_{step:06d}.jsonl"
        ids = [[r.token_ids for r in read_rollouts(run / name)] for run in (whole, resumed)]
        assert ids[0] == ids[1], step
    weights = "checkpoints/step_000004/model.safetensors"
    one, many = (load_file(run / weights) for run in (whole, resumed))
    assert all(torch.allclose(one[name], many[name], rtol=0, atol=1e-5) for name in one)
    begun = load_file(tiny_policy_path() / "model.safetensors")
    assert any((many[name] - begun[name]).abs().max() > 1e-4 for name in begun)


# --- parts, in one process -----------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3, 4, 7])
@pytest.mark.parametrize("world", [1, 2, 4, 5])
def test_parts_are_even_and_complete(count, world):
    parts = [range(count)[cut(count, world, rank)] for rank in range(world)]
    assert [i for part in parts for i in part] == [*range(count)]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert len(parts[0]) >= len(parts[-1])  # the one that reports has something to report


def test_rows_are_shared_out_by_tokens(make_rollout):
    lengths = [1, 30, 2, 3, 9, 1, 1, 40, 5, 8]
    rollouts = [make_rollout(tokens=[7] * n) for n in lengths]
    rows = [0, 1, 3, 4, 6, 7, 8, 9]
    for world in (1, 2, 3, 4, 20):
        shares = [own_rows(rows, rollouts, Ranks(rank, world)) for rank in range(world)]
        assert [row for share in shares for row in share] == rows
        tokens = [sum(lengths[row] + 2 for row in share) for share in shares]
        assert max(tokens) <= sum(tokens) / world + max(lengths) + 2


def test_idle_rows_teach_nothing(policy, make_rollout):
    idle = idle_rollout(make_rollout(tokens=(7, 8, 9)))
    [batch] = micro_batches([idle], [0], max_tokens=64)
    logprobs_BT, entropy_BT = policy.batch_logprobs(batch, temperature=1.0)
    assert not logprobs_BT.any()
    assert not entropy_BT.any()
    logprobs_BT.sum().backward()
    grads = [parameter.grad for parameter in policy.model.parameters()]
    # Every layer takes part in the backward pass, in which all ranks gather its weights.
    assert all(grad is not None and not grad.any() for grad in grads)


def test_one_rank_waits_for_nobody():
    ranks = start_ranks()
    assert (ranks.world, ranks.first, ranks.group) == (1, True, None)
    assert ranks.gather(b"x") == [b"x"]
    assert ranks.reduce({"a": 2.0}) == {"a": 2.0}
    assert math.isnan(ranks.most(math.nan))
    assert ranks.channel() is ranks
    assert in_step([], lambda: pytest.fail("nothing to wait for"), ranks) == []
    with pytest.raises(TaskError, match="t: got x"):
        ranks.agree(TaskError("t: got x"))
    ranks.close()
    assert not torch.distributed.is_initialized()


def test_half_a_start_is_refused(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="'MASTER_ADDR', 'MASTER_PORT'"):
        start_ranks(device="cpu")


def test_only_silence_becomes_a_rank_error():
    ranks = Ranks(1, 2, timeout=5)
    told = r"rank 1 of 2, waiting: got RuntimeError .*within 5 s"
    with pytest.raises(RankError, match=told), ranks.answering("waiting"):
        raise RuntimeError("[gloo/pair.cc:553] Connection closed by peer")
    for other in (RuntimeError("shapes differ"), RewardContractError("connection: got x")):
        with pytest.raises(type(other), match=str(other)), ranks.answering("waiting"):
            raise other


def test_an_engine_of_a_rank_starts_alone(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Ranks(1, 2).alone():
        assert not {"RANK", "WORLD_SIZE", "MASTER_PORT"} & os.environ.keys()
    assert os.environ["RANK"] == "1"
    with pytest.raises(ConfigError, match="tensor_parallel_size: got 2"), Ranks(1, 2).alone(2):
        pass


def test_groups_cross_ranks_bit_for_bit(make_rollout):
    rollout = make_rollout(
        logprobs=(-1 / 3, -1e-300, -0.1 - 0.2), components={"a": 0.1 + 0.2}, answer={1, 2}
    )
    [group] = _decode(_encode([Group(5, "t", [rollout])]))
    assert (group.group, group.task_id, group.rollouts[0].answer) == (5, "t", None)
    rollout.answer = None
    assert group.rollouts == [rollout]
