"""Rows of the usual math data sets as tasks: where the gold is, and golds that cannot be read."""

from __future__ import annotations

import json
import warnings

import pytest

import mrgym
from mrgym import ConfigError, Task, TaskError
from mrgym_envs.grading import grade_batch
from mrgym_envs.math_multi_reward.answers import read_gold_of_row

UNREADABLE = ["see figure", "", "Proof.", "\\frac{1}{", "\\boxed{}", None]


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def make(path, **options):
    options = {"correctness": "equivalent", "signed": True, **options}
    return mrgym.make("math_multi_reward", tasks=path, **options)


def load(env):
    """All tasks, warnings of integers aside."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*are no integers")
        return [task for split in ("train", "eval") for task in env.task_source(split)]


class TestGoldOfARow:
    @pytest.mark.parametrize(
        ("row", "gold"),
        [
            ({"solution": "so $\\boxed{\\frac{1}{2}}$."}, "\\frac{1}{2}"),
            ({"solution": "first \\boxed{3}. So it is \\boxed{4}"}, "4"),
            ({"solution": "\\fbox{7}"}, "7"),
            ({"solution": "12"}, "12"),
            ({"solution": "6 * 2\n#### 12"}, "12"),
            ({"answer": 7}, "7"),
            ({"answer": "033"}, "033"),
            ({"answer": "\\boxed{033}"}, "033"),
            ({"answer": "0.5", "solution": "\\boxed{1/2}"}, "0.5"),
            ({"answer": None, "solution": "\\boxed{1/2}"}, "1/2"),
            ({"answer": "6 * 2\n#### 12", "solution": "\\boxed{1/2}"}, "12"),
        ],
    )
    def test_is_the_answer_or_the_solutions_last_box(self, row, gold):
        assert read_gold_of_row({"problem": "?", **row}) == gold

    @pytest.mark.parametrize("row", [{}, {"answer": ""}, {"solution": "so \\boxed{ }"}])
    def test_missing_is_an_error(self, row):
        with pytest.raises(TaskError, match=r"gold answer: got .*expected"):
            read_gold_of_row(row)


class TestStyles:
    def test_math(self, tmp_path):
        rows = [
            {
                "problem": f"{i}/7?",
                "solution": f"It is $\\boxed{{\\frac{{{i}}}{{7}}}}$.",
                "level": 1,
            }
            for i in range(20)
        ]
        tasks = load(make(write(tmp_path / "rows.jsonl", rows)))
        assert {t.answer for t in tasks} == {f"\\frac{{{i}}}{{7}}" for i in range(20)}

    @pytest.mark.parametrize("kind", [int, "{:03}".format])
    def test_aime(self, tmp_path, kind):
        rows = [{"id": i, "problem": f"{i}?", "answer": kind(i)} for i in range(20)]
        env = make(write(tmp_path / "rows.jsonl", rows))
        for task in load(env):
            env.reset(options={"task": task})
            assert env.step(f"<think></think>\n<answer>{int(task.id)}</answer>")[1] == 3.0

    def test_deepscaler(self, tmp_path):
        rows = [
            {"problem": f"{i}?", "answer": f"{i}\\pi", "solution": "\\boxed{1}"} for i in range(20)
        ]
        tasks = load(make(write(tmp_path / "rows.jsonl", rows)))
        assert {t.answer for t in tasks} == {f"{i}\\pi" for i in range(20)}

    @pytest.mark.parametrize("field", ["answer", "solution"])
    def test_math500_can_be_read_as_a_whole(self, tmp_path, shared, field):
        lines = (shared / "data" / "math500.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        answers = {row["problem"]: row["answer"] for row in rows}
        path = write(
            tmp_path / "rows.jsonl", [{"problem": r["problem"], field: r[field]} for r in rows]
        )
        tasks = load(make(path))
        assert len(tasks) == 500
        verdicts = grade_batch((answers[task.prompt], task.answer) for task in tasks)
        assert [v for v in verdicts if not v.correct] == []

    def test_math500_passes_the_check_without_the_integer_component(self, shared):
        path = shared / "data" / "math500.jsonl"
        report = mrgym.check_env("math_length", tasks=path, max_tasks=500)
        assert report.ok, str(report)
        assert report.notes == []


class TestBadGolds:
    @pytest.mark.parametrize("bad", UNREADABLE, ids=repr)
    def test_one_is_named_with_file_row_and_value(self, tmp_path, bad):
        rows = [{"problem": f"{i}?", "answer": f"{i}/7"} for i in range(20)]
        rows[11]["answer"] = bad
        env = make(write(tmp_path / "rows.jsonl", rows))
        with pytest.raises(TaskError, match=r"rows\.jsonl: got 1 of 20 gold .*\(row 12 \(task"):
            env.reset(seed=0)

    def test_many_are_counted_and_some_shown(self, tmp_path):
        rows = [{"problem": f"{i}?", "answer": i if i % 2 else "see figure"} for i in range(20)]
        path = write(tmp_path / "rows.jsonl", rows)
        with pytest.raises(
            TaskError, match=r"got 10 of 20 .*row 1 .*row 5 .*'see figure'.*\.\.\.\)"
        ):
            make(path).reset(seed=0)

    def test_drop_leaves_them_out_and_warns_with_the_count(self, tmp_path):
        rows = [{"problem": f"{i}?", "answer": i if i % 2 else "see figure"} for i in range(20)]
        env = make(write(tmp_path / "rows.jsonl", rows), bad_golds="drop")
        with pytest.warns(UserWarning, match=r"rows\.jsonl: left out 10 of 20 gold answers"):
            tasks = load(env)
        assert {t.answer for t in tasks} == {str(i) for i in range(1, 20, 2)}

    def test_nothing_but_bad_ones_is_an_error(self, tmp_path):
        rows = [{"problem": f"{i}?", "answer": "see figure"} for i in range(20)]
        env = make(write(tmp_path / "rows.jsonl", rows), bad_golds="drop")
        with (
            pytest.warns(UserWarning, match="left out 20 of 20"),
            pytest.raises(TaskError, match="no tasks"),
        ):
            env.reset(seed=0)

    def test_tasks_of_ones_own_are_checked_too(self):
        tasks = [Task(f"{i}?", "see figure") for i in range(20)]
        with pytest.raises(TaskError, match=r"got 20 of 20 gold answers"):
            make(tasks).reset(seed=0)

    def test_dropping_goes_with_equivalent_only(self):
        with pytest.raises(ConfigError, match=r"got bad_golds='drop' with correctness='exact'"):
            make(None, correctness="exact", bad_golds="drop")

    def test_golds_that_are_no_integers_are_counted_in_a_warning(self, tmp_path):
        rows = [{"problem": f"{i}?", "answer": f"{i}/7" if i < 8 else i} for i in range(20)]
        env = make(write(tmp_path / "rows.jsonl", rows))
        with pytest.warns(UserWarning, match=r"8 golds of .* are no integers"):
            env.task_source("train")
