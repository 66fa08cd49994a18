"""Rollouts as bytes: the same again, strict JSON, versions, broken files.

benchflow-ai/benchflow#409; OpenPipe/ART#903; verl-project/verl#6167.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrgym import Rollout, WireError
from mrgym.rollout import SCHEMA_VERSION, Turn
from mrgym.wire import decode_rollout, encode_rollout, read_rollouts, write_rollouts

FULL = Rollout(
    task_id="t0",
    group=3,
    index=1,
    components={"right": 1.0, "length": -0.1},
    raw_components={"right": 1.0, "length": -0.2},
    reward=0.9,
    status="timeout",
    error="right: no score within 5 s",
    terminated=True,
    turns=[Turn("1 + 1?", "héllo 🎲\x00\u2028", "length", {"right": 1.0}), Turn("", "")],
    answer={"value": [1, 2.5, None, "x"]},
    prompt_token_ids=[1, 2],
    token_ids=[5, 0],
    loss_mask=[True, False],
    sampler_logprobs=[-0.1, 0.0],
    policy_version=7,
    step=2,
    advantage=0.25,
    component_advantages={"right": 0.5},
)


def rollout(**fields):
    return Rollout("t0", 0, 0, **fields)


class TestRoundTrip:
    @pytest.mark.parametrize("record", [FULL, rollout()], ids=["full", "empty"])
    def test_what_is_read_equals_what_was_written(self, record):
        assert decode_rollout(encode_rollout(record)) == record

    json_values = st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**63)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=6,
    )
    finite = st.floats(allow_nan=False, allow_infinity=False)

    @given(
        st.builds(
            Rollout,
            task_id=st.text(),
            group=st.integers(0, 2**40),
            index=st.integers(0, 2**20),
            components=st.dictionaries(st.text(), finite, max_size=3),
            reward=finite,
            status=st.sampled_from(["ok", "error", "timeout"]),
            error=st.none() | st.text(),
            truncated=st.booleans(),
            turns=st.lists(st.builds(Turn, st.text(), st.text()), max_size=2),
            answer=json_values,
            token_ids=st.lists(st.integers(0, 2**31), max_size=4),
            sampler_logprobs=st.lists(finite, max_size=4),
            advantage=st.none() | finite,
        )
    )
    def test_any_record_round_trips_as_one_line_of_json(self, record):
        data = encode_rollout(record)
        assert decode_rollout(data) == record
        assert b"\n" not in data
        assert json.loads(data)["schema"] == SCHEMA_VERSION

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_a_file_keeps_order_and_replaces_what_was_there(self, tmp_path, count):
        path = tmp_path / "new" / "rollouts.jsonl"
        records = [rollout(step=i) for i in range(count)]
        for written in ([FULL], records):
            write_rollouts(path, written)
        assert [*read_rollouts(path)] == records


class TestNumbers:
    @pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, np.int8, int])
    def test_integers_stay_integers(self, kind):
        record = rollout(answer=kind(3), token_ids=[kind(5), kind(0)], step=kind(2))
        data = json.loads(encode_rollout(record))
        for value, wanted in ((data["answer"], 3), (data["token_ids"][0], 5), (data["step"], 2)):
            assert (value, type(value)) == (wanted, int)

    @pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16, float])
    def test_floats_stay_floats(self, kind):
        record = rollout(components={"a": kind(0.5)}, reward=kind(1), answer=kind(2))
        got = decode_rollout(encode_rollout(record))
        assert (got.components, got.reward, got.answer) == ({"a": 0.5}, 1.0, 2.0)
        assert type(got.components["a"]) is type(got.reward) is type(got.answer) is float

    @pytest.mark.parametrize(
        ("value", "wanted"),
        [
            (np.bool_(True), True),
            (np.array([1, 2]), [1, 2]),
            (np.array(0.5), 0.5),
            (np.ones((2, 1)), [[1.0], [1.0]]),
            (10**40, 10**40),
            ((1, 2), [1, 2]),
            ({1: "a"}, {"1": "a"}),
        ],
        ids=repr,
    )
    def test_other_values_take_their_json_form(self, value, wanted):
        got = decode_rollout(encode_rollout(rollout(answer=value))).answer
        assert got == wanted
        assert type(got) is type(wanted)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
    @pytest.mark.parametrize(
        ("place", "fields"),
        [
            ("sampler_logprobs[1]", lambda v: {"sampler_logprobs": [-1.0, v]}),
            ("sampler_logprobs[0]", lambda v: {"sampler_logprobs": [v]}),
            ("sampler_logprobs[1]", lambda v: {"sampler_logprobs": [0, v]}),
            ("components.a", lambda v: {"components": {"a": v}}),
            ("reward", lambda v: {"reward": v}),
            ("advantage", lambda v: {"advantage": v}),
            ("answer[1]", lambda v: {"answer": [1, v]}),
            ("answer.a[0]", lambda v: {"answer": {"a": [v]}}),
            ("turns[0].scores.a", lambda v: {"turns": [Turn("", "", scores={"a": v})]}),
        ],
    )
    def test_what_json_cannot_say_is_refused_with_its_place(self, place, fields, value):
        with pytest.raises(WireError) as caught:
            encode_rollout(rollout(**fields(value)))
        assert str(caught.value).startswith(f"rollout.{place}: got ")
        assert "expected a finite number" in str(caught.value)

    @pytest.mark.parametrize("value", [object(), 1j, lambda: 0, {"a": object()}], ids=type)
    def test_a_value_without_a_json_form_names_the_task(self, value):
        with pytest.raises(WireError, match=r"rollout of task 't0': got a value without a JSON"):
            encode_rollout(rollout(answer=value))

    @pytest.mark.parametrize("text", ["\ud800", "a\udfffb"], ids=ascii)
    def test_a_lone_surrogate_is_refused(self, text):
        with pytest.raises(WireError, match=r"rollout of task 't0': got text that is no Unicode"):
            encode_rollout(rollout(turns=[Turn("", text)]))


class TestReading:
    @pytest.mark.parametrize("schema", [0, 2, 99])
    def test_another_version_is_named(self, schema):
        data = json.dumps({**json.loads(encode_rollout(FULL)), "schema": schema}).encode()
        with pytest.raises(WireError, match=rf"got schema {schema}, expected {SCHEMA_VERSION}"):
            decode_rollout(data)

    def test_a_record_without_a_version_is_refused(self):
        data = json.loads(encode_rollout(FULL))
        del data["schema"]
        with pytest.raises(WireError, match=r"got schema 0"):
            decode_rollout(json.dumps(data).encode())

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"not json",
            b"[]",
            b"null",
            b'{"schema":1}',
            b'{"schema":"1"}',
            b"\xff\xfe",
            encode_rollout(FULL)[:-10],
            encode_rollout(rollout()).replace(b'"reward":0.0', b'"reward":NaN'),
            encode_rollout(rollout()).replace(b'"reward":0.0', b'"reward":null'),
            encode_rollout(rollout()).replace(b'"status":"ok"', b'"status":"fine"'),
            encode_rollout(rollout()).replace(b"t0", b"\xff"),
        ],
        ids=range(12),
    )
    @pytest.mark.parametrize("number", [1, 3])
    def test_a_broken_line_is_named_with_file_and_line(self, tmp_path, data, number):
        path = tmp_path / "rollouts.jsonl"
        path.write_bytes((encode_rollout(FULL) + b"\n") * (number - 1) + data + b"\n")
        reader = read_rollouts(path)
        for _ in range(number - 1):
            assert next(reader) == FULL
        with pytest.raises(WireError, match=rf"rollouts\.jsonl, line {number}: rollout: got "):
            next(reader)

    def test_a_field_of_a_later_release_is_passed_over(self):
        data = json.dumps({**json.loads(encode_rollout(FULL)), "later": 1}).encode()
        assert decode_rollout(data) == FULL
