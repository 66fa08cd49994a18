"""Completions as they are ready: the sampler goes on in a thread while the caller scores."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol, TypeAlias, runtime_checkable

from mrgym.errors import RolloutError
from mrgym.sampler import Completion, Prompt, SamplingParams

__all__ = ["Ready", "StreamingSampler", "ready_completions"]

Ready: TypeAlias = "list[tuple[int, Completion]]"
"""Completions with their position, counted through all prompts."""

# One thread for good: torch makes a pool of workers for every thread that computes.
_thread = ThreadPoolExecutor(1, thread_name_prefix="mrgym-sampler")


@runtime_checkable
class StreamingSampler(Protocol):
    """A sampler that hands out completions before the last one is ready."""

    def stream(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams
    ) -> Iterator[tuple[int, int, Completion]]:
        """Yield prompt's position, completion's position and completion, in any order."""
        ...


def ready_completions(
    sampler: object,
    prompts: Sequence[Prompt],
    n: int,
    params: SamplingParams,
    *,
    whole_groups: bool = False,
) -> Generator[Ready, None, None]:
    """Yield what is ready, until all ``n`` completions of every prompt were handed out.

    A :class:`StreamingSampler` samples in a thread meanwhile; any other sampler gives all at once.

    Args:
        sampler: The sampler.
        prompts: What to complete.
        n: Completions a prompt.
        params: How to sample.
        whole_groups: Whether a prompt's completions are handed out together.

    Raises:
        SamplerError: From the sampler, as it is.
        RolloutError: If the sampler gives too many or too few completions.
    """
    if isinstance(sampler, StreamingSampler):
        arriving = _from_thread(sampler, prompts, n, params)
    else:
        sampled = sampler.sample(prompts, n, params)  # type: ignore[attr-defined]
        _check_counts(sampled, len(prompts), n)
        arriving = iter([[(i * n + j, c) for i, g in enumerate(sampled) for j, c in enumerate(g)]])
    yield from _groups_of(arriving, n) if whole_groups else arriving


def _from_thread(
    sampler: StreamingSampler, prompts: Sequence[Prompt], n: int, params: SamplingParams
) -> Iterator[Ready]:
    arrived: queue.SimpleQueue[tuple[int, Completion] | None] = queue.SimpleQueue()
    stop = threading.Event()

    def run() -> None:
        stream: Iterator[tuple[int, int, Completion]] = iter(())
        try:
            stream = sampler.stream(prompts, n, params)
            for i, j, completion in stream:
                arrived.put((i * n + j, completion))
                if stop.is_set():
                    break
        finally:
            with suppress(AttributeError):  # any iterator will do, only a generator can be closed
                stream.close()  # type: ignore[attr-defined]
            arrived.put(None)

    sampling = _thread.submit(run)
    seen: set[int] = set()
    try:
        while ready := _take_all(arrived):
            yield _new(ready, seen, len(prompts) * n)
        sampling.result()
        if len(seen) != len(prompts) * n:
            raise RolloutError(_count_message(len(seen), len(prompts) * n))
    finally:
        stop.set()
        _wait(sampling)


def _take_all(arrived: queue.SimpleQueue[tuple[int, Completion] | None]) -> Ready:
    """Wait for the next completion and return it with all that have arrived; none at the end."""
    item = arrived.get()
    ready: Ready = []
    while item is not None:
        ready.append(item)
        try:
            item = arrived.get_nowait()
        except queue.Empty:
            return ready
    if ready:
        arrived.put(None)  # seen too early; the next call needs it
    return ready


def _new(ready: Ready, seen: set[int], expected: int) -> Ready:
    for position, _ in ready:
        if position in seen or not 0 <= position < expected:
            raise RolloutError(_count_message(f"completion {position} twice or unasked", expected))
        seen.add(position)
    return ready


def _wait(sampling: Future[None]) -> None:
    """Let the thread come to rest; what it raised was raised already, or does not matter now."""
    sampling.exception()


def _groups_of(arriving: Iterator[Ready], n: int) -> Iterator[Ready]:
    waiting: dict[int, Ready] = {}
    for ready in arriving:
        for position, completion in ready:
            waiting.setdefault(position // n, []).append((position, completion))
        whole = [group for group, members in waiting.items() if len(members) == n]
        if whole:
            yield sorted(
                (item for group in whole for item in waiting.pop(group)), key=lambda item: item[0]
            )


def _check_counts(sampled: Sequence[Sequence[Completion]], prompts: int, n: int) -> None:
    counts = {len(group) for group in sampled}
    if len(sampled) != prompts or counts - {n}:
        raise RolloutError(
            f"sampler: got {len(sampled)} prompts with {sorted(counts)} completions, expected "
            f"{prompts} with {n}; mend the sampler"
        )


def _count_message(got: object, expected: int) -> str:
    return f"sampler: got {got}, expected each of {expected} completions once; mend the sampler"
