"""math_multi_reward: verdicts, golds, prompts and files."""

from __future__ import annotations

import json
import warnings

import pytest

import mrgym
from mrgym import SamplingParams, ScriptedSampler, Task, TaskError
from mrgym_envs.math_multi_reward.answers import (
    extract_answer,
    has_format,
    is_integer,
    normalise_gold,
    read_gold,
)

GOOD = "<think>2 + 2 = 4</think>\n<answer>4</answer>"


def make(**options):
    return mrgym.make("math_multi_reward", **{"train_count": 4, "eval_count": 4, **options})


def verdicts(completion, gold="4", **options):
    """Correctness, format and integer of a completion."""
    env = make(**options)
    env.reset(options={"task": Task("2 + 2?", gold)})
    values = env.step(completion)[4]["reward_components"]
    return [int(values[name]) for name in ("correctness", "format", "integer")]


def write(path, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


class TestVerdicts:
    @pytest.mark.parametrize(
        ("completion", "wanted"),
        [
            (GOOD, [1, 1, 1]),
            ("<think>no</think>\n<answer>5</answer>", [0, 1, 1]),
            ("<think>no</think>\n<answer>four</answer>", [0, 1, 0]),
            ("<think></think>\n<answer></answer>", [0, 1, 0]),
            ("<answer>4</answer>", [1, 0, 1]),
            ("<answer> 4\n</answer>", [1, 0, 1]),
            ("4", [1, 0, 1]),
            (" 4\n", [1, 0, 1]),
            ("The answer is 4", [0, 0, 0]),
            ("", [0, 0, 0]),
            ("<answer>5</answer> no, <answer>4</answer>", [1, 0, 1]),
            ("<answer>4</answer> no, <answer>5</answer>", [0, 0, 1]),
            ("<answer><answer>4</answer></answer>", [1, 0, 1]),
            ("<answer>4", [1, 0, 1]),
            ("<think>2 + 2 = 4</think>\n<answer>4", [1, 0, 1]),
            ("4</answer>", [1, 0, 1]),
            ("<answer>4</answer>5</answer>", [1, 0, 1]),
            ("<answer>4</Answer>", [0, 0, 0]),
            ("<ANSWER>4</ANSWER>", [0, 0, 0]),
            ("<answer>4.0</answer>", [0, 0, 0]),
            ("<answer>04</answer>", [0, 0, 1]),
            ("<answer>14</answer>", [0, 0, 1]),
            ("<answer>4 apples</answer>", [0, 0, 0]),
            ("<answer>$4</answer>", [0, 0, 0]),
        ],
    )
    def test_of_a_completion(self, completion, wanted):
        assert verdicts(completion) == wanted

    @pytest.mark.parametrize(
        ("text", "answer"),
        [
            ("a <answer> 7 </answer> b", "7"),
            ("<answer>1</answer><answer>2</answer>", "2"),
            ("<answer>1<answer>2</answer>", "2"),
            ("<answer>multi\nline</answer>", "multi\nline"),
            ("no tags at all", "no tags at all"),
            ("<answer>open", "open"),
            ("closed</answer> rest", "closed"),
        ],
    )
    def test_extraction_takes_the_last_answer(self, text, answer):
        assert extract_answer(text) == answer

    @pytest.mark.parametrize("text", ["4", "<answer>4", "4</answer>", "", "</answer>4<answer>"])
    def test_required_tags_leave_no_answer_without_them(self, text):
        assert extract_answer(text, require_tags=True) is None
        assert verdicts(text, require_tags=True) == [0, 0, 0]

    @pytest.mark.parametrize("text", [GOOD, "<answer>4</answer>", "x<answer> 4 </answer>y"])
    def test_required_tags_change_nothing_with_them(self, text):
        assert verdicts(text, require_tags=True) == verdicts(text)


class TestFormat:
    @pytest.mark.parametrize(
        "text",
        [
            GOOD,
            "<think>one\ntwo\n\nthree</think>\n<answer>9</answer>",
            "<think>\n</think>\n<answer>\n9\n</answer>",
            "<think>a < b > c</think>\n<answer>9</answer>",
        ],
    )
    def test_many_lines_are_fine(self, text):
        """huggingface/open-r1#237; #238."""
        assert has_format(text)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            GOOD + "\n",
            " " + GOOD,
            GOOD + GOOD,
            GOOD + " thanks",
            GOOD.replace("\n", ""),
            GOOD.replace("\n", " "),
            GOOD.replace("\n", "\n\n"),
            GOOD.replace("think", "thinking"),
            GOOD.replace("</think>", ""),
            GOOD.replace("</answer>", ""),
            GOOD.replace("2 + 2", "<think>"),
            GOOD.replace("2 + 2", "</think>"),
            GOOD.replace("2 + 2", "<answer>4</answer>"),
            "<answer>4</answer>\n<think>2 + 2 = 4</think>",
        ],
        ids=ascii,
    )
    def test_anything_else_is_not(self, text):
        assert not has_format(text)

    @pytest.mark.parametrize(
        ("completion", "formatted"),
        [
            ("2 + 2 = 4</think>\n<answer>4</answer>", 1),
            ("</think>\n<answer>4</answer>", 1),
            (GOOD, 0),
            ("they say </think> here</think>\n<answer>4</answer>", 0),
            ("2 + 2 = 4</think><answer>4</answer>", 0),
            ("<answer>4</answer>", 0),
        ],
    )
    def test_a_tag_the_prompt_opened_counts(self, completion, formatted):
        """huggingface/trl#6966; #7141: a mention of the closing tag counts as the tag."""
        assert verdicts(completion, prefill_think=True) == [1, formatted, 1]

    @pytest.mark.parametrize("completion", ["2 + 2 = 4</think>\n<answer>4</answer>"])
    def test_without_the_prefill_it_does_not(self, completion):
        """huggingface/trl#6966; #7141."""
        assert verdicts(completion) == [1, 0, 1]

    def test_the_prefill_reaches_the_sampler_and_the_gold_follows_it(self):
        env = make(prefill_think=True)
        task = env.task_source("train")[0]
        asked = []
        sampler = ScriptedSampler(lambda p: asked.append(p.prefill) or env.gold_completion(task))
        (rollout,) = mrgym.run_group(env, sampler, task, 1, SamplingParams()).rollouts
        assert asked == ["<think>"]
        assert rollout.components == {"correctness": 1.0, "format": 1.0, "integer": 1.0}


class TestInteger:
    @pytest.mark.parametrize("answer", ["0", "10", "007", "1234567890" * 5])
    def test_ascii_digits_are(self, answer):
        assert is_integer(answer)
        assert is_integer(answer, signed=True)

    @pytest.mark.parametrize(
        "answer",
        [
            *("Reward: 10", "1e-1", "nan", "", " ", "1 0", "1,000", "1.0", "1_000", "0x1F", "inf"),
            *("²", "٤", "\uff14", "①", "x", "½", "--1", "+", "1-", "- 1"),
        ],
        ids=ascii,
    )
    def test_anything_else_is_not(self, answer):
        """modelscope/ms-swift#10163."""
        assert not is_integer(answer)
        assert not is_integer(answer, signed=True)
        assert verdicts(f"<answer>{answer}</answer>")[2] == 0

    @pytest.mark.parametrize("answer", ["4\n", " 4", "4 4"])
    def test_space_is_no_digit_but_is_stripped_from_an_answer(self, answer):
        assert not is_integer(answer)
        assert verdicts(f"<answer>{answer}</answer>")[2] == int(answer.strip() == "4")

    @pytest.mark.parametrize("answer", ["-2", "+2", "-0"])
    def test_a_sign_is_allowed_on_request(self, answer):
        """modelscope/ms-swift#10163."""
        assert verdicts(f"<answer>{answer}</answer>", gold=answer) == [1, 0, 0]
        assert verdicts(f"<answer>{answer}</answer>", gold=answer, signed=True) == [1, 0, 1]


class TestGolds:
    @pytest.mark.parametrize(
        ("answer", "gold"),
        [
            ("so 36 + 36 = <<36+36=72>>72\n#### 72", "72"),
            ("#### 1 #### 2", "2"),
            ("72", "72"),
            (" 72 ", "72"),
            (72, "72"),
            (7.5, "7.5"),
            (0, "0"),
        ],
    )
    def test_are_read_as_gsm8k_writes_them(self, answer, gold):
        assert read_gold(answer) == gold

    @pytest.mark.parametrize("answer", [None, True, [], {}, "", "  ", "text ####", "#### "])
    def test_no_gold_is_an_error(self, answer):
        with pytest.raises(TaskError, match=r"gold answer: got .*expected .*mend"):
            read_gold(answer)

    @pytest.mark.parametrize(
        ("gold", "plain"),
        [
            ("1,080", "1080"),
            ("1,234,567", "1234567"),
            ("$5", "5"),
            ("-1,000.5", "-1000.5"),
            ("72", "72"),
            ("0.5", "0.5"),
        ],
    )
    def test_commas_are_taken_out(self, gold, plain):
        assert normalise_gold(gold) == plain

    @pytest.mark.parametrize(
        "gold",
        ["see figure", "1,08", "10,80", "1,0800", "72.", "1/2", "٤", "7 2", "", "1e3", "x=3"],
    )
    def test_what_is_no_number_is_refused(self, gold):
        with pytest.raises(TaskError, match=r"gold answer: got .*expected a number"):
            normalise_gold(gold)

    @pytest.mark.parametrize("answer", [4, 4.0, None, ["4"]], ids=repr)
    def test_tasks_of_ones_own_need_text_as_gold(self, answer):
        env = make(tasks=[Task(f"{i}?", "1") for i in range(20)] + [Task("2 + 2?", answer)])
        with pytest.raises(TaskError, match=r"got gold answer .*expected text"):
            env.reset(seed=0)


class TestGsm8k:
    @pytest.fixture(scope="class")
    @classmethod
    def rows(cls, shared):
        lines = (shared / "data" / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    @pytest.fixture(scope="class")
    @classmethod
    def files(cls, shared):
        return {
            "tasks": shared / "data" / "gsm8k_train.jsonl",
            "eval_tasks": shared / "data" / "gsm8k_test.jsonl",
        }

    @pytest.mark.filterwarnings("ignore:.*carry a sign")
    def test_every_comma_gold_can_be_answered_with_full_marks(self, files, rows):
        env = make(**files)
        source = env.task_source("train")
        commas = [t for t, r in zip(source, rows, strict=True) if "," in read_gold(r["answer"])]
        assert len(commas) == 79
        for task in commas:
            env.reset(options={"task": task})
            assert env.step(env.gold_completion(task))[1] == 3.0

    def test_keep_leaves_them_as_they_are(self, files):
        env = make(**files, golds="keep", signed=True)
        commas = [task for task in env.task_source("train") if "," in task.answer]
        assert len(commas) == 79
        env.reset(options={"task": commas[0]})
        values = env.step(env.gold_completion(commas[0]))[4]["reward_components"]
        assert values == {"correctness": 1.0, "format": 1.0, "integer": 0.0}

    def test_its_signed_golds_are_counted(self, files):
        with pytest.warns(UserWarning, match=r"golds .* carry a sign") as caught:
            make(**files).task_source("train")
        assert [str(w.message).split()[1] for w in caught] == ["3", "2"]

    def test_nothing_is_lost_or_shared(self, files):
        env = make(**files, signed=True)
        counts = [len(env.task_source(split)) for split in ("train", "eval")]
        assert counts == [7473, 1319]


ROWS = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(30)]


class TestFiles:
    @pytest.mark.parametrize("as_text", [True, False])
    @pytest.mark.parametrize("field", ["question", "prompt", "problem"])
    def test_a_jsonl_file_is_taken(self, tmp_path, as_text, field):
        rows = [{field: r["question"], "answer": r["answer"], "id": i} for i, r in enumerate(ROWS)]
        path = write(tmp_path / "rows.jsonl", *rows)
        env = make(tasks=str(path) if as_text else path)
        tasks = [t for split in ("train", "eval") for t in env.task_source(split)]
        assert {(t.id, t.answer) for t in tasks} == {(str(i), str(i + 1)) for i in range(30)}

    def test_with_a_held_out_file_nothing_is_split_off(self, tmp_path):
        train, held_out = (
            write(tmp_path / "a.jsonl", *ROWS[:20]),
            write(tmp_path / "b.jsonl", ROWS[29]),
        )
        env = make(tasks=train, eval_tasks=held_out)
        assert [len(env.task_source(split)) for split in ("train", "eval")] == [20, 1]

    @pytest.mark.parametrize(
        ("row", "said"),
        [
            ({"question": "?", "answer": "see figure"}, r"got 'see figure', expected a number"),
            ({"question": "?", "answer": "#### 1/2"}, r"got '1/2', expected a number"),
            ({"question": "?", "answer": "text ####"}, r"got 'text ####', expected an answer"),
            ({"question": "?", "answer": None}, r"got None, expected text or a number"),
            ({"question": "?"}, r"got None, expected text or a number"),
            ({"answer": "#### 1"}, r"got fields \['answer'\], expected one of"),
            ({"question": 3, "answer": "1"}, r"got prompt 3, expected text"),
            ("{broken", r"got '\{broken', expected one JSON object"),
        ],
    )
    @pytest.mark.parametrize("line", [1, 3])
    def test_an_unusable_row_is_named_with_file_line_and_value(self, tmp_path, row, said, line):
        path = write(tmp_path / "rows.jsonl", *ROWS[: line - 1], row, *ROWS[line:])
        with pytest.raises(TaskError, match=rf"rows\.jsonl, line {line}: .*{said}"):
            make(tasks=path).reset(seed=0)

    def test_keep_takes_golds_that_are_no_numbers(self, tmp_path):
        rows = [{"question": f"{i}?", "answer": f"#### {i}/7"} for i in range(30)]
        env = make(tasks=write(tmp_path / "rows.jsonl", *rows), golds="keep")
        task = env.task_source("train")[0]
        env.reset(options={"task": task})
        assert env.step(f"<answer>{task.answer}</answer>")[4]["reward_components"]["correctness"]

    @pytest.mark.parametrize("sign", ["-", "+"])
    def test_signed_golds_warn_unless_signs_are_allowed(self, tmp_path, sign):
        rows = [{"question": f"{i}?", "answer": f"#### {sign}{i + 1}"} for i in range(30)]
        path = write(tmp_path / "rows.jsonl", *rows)
        with pytest.warns(UserWarning, match=r"30 golds .*pass signed=True to allow it"):
            make(tasks=path).task_source("train")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            make(tasks=path, signed=True).task_source("train")


class TestPrompts:
    @pytest.mark.parametrize("question", ["2 + 2?", "Two\nlines?", "¿Cuánto?"])
    def test_the_plain_prompt_is_the_question_and_a_newline(self, question):
        observation, info = make().reset(options={"task": Task(question, "4")})
        assert observation == f"{question}\n"
        (message,) = info["messages"]
        assert message["role"] == "user"
        assert message["content"].endswith(question)

    @pytest.mark.parametrize("tag", ["<think>", "</think>", "<answer>", "</answer>"])
    def test_the_messages_say_which_format_is_wanted(self, tag):
        (message,) = make().reset(seed=0)[1]["messages"]
        assert tag in message["content"]

    def test_the_chosen_difficulty_and_kinds_are_built(self):
        env = make(difficulty="medium", kinds=["add_subtract"], seed=3)
        tasks = [*env.task_source("train"), *env.task_source("eval")]
        assert {(t.metadata["difficulty"], t.metadata["kind"]) for t in tasks} == {
            ("medium", "add_subtract")
        }
        assert len(tasks) == 8

    @pytest.mark.parametrize(
        ("options", "meant"),
        [({"difficulty": "esay"}, "easy"), ({"kinds": ["add_subtrat"]}, "add_s")],
    )
    def test_unknown_choices_are_named(self, options, meant):
        with pytest.raises(TaskError, match=rf"did you mean '{meant}"):
            make(**options).reset(seed=0)
