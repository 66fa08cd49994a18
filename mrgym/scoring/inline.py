"""Running score functions in the calling process."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

from mrgym.errors import RewardContractError
from mrgym.scoring.declare import EVERY, ScoreMethod

if TYPE_CHECKING:
    from mrgym.sampler import Completion
    from mrgym.text import State, TextEnv

__all__ = ["InlineScorer", "Outcome", "Scorer", "Status"]

Status: TypeAlias = Literal["ok", "error", "timeout"]
T = TypeVar("T")

# Ctrl-C is the one thing that is not the score function's.
_ANYTHING = (Exception, SystemExit, asyncio.CancelledError)


@dataclass(slots=True)
class Outcome:
    """What the score functions said of one completion.

    Attributes:
        scores: Score by component, unchecked; complete only where ``status`` is ``"ok"``.
        status: ``"ok"``, ``"error"`` (a function raised) or ``"timeout"``.
        error: What went wrong, with the component's name.
    """

    scores: dict[str, Any] = field(default_factory=dict)
    status: Status = "ok"
    error: str | None = None

    def record(self, component: str, value: Any) -> None:
        """Keep a score, or all of a mapping where ``component`` is :data:`EVERY`."""
        if component != EVERY:
            self.scores[component] = value
        elif isinstance(value, Mapping):
            self.scores.update(value)
        else:
            raise RewardContractError(
                f"scores: got {value!r}, expected a mapping from component name to score; "
                "return a dict over the declared components"
            )

    def fail(self, status: Status, component: str, reason: str) -> None:
        """Record a failure; the first one stays."""
        if self.status == "ok":
            self.status, self.error = status, f"{component}: {reason}"


class Scorer(Protocol):
    """Runs the score functions of an environment somewhere."""

    def score(
        self, env: TextEnv, states: Sequence[State], completions: Sequence[Completion]
    ) -> list[Outcome]:
        """Return one outcome a completion, in order."""
        ...

    def close(self) -> None:
        """Free what the scorer holds."""
        ...


class InlineScorer:
    """Runs score functions here, async ones concurrently.

    Args:
        timeout: Seconds an ``async`` score function may take. A synchronous one cannot be
            interrupted inside its own process; use worker processes for code that may hang.
    """

    def __init__(self, timeout: float | None = 60.0) -> None:
        self.timeout = timeout

    def score(
        self, env: TextEnv, states: Sequence[State], completions: Sequence[Completion]
    ) -> list[Outcome]:
        """Return one outcome a completion, in order.

        Raises:
            RewardContractError: If a batched function returned another number of scores than it
                was given completions.
        """
        outcomes = [Outcome() for _ in completions]
        pending: list[tuple[Outcome, str, Awaitable[Any]]] = []
        for method in env.score_methods.values():
            function = getattr(env, method.attribute)
            subjects = states if method.wants_state else [state.task for state in states]
            if method.batched and completions:
                _score_batch(method, function, subjects, completions, outcomes, self.timeout)
                continue
            for outcome, subject, completion in zip(outcomes, subjects, completions, strict=True):
                _score_one(method.component, function, subject, completion, outcome, pending)
        if pending:
            _run(self._gather(pending))
        return outcomes

    def close(self) -> None:
        """Nothing to free."""

    async def _gather(self, pending: Sequence[tuple[Outcome, str, Awaitable[Any]]]) -> None:
        await asyncio.gather(*(self._settle(*item) for item in pending))

    async def _settle(self, outcome: Outcome, component: str, score: Awaitable[Any]) -> None:
        try:
            outcome.record(component, await asyncio.wait_for(score, self.timeout))
        except TimeoutError as error:
            outcome.fail("timeout", component, _timeout_reason(error, self.timeout))
        except RewardContractError:
            raise
        except _ANYTHING as error:  # a user's function may raise anything; it becomes a status
            outcome.fail("error", component, repr(error))


def _score_one(
    component: str,
    function: Callable[..., Any],
    subject: Any,
    completion: Completion,
    outcome: Outcome,
    pending: list[tuple[Outcome, str, Awaitable[Any]]],
) -> None:
    try:
        score = function(subject, completion)
    except RewardContractError:
        raise
    except _ANYTHING as error:  # a user's function may raise anything; it becomes a status
        outcome.fail("error", component, repr(error))
        return
    if inspect.isawaitable(score):
        pending.append((outcome, component, score))
    else:
        outcome.record(component, score)


def _score_batch(
    method: ScoreMethod,
    function: Callable[..., Any],
    subjects: Sequence[Any],
    completions: Sequence[Completion],
    outcomes: Sequence[Outcome],
    timeout: float | None = None,
) -> None:
    try:
        scores = function(list(subjects), list(completions))
        if inspect.isawaitable(scores):
            scores = _run(asyncio.wait_for(scores, timeout))
    except RewardContractError:
        raise
    except _ANYTHING as error:  # a user's function may raise anything; it becomes a status
        timed_out = isinstance(error, TimeoutError)
        reason = _timeout_reason(error, timeout) if timed_out else repr(error)
        for outcome in outcomes:
            outcome.fail("timeout" if timed_out else "error", method.component, reason)
        return
    values = _as_list(scores)
    if values is None or len(values) != len(completions):
        got = "one value" if values is None else f"{len(values)} values"
        raise RewardContractError(
            f"{method.attribute}: got {got} for {len(completions)} completions, expected one a "
            "completion; return a list of that length (nothing is broadcast)"
        )
    for outcome, value in zip(outcomes, values, strict=True):
        outcome.record(method.component, value)


def _as_list(scores: Any) -> list[Any] | None:
    if hasattr(scores, "tolist"):
        scores = scores.tolist()
    return list(scores) if isinstance(scores, (list, tuple)) else None


def _timeout_reason(error: BaseException, timeout: float | None) -> str:
    """Say whose patience ended: ours (the error carries no text), or the function's own."""
    return repr(error) if error.args or timeout is None else f"no score within {timeout:g} s"


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where an event loop is already running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    result: list[T] = []
    failure: list[BaseException] = []

    def target() -> None:
        try:
            result.append(asyncio.run(work))
        except BaseException as error:  # handed to the calling thread
            failure.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]
