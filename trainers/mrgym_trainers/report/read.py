"""Load a run folder into one typed, read-only :class:`Run`.

The folder is read as it is: a run that is still going, was killed or crashed has gaps, and a gap
becomes a note, never a guessed number. Only a broken record in the middle of a file is an error.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import msgspec
import yaml

from mrgym.components import reward_key
from mrgym.errors import ConfigError, WireError
from mrgym.rollout import SCHEMA_VERSION

__all__ = ["Evaluation", "Outcomes", "Run", "Sample", "Series", "Summary", "Turn", "read_run"]

DEAD_AT = 0.9  # a component constant in this share of groups is called dead
Row = Mapping[str, float]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Series:
    """One metric over the train steps that logged it."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.values)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Means over held-out tasks after ``step`` updates; ``mode`` is ``sampled`` or ``greedy``."""

    step: int
    mode: str
    row: Row

    @property
    def n(self) -> int | None:
        """Number of completions behind the means, where it was logged."""
        return int(self.row["n"]) if "n" in self.row else None

    def mean(self, component: str | None) -> float | None:
        """Mean of a component, or of the plain sum for ``None``."""
        return self.row.get("reward" if component is None else reward_key(component))

    def error(self, component: str | None) -> float | None:
        """Standard error of :meth:`mean`, where it was logged."""
        return self.row.get("reward_se" if component is None else f"{reward_key(component)}/se")


class Summary(msgspec.Struct, frozen=True):
    """The trainer's ``summary.json``."""

    env: str | None = None
    model: str | None = None
    seed: int | None = None
    steps: int | None = None
    wall_s: float | None = None
    completions: int | None = None
    status: str | None = None
    eval: dict[str, dict[str, float | None] | None] = {}
    eval_greedy: dict[str, dict[str, float | None] | None] = {}


class Turn(msgspec.Struct, frozen=True):
    """One prompt and the completion sampled for it."""

    prompt: str = ""
    completion: str = ""


class Sample(msgspec.Struct, frozen=True):
    """What a report shows of a stored :class:`mrgym.rollout.Rollout`; token ids are skipped."""

    schema: int
    task_id: str
    status: str = "ok"
    truncated: bool = False
    reward: float | None = None
    components: dict[str, float] = {}
    raw_components: dict[str, float] | None = None
    advantage: float | None = None
    component_advantages: dict[str, float] | None = None
    turns: list[Turn] = []
    answer: Any = None
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """How the stored rollouts ended; ``errors`` counts (status, error text)."""

    steps: tuple[int, ...]
    statuses: Counter[str]
    truncated: int
    errors: Counter[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything a report needs from a run folder.

    ``samples`` holds the first and the last stored step only; ``outcomes`` counts all of them.
    ``notes`` says, in whole sentences, what could not be read.
    """

    path: Path
    config_text: str
    config: Mapping[str, Any]
    summary: Summary | None
    train: Sequence[Row]
    evaluations: Sequence[Evaluation]
    samples: Mapping[int, Sequence[Sample]]
    outcomes: Outcomes
    components: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def last_step(self) -> int:
        """The last train step in the metrics, 0 when there is none."""
        return int(self.train[-1]["step"]) if self.train else 0

    def series(self, key: str) -> Series:
        """Return the metric ``key`` over the train steps that hold it."""
        rows = [row for row in self.train if key in row]
        return Series(tuple(int(r["step"]) for r in rows), tuple(r[key] for r in rows))

    def late_mean(self, key: str) -> float | None:
        """Mean of a metric over the last quarter of the run, ``None`` when not logged there."""
        start = self.late_from
        late = [row[key] for row in self.train if key in row and row["step"] >= start]
        return fmean(late) if late else None

    @property
    def late_from(self) -> int:
        """First step of the last quarter of the run."""
        return math.floor(0.75 * self.last_step) + 1

    def dead_components(self) -> dict[str, float]:
        """Components constant in at least 90 % of groups over the last quarter, with that share."""
        shares = {c: self.late_mean(f"advantage/frac_constant/{c}") for c in self.components}
        return {c: share for c, share in shares.items() if share is not None and share >= DEAD_AT}

    def evaluations_of(self, mode: str) -> list[Evaluation]:
        """Evaluations of one mode by step; from ``summary.json`` where the metrics hold none."""
        found = sorted((e for e in self.evaluations if e.mode == mode), key=lambda e: e.step)
        return found or self._summarised(mode)

    def _summarised(self, mode: str) -> list[Evaluation]:
        if self.summary is None:
            return []
        ends = self.summary.eval_greedy if mode == "greedy" else self.summary.eval
        steps = {"start": 0, "end": self.summary.steps or self.last_step}
        return [
            Evaluation(steps[end], mode, _numbers(row))
            for end in ("start", "end")
            if (row := ends.get(end))
        ]

    def setting(self, key: str) -> Any:
        """Return the shallowest value named ``key`` in the config, ``None`` when there is none."""
        level: list[Mapping[str, Any]] = [self.config]
        while level:
            for mapping in level:
                if mapping.get(key) is not None:
                    return mapping[key]
            level = [v for m in level for v in m.values() if isinstance(v, Mapping)]
        return None


def read_run(path: Path) -> Run:
    """Return the run stored in ``path``.

    Raises:
        ConfigError: ``path`` is not a run folder.
        WireError: A record other than a file's last is broken, or has an unknown schema.
    """
    if not (path / "metrics.jsonl").is_file():
        raise ConfigError(
            f"report: got {str(path)!r}, expected a run folder holding metrics.jsonl; "
            "pass the folder given to 'mrgym train --out'"
        )
    notes: list[str] = []
    config_text, config = _read_config(path / "config.yaml", notes)
    summary = _read_summary(path / "summary.json", notes)
    train, evaluations = _read_metrics(path / "metrics.jsonl", notes)
    samples, outcomes = _read_rollouts(path / "rollouts", notes)
    components = _component_names(train, evaluations, samples)
    return Run(
        path=path.resolve(),
        config_text=config_text,
        config=config,
        summary=summary,
        train=train,
        evaluations=evaluations,
        samples=samples,
        outcomes=outcomes,
        components=components,
        notes=tuple(notes),
    )


def _read_config(path: Path, notes: list[str]) -> tuple[str, Mapping[str, Any]]:
    if not path.is_file():
        notes.append("config.yaml is not there.")
        return "", {}
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError:
        config = None
    if not isinstance(config, dict):
        notes.append("config.yaml is not a YAML mapping; it is shown as it stands.")
        return text, {}
    return text, config


def _read_summary(path: Path, notes: list[str]) -> Summary | None:
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Summary)
    except ValueError as error:
        notes.append(f"summary.json could not be read and was left out: {error}.")
        return None


class _Head(msgspec.Struct):
    kind: str
    step: int
    mode: str = "sampled"


def _read_metrics(path: Path, notes: list[str]) -> tuple[list[Row], list[Evaluation]]:
    train: dict[int, Row] = {}
    evaluations: dict[tuple[int, str], Evaluation] = {}
    rewound = 0
    for head, row in _records(path, _metric, notes):
        if head.kind == "eval":
            evaluations[head.step, head.mode] = Evaluation(head.step, head.mode, row)
        elif head.kind == "train":
            rewound += _rewind(head.step, train, evaluations)
            train[head.step] = row
    if rewound:
        notes.append(f"The run was resumed: {rewound} older lines of repeated steps were left out.")
    return list(train.values()), list(evaluations.values())


def _metric(line: bytes) -> tuple[_Head, Row]:
    head = msgspec.json.decode(line, type=_Head)
    return head, _numbers(msgspec.json.decode(line))


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    numbers = ((k, v) for k, v in row.items() if isinstance(v, int | float))
    return {k: float(v) for k, v in numbers if not isinstance(v, bool)}


def _rewind(
    step: int, train: dict[int, Row], evaluations: dict[tuple[int, str], Evaluation]
) -> int:
    """Forget what an earlier attempt logged from ``step`` on; return how many lines that was."""
    if not train or step > next(reversed(train)):
        return 0
    stale_steps = [s for s in train if s >= step]
    stale_evaluations = [key for key in evaluations if key[0] >= step]
    for s in stale_steps:
        del train[s]
    for key in stale_evaluations:
        del evaluations[key]
    return len(stale_steps) + len(stale_evaluations)


def _read_rollouts(folder: Path, notes: list[str]) -> tuple[dict[int, list[Sample]], Outcomes]:
    files = {int(p.stem[5:]): p for p in folder.glob("step_*.jsonl") if p.stem[5:].isdigit()}
    steps = tuple(sorted(files))
    samples: dict[int, list[Sample]] = {}
    outcomes = Outcomes(steps, Counter(), 0, Counter())
    for step in steps:
        stored = list(_records(files[step], _sample, notes))
        outcomes = _counted(outcomes, stored, files[step])
        if step in (steps[0], steps[-1]):
            samples[step] = stored
    return samples, outcomes


def _sample(line: bytes) -> Sample:
    return msgspec.json.decode(line, type=Sample)


def _counted(outcomes: Outcomes, stored: Sequence[Sample], path: Path) -> Outcomes:
    for sample in stored:
        if sample.schema != SCHEMA_VERSION:
            raise WireError(
                f"{path}: got rollout schema {sample.schema}, expected {SCHEMA_VERSION}; "
                "make the report with the mrgym version that wrote the run"
            )
        outcomes.statuses[sample.status] += 1
        if sample.status != "ok" or sample.error:
            outcomes.errors[sample.status, sample.error or "(no error text)"] += 1
    truncated = outcomes.truncated + sum(sample.truncated for sample in stored)
    return dataclasses.replace(outcomes, truncated=truncated)


def _records(path: Path, decode: Callable[[bytes], T], notes: list[str]) -> Iterator[T]:
    """Yield every record; a broken last line becomes a note, any other broken line an error."""
    lines = [(n, line) for n, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]
    for number, line in lines:
        try:
            record = decode(line)
        except ValueError as error:
            if number != lines[-1][0]:
                raise WireError(
                    f"{path}, line {number}: got a broken record ({error}), expected one JSON "
                    "object a line; repair or remove that line"
                ) from error
            notes.append(f"The last line of {path.name} (line {number}) is cut off; left out.")
            return
        yield record


def _component_names(
    train: Iterable[Row],
    evaluations: Iterable[Evaluation],
    samples: Mapping[int, Sequence[Sample]],
) -> tuple[str, ...]:
    """Names in the order they were first logged; train lines are the authority on spelling."""
    trained = _between("reward/", "/mean", (key for row in train for key in row))
    if trained:
        return trained
    keys = dict.fromkeys(key for e in evaluations for key in e.row)
    errors = {f"{key}/se" for key in keys}
    evaluated = _between("reward/", "", (key for key in keys if key not in errors))
    stored = (c for step in samples.values() for sample in step for c in sample.components)
    return evaluated or tuple(dict.fromkeys(stored))


def _between(start: str, end: str, keys: Iterable[str]) -> tuple[str, ...]:
    names = (
        key[len(start) : len(key) - len(end)]
        for key in keys
        if key.startswith(start) and key.endswith(end) and len(key) > len(start) + len(end)
    )
    return tuple(dict.fromkeys(names))
