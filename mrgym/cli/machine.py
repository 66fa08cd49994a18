"""What this machine has: processors, memory, disk, GPUs. Nothing heavy is imported here."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

__all__ = ["Gpus", "Machine", "find_gpus", "find_machine"]

_GIB: Final = 2**30
_TORCH_LIMIT: Final = 120.0  # seconds: a cold import from a network disk is slow
_ASK_TORCH: Final = """
import json, torch
devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "cuda": torch.version.cuda,
    "devices": [{"name": d.name, "memory_gib": round(d.total_memory / 2**30, 1),
                 "capability": f"{d.major}.{d.minor}"} for d in devices],
}))
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine, as far as runs care.

    Attributes:
        python: Version of this Python.
        executable: Where it is.
        platform: Operating system and architecture.
        cores: Processors this process may use.
        memory_gib: Memory this process may use, containers' limits included.
        memory_free_gib: Memory that is free.
        disk_free_gib: Room on the disk of the working directory.
        shm_gib: Size of ``/dev/shm``, through which weights reach vLLM; None if there is none.
        shm_free_gib: Room there.
        runs: The folder that runs go to.
        runs_error: Why nothing can be written there; None if it can.
    """

    python: str
    executable: str
    platform: str
    cores: int
    memory_gib: float | None
    memory_free_gib: float | None
    disk_free_gib: float
    shm_gib: float | None
    shm_free_gib: float | None
    runs: str
    runs_error: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs, by torch and by ``nvidia-smi``.

    Attributes:
        torch: Devices torch can use, each with name, memory and capability.
        torch_cuda: The CUDA version torch was built for; None for a build without.
        torch_error: Why torch could not be asked.
        nvidia_smi: Devices that ``nvidia-smi`` lists, as text.
    """

    torch: list[dict[str, Any]] = field(default_factory=list)
    torch_cuda: str | None = None
    torch_error: str | None = None
    nvidia_smi: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


def find_machine(runs: Path = Path("runs")) -> Machine:
    """Return what this machine has."""
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    memory, free = _memory()
    return Machine(
        python=platform.python_version(),
        executable=sys.executable,
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=_cores(),
        memory_gib=memory,
        memory_free_gib=free,
        disk_free_gib=_gib(shutil.disk_usage(Path.cwd()).free),
        shm_gib=None if shm is None else _gib(shm.total),
        shm_free_gib=None if shm is None else _gib(shm.free),
        runs=str(runs.absolute()),
        runs_error=_write_error(runs),
    )


def find_gpus(*, torch_installed: bool) -> Gpus:
    """Return the GPUs; torch is asked in a process of its own, which may crash or hang."""
    listed = _nvidia_smi()
    if not torch_installed:
        return Gpus(nvidia_smi=listed)
    try:
        answer = json.loads(_output([sys.executable, "-c", _ASK_TORCH], _TORCH_LIMIT))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return Gpus(torch_error=lines[-1] if lines else repr(error), nvidia_smi=listed)
    return Gpus(answer["devices"], answer["cuda"], None, listed)


def _gib(size: float) -> float:
    return round(size / _GIB, 2)


def _cores() -> int:
    usable = getattr(os, "sched_getaffinity", None)
    found = len(usable(0)) if usable else (os.cpu_count() or 1)
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        found = min(found, max(1, round(int(quota) / int(period))))
    return found


def _memory() -> tuple[float | None, float | None]:
    """Return all and free memory in GiB, a container's limit included."""
    lines = (line.split() for line in _read("/proc/meminfo").splitlines())
    sizes = {words[0]: int(words[1]) * 1024 for words in lines if len(words) > 1}
    total, free = sizes.get("MemTotal:"), sizes.get("MemAvailable:")
    if total is None and hasattr(os, "sysconf"):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    if limit.isdigit() and total is not None and int(limit) < total:
        total = int(limit)
        used = _read("/sys/fs/cgroup/memory.current").strip()
        free = max(0, total - int(used)) if used.isdigit() else free
    return (None if size is None else _gib(size) for size in (total, free))  # type: ignore[return-value]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _write_error(folder: Path) -> str | None:
    """Return why a folder cannot be written to, or made; None if it can."""
    folder = folder.absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return f"{there}: {error.strerror or error}"


def _nvidia_smi() -> list[str]:
    command = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,driver_version",
        "--format=csv,noheader",
    ]
    try:
        return [line.strip() for line in _output(command, 20).splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError):
        return []


def _output(command: list[str], limit: float) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=limit, check=True).stdout
