"""A run folder: configuration, metrics, rollouts, checkpoints and summary on disk."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from mrgym.errors import ConfigError
from mrgym.rollout import Rollout
from mrgym.wire import write_rollouts
from mrgym_trainers.gdpo.checkpoint import remove, write_synced
from mrgym_trainers.gdpo.config import GDPOConfig

__all__ = ["RunFolder"]

_OWN = ("config.yaml", "metrics.jsonl", "summary.json", "report.html", "rollouts", "checkpoints")


class RunFolder:
    """The files of one run.

    Args:
        path: The folder; made if it is not there.
        overwrite: Remove the files of an earlier run there (nothing else).
        resume: Go on with the run there.

    Raises:
        ConfigError: If it holds a run already and ``overwrite`` is false, is a file, or cannot
            be written to.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False, resume: bool = False) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path}: got a file, expected a folder; choose another --out")
        held = [name for name in _OWN if (self.path / name).exists()]
        if held and not (overwrite or resume):
            raise ConfigError(
                f"{self.path}: got a folder that already holds a run ({', '.join(held)}), expected "
                "a new one; choose another --out or pass --overwrite"
            )
        try:
            for name in [] if resume else held:
                remove(self.path / name)
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            (self.path / "metrics.jsonl").touch()
            with tempfile.TemporaryFile(dir=self.checkpoints):  # better now than after a step
                pass
        except OSError as error:
            raise ConfigError(
                f"{self.path}: got {error.strerror}, expected a folder to write to; "
                "choose another --out"
            ) from error

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    def write_config(
        self, config: GDPOConfig, env: str, env_args: Mapping[str, Any] | None = None
    ) -> None:
        """Write the resolved configuration, and what it is a run of."""
        head: dict[str, Any] = {"env": env}
        if env_args:
            head["env_args"] = dict(env_args)
        text = yaml.safe_dump(head, sort_keys=False) + config.to_yaml()
        write_synced(self.path / "config.yaml", text.encode())

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Append one line of strict JSON to ``metrics.jsonl``."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as out:
            out.write(json.dumps(line, allow_nan=False) + "\n")

    def write_rollouts(self, step: int, rollouts: Iterable[Rollout]) -> None:
        """Write the rollouts of a step."""
        write_rollouts(self.path / "rollouts" / f"step_{step:06d}.jsonl", rollouts)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``, whole or not at all."""
        partial = self.path / "summary.json.partial"
        partial.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(partial, self.path / "summary.json")

    def metrics_bytes(self) -> int:
        """Return the length of ``metrics.jsonl``."""
        return (self.path / "metrics.jsonl").stat().st_size

    def sync(self) -> None:
        """Have ``metrics.jsonl`` on disk before a checkpoint that refers to its length."""
        with (self.path / "metrics.jsonl").open("rb") as file:
            os.fsync(file.fileno())

    def cut(self, step: int, metrics_bytes: int) -> list[dict[str, Any]]:
        """Remove what was written after a checkpoint, and return the metrics that are left.

        Raises:
            ConfigError: If metrics are missing that were there.
        """
        path = self.path / "metrics.jsonl"
        if (size := path.stat().st_size) < metrics_bytes:
            raise ConfigError(
                f"{path}: got {size} bytes, expected at least the {metrics_bytes} of the "
                "checkpoint; put the file back, or resume from an earlier checkpoint"
            )
        os.truncate(path, metrics_bytes)
        for name in ("summary.json", "report.html"):
            remove(self.path / name)
        for rollouts in (self.path / "rollouts").glob("step_*.jsonl"):
            if int(rollouts.stem.removeprefix("step_")) > step:
                remove(rollouts)
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
