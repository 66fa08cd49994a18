"""What a service counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from mrgym.scoring import Status

__all__ = ["METRICS_TYPE", "Metrics"]

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The counters of one service."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._kept: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._requests = Counter(
            "mrgym_requests",
            "Requests answered.",
            ["method", "route", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "mrgym_request_seconds",
            "Seconds from a request's head to the end of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._scored = Counter(
            "mrgym_completions_scored", "Completions scored.", registry=self._registry
        )
        self._failed = Counter(
            "mrgym_scoring_failures",
            "Completions without scores.",
            ["status"],
            registry=self._registry,
        )
        self._sums = Gauge(
            "mrgym_component_sum",
            "Sum of a component's scores so far (it falls where scores are negative).",
            ["component"],
            registry=self._registry,
        )
        self._steps = Counter(
            "mrgym_session_steps", "Steps taken in sessions.", registry=self._registry
        )
        self._sessions = Gauge(
            "mrgym_sessions", "Sessions that hold an environment.", registry=self._registry
        )

    def watch_sessions(self, count: Callable[[], int]) -> None:
        """Read the number of sessions from ``count``."""
        self._sessions.set_function(count)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        kept = self._kept.get((method, route, status))
        if kept is None:
            labels = self._requests.labels(method, route, str(status))
            kept = self._kept[method, route, status] = (labels, self._seconds.labels(route))
        kept[0].inc()
        kept[1].observe(seconds)

    def scored(self, results: Iterable[tuple[Status, Mapping[str, float]]]) -> None:
        """Count completions by their status and components."""
        sums: dict[str, float] = {}
        scored = 0
        for status, components in results:
            if status != "ok":
                self._failed.labels(status).inc()
                continue
            scored += 1
            for name, value in components.items():
                sums[name] = sums.get(name, 0.0) + value
        self._scored.inc(scored)
        self._add(sums)

    def stepped(self, components: Mapping[str, float]) -> None:
        """Count a step of a session."""
        self._steps.inc()
        self._add(components)

    def text(self) -> bytes:
        """Return everything in the text format of Prometheus."""
        return generate_latest(self._registry)

    def _add(self, components: Mapping[str, float]) -> None:
        for name, value in components.items():
            self._sums.labels(name).inc(value)
