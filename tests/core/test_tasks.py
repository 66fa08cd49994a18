"""Tasks, their sources, and the split into train and eval."""

from __future__ import annotations

import json
import pickle
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mrgym
from mrgym import Task, TaskError, TaskSource
from mrgym.tasks import (
    check_disjoint,
    content_hash,
    generated_tasks,
    huggingface_tasks,
    jsonl_tasks,
    task_from_row,
)

ROWS = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(8)]


def tasks(count, start=0):
    return [Task(f"{i} + 1?", str(i + 1)) for i in range(start, start + count)]


def write(path, *lines):
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


class TestTask:
    @pytest.mark.parametrize(
        "prompt", ["text", "", [{"role": "user", "content": "hi"}], [{"role": "u", "content": ""}]]
    )
    def test_a_prompt_is_text_or_messages(self, prompt):
        assert Task(prompt).prompt == prompt

    @pytest.mark.parametrize("prompt", [None, 3, b"x", [], ["hi"], [{"role": "user"}], {}])
    def test_anything_else_is_refused(self, prompt):
        with pytest.raises(TaskError, match=r"Task: got prompt .*expected text or a list"):
            Task(prompt)

    def test_ids_are_made_of_prompt_and_answer(self):
        assert Task("1 + 1?", "2").id == Task("1 + 1?", "2", metadata={"a": 1}).id
        assert Task("1 + 1?", "2").id != Task("1 + 1?", "3").id

    @pytest.mark.parametrize(
        ("task", "task_id"),
        [
            (Task("1 + 1?", "2"), "183d245bff83a189"),
            (Task([{"role": "user", "content": "é"}]), "1bcab9580089b6c5"),
        ],
    )
    def test_ids_and_so_the_split_do_not_change_between_releases(self, task, task_id):
        assert task.id == task_id

    def test_a_task_is_immutable(self):
        with pytest.raises(AttributeError):
            Task("a").prompt = "b"

    @pytest.mark.parametrize("answer", [{1, 2}, object, b"x", {"a": [1]}, float("nan")], ids=repr)
    def test_any_answer_can_be_hashed(self, answer):
        assert len(Task("a", answer).id) == 16

    @given(st.text(), st.text())
    def test_no_prompt_breaks_the_hash(self, prompt, answer):
        assert content_hash(prompt, answer) == content_hash(prompt, answer)
        assert content_hash("\ud800" + prompt, answer) != content_hash(prompt, answer)


class TestSource:
    def test_it_is_a_sequence(self):
        source = TaskSource(tasks(5), name="sums")
        assert len(source) == 5
        assert source[0] == tasks(1)[0]
        assert [*source[1:3]] == tasks(2, start=1)
        assert source[-1] in source
        assert repr(source) == "TaskSource('sums', 5 tasks)"
        assert [*pickle.loads(pickle.dumps(source))] == tasks(5)

    @pytest.mark.parametrize("empty", [[], (), iter([])])
    def test_no_tasks_is_an_error(self, empty):
        with pytest.raises(TaskError, match=r"sums: got no tasks, expected at least one"):
            TaskSource(empty, name="sums")

    @pytest.mark.parametrize("item", ["text", {"prompt": "text"}, None, ("a", "b")], ids=repr)
    def test_an_item_that_is_no_task_is_named_with_its_place(self, item):
        with pytest.raises(TaskError, match=r"at position 1, expected a mrgym\.Task"):
            TaskSource([Task("a"), item])

    def test_equal_rows_get_ids_of_their_own(self):
        source = TaskSource([Task("a", "1")] * 3 + [Task("a", "2")])
        first = Task("a", "1").id
        assert [task.id for task in source][:3] == [first, f"{first}#2", f"{first}#3"]
        assert len({task.id for task in source}) == 4

    @pytest.mark.parametrize("second", [Task("a", id="x"), Task("b", id="x")])
    def test_an_explicit_id_twice_is_an_error(self, second):
        with pytest.raises(TaskError, match=r"task id 'x' twice \(again at position 2\)"):
            TaskSource([Task("a", id="x"), Task("c"), second])

    def test_tasks_are_found_by_id(self):
        source = TaskSource([Task("a", id="first"), Task("b", id="second")])
        assert source.by_id("second").prompt == "b"
        with pytest.raises(TaskError, match=r"'secnd', expected one of 2 ids; did you mean 'sec"):
            source.by_id("secnd")

    @pytest.mark.parametrize("seed", [0, 1, 12345])
    def test_shuffling_depends_on_the_seed_alone(self, seed):
        source = TaskSource(tasks(50))
        random.seed(1)
        once = [*source.shuffled(seed)]
        random.seed(2)
        assert [*source.shuffled(seed)] == once != [*source]
        assert sorted(t.id for t in once) == sorted(t.id for t in source)
        assert [*source.shuffled(seed + 1)] != once
        assert [*source] == tasks(50)


class TestSplit:
    @given(st.lists(st.text(max_size=4), min_size=30, max_size=60, unique=True))
    def test_no_prompt_stands_on_both_sides(self, prompts):
        repeated = [Task(p, a) for p in prompts for a in "12"]
        train, held_out = TaskSource(repeated).split(0.5)
        assert not {t.prompt for t in train} & {t.prompt for t in held_out}
        assert len(train) + len(held_out) == len(repeated)
        check_disjoint(train, held_out)

    def test_a_task_stays_on_its_side_when_others_come_and_go(self):
        few, many = TaskSource(tasks(40)).split(), TaskSource(tasks(400)[::-1]).split()
        for side in (0, 1):
            assert {t.id for t in few[side]} <= {t.id for t in many[side]}

    @pytest.mark.parametrize("fraction", [0.1, 0.2, 0.5])
    def test_the_fraction_is_about_kept(self, fraction):
        held_out = TaskSource(tasks(2000)).split(fraction)[1]
        assert len(held_out) == pytest.approx(2000 * fraction, rel=0.2)

    @pytest.mark.parametrize("fraction", [-0.1, 0.0, 1.0, float("nan")])
    def test_a_fraction_that_leaves_a_side_empty_is_an_error(self, fraction):
        with pytest.raises(TaskError, match=r"eval_fraction=.*, expected between 0 and 1"):
            TaskSource(tasks(20)).split(fraction)

    @pytest.mark.parametrize("count", [2, 3, 5, 10])
    def test_a_handful_of_tasks_still_gives_both_sides(self, count):
        for start in range(20):
            train, held_out = TaskSource(tasks(count, start=start)).split()
            assert len(train) + len(held_out) == count
            check_disjoint(train, held_out)

    @pytest.mark.parametrize("prompts", [["a"], ["a", "a"]])
    def test_one_prompt_cannot_be_split(self, prompts):
        with pytest.raises(TaskError, match="with one prompt, expected two different ones"):
            TaskSource([Task(p, str(i)) for i, p in enumerate(prompts)]).split()

    @pytest.mark.parametrize("shared_ones", [1, 3])
    def test_overlap_is_counted_and_shown(self, shared_ones):
        train, held_out = TaskSource(tasks(5)), TaskSource(tasks(8, start=5 - shared_ones))
        with pytest.raises(TaskError, match=rf"{shared_ones} eval tasks that stand in.*\d \+ 1\?"):
            check_disjoint(train, held_out)

    def test_another_answer_does_not_hide_an_overlap(self):
        with pytest.raises(TaskError, match=r"1 eval tasks"):
            check_disjoint(TaskSource([Task("a", "1")]), TaskSource([Task("a", "2")]))

    def test_an_overlap_is_refused_whoever_asks_again(self):
        env = mrgym.from_functions([Task("a")], {"one": lambda t, c: 1.0}, eval_tasks=[Task("a")])
        for split in ("train", "eval", "train"):
            with pytest.raises(TaskError, match="stand in"):
                env.task_source(split)

    def test_an_environment_that_overlaps_is_refused(self):
        class Leaky(mrgym.SingleTurnEnv):
            def tasks(self, split):
                return tasks(5)

        env = Leaky()
        env.task_source("train")
        with pytest.raises(TaskError, match=r"5 eval tasks that stand in .*Leaky \[train\]"):
            env.task_source("eval")

    def test_tasks_without_a_split_parameter_are_split(self):
        class Whole(mrgym.SingleTurnEnv):
            def tasks(self):
                return tasks(50)

        env = Whole()
        sides = [{t.prompt for t in env.task_source(split)} for split in ("train", "eval")]
        assert not sides[0] & sides[1]
        assert len(sides[0] | sides[1]) == 50


class TestRows:
    @pytest.mark.parametrize("prompt", ["prompt", "question", "problem"])
    @pytest.mark.parametrize("answer", ["answer", "solution"])
    def test_the_usual_names_are_known(self, prompt, answer):
        task = task_from_row({prompt: "1 + 1?", answer: "2", "level": 3})
        assert (task.prompt, task.answer, task.metadata) == ("1 + 1?", "2", {"level": 3})

    @pytest.mark.parametrize(("given_id", "taken"), [("x", "x"), (0, "0"), (17, "17")])
    def test_an_id_is_taken(self, given_id, taken):
        assert task_from_row({"prompt": "a", "id": given_id}).id == taken

    @pytest.mark.parametrize("row", [{"id": None}, {"id": ""}, {}, {"metadata": None}])
    def test_an_empty_field_is_an_absent_one(self, row):
        assert task_from_row({"prompt": "a", **row}) == Task("a")

    def test_metadata_and_further_fields_are_merged(self):
        row = {"prompt": "a", "metadata": {"x": 1, "y": 1}, "y": 2}
        assert task_from_row(row).metadata == {"x": 1, "y": 2}

    @pytest.mark.parametrize("row", [{}, {"text": "a"}, {"Prompt": "a"}])
    def test_no_prompt_is_an_error(self, row):
        with pytest.raises(TaskError, match=r"expected one of \['prompt', 'question', 'problem'\]"):
            task_from_row(row)


class TestJsonl:
    def test_a_file_is_read_line_by_line(self, tmp_path):
        lines = [json.dumps(row) for row in ROWS]
        source = jsonl_tasks(write(tmp_path / "rows.jsonl", *lines[:2], "", "  ", *lines[2:], ""))
        assert [t.prompt for t in source] == [row["question"] for row in ROWS]

    @pytest.mark.parametrize("prompt", ["héllo 漢字 🎲", "line\u2028separator", "\u202e"])
    @pytest.mark.parametrize("ascii_only", [True, False])
    def test_unicode_is_kept(self, tmp_path, prompt, ascii_only):
        line = json.dumps({"prompt": prompt}, ensure_ascii=ascii_only)
        assert jsonl_tasks(write(tmp_path / "rows.jsonl", line))[0].prompt == prompt

    def test_a_byte_order_mark_and_windows_lines_are_fine(self, tmp_path):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
        assert [t.prompt for t in jsonl_tasks(path)] == ["a", "b"]

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ('{"prompt": "a"', r"got '\{\"prompt\": \"a\"', expected one JSON object"),
            ("{'prompt': 'a'}", r"expected one JSON object"),
            ("not json", r"got 'not json', expected one JSON object"),
            ('{"prompt": "a"} {"prompt": "b"}', r"expected one JSON object"),
            ("[1, 2]", r"got \[1, 2\], expected a JSON object"),
            ('"text"', r"got 'text', expected a JSON object"),
            ("3", r"got 3, expected a JSON object"),
            ("null", r"got None, expected a JSON object"),
            ('{"text": "a"}', r"got fields \['text'\]"),
            ('{"prompt": 3}', r"got prompt 3"),
            ('{"prompt": null}', r"got prompt None"),
        ],
    )
    @pytest.mark.parametrize("number", [1, 4])
    def test_a_broken_line_is_named_with_file_line_and_value(self, tmp_path, line, said, number):
        good = [json.dumps(row) for row in ROWS[: number - 1]]
        path = write(tmp_path / "rows.jsonl", *good, line, json.dumps(ROWS[-1]))
        with pytest.raises(TaskError, match=rf"rows\.jsonl, line {number}: .*{said}"):
            jsonl_tasks(path)

    @pytest.mark.parametrize("data", [b'{"prompt": "\xff"}', b"\x80\x81\x82", b"\xff\xfe{"])
    def test_bytes_that_are_no_text_are_named_too(self, tmp_path, data):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(b'{"prompt": "a"}\n' + data + b"\n")
        with pytest.raises(TaskError, match=r"rows\.jsonl, line 2: got .*expected one JSON object"):
            jsonl_tasks(path)

    @pytest.mark.parametrize("content", ["", "\n\n  \n"])
    def test_an_empty_file_is_an_error(self, tmp_path, content):
        with pytest.raises(TaskError, match=r"empty\.jsonl: got no tasks"):
            jsonl_tasks(write(tmp_path / "empty.jsonl", content))

    @pytest.mark.parametrize("name", ["absent.jsonl", ""])
    def test_a_missing_file_or_a_folder_is_an_error(self, tmp_path, name):
        with pytest.raises(TaskError, match=r"got no file, expected a JSONL file"):
            jsonl_tasks(tmp_path / name)

    @pytest.mark.parametrize(
        "error",
        [
            KeyError("answer"),
            ValueError("bad"),
            IndexError("short"),
            TypeError("x"),
            TaskError("y"),
        ],
        ids=repr,
    )
    def test_whatever_a_parser_raises_is_named_with_the_line(self, tmp_path, error):
        def parse(row):
            if row["prompt"] == "b":
                raise error
            return Task(row["prompt"])

        path = write(tmp_path / "rows.jsonl", '{"prompt": "a"}', '{"prompt": "b"}')
        with pytest.raises(TaskError, match=rf"rows\.jsonl, line 2: .*{error.args[0]}"):
            jsonl_tasks(path, parse=parse)

    @pytest.mark.parametrize("as_text", [True, False])
    def test_an_environment_takes_a_file(self, tmp_path, as_text):
        path = write(tmp_path / "rows.jsonl", *(json.dumps(row) for row in ROWS * 5))
        env = mrgym.from_functions(str(path) if as_text else path, {"a": lambda t, c: 1})
        assert len(env.task_source("train")) + len(env.task_source("eval")) == 40

    def test_a_misspelt_file_is_named(self, tmp_path):
        env = mrgym.from_functions(str(tmp_path / "absent.jsonl"), {"a": lambda t, c: 1})
        with pytest.raises(TaskError, match=r"absent\.jsonl: got no file"):
            env.reset()


class TestGenerated:
    def test_tasks_are_made_by_number(self):
        source = generated_tasks(lambda i: Task(f"{i}?"), 3, name="made")
        assert [t.prompt for t in source] == ["0?", "1?", "2?"]
        assert source.name == "made"

    @pytest.mark.parametrize("make", [lambda i: f"{i}", lambda i: None])
    def test_what_is_made_must_be_tasks(self, make):
        with pytest.raises(TaskError, match=r"position 0, expected a mrgym\.Task"):
            generated_tasks(make, 3)

    def test_a_python_generator_is_a_source(self):
        env = mrgym.from_functions((t for t in tasks(30)), {"a": lambda t, c: 1})
        assert len(env.task_source("eval")) + len(env.task_source("train")) == 30


@pytest.fixture
def datasets(monkeypatch, tmp_path):
    """The library of that name, kept from the network and from the user's cache."""
    module = pytest.importorskip("datasets")
    monkeypatch.setattr(module.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return module


class TestHuggingFace:
    def test_a_loaded_dataset(self, datasets):
        source = huggingface_tasks(datasets.Dataset.from_list(ROWS))
        assert [t.answer for t in source] == [row["answer"] for row in ROWS]

    def test_a_bad_row_is_named(self, datasets):
        rows = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": None}])
        with pytest.raises(TaskError, match=r"Dataset \[train\], row 1: Task: got prompt None"):
            huggingface_tasks(rows)

    @pytest.fixture
    def folder(self, datasets, tmp_path):
        home = tmp_path / "dataset"
        home.mkdir()
        write(home / "train.jsonl", *(json.dumps(row) for row in ROWS))
        write(home / "test.jsonl", json.dumps({"question": "9 + 1?", "answer": "10"}))
        return home

    @pytest.mark.parametrize(("split", "count"), [("train", 8), ("test", 1), ("train[:3]", 3)])
    def test_a_local_folder(self, folder, split, count):
        assert len(huggingface_tasks(str(folder), split=split)) == count

    def test_an_environment_takes_its_held_out_split(self, folder):
        env = mrgym.from_functions(
            str(folder),
            {"a": lambda t, c: 1},
            eval_tasks=huggingface_tasks(str(folder), split="test"),
        )
        assert [len(env.task_source(split)) for split in ("train", "eval")] == [8, 1]

    @pytest.mark.parametrize(
        "error", [ConnectionError("no route"), FileNotFoundError("404"), ValueError("config")]
    )
    def test_a_dataset_that_cannot_be_loaded_is_named(self, datasets, monkeypatch, error):
        def load_dataset(*args, **options):
            raise error

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        said = rf"some/name \[train\]: got {type(error).__name__} \({error}\), expected a dataset"
        with pytest.raises(TaskError, match=said):
            huggingface_tasks("some/name")

    def test_an_empty_folder_is_named(self, datasets, tmp_path):
        (tmp_path / "nothing").mkdir()
        with pytest.raises(TaskError, match=r"nothing \[train\]: got .*expected a dataset"):
            huggingface_tasks(str(tmp_path / "nothing"))

    def test_an_unknown_split_is_named(self, folder):
        with pytest.raises(TaskError, match=r"dataset \[validation\]: got .*validation.*expected"):
            huggingface_tasks(str(folder), split="validation")

    def test_without_the_package_the_command_is_shown(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(mrgym.MissingExtraError, match=r"pip install 'mrgym\[data\]'"):
            huggingface_tasks("openai/gsm8k")

    @pytest.mark.parametrize("row", ROWS[:2])
    def test_any_iterable_of_rows_will_do_without_the_package(self, monkeypatch, row):
        monkeypatch.setitem(sys.modules, "datasets", None)
        assert huggingface_tasks([row])[0].prompt == row["question"]


def test_tasks_that_were_given_are_the_environments_tasks():
    env = mrgym.from_functions([mrgym.Task(f"q{i}") for i in range(9)], {"len": lambda t, c: 1.0})
    assert [*env.tasks("train")] == [*env.task_source("train")]
    assert [*env.tasks("eval")] == [*env.task_source("eval")]
