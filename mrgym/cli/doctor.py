"""``mrgym doctor``: what this machine can run, and what is missing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mrgym.cli.machine import Gpus, Machine, find_gpus, find_machine
from mrgym.cli.options import Json, out
from mrgym.cli.packages import (
    Advice,
    installed,
    missing_extras,
    requirements_ok,
    version_conflicts,
)
from mrgym.cli.selftest import TESTS, TestResult, run_test

__all__ = ["Diagnosis", "diagnose", "doctor"]

_SMALL_SHM_GIB = 0.25  # Docker gives 64 MiB, one message of a weight sync
_NEEDS = {
    "training step on CPU": ("torch", "mrgym[train]"),
    "vLLM imports": ("vllm", "mrgym[vllm]"),
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found.

    Attributes:
        machine: Processors, memory, disk.
        gpus: GPUs, by torch and by nvidia-smi.
        packages: Installed packages and their versions.
        problems: What is there and does not work, one line each.
        notes: What works, with limits.
        advice: What to install for more.
        tests: The self-test.
    """

    machine: Machine
    gpus: Gpus
    packages: dict[str, str]
    problems: list[str]
    notes: list[str]
    advice: list[Advice]
    tests: list[TestResult]

    @property
    def ok(self) -> bool:
        """Whether all that is installed works."""
        return not self.problems and all(test.status != "failed" for test in self.tests)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {"ok": self.ok, **asdict(self)}


def doctor(
    self_test: Annotated[
        bool, typer.Option("--self-test/--no-self-test", help="Really run small things.")
    ] = True,
    time_limit: Annotated[
        float, typer.Option(min=1.0, help="Most seconds of each part of the self-test.")
    ] = 120.0,
    as_json: Json = False,
) -> None:
    """Say what this machine can run and what is missing; exit 1 if what is installed fails."""
    found = diagnose(self_test=self_test, time_limit=time_limit)
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict()) + "\n")
    else:
        _show(found, out())
    if not found.ok:
        raise typer.Exit(1)


def diagnose(*, self_test: bool = True, time_limit: float = 120.0) -> Diagnosis:
    """Return what this machine can run.

    Args:
        self_test: Whether small things are really run, in processes of their own.
        time_limit: Most seconds of each.
    """
    packages = installed()
    machine, gpus = find_machine(), find_gpus(torch_installed="torch" in packages)
    advice = missing_extras(nvidia=bool(gpus.torch or gpus.nvidia_smi))
    return Diagnosis(
        machine=machine,
        gpus=gpus,
        packages=packages,
        problems=[*version_conflicts(), *_problems(machine, gpus)],
        notes=[*_notes(machine, gpus, packages)],
        advice=advice,
        tests=[_tested(name, packages, advice, time_limit) for name in TESTS if self_test],
    )


def _tested(
    name: str, packages: Mapping[str, str], advice: list[Advice], limit: float
) -> TestResult:
    package, extra = _NEEDS.get(name, (None, ""))
    names = {package, f"{package}-cpu"}
    if package is None or names & packages.keys():
        return run_test(name, limit)
    command = next((a.command for a in advice if a.what == extra), f"pip install '{extra}'")
    return TestResult(name, "skipped", 0.0, f"{package} is not installed; {command}")


def _problems(machine: Machine, gpus: Gpus) -> Iterator[str]:
    if machine.runs_error is not None:
        yield (
            f"runs/: got {machine.runs_error}, expected a folder to write to; go to another "
            "folder or pass --out"
        )
    if gpus.torch_error is not None:
        yield (
            f"torch: got {gpus.torch_error}, expected it to import; "
            "pip install --force-reinstall torch"
        )
    elif gpus.nvidia_smi and gpus.torch_cuda and not gpus.torch:
        yield (
            f"torch: got no device of the {len(gpus.nvidia_smi)} that nvidia-smi lists, expected "
            f"all; its CUDA {gpus.torch_cuda} may be newer than the driver: renew the driver, and "
            "look at CUDA_VISIBLE_DEVICES"
        )


def _notes(machine: Machine, gpus: Gpus, packages: Mapping[str, str]) -> Iterator[str]:
    unknown = requirements_ok()
    if unknown is not None:
        yield unknown
    if gpus.nvidia_smi and "torch" in packages and gpus.torch_cuda is None:
        yield (
            f"torch: got a build without CUDA beside {len(gpus.nvidia_smi)} NVIDIA GPUs, expected "
            "one with it; install torch anew, from where it has a build for CUDA"
        )
    if machine.shm_gib is not None and machine.shm_gib < _SMALL_SHM_GIB:
        yield (
            f"/dev/shm: got {machine.shm_gib} GiB, expected {_SMALL_SHM_GIB} or more for weights "
            "on their way to vLLM; docker run --shm-size=2g"
        )
    if "torch" not in packages:
        yield "without torch: list, check, eval (scripted, openai) work; train does not"
    elif not gpus.torch:
        yield "without a GPU: the recipe laptop works (mrgym train --config laptop)"


def _show(found: Diagnosis, console: Console) -> None:
    console.print(_table("machine", _machine_rows(found)))
    console.print(_table("packages", found.packages))
    if found.tests:
        rows = {t.name: f"{t.status} ({t.seconds} s) {t.reason or ''}" for t in found.tests}
        console.print(_table("self-test", rows))
    for line in found.problems:
        console.print(f"problem: {line}", markup=False, soft_wrap=True)
    for line in found.notes:
        console.print(f"note: {line}", markup=False, soft_wrap=True)
    for a in found.advice:
        console.print(f"for {a.what} ({', '.join(a.missing)}): {a.command}",
                      markup=False, soft_wrap=True)  # fmt: skip
    console.print("all that is installed works" if found.ok else "something does not work")


def _machine_rows(found: Diagnosis) -> dict[str, str]:
    m = found.machine
    by_torch = [f"{g['name']} {g['memory_gib']} GiB" for g in found.gpus.torch]
    return {
        "Python": f"{m.python} ({m.executable})",
        "platform": m.platform,
        "cores": str(m.cores),
        "memory": f"{m.memory_gib} GiB, {m.memory_free_gib} free",
        "disk here": f"{m.disk_free_gib} GiB free",
        "/dev/shm": "none" if m.shm_gib is None else f"{m.shm_gib} GiB, {m.shm_free_gib} free",
        "runs/": "can be written" if m.runs_error is None else m.runs_error,
        "GPUs by torch": ", ".join(by_torch) or "none",
        "GPUs by nvidia-smi": "; ".join(found.gpus.nvidia_smi) or "none",
    }


def _table(title: str, rows: Mapping[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table
