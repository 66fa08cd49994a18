"""The HTML report: what it says about a run, and what hostile or broken runs cannot do to it."""

import json
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser

import matplotlib
import pytest

from mrgym.errors import ConfigError, WireError
from mrgym.rollout import Rollout, Turn
from mrgym.wire import write_rollouts
from mrgym_trainers.report import read_run, render, write_report
from mrgym_trainers.report.plots import Trace, draw, smooth, thin, unit_limits
from mrgym_trainers.report.read import Series
from mrgym_trainers.report.render import Change, clip, count, duration, percent, score, signed

ASCII = {0x2013: "-", 0x2212: "-", 0xD7: "x", 0x202F: "'"}  # dash, minus, times, thin space
VOID = {"meta", "link", "br", "img", "input", "hr"}
HOSTILE = (
    "<script>alert(1)</script></details></pre>{{7*7}}{% raw %}\x00\x1b[31m\"'><img src=x onerror=a>"
)


class Page(HTMLParser):
    """A parsed report; parsing fails on elements that do not nest."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.tags, self.attrs, self.words, self.open = Counter(), [], [], []
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags[tag] += 1
        self.attrs += attrs
        self.words.append(" ")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.words.append(" ")

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return " ".join("".join(self.words).translate(ASCII).split())

    def values(self, name):
        return [value for key, value in self.attrs if key == name]


def train_line(step, components, **extra):
    line = {"kind": "train", "step": step, "reward/mean": 0.5 * len(components), "lr": 1e-6}
    for name in components:
        line |= {f"reward/{name}/mean": 0.5, f"reward/{name}/std": 0.1}
        line |= {f"advantage/std/{name}": 0.9, f"advantage/frac_constant/{name}": 0.25}
    line |= {"loss/policy": 0.0, "score/error_rate": 0.0, "time/sample_s": 2.0, "time/step_s": 4.0}
    return line | extra


def eval_line(step, components, mode="sampled", mean=0.5, se=0.01):
    line = {"kind": "eval", "step": step, "mode": mode, "n": 64, "reward": mean * len(components)}
    for name in components:
        line |= {f"reward/{name}": mean, f"reward/{name}/se": se}
    return line


def rollout_line(step, index, components, completion="fine", **extra):
    line = {
        "schema": 1, "step": step, "task_id": f"task-{index}", "group": index // 4, "status": "ok",
        "truncated": False, "reward": 0.1 * index * len(components),
        "components": dict.fromkeys(components, 0.1 * index), "raw_components": None,
        "advantage": 0.25, "component_advantages": dict.fromkeys(components, -0.75),
        "turns": [{"prompt": f"prompt {index}", "completion": completion}],
        "answer": "42", "error": None,
    }  # fmt: skip
    return line | extra


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


@pytest.fixture
def make_run(tmp_path):
    def make(
        components=("correctness", "format"), steps=12, *, summary=True, evals=True, rollouts=()
    ):
        folder = tmp_path / "run"
        lines = [train_line(step, components) for step in range(1, steps + 1)]
        if evals:
            for mode in ("sampled", "greedy"):
                lines.insert(0, eval_line(0, components, mode, 0.25))
                lines.append(eval_line(steps, components, mode, 0.75))
        write_lines(folder / "metrics.jsonl", lines)
        for step in rollouts:
            stored = [rollout_line(step, i, components) for i in range(12)]
            write_lines(folder / f"rollouts/step_{step:06d}.jsonl", stored)
        (folder / "config.yaml").write_text(
            "env: my_env\nmodel: {path: some/model}\nseed: 3\nadvantage: {weights: {format: 0.5}}\n"
        )
        if summary:
            found = {"env": "my_env", "model": "some/model", "seed": 3, "steps": steps}
            found |= {"wall_s": 75.0, "completions": 1536, "status": "finished"}
            (folder / "summary.json").write_text(json.dumps(found))
        return folder

    return make


def report(folder):
    html = write_report(folder).read_text(encoding="utf-8")
    return html, Page(html)


# --- what a whole run shows -----------------------------------------------------------------


def test_report_shows_every_part_in_order(make_run):
    html, page = report(make_run(rollouts=(1, 12)))
    order = [html.index(f'<section id="{name}"') for name in (
        "result", "curves", "signal", "failures", "optimisation", "time", "samples", "config",
    )]  # fmt: skip
    assert order == sorted(order)
    assert page.text.startswith("my_env · some/model - mrgym report my_env some/model finished")
    assert "seed 3 completions 1'536" in page.text
    assert "wall time 1 min 15 s" in page.text
    assert "correctness 0.250 0.750 +0.500 ± 0.028 0.250 0.750 +0.500 ± 0.028" in page.text
    assert "plain sum 0.500 1.500 +1.000" in page.text
    assert "(format x 0.5)" in page.text
    assert "No component was constant in 90 % or more of groups" in page.text
    assert "An on-policy first step has a loss near 0; that is expected." in page.text
    assert "sampling 2.0 s 24 s 50 %" in page.text


def test_page_is_self_contained(make_run):
    html, page = report(make_run(rollouts=(1,)))
    assert not page.tags.keys() & {"script", "link", "img", "iframe", "object", "form", "base"}
    assert all(link.startswith("#") for link in page.values("href"))
    assert not page.values("src")
    assert "http:" not in html
    assert "https:" not in html
    assert "@import" not in html
    assert set(re.findall(r"url\((.)", html)) == {"#"}
    assert "default-src 'none'" in " ".join(page.values("content"))


def test_ids_are_unique_and_every_reference_has_a_target(make_run):
    html, page = report(make_run(rollouts=(1,)))
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    referred = set(re.findall(r"url\(#([^)]*)\)", html)) | {h[1:] for h in page.values("href")}
    assert referred <= set(ids)


def test_colours_are_css_variables_with_a_dark_value(make_run):
    html, _ = report(make_run())
    style = html[html.index("<style>") : html.index("</style>")]
    dark = style[style.index("prefers-color-scheme: dark") :]
    used = set(re.findall(r"var\((--\w+)\)", html))
    assert {"--train", "--sampled", "--greedy", "--ink", "--grid"} <= used
    assert all(f"{name}:" in dark for name in used - {"--code"})
    assert "#0102" not in html


def settings():
    keys = set(matplotlib.rcParams) - {"backend"}  # reading that one resolves it
    return {key: matplotlib.rcParams[key] for key in keys}


def test_same_run_gives_the_same_bytes_and_leaves_matplotlib_alone(make_run, monkeypatch):
    folder = make_run(rollouts=(1, 12))
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "path")
    before = settings()
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first
    assert settings() == before
    assert not list(folder.glob("*.part"))


def test_out_names_the_file(make_run, tmp_path):
    folder = make_run()
    out = tmp_path / "deep" / "page.html"
    assert write_report(folder, out) == out
    assert out.is_file()
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("count", [1, 8])
def test_every_component_has_its_own_charts(make_run, count):
    names = tuple(f"part_{i}" for i in range(count))
    html, page = report(make_run(names))
    curves = html[html.index('id="curves"') : html.index("<h3>Sums")]
    assert curves.count("<figure>") == count
    labels = [label for label in page.values("aria-label") if label]
    for name in names:
        assert len([label for label in labels if label.startswith(f"{name}:")]) == 3


def test_many_evaluations_are_drawn_sparsely_from_first_to_last(make_run):
    folder = make_run(("format",), evals=False)
    evals = [eval_line(step, ("format",)) for step in range(100)]
    write_lines(folder / "metrics.jsonl", evals)
    drawn = render._points(read_run(folder), "sampled", "format").series.steps
    assert len(drawn) == render.POINTS
    assert (drawn[0], drawn[-1]) == (0, 99)
    assert list(drawn) == sorted(set(drawn))


def test_odd_component_names_survive(make_run):
    names = ("a b/c", "<i>x</i>", "$x^{2$", "日本語", 'q"&amp;', "mean", "se")
    folder = make_run(names, rollouts=(1,))
    assert read_run(folder).components == names
    _, page = report(folder)
    for name in names:
        assert f"{name} 0.250 0.750 +0.500" in page.text


# --- dead components and noise --------------------------------------------------------------


def constant_run(make_run, shares):
    folder = make_run(summary=False)
    lines = [
        train_line(step, ("correctness", "format"), **{"advantage/frac_constant/format": share})
        for step, share in enumerate(shares, 1)
    ]
    write_lines(folder / "metrics.jsonl", lines)
    return folder


def test_dead_component_is_named(make_run):
    _, page = report(constant_run(make_run, [0.1] * 12 + [0.96, 0.97, 0.97, 0.98]))
    assert "dead: format was constant in 97 % of groups" in page.text
    assert "(steps 13 to 16, the last quarter of the run)" in page.text
    assert "dead: correctness" not in page.text
    assert "No component was constant" not in page.text


@pytest.mark.parametrize("shares", [[0.99] * 12 + [0.2] * 4, [0.89] * 16])
def test_live_component_is_not_called_dead(make_run, shares):
    _, page = report(constant_run(make_run, shares))
    assert "dead: " not in page.text


def test_dead_threshold_is_inclusive(make_run):
    assert read_run(constant_run(make_run, [0.9] * 4)).dead_components() == {"format": 0.9}


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (Change(0.2, 0.3, 0.05), "up"),
        (Change(0.3, 0.2, 0.05), "down"),
        (Change(0.2, 0.24, 0.05), "flat"),
        (Change(0.2, 0.24, None), "up"),
        (Change(0.2, None, None), "flat"),
    ],
)
def test_change_within_noise_is_flat(change, verdict):
    assert change.verdict == verdict


# --- failures and samples -------------------------------------------------------------------


def test_failures_are_counted_by_error_text(make_run):
    folder = make_run(rollouts=(1,))
    for step in (1, 6, 12):
        bad = {"error": "grader: no result in 5 s", "status": "timeout"}
        lines = [
            rollout_line(step, i, ("correctness",), **(bad if i < 2 else {})) for i in range(8)
        ]
        lines[7] |= {"status": "error", "error": "boom <b>", "truncated": True}
        write_lines(folder / f"rollouts/step_{step:06d}.jsonl", lines)
    _, page = report(folder)
    assert "24 rollouts are stored over 3 steps: 3 error, 15 ok, 6 timeout; 3 were truncated." in (
        page.text
    )
    assert "timeout 6 grader: no result in 5 s" in page.text
    assert "error 3 boom <b>" in page.text


def test_samples_of_last_and_first_stored_step(make_run):
    _, page = report(make_run(rollouts=(1, 6, 12)))
    assert "Step 6" not in page.text
    last, first = page.text.index("Step 12 (last stored)"), page.text.index("Step 1 (first stored)")
    assert last < first
    shown = page.text[last:first]
    assert re.findall(r"\bbest [\d.]+ .*? task (task-\d+)", shown) == ["task-11", "task-10"]
    assert re.findall(r"\bworst [\d.]+ .*? task (task-\d+)", shown) == ["task-0", "task-1"]
    tasks = re.findall(r"(?:best|worst|random) [\d.]+ .*? task (task-\d+)", shown)
    assert len(tasks) == len(set(tasks)) == 7
    assert "correctness 1.100 -0.750" in shown
    assert "Prompt prompt 11 Completion fine Gold answer 42" in shown


def test_real_rollouts_can_be_read(make_run):
    folder = make_run()
    turns = [Turn(prompt="p", completion="first try"), Turn(prompt="q", completion="second try")]
    rollout = Rollout(
        task_id="t", group=0, index=0, components={"correctness": 1.0, "format": 0.0},
        raw_components={"correctness": 1.0, "format": 0.5}, reward=1.0, turns=turns,
        answer={"x": 1}, token_ids=[1, 2], sampler_logprobs=[-0.5],
    )  # fmt: skip
    write_rollouts(folder / "rollouts" / "step_000001.jsonl", [rollout])
    _, page = report(folder)
    assert "Completion, turn 2 second try Gold answer {'x': 1}" in page.text
    assert "format 0.000 0.500" in page.text


def test_hostile_text_is_shown_not_obeyed(make_run):
    folder = make_run((HOSTILE,), rollouts=(1,))
    plain = Page(write_report(folder).read_text(encoding="utf-8")).tags
    lines = [
        rollout_line(1, i, (HOSTILE,), HOSTILE, task_id=HOSTILE, error=HOSTILE, answer=HOSTILE)
        for i in range(12)
    ]
    write_lines(folder / "rollouts/step_000001.jsonl", lines)
    (folder / "config.yaml").write_text(f"note: '{HOSTILE[:30]}'\n# {HOSTILE}", encoding="utf-8")
    summary = {"env": HOSTILE, "model": HOSTILE, "status": HOSTILE}
    (folder / "summary.json").write_text(json.dumps(summary))
    html, page = report(folder)
    assert not page.tags.keys() & {"script", "img"}
    assert page.tags["details"] == plain["details"]
    assert page.tags["pre"] == plain["pre"]
    assert page.text.count("{{7*7}}{% raw %}␀␛[31m") > 12
    assert not set(html) & {chr(c) for c in range(32) if chr(c) not in "\t\n"}


def test_long_completions_are_cut_with_a_note(make_run):
    folder = make_run()
    long = "head" + "x" * 100_000 + "tail"
    write_lines(folder / "rollouts/step_000001.jsonl", [rollout_line(1, 0, ("format",), long)])
    html, page = report(folder)
    assert "94'008 of 100'008 characters left out" in page.text
    assert "headxxx" in page.text
    assert "xxxtail" in page.text
    assert len(html) < 200_000


def test_leading_newline_of_a_completion_is_kept(make_run):
    folder = make_run()
    write_lines(folder / "rollouts/step_000001.jsonl", [rollout_line(1, 0, ("format",), "\n\nhi")])
    html, _ = report(folder)
    assert "<pre>\n\n\nhi</pre>" in html  # a browser drops the first newline of a <pre>


# --- runs with gaps -------------------------------------------------------------------------


def test_run_without_summary_says_so(make_run):
    _, page = report(make_run(summary=False))
    assert "no summary The run left no final summary" in page.text
    assert "The numbers reach up to step 12." in page.text
    assert page.text.startswith("my_env · some/model")


@pytest.mark.parametrize("status", ["interrupted", "failed"])
def test_status_is_shown(make_run, status):
    folder = make_run()
    (folder / "summary.json").write_text(json.dumps({"status": status, "steps": 12}))
    assert f"{status} The run " in report(folder)[1].text


def test_summary_that_disagrees_or_is_broken_is_noted(make_run):
    folder = make_run()
    (folder / "summary.json").write_text(json.dumps({"status": "finished", "steps": 20}))
    assert "summary.json says 20 steps, metrics.jsonl ends at 12." in report(folder)[1].text
    (folder / "summary.json").write_text('{"steps": 20')
    assert "summary.json could not be read" in report(folder)[1].text


def test_evaluations_come_from_the_summary_when_metrics_hold_none(make_run):
    folder = make_run(evals=False)
    ends = {"start": {"reward/format": 0.125, "reward": 0.5}, "end": {"reward/format": 0.875}}
    (folder / "summary.json").write_text(json.dumps({"steps": 12, "eval_greedy": ends}))
    _, page = report(folder)
    assert "greedy component start step 0 last step 12" in page.text
    assert "format 0.125 0.875 +0.750" in page.text
    assert "correctness - - -" in page.text


def test_no_steps_yet(make_run):
    folder = make_run(evals=False, summary=False)
    (folder / "metrics.jsonl").write_text("")
    _, page = report(folder)
    for text in (
        "This run has no steps yet.",
        "This run holds no evaluation on held-out tasks.",
        "No rollouts are stored in this run.",
        "No component was logged yet.",
    ):
        assert text in page.text
    assert page.tags["svg"] == 0


def test_only_an_evaluation_before_training(make_run):
    folder = make_run(summary=False)
    write_lines(folder / "metrics.jsonl", [eval_line(0, ("a", "b")) | {"reward_se": 0.1}])
    run = read_run(folder)
    assert run.components == ("a", "b")
    assert run.evaluations[0].error(None) == 0.1
    assert "a 0.500 - -" in report(folder)[1].text


def test_steps_without_a_metric_are_left_out(make_run):
    folder = make_run()
    lines = [train_line(step, ("format",)) for step in (1, 2, 3)]
    lines[1]["loss/policy"] = None
    write_lines(folder / "metrics.jsonl", lines)
    assert read_run(folder).series("loss/policy").steps == (1, 3)


def test_cut_off_last_line_is_noted(make_run):
    folder = make_run(rollouts=(1,))
    for name in ("metrics.jsonl", "rollouts/step_000001.jsonl"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole + whole[:40])
    run = read_run(folder)
    assert len(run.train) == len(run.samples[1]) == 12
    _, page = report(folder)
    assert "The last line of metrics.jsonl (line 17) is cut off; left out." in page.text
    assert "The last line of step_000001.jsonl (line 13) is cut off; left out." in page.text


@pytest.mark.parametrize("line", ['{"kind": "train", "st', '{"kind": "train"}', "[1]", "\x00\x00"])
def test_broken_line_elsewhere_names_file_and_line(make_run, line):
    folder = make_run()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[4] = line
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    with pytest.raises(WireError, match=r"metrics\.jsonl, line 5: got a broken record"):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_unknown_rollout_schema_is_an_error(make_run):
    folder = make_run()
    line = rollout_line(1, 0, ("format",), schema=99)
    write_lines(folder / "rollouts/step_000001.jsonl", [line])
    with pytest.raises(WireError, match="got rollout schema 99, expected 1"):
        write_report(folder)


def test_folder_that_is_not_a_run(tmp_path):
    with pytest.raises(ConfigError) as caught:
        write_report(tmp_path)
    expected = f"report: got {str(tmp_path)!r}, expected a run folder holding metrics.jsonl; "
    assert str(caught.value).startswith(expected)


def test_resumed_run_keeps_the_newer_lines(make_run):
    folder = make_run(summary=False)
    first = [train_line(s, ("format",), lr=1.0) for s in range(1, 8)]
    again = [train_line(s, ("format",), lr=2.0) for s in (5, 6)]
    evals = [eval_line(4, ("format",)), eval_line(7, ("format",))]
    write_lines(folder / "metrics.jsonl", [*first, *evals, *again])
    run = read_run(folder)
    assert run.series("lr") == Series((1, 2, 3, 4, 5, 6), (1.0,) * 4 + (2.0,) * 2)
    assert [e.step for e in run.evaluations_of("sampled")] == [4]
    assert run.notes == ("The run was resumed: 4 older lines of repeated steps were left out.",)


def test_missing_matplotlib_names_the_extra():
    code = "import sys; sys.modules['matplotlib'] = None; import mrgym_trainers.report"
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert "MissingExtraError: matplotlib: not installed" in done.stderr
    assert "pip install 'mrgym[train]'" in done.stderr


# --- charts and numbers ---------------------------------------------------------------------


def ticks(svg):
    return re.findall(r">([^<>\n]+)</text>", svg)


def test_unit_axis_where_the_values_fit():
    inside = [Trace(Series((1, 2), (0.2, 0.4)))]
    assert unit_limits(inside) == (-0.03, 1.03)
    assert unit_limits([Trace(Series((1, 2), (0.2, 1.5)))]) is None
    assert {"0", "0.5", "1"} <= set(ticks(draw("a", inside, unit_limits(inside))))
    assert "0.5" not in ticks(draw("a", inside))


@pytest.mark.parametrize("values", [(0.0, 0.0), (1e-6, 1e-6), (-3.0, 4e38), (7.0,)])
def test_any_finite_values_can_be_drawn(values):
    svg = draw("a", [Trace(Series(tuple(range(len(values))), values))])
    assert svg.startswith("<svg viewBox=")
    Page(svg)


def test_smoothing_keeps_lines_straight_and_constants_constant():
    steps = tuple(range(50))
    constant = Series(steps, (0.3,) * 50)
    assert smooth(constant, 9).values == pytest.approx(constant.values)
    line = Series(steps, tuple(float(s) for s in steps))
    assert smooth(line, 9).values[4:-4] == pytest.approx(line.values[4:-4])
    assert smooth(line, 1) == line


def test_long_runs_are_thinned_by_means():
    long = Series(tuple(range(1000)), tuple(float(i % 2) for i in range(1000)))
    assert len(thin(long, 250)) == 250
    assert set(thin(long, 250).values) == {0.5}
    assert thin(long, 1000) == long


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (score(0.12345), "0.123"),
        (score(-0.00001), "0.000"),
        (score(123.456), "123.5"),
        (score(None), "-"),
        (signed(-0.5), "-0.500"),
        (signed(0.5), "+0.500"),
        (percent(0.97), "97 %"),
        (percent(0.997), "99.7 %"),
        (percent(1.0), "100 %"),
        (percent(0.0), "0 %"),
        (count(1234567), "1'234'567"),
        (duration(5.64), "5.6 s"),
        (duration(3725), "1 h 02 min"),
        (clip("abcdefgh", 4).head + "|" + clip("abcdefgh", 4).tail, "abc|h"),
    ],
)
def test_numbers_are_rounded_sensibly(got, expected):
    assert got.translate(ASCII) == expected
