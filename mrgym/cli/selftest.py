"""The self-test of ``mrgym doctor``: small things that really run, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from mrgym.errors import MrgymError

__all__ = ["TESTS", "TestResult", "run_here", "run_test"]

_ENV: Final = "math_multi_reward"
_START: Final = "import sys; from mrgym.cli.selftest import run_here; sys.exit(run_here({name!r}))"


@dataclass(frozen=True, slots=True)
class TestResult:
    """What came of a test.

    Attributes:
        name: The test.
        status: ``skipped`` where something it needs is not installed.
        seconds: How long it took.
        reason: Why it failed or was skipped.
    """

    __test__ = False  # no test of pytest's

    name: str
    status: Literal["ok", "failed", "skipped"]
    seconds: float
    reason: str | None = None


def run_test(name: str, limit: float) -> TestResult:
    """Run a test in a process of its own that sees no GPU and no network, and is ended in time."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _START.format(name=name)],
            capture_output=True, text=True, timeout=limit, env=env, check=False,
        )  # fmt: skip
        reason = None if done.returncode == 0 else _why(done)
    except subprocess.TimeoutExpired:
        reason = f"got no end within {limit:g} s, expected one; raise --time-limit"
    except OSError as error:
        reason = f"got {error} while starting {sys.executable}, expected it to start"
    seconds = round(time.perf_counter() - start, 2)
    return TestResult(name, "failed" if reason else "ok", seconds, reason)


def run_here(name: str) -> int:
    """Run a test in this process and return its exit code; the reason goes to stderr."""
    try:
        TESTS[name]()
    except MrgymError as error:
        sys.stderr.write(f"\n{error}\n")
        return 1
    except Exception as error:  # whatever it is, it is the answer
        sys.stderr.write(f"\n{type(error).__name__}: {' '.join(str(error).split())[:300]}\n")
        return 1
    return 0


def _why(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"got signal {-done.returncode}, expected it to run; memory may have run out"
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"got exit code {done.returncode}, expected 0"


def _environment() -> None:
    from mrgym.check import check_env

    report = check_env(_ENV, max_tasks=20)
    if not report.ok:
        raise RuntimeError(f"{_ENV}: {report.failures[0]}")


def _scoring() -> None:
    """Score gold completions in a worker process."""
    from mrgym.components import reward_key
    from mrgym.evaluate import evaluate
    from mrgym.registry import make
    from mrgym.sampler import SamplingParams, ScriptedSampler
    from mrgym.scoring import WorkerScorer
    from mrgym.stepwise import as_text_env

    env = as_text_env(lambda: make(_ENV))
    tasks = env.task_source("eval")[:4]
    golds = {task.id: env.gold_completion(task) or "" for task in tasks}
    scorer = WorkerScorer(workers=1, deadline=30.0)
    try:
        sampler = ScriptedSampler(golds)
        means, _ = evaluate(env, sampler, tasks, SamplingParams(64), scorer=scorer)
    finally:
        scorer.close()
    low = {name: means[reward_key(name)] for name in env.components}
    if any(mean != 1.0 for mean in low.values()):
        raise RuntimeError(f"{_ENV}: got {low} for gold completions, expected 1 each")


def _training() -> None:
    """Take one training step with the policy in the package, on CPU."""
    import torch

    from mrgym_trainers.gdpo.config import GDPOConfig
    from mrgym_trainers.gdpo.train import GDPOTrainer

    config = GDPOConfig(
        device="cpu", steps=1, prompts_per_step=8, group_size=4, eval_tasks=4,
        max_completion_tokens=24,
    )  # fmt: skip
    trainer = GDPOTrainer(_ENV, config)
    before = [parameter.detach().clone() for parameter in trainer.policy.model.parameters()]
    trainer.train()
    after = [*trainer.policy.model.parameters()]
    if all(torch.equal(old, new) for old, new in zip(before, after, strict=True)):
        raise RuntimeError("training step: got the weights it began with, expected other ones")
    if not all(bool(torch.isfinite(parameter).all()) for parameter in after):
        raise RuntimeError("training step: got weights that are not finite, expected finite ones")


def _vllm() -> None:
    import vllm  # noqa: F401


TESTS: Final[Mapping[str, Callable[[], None]]] = {
    "environment check": _environment,
    "scoring in a worker process": _scoring,
    "training step on CPU": _training,
    "vLLM imports": _vllm,
}
