"""What many ranks cost: FSDP2 on one rank against none, 2 ranks against 1, and passing rollouts on.

    python benchmarks/ranks.py [--turns 7] [--steps 5]

1. *Overhead*: forward, backward and optimiser step of the same rows, with a whole policy and with
   one that FSDP2 shards over a group of one process: hooks, gathering and freeing without a
   network. The two take turns; printed is the ratio of the shortest times.
2. *Weak scaling*: steps of the trainer on 1 rank, and on 2 ranks (gloo) with twice the prompts.
   On as many free cores as ranks 1.00 is perfect; each rank has one thread.
3. *Exchange*: bytes and time of encoding and decoding the rollouts that all ranks get.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

SIZES = {"tiny": None, "9M": (320, 7), "40M": (640, 8)}
ROWS, LENGTH = 8, 128


def new_model(name: str, folder: Path) -> str:
    """Return the name or folder of a model: the bundled one, or a random one with its tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from mrgym_trainers.tiny_policy import tiny_policy_path

    shape = SIZES[name]
    if shape is None:
        return "tiny"
    path = folder / name
    if not path.exists():
        tokenizer = AutoTokenizer.from_pretrained(tiny_policy_path())
        torch.manual_seed(0)
        hidden, layers = shape
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=3 * hidden,
            num_hidden_layers=layers, num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 64, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return str(path)


def learner(model: str, *, sharded: bool) -> Callable[[], float]:
    """Return a function that learns from some rows once and returns the seconds it took."""
    from mrgym_trainers.gdpo.policy import load_policy
    from mrgym_trainers.gdpo.sharding import shard

    policy = load_policy(model, device="cpu")
    if sharded:
        shard(policy, 1)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-6)
    ids_BT = torch.randint(3, 20, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))

    def learn() -> float:
        start = time.perf_counter()
        logprobs_BT, _ = policy.logprobs(ids_BT, 16, temperature=1.0)
        logprobs_BT.mean().backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    return learn


def overhead(turns: int, folder: Path) -> None:
    """Print the time of FSDP2 on one rank against none."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print("| policy | whole ms | FSDP2, 1 rank, ms | ratio |\n| --- | ---: | ---: | ---: |")
    for name in SIZES:
        model = new_model(name, folder)
        ways = [learner(model, sharded=sharded) for sharded in (False, True)]
        times = [[learn() for learn in ways] for _ in range(turns + 1)][1:]
        whole, sharded = (min(column) for column in zip(*times, strict=True))
        print(f"| {name} | {1e3 * whole:.1f} | {1e3 * sharded:.1f} | {sharded / whole:.2f} |")
    dist.destroy_process_group()


def trained(model: str, world: int, steps: int, folder: Path) -> dict[str, float]:
    """Return the shortest seconds of the phases of a run's steps."""
    out = folder / f"run-{Path(model).name}-{world}-{time.monotonic_ns()}"
    launcher = [sys.executable]
    if world > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(world)]
    settings = {
        "model": model, "device": "cpu", "steps": steps + 1, "prompts_per_step": 8 * world,
        "group_size": 8, "eval_tasks": 1, "max_completion_tokens": 36, "lr_schedule": "constant",
        "learning_rate": 1e-6, "loss.entropy_coef": 1e-6,  # which learns from every rollout
    }  # fmt: skip
    command = ["-m", "mrgym.cli", "train", "math_multi_reward", "--out", str(out), "--json"]
    command += [f"{key}={value}" for key, value in settings.items()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, *command], env=environment, check=True, capture_output=True)
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    found = [line for line in lines if line["kind"] == "train"][1:]
    keys = ("step", "draw", "update", "sync")
    return {key: min(line[f"time/{key}_s"] for line in found) for key in keys}


def weak_scaling(steps: int, folder: Path) -> None:
    """Print the time of steps on 1 and 2 ranks, with the same work a rank."""
    print("\n| policy | ranks | step s | draw | update | sync | efficiency |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name in ("tiny", "9M"):
        model = new_model(name, folder)
        turns = [{world: trained(model, world, steps, folder) for world in (1, 2)} for _ in "ab"]
        best = {n: min((turn[n] for turn in turns), key=lambda t: t["step"]) for n in (1, 2)}
        for world, found in best.items():
            cells = " | ".join(f"{seconds:.3f}" for seconds in found.values())
            print(f"| {name} | {world} | {cells} | {best[1]['step'] / found['step']:.2f} |")


def exchange() -> None:
    """Print what passing rollouts on costs a rank, beside the network."""
    from mrgym.rollout import Group, Rollout
    from mrgym_trainers.gdpo.exchange import _decode, _encode

    tokens, logprobs = [*range(1000, 2000)], [-(i % 97) / 31 for i in range(1000)]
    groups = [
        Group(g, "task", [
            Rollout("task", g, i, prompt_token_ids=tokens[:100], token_ids=tokens,
                    loss_mask=[True] * 1000, sampler_logprobs=logprobs)
            for i in range(8)
        ])
        for g in range(16)
    ]  # fmt: skip
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        message = _encode(groups)
        middle = time.perf_counter()
        _decode(message)
        seconds.append((middle - start, time.perf_counter() - middle))
    made, read = (statistics.median(column) for column in zip(*seconds, strict=True))
    count = 16 * 8 * 1000 / 1e6
    print(
        f"\nexchange, a million sampled tokens: {len(message) / count / 1e6:.1f} MB, "
        f"{1e3 * made / count:.0f} ms to encode, {1e3 * read / count:.0f} ms to decode"
    )


def main() -> None:
    """Run all three."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        overhead(args.turns, Path(folder))
        weak_scaling(args.steps, Path(folder))
    exchange()


if __name__ == "__main__":
    main()
