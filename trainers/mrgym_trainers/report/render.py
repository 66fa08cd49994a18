"""Write a run as one self-contained HTML page: no scripts, no network, escaped throughout."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from mrgym_trainers.report import plots
from mrgym_trainers.report.plots import MINUS, Chart, Colour, Trace, chart_of, metric_chart
from mrgym_trainers.report.read import Evaluation, Run, Sample, Series, read_run

__all__ = ["render", "write_report"]

BEST, WORST, RANDOM, FAILED = 2, 2, 3, 2  # samples shown a step
COMPLETION_LIMIT, PROMPT_LIMIT, ERROR_LIMIT = 6000, 3000, 300  # characters shown
TURN_LIMIT, ERROR_ROWS = 12, 12
POINTS = 16  # evaluations drawn a chart
MODES = ("sampled", "greedy")
SUM = "plain sum"
DASH = "\u2013"
_VISIBLE = {c: 0x2400 + c for c in range(32) if c not in (9, 10)} | {127: 0x2421}


@dataclasses.dataclass(frozen=True)
class Change:
    """Start and end of one number; ``noise`` is half the 95 % interval of the difference."""

    start: float | None
    end: float | None
    noise: float | None

    @property
    def change(self) -> float | None:
        """End minus start, where both are known."""
        return None if self.start is None or self.end is None else self.end - self.start

    @property
    def verdict(self) -> str:
        """``up``, ``down``, or ``flat`` for a change the noise can explain."""
        if self.change is None or abs(self.change) <= (self.noise or 5e-4):
            return "flat"
        return "up" if self.change > 0 else "down"


@dataclasses.dataclass(frozen=True)
class Clip:
    """A text cut in the middle: ``omitted`` characters are missing between head and tail."""

    head: str
    omitted: int
    tail: str
    total: int


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of a run folder and return its path (default ``run_dir/report.html``).

    Raises:
        ConfigError: ``run_dir`` is not a run folder.
        WireError: A stored record is broken (a cut-off last line is only noted).
    """
    target = Path(out) if out else Path(run_dir) / "report.html"
    page = render(read_run(Path(run_dir)))
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    part.write_bytes(page.encode("utf-8", errors="replace"))
    part.replace(target)
    return target


def render(run: Run) -> str:
    """Return the page; the same run gives the same bytes. Control characters become visible."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    filters = {
        "score": score, "brief": brief, "percent": percent, "signed": signed, "clip": clip,
        "count": count, "duration": duration,
    }  # fmt: skip
    environment.filters.update(filters)
    source = files("mrgym_trainers.report").joinpath("template.html.j2").read_text("utf-8")
    return environment.from_string(source).render(_page(run)).translate(_VISIBLE)


def _page(run: Run) -> dict[str, Any]:
    return {
        "run": run,
        "env": _label(run, "env", "unknown environment"),
        "model": _label(run, "model", "unknown model"),
        "seed": _label(run, "seed", DASH),
        "status": _status(run),
        "remarks": _remarks(run),
        "headline": _headline(run),
        "curves": _curves(run),
        "sums": _sums(run),
        "weights": _weights(run),
        "smoothing": _smoothing(run),
        "signal": _signal(run),
        "failures": _failures(run),
        "optimisation": _charts(run, _OPTIMISATION),
        "time": _time(run),
        "samples": [(step, _pick(run.samples[step])) for step in sorted(run.samples)[::-1]],
        "limits": {"completion": COMPLETION_LIMIT, "prompt": PROMPT_LIMIT, "turns": TURN_LIMIT},
        "points": POINTS,
    }


# --- head -----------------------------------------------------------------------------------


def _label(run: Run, key: str, missing: str) -> str:
    known = getattr(run.summary, key, None)
    known = run.setting(key) if known is None else known
    if isinstance(known, Mapping):
        known = next((known[k] for k in ("id", "name", "path") if k in known), None)
    return missing if known in (None, "") else str(known)


def _status(run: Run) -> tuple[str, str]:
    """Return the status word and a sentence for it."""
    step = run.last_step
    if run.summary is None:
        return "no summary", (
            "The run left no final summary: it is still going, was killed or crashed. "
            f"The numbers reach up to step {step}."
        )
    status = run.summary.status or "unknown"
    sentences = {
        "finished": f"The run finished after {step} steps.",
        "interrupted": f"The run was interrupted after step {step}; the numbers end there.",
        "failed": f"The run failed after step {step}; the numbers end there.",
    }
    return status, sentences.get(status, f"The numbers reach up to step {step}.")


def _remarks(run: Run) -> list[str]:
    remarks = list(run.notes)
    if not run.train:
        remarks.append("This run has no steps yet.")
    elif run.summary and run.summary.steps not in (None, run.last_step):
        remarks.append(
            f"summary.json says {run.summary.steps} steps, metrics.jsonl ends at {run.last_step}."
        )
    return remarks + _dead_sentences(run)


def _dead_sentences(run: Run) -> list[str]:
    span = f"steps {run.late_from} to {run.last_step}, the last quarter of the run"
    sentences = []
    for name, share in run.dead_components().items():
        level = run.late_mean(f"reward/{name}/mean")
        at = "" if level is None else f", at a mean score of {score(level)}"
        sentences.append(
            f"dead: {name} was constant in {percent(share)} of groups{at} ({span}); "
            "it gives almost no signal there."
        )
    return sentences


def _headline(run: Run) -> dict[str, Any]:
    found = {mode: evals for mode in MODES if (evals := run.evaluations_of(mode))}
    rows = [
        (name or SUM, [_change(evals, name) for evals in found.values()])
        for name in (*run.components, None)
    ]
    return {"modes": found, "rows": rows if found else []}


def _change(evals: Sequence[Evaluation], name: str | None) -> Change:
    start, end = evals[0], evals[-1]
    if start is end:
        return Change(start.mean(name), None, None)
    errors = start.error(name), end.error(name)
    known = errors[0] is not None and errors[1] is not None
    noise = 1.96 * math.hypot(errors[0] or 0.0, errors[1] or 0.0) if known else None
    return Change(start.mean(name), end.mean(name), noise)


# --- charts ---------------------------------------------------------------------------------


def _curves(run: Run) -> list[Chart]:
    charts = (_reward_chart(run, f"reward/{c}/mean", c, c) for c in run.components)
    return [chart for chart in charts if chart]


def _sums(run: Run) -> list[Chart]:
    plain = _reward_chart(run, "reward/mean", SUM, None)
    weighted = metric_chart(
        "reward_weighted/mean", "weighted sum", run.series("reward_weighted/mean"), unit=True
    )
    return [chart for chart in (plain, weighted) if chart]


def _reward_chart(run: Run, key: str, title: str, component: str | None) -> Chart | None:
    points = [_points(run, "sampled", component), _points(run, "greedy", component)]
    known = [p for p in points if len(p.series)]
    return metric_chart(key, title, run.series(key), unit=True, points=known)


def _points(run: Run, mode: str, component: str | None) -> Trace:
    known = _spread([e for e in run.evaluations_of(mode) if e.mean(component) is not None])
    values = tuple(e.mean(component) or 0.0 for e in known)
    widths = tuple(1.96 * (e.error(component) or 0.0) for e in known)
    series = Series(tuple(e.step for e in known), values)
    if mode == "greedy":
        return Trace(series, "greedy", "diamonds", widths)
    return Trace(series, "sampled", "circles", widths)


def _spread(evals: list[Evaluation]) -> list[Evaluation]:
    """Return at most ``POINTS`` evaluations, evenly chosen, the first and the last among them."""
    if len(evals) <= POINTS:
        return evals
    return [evals[round(i * (len(evals) - 1) / (POINTS - 1))] for i in range(POINTS)]


def _charts(run: Run, metrics: Mapping[str, str], **options: Any) -> list[Chart]:
    charts = (
        metric_chart(key, title, run.series(key), smoothed=key not in _EXACT, **options)
        for key, title in metrics.items()
    )
    return [chart for chart in charts if chart]


def _smoothing(run: Run) -> dict[str, str]:
    """Return what the caption must say about the lines and about the numbers beside them."""
    window = plots.window_for(len(run.train))
    text = "not smoothed, as the run is short"
    if window > 1:
        text = f"moving mean over {window} steps (faint: unsmoothed)"
    size = -(-len(run.train) // plots.MAX_POINTS)
    text += f"; each drawn point is the mean of {size} steps" if size > 1 else ""
    ends = plots.end_size(window)
    return {"line": text, "ends": f"{ends} steps" if ends > 1 else "step"}


def _weights(run: Run) -> str:
    weights = run.setting("weights")
    if not isinstance(weights, Mapping) or not weights:
        return ""
    return ", ".join(f"{name} \u00d7 {weight}" for name, weight in weights.items())


# --- advantages -----------------------------------------------------------------------------

_NO_SIGNAL = {
    "advantage/frac_no_signal": "share without any signal",
    "advantage/abs_mean": "mean size of advantage",
}


def _signal(run: Run) -> dict[str, Any]:
    spread = {f"advantage/std/{c}": c for c in run.components}
    constant = {f"advantage/frac_constant/{c}": c for c in run.components}
    together = [Trace(series) for key in spread if len(series := run.series(key))]
    limits = plots.data_limits([*together, Trace(Series((0,), (0.0,)))])
    return {
        "rows": [_signal_row(run, c) for c in run.components] if run.train else [],
        "dead": _dead_sentences(run),
        "judged": any(len(run.series(key)) for key in constant),
        "spread": _charts(run, spread, limits=limits),
        "constant": _charts(run, constant, limits=(-0.03, 1.03)),
        "whole": _charts(run, _NO_SIGNAL),
    }


def _signal_row(run: Run, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "mean": run.late_mean(f"reward/{name}/mean"),
        "std": run.late_mean(f"reward/{name}/std"),
        "advantage": run.late_mean(f"advantage/std/{name}"),
        "constant": run.late_mean(f"advantage/frac_constant/{name}"),
        "present": run.late_mean(f"present/{name}/frac"),
        "dead": name in run.dead_components(),
    }


# --- failures, optimisation, time -----------------------------------------------------------

_RATES = {
    "score/error_rate": "score errors",
    "score/timeout_rate": "score timeouts",
    "completion/truncated_frac": "truncated completions",
    "completion/length_mean": "completion length (tokens)",
}
_OPTIMISATION = {
    "loss/policy": "policy loss",
    "loss/grad_norm": "gradient norm",
    "loss/clip_frac": "clipped tokens",
    "lr": "learning rate",
    "mismatch/kl": "mismatch: KL",
    "mismatch/max_abs": "mismatch: largest gap",
    "groups/size_min": "smallest group",
}
_EXACT = {"lr", "groups/size_min"}  # set by the config, not measured: never smoothed
_PARTS: dict[str, tuple[str, Colour]] = {
    "time/sample_s": ("sampling", "part1"),
    "time/score_s": ("scoring", "part2"),
    "time/update_s": ("update", "part3"),
    "time/step_s": ("whole step", "part4"),
}


def _failures(run: Run) -> dict[str, Any]:
    outcomes = run.outcomes
    return {
        "charts": _charts(run, _RATES),
        "stored": outcomes.statuses.total(),
        "files": len(outcomes.steps),
        "statuses": sorted(outcomes.statuses.items()),
        "truncated": outcomes.truncated,
        "errors": outcomes.errors.most_common(ERROR_ROWS),
        "more": max(0, len(outcomes.errors) - ERROR_ROWS),
        "limit": ERROR_LIMIT,
    }


def _time(run: Run) -> dict[str, Any]:
    known = {key: series for key in _PARTS if len(series := run.series(key))}
    whole = math.fsum(known["time/step_s"].values) if "time/step_s" in known else 0.0
    rows = [
        (*_PARTS[key], math.fsum(s.values), math.fsum(s.values) / len(s))
        for key, s in known.items()
    ]
    return {"rows": rows, "whole": whole, "chart": _time_chart(known)}


def _time_chart(known: Mapping[str, Series]) -> Chart | None:
    if not known:
        return None
    smoothed = {key: plots.smooth(s, plots.window_for(len(s))) for key, s in known.items()}
    traces = [Trace(s, _PARTS[key][1]) for key, s in smoothed.items()]
    top = max(v for trace in traces for v in trace.series.values)
    svg = plots.draw("time", traces, (0.0, 1.08 * top or 1.0))
    return chart_of("seconds a step", svg, traces[-1].series)


# --- samples --------------------------------------------------------------------------------


def _pick(samples: Sequence[Sample]) -> list[tuple[str, Sample]]:
    """Return the best, the worst, some random and some failed rollouts of a step, each once."""
    scored = [s for s in samples if s.status == "ok" and s.reward is not None]
    ranked = sorted(scored, key=lambda s: -(s.reward or 0.0))
    best, rest = ranked[:BEST], ranked[BEST:]
    worst, middle = rest[-WORST:], rest[:-WORST]
    chosen = random.Random(0).sample(middle, min(RANDOM, len(middle)))
    failed = [s for s in samples if s.status != "ok"][:FAILED]
    labelled = {"best": best, "worst": worst[::-1], "random": chosen, "failed": failed}
    return [(label, sample) for label, some in labelled.items() for sample in some]


# --- numbers and text -----------------------------------------------------------------------


def score(value: float | None) -> str:
    """Return a score with three decimals (fewer for large ones), a dash for ``None``."""
    if value is None:
        return DASH
    decimals = 3 if abs(value) < 100 else 1
    return f"{round(value, decimals) + 0.0:.{decimals}f}".replace("-", MINUS)


def signed(value: float | None) -> str:
    """Return a change as a score with its sign."""
    text = score(value)
    return text if value is None or text.startswith(MINUS) else f"+{text}"


def brief(value: float | None) -> str:
    """Return three significant digits, a dash for ``None``."""
    return DASH if value is None else f"{value:.3g}".replace("-", MINUS)


def percent(share: float | None) -> str:
    """Return a share in whole percent, with a decimal where rounding would say 0 or 100."""
    if share is None:
        return DASH
    rounds_away = round(100 * share) in (0, 100) and share not in (0, 1)
    return f"{100 * share:.{1 if rounds_away else 0}f} %"


def count(value: float) -> str:
    """Return a whole number with thin spaces between thousands."""
    return f"{int(value):,}".replace(",", "\u202f")


def duration(seconds: float) -> str:
    """Return ``1 h 02 min``, ``3 min 04 s`` or ``5.6 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def clip(text: str, limit: int) -> Clip:
    """Cut a long text in the middle: three quarters of ``limit`` from the head, one of the tail."""
    omitted = len(text) - limit
    if omitted <= 0:
        return Clip(text, 0, "", len(text))
    tail = limit // 4
    return Clip(text[: limit - tail], omitted, text[-tail:], len(text))
