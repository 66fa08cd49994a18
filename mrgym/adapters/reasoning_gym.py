"""reasoning-gym: any of its datasets as tasks, its own scorer as correctness, beside a format.

    env = mrgym.adapters.reasoning_gym.from_reasoning_gym("chain_sum", size=1000, max_terms=4)
    mrgym.check_env(env)

In training: ``mrgym train mrgym.adapters.reasoning_gym:from_reasoning_gym -e name=chain_sum``.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mrgym.adapters._common import need
from mrgym.errors import ConfigError, RegistryError, TaskError, closest
from mrgym.sampler import Completion
from mrgym.scoring import component
from mrgym.tasks import Task, TaskSource
from mrgym.text import SingleTurnEnv

__all__ = [
    "EVALUATES",
    "ReasoningGym",
    "dataset_names",
    "from_reasoning_gym",
    "tagged_answer",
    "tagged_format",
]

Extract = Callable[[str], "str | None"]
HasFormat = Callable[[str], bool]

EVALUATES = frozenset(
    "binary_matrix countdown intermediate_integration n_queens polynomial_multiplication puzzle24 "
    "simple_integration spiral_matrix string_insertion".split()
)
"""Datasets whose scorers run the answer as Python code, as of reasoning-gym 0.1.25."""

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def from_reasoning_gym(
    name: str,
    *,
    size: int = 500,
    seed: int = 0,
    extract: Extract | None = None,
    has_format: HasFormat | None = None,
    unreadable: float | None = None,
    evaluate_answers: bool = False,
    **config: Any,
) -> ReasoningGym:
    """Return a dataset of reasoning-gym as an environment.

    Args:
        name: The dataset, such as ``"chain_sum"``; :func:`dataset_names` lists them.
        size: Number of tasks; a stable fifth of them, by prompt, is held out.
        seed: Seed of the tasks.
        extract: ``completion -> answer or None``; the text in the last answer tags by default
            (:func:`tagged_answer`). A function of a module, so that workers can be sent it.
        has_format: ``completion -> bool``; :func:`tagged_format` by default.
        unreadable: Correctness where the dataset's scorer raises. By default that is a failed
            score (status ``"error"``), as for any score function.
        evaluate_answers: Whether a dataset of :data:`EVALUATES` may be used: its scorer passes
            the model's answer to Python's ``eval`` (or to SymPy's parser, which does), so an
            answer can do whatever the process can. Score in a sandbox.
        **config: Further configuration of the dataset.

    Raises:
        MissingExtraError: If reasoning-gym is not installed.
        RegistryError: If there is no such dataset.
        ConfigError: If the dataset does not take the configuration, or its scorer runs answers
            as code and ``evaluate_answers`` is not set.
    """
    _check_config(name, {**config, "size": size, "seed": seed})
    if not isinstance(seed, int):  # None would give other tasks in every process
        raise ConfigError(
            f"reasoning_gym {name}: got seed={seed!r}, expected a whole number; write one"
        )
    if unreadable is not None and not 0 <= unreadable <= 1:
        raise ConfigError(
            f"reasoning_gym {name}: got unreadable={unreadable!r}, expected 0 to 1, the range of "
            "correctness; change it"
        )
    if not evaluate_answers:
        _refuse_evaluation(name, config)
    dataset = _Dataset(name, {"size": size, "seed": seed, **config})
    return ReasoningGym(dataset, extract or tagged_answer, has_format or tagged_format, unreadable)


def dataset_names() -> list[str]:
    """Return the names of all datasets."""
    return sorted(_known())


def tagged_answer(completion: str) -> str | None:
    """Return what stands after the last ``<answer>`` and before the next ``</answer>``, stripped.

    ``None`` where the tags are missing, as reasoning-gym's own ``extract_answer`` has it.
    """
    _, opened, tail = completion.rpartition("<answer>")
    inside, closed, _ = tail.partition("</answer>")
    return inside.strip() if opened and closed else None


def tagged_format(completion: str) -> bool:
    """Return whether a text is one think block, a newline and one answer block, nothing else."""
    around = completion.startswith("<think>") and completion.endswith("</answer>")
    joined = "</think>\n<answer>" in completion
    return around and joined and all(completion.count(tag) == 1 for tag in _TAGS)


class ReasoningGym(SingleTurnEnv):
    """Tasks of a reasoning-gym dataset; made by :func:`from_reasoning_gym`.

    Reward Space:
        * ``correctness``: what the dataset's ``score_answer`` gives the stripped answer, 0 to 1.
        * ``format``: 1 if the completion has the wanted form, else 0.

    Observation Space:
        The question, as text (chat messages with the instruction in ``info``).

    Action Space:
        The completion, as text.
    """

    instruction = (
        "Answer the question. Work it out between <think> and </think>; then, on the next line, "
        "give the final answer alone between <answer> and </answer>."
    )

    def __init__(
        self,
        dataset: _Dataset,
        extract: Extract,
        has_format: HasFormat,
        unreadable: float | None,
    ) -> None:
        super().__init__()
        self._dataset = dataset
        self._extract = extract
        self._has_format = has_format
        self._unreadable = unreadable

    @property
    def contract_name(self) -> str:
        """How this environment is called in error messages."""
        return f"reasoning_gym {self._dataset.name}"

    def tasks(self) -> TaskSource:  # type: ignore[override]
        """Return the dataset's tasks, generated when they are first asked for."""
        entries = enumerate(self._dataset.entries())
        return TaskSource((self._task(i, entry) for i, entry in entries), name=self.contract_name)

    def gold_completion(self, task: Task) -> str | None:
        """Return the dataset's answer in the wanted format; ``None`` where it gives none."""
        if task.answer is None:
            return None
        return f"<think>...</think>\n<answer>{task.answer}</answer>"

    @component(low=0, high=1)
    def correctness(self, task: Task, completion: Completion) -> Any:
        """What the dataset's own scorer gives the answer."""
        answer = self._extract(str(completion))
        entry = {"question": task.prompt, "answer": task.answer, "metadata": task.metadata}
        try:
            return self._dataset.score(None if answer is None else answer.strip(), entry)
        except Exception:  # a scorer that cannot read an answer raises anything
            if self._unreadable is None:
                raise
            return self._unreadable

    @component(low=0, high=1)
    def format(self, task: Task, completion: Completion) -> bool:
        """1 if the completion has the wanted form."""
        return self._has_format(str(completion))

    def _task(self, index: int, entry: dict[str, Any]) -> Task:
        answer = entry["answer"]
        if answer is not None and not isinstance(answer, str):
            raise TaskError(
                f"{self.contract_name}, item {index}: got answer {answer!r}, expected text or "
                "None; choose another dataset"
            )
        return Task(entry["question"], answer, metadata=entry["metadata"])


class _Dataset:
    """A dataset by its configuration: made anew after pickling, since some hold lambdas."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self.name = name
        self.config = config
        self._made = self._make()

    def __reduce__(self) -> tuple[type[_Dataset], tuple[str, dict[str, Any]]]:
        return (_Dataset, (self.name, self.config))

    def _make(self) -> Any:
        with _seeded(self.config["seed"]):
            try:
                return need("reasoning_gym", "reasoning-gym").create_dataset(
                    self.name, **self.config
                )
            except (AssertionError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"reasoning_gym {self.name}: got {self.config} ({error}), expected a "
                    "configuration it takes; change it"
                ) from error

    def entries(self) -> Iterator[dict[str, Any]]:
        """Yield the dataset's items, the same ones every time."""
        for index in range(len(self._made)):
            with _seeded(self.config["seed"] + index):
                entry = self._made[index]
            yield entry

    def score(self, answer: str | None, entry: dict[str, Any]) -> Any:
        """Return what the dataset gives an answer."""
        return self._made.score_answer(answer, entry)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generators, which some datasets draw from or reseed, and restore them."""
    state, np_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(np_state)


def _check_config(name: str, config: dict[str, Any]) -> None:
    known = _known()
    if name not in known:
        raise RegistryError(
            f"from_reasoning_gym: got dataset {name!r}, expected one of {len(known)}"
            f"{closest(name, known)}; look at dataset_names()"
        )
    fields = [field.name for field in dataclasses.fields(known[name][1])]
    unknown = [key for key in config if key not in fields]
    if unknown:
        raise ConfigError(
            f"reasoning_gym {name}: got {unknown}, expected some of {fields}"
            f"{closest(unknown[0], fields)}; rename or remove it"
        )


def _refuse_evaluation(name: str, config: dict[str, Any]) -> None:
    parts = [getattr(part, "name", None) for part in config.get("datasets") or ()]  # composite's
    running = sorted(EVALUATES & {name, *parts})
    if running:
        raise ConfigError(
            f"reasoning_gym {name}: got {running}, whose scorer runs the model's answer as Python "
            "code, expected one that reads it; choose another dataset, or score in a sandbox and "
            "pass evaluate_answers=True"
        )


def _known() -> dict[str, tuple[Any, Any]]:
    need("reasoning_gym", "reasoning-gym")  # importing the package fills the registry
    datasets: dict[str, tuple[Any, Any]] = need("reasoning_gym.factory", "reasoning-gym").DATASETS
    return datasets
