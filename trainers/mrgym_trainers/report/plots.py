"""Small charts as inline SVG.

No text of a run ever enters a chart: titles and legends are HTML, so only numbers are drawn.
Colours are placeholders that become CSS variables, so one chart serves light and dark mode.
"""

from __future__ import annotations

import dataclasses
import io
import re
import zlib
from collections.abc import Sequence
from statistics import fmean
from typing import Literal

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mrgym_trainers.report.read import Series

__all__ = [
    "MAX_POINTS",
    "Chart",
    "Trace",
    "data_limits",
    "draw",
    "end_size",
    "metric_chart",
    "smooth",
    "thin",
    "unit_limits",
    "window_for",
]

MAX_POINTS = 240  # points drawn a line: more than a small chart has pixels for
Colour = Literal["train", "sampled", "greedy", "part1", "part2", "part3", "part4"]
_PLACEHOLDERS = {
    "ink": "#010203",
    "grid": "#010204",
    "train": "#010205",
    "sampled": "#010206",
    "greedy": "#010207",
    "part1": "#010208",
    "part2": "#010209",
    "part3": "#01020a",
    "part4": "#01020b",
}
MINUS = "\u2212"


@dataclasses.dataclass(frozen=True)
class Trace:
    """One thing to draw: a line, a faint line, or points with optional 95 % intervals."""

    series: Series
    colour: Colour = "train"
    style: Literal["line", "faint", "circles", "diamonds"] = "line"
    half_widths: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Chart:
    """A drawing with its heading, the steps it spans, and its values at either end."""

    title: str
    svg: Markup
    steps: tuple[int, int]
    first: float
    last: float


def window_for(count: int) -> int:
    """Return the odd smoothing window for ``count`` values: about a tenth of them, at most 21."""
    return 1 if count < 10 else min(21, count // 10 | 1)


def smooth(series: Series, window: int) -> Series:
    """Return the centred moving mean; near the ends the window shrinks, to bend them little."""
    values, last, half = series.values, len(series) - 1, window // 2
    means = []
    for i in range(len(values)):
        reach = max(half // 2, min(half, i, last - i))
        means.append(fmean(values[max(0, i - reach) : i + reach + 1]))
    return Series(series.steps, tuple(means))


def thin(series: Series, limit: int = MAX_POINTS) -> Series:
    """Return at most ``limit`` points, each the mean of a run of neighbours."""
    size = -(-len(series) // limit)
    if size <= 1:
        return series
    starts = range(0, len(series), size)
    steps = tuple(round(fmean(series.steps[i : i + size])) for i in starts)
    return Series(steps, tuple(fmean(series.values[i : i + size]) for i in starts))


def end_size(window: int) -> int:
    """Return over how many steps the numbers beside a chart are averaged at either end."""
    return window // 2 + 1


def metric_chart(
    key: str,
    title: str,
    series: Series,
    *,
    points: Sequence[Trace] = (),
    smoothed: bool = True,
    unit: bool = False,
    limits: tuple[float, float] | None = None,
) -> Chart | None:
    """Return a metric with its moving mean and ``points``, ``None`` when there is nothing to draw.

    The y axis is ``limits``, or [0, 1] for a ``unit`` metric that fits in it, or the data's range.
    """
    window = window_for(len(series)) if smoothed else 1
    lines = [Trace(series, style="faint"), Trace(smooth(series, window))] if len(series) else []
    traces = [*lines, *points]
    if not traces:
        return None
    limits = limits or (unit_limits(traces) if unit else None)
    svg = draw(f"c{zlib.crc32(key.encode()):08x}", traces, limits)
    return chart_of(title, svg, traces[0].series, end_size(window) if lines else 1)


def chart_of(title: str, svg: Markup, series: Series, size: int = 1) -> Chart:
    """Return a drawing with its heading and the mean of ``size`` values at either end."""
    first, last = fmean(series.values[:size]), fmean(series.values[-size:])
    return Chart(title, svg, (series.steps[0], series.steps[-1]), first, last)


def draw(name: str, traces: Sequence[Trace], limits: tuple[float, float] | None = None) -> Markup:
    """Return traces over steps as an SVG element; ``name`` must be unique in the page."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "mrgym"})
        figure = Figure(figsize=(3.7, 2.0))
        figure.patch.set_visible(False)
        axes = figure.add_axes((0.125, 0.12, 0.86, 0.84))
        _style(axes)
        for trace in traces:
            _draw(axes, trace)
        axes.set_ylim(*(limits or data_limits(traces)))
        return Markup(_clean(_svg(figure), name))


def unit_limits(traces: Sequence[Trace]) -> tuple[float, float] | None:
    """Return [0, 1] with a hair of margin where every value fits in it, else ``None``."""
    inside = all(0 <= v <= 1 for trace in traces for v in trace.series.values)
    return (-0.03, 1.03) if inside else None


def data_limits(traces: Sequence[Trace]) -> tuple[float, float]:
    """Return the padded range of the values, intervals included."""
    values = [0.0] if not any(len(trace.series) for trace in traces) else []
    for trace in traces:
        widths = trace.half_widths or (0.0,) * len(trace.series)
        for value, width in zip(trace.series.values, widths, strict=True):
            values += [value - width, value + width]
    low, high = min(values), max(values)
    if low == high == 0:
        return -0.03, 1.03
    flat = high - low <= 1e-9 * abs(high)
    pad = 0.1 * abs(high) if flat else 0.06 * (high - low)
    return low - pad, high + pad


def _style(axes: Axes) -> None:
    ink, grid = _PLACEHOLDERS["ink"], _PLACEHOLDERS["grid"]
    axes.patch.set_visible(False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(grid)
    axes.grid(axis="y", color=grid, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=ink, labelsize=9, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(_tick))


def _tick(value: float, _position: int | None) -> str:
    """Return a short label: plain decimals in the usual range, an exponent beyond it."""
    usual = value == 0 or 1e-3 <= abs(value) < 1e5
    text = f"{round(value, 9):g}" if usual else f"{value:.2g}"
    return re.sub(r"e([+-])0?", r"e\1", text).replace("e+", "e").replace("-", MINUS)


def _draw(axes: Axes, trace: Trace) -> None:
    colour = _PLACEHOLDERS[trace.colour]
    series = thin(trace.series)
    if trace.style in ("line", "faint"):
        alpha, width = (1.0, 1.6) if trace.style == "line" else (0.35, 0.8)
        lone = "." if len(series) == 1 else ""
        axes.plot(series.steps, series.values, color=colour, alpha=alpha, lw=width, marker=lone)
        return
    marker, size = ("o", 4.5) if trace.style == "circles" else ("D", 4.0)
    axes.errorbar(
        trace.series.steps,
        trace.series.values,
        yerr=trace.half_widths,
        color=colour,
        marker=marker,
        ms=size,
        lw=1,
        ls=":",
        elinewidth=1,
    )


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    return buffer.getvalue()


def _clean(svg: str, name: str) -> str:
    """Return the bare element: unique ids, CSS colours, no date, no fixed size, short numbers."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"| (width|height)="[\d.]+pt"', "", svg, count=4)
    svg = re.sub(r"<defs>\s*<style.*?</defs>|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"|<text style="[^"]*(?=text-anchor)', _bare, svg)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r' (?:d|x|y)="[^"]*"', _short_numbers, svg)
    svg = re.sub(r"\n\s*", "\n", svg)
    for role, colour in _PLACEHOLDERS.items():
        svg = svg.replace(colour, f"var(--{role})")
    return svg.strip()


def _bare(start: re.Match[str]) -> str:
    """Drop the ids of groups, which nothing refers to, and the font, which the page sets."""
    return "<g" if start[0].startswith("<g") else '<text style="'


def _short_numbers(attribute: re.Match[str]) -> str:
    return re.sub(r"\d+\.\d{2,}", lambda n: f"{float(n[0]):.1f}", attribute[0]).replace("\n", "")
