"""The parts of gpu_check.py: each returns figures, and as "failed" what was not as it must be."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["PARTS", "Values", "size_of"]

PEAKS = {
    "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12,
    "L40S": 362e12, "L40": 181e12, "L4": 121e12, "4090": 165e12,
}  # fmt: skip
"""Dense bfloat16 operations a second, from data sheets."""

Values = dict[str, Any]
GIB = 2**30


@dataclass(frozen=True)
class Size:
    """How large everything is: on a GPU, or as a toy on the CPU."""

    device: str
    folder: str
    model: Values
    rows: int
    tokens: int
    repeats: int
    prompts: int
    completion: int
    logprob_tokens: int
    learn_steps: int

    @property
    def dtype(self) -> str:
        """What the model computes in: a CPU without bfloat16 units would prove nothing."""
        return "bfloat16" if self.device == "cuda" else "float32"


def size_of(device: str, folder: str) -> Size:
    """Return the size that suits a device."""
    if device == "cuda":
        import torch

        large = torch.cuda.get_device_properties(0).total_memory > 40 * GIB
        half_billion = {
            "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936,
        }  # fmt: skip
        return Size("cuda", folder, half_billion, 8 if large else 2, 1024, 10, 32, 128, 4096, 60)
    toy = {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    }  # fmt: skip
    return Size("cpu", folder, toy, 4, 64, 2, 4, 12, 128, 2)


def model(size: Size) -> Values:
    """Make a random Qwen2 model, and save it with the tokenizer of the tiny policy."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from mrgym_trainers.tiny_policy import tiny_policy_path

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_policy_path()))
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(
        **size.model, **ends, bos_token_id=None, tie_word_embeddings=True,
        max_position_embeddings=2048, dtype="float32",
    )  # fmt: skip
    qwen2 = Qwen2ForCausalLM(config)
    # As it is initialised it would repeat its last token for good. Here layers outweigh the
    # embedding, and logits have a standard deviation near 3, as those of trained models.
    for name, weight in qwen2.named_parameters():
        if weight.dim() == 2:
            scale = 3 if "embed" in name else 1
            weight.data.normal_(0, scale / weight.shape[1] ** 0.5)
    qwen2.save_pretrained(size.folder)
    tokenizer.save_pretrained(size.folder)
    return {"parameters": sum(weight.numel() for weight in qwen2.parameters())}


def train(size: Size) -> Values:
    """Measure forward and backward of Policy.logprobs, float32 weights computing in bfloat16."""
    import torch

    policy = _policy(size)
    ids_BT = _ids(size, size.rows, size.tokens)

    def step() -> None:
        logprobs_BT, _ = policy.logprobs(ids_BT, 1, temperature=1.0)
        logprobs_BT.mean().backward()

    seconds = _seconds(size, step, size.repeats)
    gradients = [weight.grad for weight in policy.model.parameters()]
    finite = all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    tokens = ids_BT.numel()
    weights = sum(weight.numel() for weight in policy.model.parameters())
    layers, width = size.model["num_hidden_layers"], size.model["hidden_size"]
    flops = tokens * (6 * weights + 6 * layers * width * size.tokens)
    peak = next((p for n, p in PEAKS.items() if n in _device_name(size).split("-")[0]), None)
    return {
        "tokens_per_s": tokens / seconds,
        "tflops": flops / seconds / 1e12,
        "share_of_peak": flops / seconds / peak if peak else None,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if size.device == "cuda" else None,
        "failed": [] if finite else ["gradient not finite"],
    }


def fsdp2(size: Size) -> Values:
    """Compare three AdamW steps with and without fully_shard, on a process group of one rank."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    backend = "nccl" if size.device == "cuda" else "gloo"
    store = dist.FileStore(str(Path(size.folder) / f"store-{os.getpid()}"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    mesh = dist.init_device_mesh(size.device, (1,))

    def shard(model: Any) -> None:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    plain_losses, plain_s = _steps(size, lambda model: None)
    shard_losses, shard_s = _steps(size, shard)
    dist.destroy_process_group()
    gap = max(abs(a - b) for a, b in zip(plain_losses, shard_losses, strict=True))
    limit = 1e-5 if size.dtype == "float32" else 5e-2
    moved = abs(plain_losses[0] - plain_losses[-1])
    return {
        "loss": plain_losses[-1],
        "loss_gap": gap,
        "time_ratio": shard_s / plain_s,
        "failed": [f"loss gap {gap:.2g} > {limit:g}"] * (not gap <= limit)
        + ["loss did not move"] * (moved <= gap),
    }


def _steps(size: Size, prepare: Callable[[Any], None]) -> tuple[list[float], float]:
    """Return the losses of three steps and the seconds of later ones."""
    import torch

    policy = _policy(size, master_weights=False)
    prepare(policy.model)
    ids_BT = _ids(size, size.rows, size.tokens)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = policy.model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return float(loss)

    losses = [step() for _ in range(3)]
    return losses, _seconds(size, step, size.repeats)


def sampler(size: Size) -> Values:
    """Sample with TransformersSampler and compare with Policy.logprobs."""
    from functools import partial

    from mrgym_trainers.samplers.transformers import TransformersSampler

    policy = _policy(size)
    sampling = TransformersSampler(
        policy.model, policy.tokenizer, autocast=partial(policy.autocast, cache=True)
    )
    return _speed_and_gap(size, policy, sampling)


def vllm(size: Size, transfer: str = "shared_memory") -> Values:
    """Start an engine, sync changed weights, put it to sleep and wake it; compare every time."""
    policy = _policy(size)
    start = time.perf_counter()
    engine = _engine(size, policy, transfer)
    values: Values = {"start_s": time.perf_counter() - start}
    try:
        fresh = _speed_and_gap(size, policy, engine)
        values |= {**fresh, "gap_fresh": fresh["gap_max"]}
        _change(policy)
        values["gap_stale"] = _gap(size, policy, engine, seed=2)[0]
        values["sync_s"] = _sync(policy, engine, 1)
        values["gap_synced"], values["gap_mean"] = _gap(size, policy, engine, seed=3)
        values |= _sleep(size, policy, engine)
    finally:
        engine.close()
    failed = [*fresh["failed"]]
    for name in ("gap_synced", "gap_awake"):
        failed += [f"{name} {values[name]:.2g}"] * (not values[name] <= _limit(size))
    if not values["gap_stale"] > _limit(size):
        failed.append("changed weights made no difference, so that the comparison proves nothing")
    return {**values, "failed": failed}


def vllm_ipc(size: Size) -> Values:
    """Do the same with weights passed on the GPU."""
    return vllm(size, "ipc")


def _engine(size: Size, policy: Any, transfer: str) -> Any:
    from mrgym_trainers.samplers.codec import stop_ids
    from mrgym_trainers.samplers.vllm.engine import VLLMSampler
    from mrgym_trainers.samplers.vllm.settings import VLLMConfig

    config = VLLMConfig(
        max_model_len=32 + size.completion,
        gpu_memory_utilization=0.4,
        weight_transfer=transfer,
        enforce_eager=True if transfer == "ipc" else None,
    )
    ends = stop_ids(policy.model, policy.tokenizer)
    return VLLMSampler(size.folder, policy.tokenizer, ends, config=config, dtype=size.dtype)


def _sync(policy: Any, engine: Any, version: int) -> float:
    start = time.perf_counter()
    engine.update_weights(policy.named_tensors(), version)
    return time.perf_counter() - start


def _sleep(size: Size, policy: Any, engine: Any) -> Values:
    """Return the memory that sleep freed (None on a CPU), and the gap after waking."""
    awake = _used_gib(size)
    engine.rest()
    asleep = _used_gib(size)
    wake_s = _sync(policy, engine, 2)
    values: Values = {"wake_s": wake_s, "gap_awake": _gap(size, policy, engine, seed=4)[0]}
    if awake is not None and asleep is not None:
        values |= {"awake_gib": awake, "freed_gib": awake - asleep}
    return values


def memory(size: Size) -> Values:
    """Compare the memory of chunked log-probabilities with that of the whole softmax."""
    import memory as benchmark
    import torch

    vocabulary, tokens = size.model["vocab_size"], size.logprob_tokens
    if size.device == "cpu":
        naive, ours = (
            benchmark.measured(vocabulary, tokens, rows, "float32")["extra"] for rows in (0, 32)
        )
        return {"naive_mb": naive, "chunked_mb": ours}
    hidden_MH, weight_VH, targets_M = benchmark.make_inputs(vocabulary, tokens, "master")
    extra, values = [], []
    for way in (benchmark.naive, benchmark.chunked(benchmark.rows_per_chunk(vocabulary, "cuda"))):
        inputs = [t.detach().cuda().requires_grad_() for t in (hidden_MH, weight_VH)]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        logprobs_M = way(*inputs, targets_M.cuda())
        logprobs_M.mean().backward()
        gradients = sum(t.numel() * t.element_size() for t in inputs)
        extra.append((torch.cuda.max_memory_allocated() - before - gradients) / 2**20)
        values.append(logprobs_M.detach())
    gap = float((values[0] - values[1]).abs().max())
    return {
        "naive_mb": extra[0],
        "chunked_mb": extra[1],
        "ratio": extra[1] / extra[0],
        "gap_max": gap,
        "failed": [f"values differ by {gap:.2g}"] * (not gap <= 1e-2)
        + ["chunks need more memory"] * (extra[1] >= extra[0]),
    }


def learns(size: Size) -> Values:
    """Train the tiny policy for a short while."""
    from mrgym_trainers import GDPOConfig, GDPOTrainer

    tasks = 256 if size.device == "cuda" else 8
    config = GDPOConfig(steps=size.learn_steps, eval_tasks=tasks, device=size.device)
    trainer = GDPOTrainer("math_multi_reward", config)
    summary = trainer.train()
    start, end = (summary["eval"][when]["reward"] for when in ("start", "end"))
    steps = [line for line in trainer.history if line["kind"] == "train"][1:]
    gained = end - start > 0.1
    return {
        "reward_start": start,
        "reward_end": end,
        "step_s": sum(line["time/step_s"] for line in steps) / len(steps),
        # Two steps at toy size teach nothing that could be told from chance.
        "failed": ["reward did not rise by 0.1"] * (size.device == "cuda" and not gained),
    }


PARTS: dict[str, tuple[Callable[[Size], Values], float]] = {
    "model": (model, 45),
    "train": (train, 60),
    "fsdp2": (fsdp2, 60),
    "sampler": (sampler, 60),
    "memory": (memory, 40),
    "learns": (learns, 90),
    "vllm": (vllm, 180),
    "vllm_ipc": (vllm_ipc, 120),
}
"""Name, function and time limit in seconds; the whole has a limit too."""


# --- what parts share -----------------------------------------------------------------------------


def _policy(size: Size, *, master_weights: bool = True) -> Any:
    from mrgym_trainers.gdpo.policy import load_policy

    return load_policy(
        size.folder, device=size.device, dtype=size.dtype, master_weights=master_weights
    )


def _ids(size: Size, rows: int, tokens: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(8, size.model["vocab_size"], (rows, tokens), generator=generator)
    return ids_BT.to(size.device)


def _seconds(size: Size, call: Callable[[], object], repeats: int) -> float:
    """Return the mean seconds of a call, after three to warm up."""
    import torch

    wait = torch.cuda.synchronize if size.device == "cuda" else lambda: None
    for _ in range(3):
        call()
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    wait()
    return (time.perf_counter() - start) / repeats


def _sampled(size: Size, engine: Any, seed: int) -> list[tuple[list[int], Any]]:
    """Return prompts' ids with a completion each."""
    from mrgym.sampler import Prompt, SamplingParams

    starts = _ids(size, size.prompts, 16).tolist()
    prompts = [Prompt("", [], token_ids=start) for start in starts]
    params = SamplingParams(max_tokens=size.completion, temperature=1.0, seed=seed)
    groups = engine.sample(prompts, 8, params)
    return [(s, one) for s, group in zip(starts, groups, strict=True) for one in group]


def _speed_and_gap(size: Size, policy: Any, engine: Any) -> Values:
    _sampled(size, engine, seed=0)
    start = time.perf_counter()
    sampled = _sampled(size, engine, seed=1)
    seconds = time.perf_counter() - start
    worst, mean = _gaps(size, policy, sampled[::8])
    logprobs = [logprob for _, one in sampled for logprob in one.sampler_logprobs]
    return {
        "tokens_per_s": sum(len(one.token_ids) for _, one in sampled) / seconds,
        "logprob_mean": sum(logprobs) / len(logprobs),
        "gap_max": worst,
        "gap_mean": mean,
        "failed": [f"gap_max {worst:.2g} > {_limit(size):g}"] * (not worst <= _limit(size)),
    }


def _gap(size: Size, policy: Any, engine: Any, seed: int) -> tuple[float, float]:
    return _gaps(size, policy, _sampled(size, engine, seed)[::8])


def _gaps(size: Size, policy: Any, sampled: Sequence[tuple[list[int], Any]]) -> tuple[float, float]:
    """Return largest and mean difference between sampler_logprobs and policy_logprobs."""
    import torch

    policy.model.eval()
    gaps = []
    with torch.no_grad():
        for start, one in sampled:
            ids_BT = torch.tensor([[*start, *one.token_ids]], device=size.device)
            policy_logprobs_BT, _ = policy.logprobs(ids_BT, len(start), temperature=1.0)
            gaps.append(policy_logprobs_BT[0].cpu() - torch.tensor(one.sampler_logprobs))
    gaps_M = torch.cat(gaps).abs()
    return float(gaps_M.max()), float(gaps_M.mean())


def _limit(size: Size) -> float:
    """Return the probe's own threshold."""
    from mrgym_trainers.gdpo.config import ProbeConfig

    return ProbeConfig().limit(size.dtype)


def _change(policy: Any) -> None:
    """Change every weight a little, and the output visibly."""
    import torch

    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.add_(torch.randn_like(weight) * 0.3 * weight.std().nan_to_num())


def _device_name(size: Size) -> str:
    import torch

    return torch.cuda.get_device_name() if size.device == "cuda" else platform.machine()


def _used_gib(size: Size) -> float | None:
    import torch

    if size.device == "cpu":
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB
