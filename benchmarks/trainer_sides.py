"""One side of benchmarks/trainer_vs_trl.py, in a process of its own.

``python benchmarks/trainer_sides.py JSON`` measures what the JSON list names (side, case, sampler)
and prints the result as JSON; the other script starts it.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHORT = 130  # characters of a GSM8K question; on CPU longer ones only make the run longer
TRL_ROWS = (
    32  # of a forward pass: faster by a seventh than 512 at a time, and a sixth of the memory
)
Result = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One comparison: a model, a batch, and how long to measure."""

    name: str
    model: str
    prompts: int
    group: int
    tokens: int
    steps: int
    """Steps that are measured; one more goes before."""
    turns: int
    hashed: bool = False
    gsm8k: str | None = None

    @property
    def completions(self) -> int:
        """Completions a step."""
        return self.prompts * self.group


def make_env(case: Case) -> Any:
    """Return the environment both sides take tasks and scores from."""
    import mrgym
    from mrgym_envs.math_multi_reward.env import MathMultiReward

    class Hashed(MathMultiReward):
        """Has a further score that differs between any two completions."""

        @mrgym.component(low=0, high=1)
        def hashed(self, task: mrgym.Task, completion: str) -> float:
            """Hash of the text, as a share of its range."""
            return zlib.crc32(completion.encode()) / 2**32

    env = Hashed() if case.hashed else MathMultiReward()
    if case.gsm8k is None:
        return env
    lines = Path(case.gsm8k).read_text(encoding="utf-8").splitlines()
    rows = [row for line in lines if len((row := json.loads(line))["question"]) <= SHORT]
    return type(env)(tasks=[env.task_from_row(row) for row in rows], signed=True)


def ours(case: Case, sampler: str) -> Result:
    """Return what our trainer took, or why this sampler cannot be had."""
    from mrgym.errors import ConfigError

    clock = Clock(case)
    try:
        trainer = our_trainer(case, {} if sampler == "transformers" else {"sampler": sampler})
        trainer.history = clock.history()
        seconds = time_parts(trainer.policy)
        resident = memory("VmRSS")
        trainer.train()
    except (ConfigError, ImportError) as error:
        return {"skipped": str(error)}
    lines = [line for line in trainer.history if line["kind"] == "train"][1:]
    for name in ("sample", "score", "step"):
        seconds[name] = [line.get(f"time/{name}_s", 0.0) for line in lines]
    model = trainer.policy.model
    positions, scored = (sum(seconds.pop(n)[-case.steps :]) for n in ("positions", "scored"))
    head = model.get_output_embeddings().weight.numel()
    body = sum(shape.numel() for shape in linear_shapes(model)) - head
    return clock.result(resident) | {
        "phases": {name: sum(spent[-case.steps :]) for name, spent in seconds.items()},
        "kept": statistics.mean(line.get("loss/kept_frac", 1.0) for line in lines),
        "length": statistics.mean(line["completion/length_mean"] for line in lines),
        "flop": 6 * (body * positions + head * scored),
        "matmul_flops": matmul_flops(model),
    }


def our_trainer(case: Case, keys: dict[str, Any]) -> Any:
    """Return our trainer, loaded."""
    from mrgym_trainers import GDPOConfig, GDPOTrainer

    config = GDPOConfig(
        model=case.model, steps=case.steps + 1, prompts_per_step=case.prompts,
        group_size=case.group, max_completion_tokens=case.tokens, learning_rate=1e-5,
        lr_schedule="constant", eval_every=10**6, eval_tasks=1, device="cpu",
        micro_batch_tokens=4096, **keys,
    )  # fmt: skip
    return GDPOTrainer(make_env(case), config)


class Clock:
    """Notes when steps end."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.ends: list[float] = []

    def tick(self) -> None:
        """Note the end of a step."""
        self.ends.append(time.perf_counter())

    def history(self) -> list[dict[str, Any]]:
        """Return a trainer's history that ticks with every step's line."""
        clock = self

        class Ticking(list[dict[str, Any]]):
            def append(self, line: dict[str, Any]) -> None:
                if line["kind"] == "train":
                    clock.tick()
                super().append(line)

        return Ticking()

    def result(self, resident: int) -> Result:
        """Return the rate from the end of the first step to the end of the last, and memory."""
        seconds = self.ends[-1] - self.ends[0]
        completions = self._case.completions * (len(self.ends) - 1)
        peak = memory("VmHWM")
        return {"rate": completions / seconds, "peak": peak, "over_start": peak - resident}


def time_parts(policy: Any) -> dict[str, list[float]]:
    """Return lists that fill with each step's seconds of forward, backward and optimiser."""
    import torch
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    seconds: dict[str, list[float]] = {
        name: [] for name in ("forward", "backward", "optimizer", "positions", "scored")
    }
    open_step = dict.fromkeys(seconds, 0.0)
    forward, backward = policy.batch_logprobs, torch.Tensor.backward

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                open_step[name] += time.perf_counter() - start

        return run

    def counted(batch: Any, **kwargs: Any) -> Any:
        read = batch.input_ids_BT if batch.line is None else batch.line.input_ids_C
        open_step["positions"] += read.numel()
        open_step["scored"] += int(batch.mask_BT.sum())
        return timed("forward", forward)(batch, **kwargs)

    def before(*_: Any) -> None:
        open_step["optimizer"] -= time.perf_counter()

    def after(*_: Any) -> None:
        open_step["optimizer"] += time.perf_counter()
        for name in seconds:
            seconds[name].append(open_step[name])
            open_step[name] = 0.0

    policy.batch_logprobs = counted
    torch.Tensor.backward = timed("backward", backward)  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    return seconds


def linear_shapes(model: Any) -> list[Any]:
    """Return the shapes of the model's linear layers, its head among them."""
    import torch

    return [m.weight.shape for m in model.modules() if isinstance(m, torch.nn.Linear)]


def matmul_flops(model: Any, rows: int = 2048) -> float:
    """Return the FLOP/s of the forward matrix products of the model's own sizes, alone."""
    import torch

    shapes, flop, seconds = linear_shapes(model), 0.0, 0.0
    for shape in set(shapes):
        weight, inputs = torch.randn(shape), torch.randn(rows, shape[1])
        times = []
        for _ in range(5):
            start = time.perf_counter()
            torch.nn.functional.linear(inputs, weight)
            times.append(time.perf_counter() - start)
        flop += shapes.count(shape) * 2 * rows * shape.numel()
        seconds += shapes.count(shape) * statistics.median(times)
    return flop / seconds


def trl(case: Case) -> Result:
    """Return what TRL's trainer took."""
    import datasets
    import trl as library
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

    from mrgym_trainers.tiny_policy import tiny_policy_path

    env, folder = make_env(case), case.model
    if folder == "tiny":
        folder = str(tiny_policy_path())
    tasks = env.task_source("train").shuffled(0)[: case.prompts * (case.steps + 1)]
    # AutoTokenizer may choose a class that drops spaces.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    lengths: list[int] = []
    functions = reward_functions(env, tasks, lengths)
    prompt = "messages" if tokenizer.chat_template else "text"
    rows = [{"prompt": getattr(env.prompt_for(task), prompt), "id": task.id} for task in tasks]
    clock = Clock(case)

    class EndOfStep(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    with tempfile.TemporaryDirectory() as out:
        trainer = library.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
            args=trl_config(case, out, [env.components.weights[f.__name__] for f in functions]),
            processing_class=tokenizer,
            reward_funcs=functions,
            train_dataset=datasets.Dataset.from_list(rows),
            callbacks=[EndOfStep()],
        )
        sampling = [0.0]
        trainer.model.generate = timed_generate(trainer.model.generate, sampling)
        resident = memory("VmRSS")
        trainer.train()
    measured = lengths[case.completions :]
    return clock.result(resident) | {
        "phases": {"sample": sum(sampling[2:]), "step": clock.ends[-1] - clock.ends[0]},
        "length": statistics.mean(measured),
        "trl": library.__version__,
    }


def trl_config(case: Case, out: str, weights: list[float]) -> Any:
    """Return TRL's configuration of the same training."""
    import trl as library

    rows = min(TRL_ROWS, case.completions)
    return library.GRPOConfig(
        output_dir=out, use_cpu=True, bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=rows, gradient_accumulation_steps=case.completions // rows,
        num_generations=case.group,
        max_completion_length=case.tokens, max_steps=case.steps + 1, temperature=1.0, top_p=1.0,
        top_k=0, beta=0.0, num_iterations=1, epsilon=0.2, epsilon_high=0.28, loss_type="dapo",
        multi_objective_aggregation="normalize_then_sum", scale_rewards="group",
        reward_weights=weights, learning_rate=1e-5, lr_scheduler_type="constant", adam_beta1=0.9,
        adam_beta2=0.99, weight_decay=0.0, max_grad_norm=1.0, shuffle_dataset=False,
        dataloader_num_workers=0, dataloader_pin_memory=False, logging_strategy="no",
        report_to="none", save_strategy="no", eval_strategy="no", disable_tqdm=True, seed=0,
    )  # fmt: skip


def reward_functions(env: Any, tasks: Any, lengths: list[int]) -> list[Any]:
    """Return a function a component; the first also notes the completions' lengths."""
    by_id = {task.id: task for task in tasks}

    def make(name: str, first: bool) -> Any:
        score = getattr(env, name)

        def reward(
            completions: list[Any], completion_ids: list[list[int]], id: list[str], **_: Any
        ) -> list[float]:
            if first:
                lengths.extend(map(len, completion_ids))
            texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
            return [float(score(by_id[i], text)) for i, text in zip(id, texts, strict=True)]

        reward.__name__ = name
        return reward

    return [make(name, first=i == 0) for i, name in enumerate(env.components)]


def timed_generate(generate: Any, seconds: list[float]) -> Any:
    """Return ``generate``, adding each call's seconds to the list."""

    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        out = generate(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
        return out

    return run


def memory(key: str) -> int:
    """Return this process's ``VmHWM`` (peak) or ``VmRSS`` (now) in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status: got no {key}, expected one; run this on Linux")


def main() -> None:
    """Measure one side."""
    side, spec, sampler = json.loads(sys.argv[1])
    case = Case(**spec)
    print(json.dumps(trl(case) if side == "trl" else ours(case, sampler)))


if __name__ == "__main__":
    main()
