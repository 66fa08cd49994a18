"""The progress bar of a run: steps, and the component means live."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mrgym.components import reward_key

__all__ = ["ConsoleProgress", "ProgressView", "SilentProgress"]

_PLAIN_EVERY = 25  # steps between lines where there is no terminal to redraw


class ProgressView(Protocol):
    """Is told how a run goes."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Show the metrics of a finished step."""
        ...

    def evaluated(self, line: Mapping[str, Any]) -> None:
        """Show an evaluation."""
        ...


class SilentProgress:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Show nothing."""

    def evaluated(self, line: Mapping[str, Any]) -> None:
        """Show nothing."""


class ConsoleProgress:
    """A bar with every component's mean; a line now and then where output is not a terminal.

    Args:
        names: Components to show, in order.
        steps: Number of steps.
        console: Where to show it; standard error by default.
    """

    def __init__(self, names: Sequence[str], steps: int, console: Console | None = None) -> None:
        self._names = names
        self._steps = steps
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("[bold]train"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[means]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=steps, means="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Advance the bar and show the step's component means."""
        means = self._means(metrics, "/mean")
        self._bar.update(self._task, advance=1, means=means)
        step = metrics["step"]
        if not self._console.is_terminal and (step % _PLAIN_EVERY == 0 or step == self._steps):
            self._console.print(f"step {step}/{self._steps}  {means}", highlight=False)

    def evaluated(self, line: Mapping[str, Any]) -> None:
        """Print the component means of an evaluation above the bar."""
        label = f"eval at step {line['step']:>4} ({line['mode']})"
        self._console.print(f"{label:<27} {self._means(line, '')}", highlight=False)

    def _means(self, metrics: Mapping[str, Any], suffix: str) -> str:
        shown = ((name, metrics.get(reward_key(name) + suffix)) for name in self._names)
        return "  ".join(f"{name} {value:.3f}" for name, value in shown if value is not None)
