"""A run folder: configuration, metrics, rollouts, checkpoints and summary on disk."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mrgym.errors import ConfigError
from mrgym.rollout import Rollout
from mrgym.wire import write_rollouts
from mrgym_trainers.gdpo.config import GDPOConfig
from mrgym_trainers.gdpo.policy import Policy

__all__ = ["RunFolder"]

_OWN = ("config.yaml", "metrics.jsonl", "summary.json", "report.html", "rollouts", "checkpoints")


class RunFolder:
    """The files of one run.

    Args:
        path: The folder; made if it is not there.
        overwrite: Remove the files of an earlier run there (nothing else).

    Raises:
        ConfigError: If it holds a run already and ``overwrite`` is false, is a file, or cannot
            be written to.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path}: got a file, expected a folder; choose another --out")
        held = [name for name in _OWN if (self.path / name).exists()]
        if held and not overwrite:
            raise ConfigError(
                f"{self.path}: got a folder that already holds a run ({', '.join(held)}), expected "
                "a new one; choose another --out or pass --overwrite"
            )
        try:
            for name in held:
                _remove(self.path / name)
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "metrics.jsonl").touch()
        except OSError as error:
            raise ConfigError(
                f"{self.path}: got {error.strerror}, expected a folder to write to; "
                "choose another --out"
            ) from error

    def write_config(self, config: GDPOConfig, env: str) -> None:
        """Write the resolved configuration."""
        (self.path / "config.yaml").write_text(f"env: {env}\n{config.to_yaml()}", encoding="utf-8")

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

    def write_checkpoint(self, policy: Policy, step: int) -> Path:
        """Write model and tokenizer as a Hugging Face folder, whole or not at all."""
        final = self.path / "checkpoints" / f"step_{step:06d}"
        partial = final.with_name(final.name + ".partial")
        _remove(partial)
        policy.model.save_pretrained(partial)
        policy.tokenizer.save_pretrained(partial)
        _remove(final)
        os.replace(partial, final)
        return final


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
