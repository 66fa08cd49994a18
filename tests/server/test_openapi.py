"""The service's OpenAPI is true: generated requests, good and bad, get the answers it promises."""

from __future__ import annotations

import contextlib
import json

import hypothesis
import msgspec
import pytest

import mrgym

schemathesis = pytest.importorskip("schemathesis", reason="needs the extra dev")

from schemathesis import checks  # noqa: E402
from schemathesis.specs.openapi import checks as openapi_checks  # noqa: E402

MSGPACK = "application/msgpack"


@schemathesis.serializer(MSGPACK)
def _to_msgpack(context, value):
    if isinstance(value, bytes):
        return value
    with contextlib.suppress(Exception):  # generated values that msgpack has no form for
        return msgspec.msgpack.encode(value)
    return b"\xc1"


@schemathesis.deserializer(MSGPACK)
def _from_msgpack(context, response):
    return msgspec.msgpack.decode(response.content)


CHECKS = (
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
)


@pytest.fixture
def service(serving):
    return serving(mrgym.make("math_multi_reward"))


@pytest.fixture
def api(service):
    return schemathesis.openapi.from_url(f"{service.url}/openapi.json")


SETTINGS = hypothesis.settings(
    max_examples=80, deadline=None, suppress_health_check=[*hypothesis.HealthCheck]
)
OPERATIONS = [
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/env"),
    ("GET", "/tasks"),
    ("POST", "/prompts"),
    ("POST", "/score"),
    ("POST", "/turns"),
    ("POST", "/sessions"),
    ("DELETE", "/sessions/{session_id}"),
    ("POST", "/sessions/{session_id}/reset"),
    ("POST", "/sessions/{session_id}/step"),
]


def attack(operation, mode, session=None):
    """Send generated requests, good or bad by the schema, and check every answer."""
    sent = []

    @SETTINGS
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def ask(case):
        if session is not None:
            case.path_parameters["session_id"] = session
        response = case.call()
        sent.append(response.status_code)
        case.validate_response(response, checks=[*CHECKS])

    ask()
    return sent


@pytest.mark.slow
@pytest.mark.parametrize("mode", [*schemathesis.GenerationMode])
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_generated_requests_get_the_answers_that_are_promised(api, method, path, mode):
    try:
        statuses = attack(api[path][method], mode)
    except hypothesis.errors.Unsatisfiable:
        pytest.skip("a request without parameters cannot be wrong")
    assert max(statuses) < 500


@pytest.mark.slow
@pytest.mark.parametrize("mode", [*schemathesis.GenerationMode])
@pytest.mark.parametrize("verb", ["reset", "step"])
def test_generated_requests_in_an_open_session_do_no_harm(service, api, verb, mode):
    session = service.http.post("/sessions", json={}).json()["id"]
    service.http.post(f"/sessions/{session}/reset", json={})
    operation = api["/sessions/{session_id}/" + verb]["POST"]
    statuses = attack(operation, mode, session)
    assert max(statuses) < 500
    assert {*statuses} & {200, 409, 422}


def test_every_route_declares_its_errors_and_both_formats(service):
    described = service.http.get("/openapi.json").json()
    assert {*described["paths"]} == {path for _, path in OPERATIONS}
    for path, methods in described["paths"].items():
        for operation in methods.values():
            assert {"400", "401", "413", "503"} <= {*operation["responses"]}, path
            for status, response in operation["responses"].items():
                if path != "/metrics" or status != "200":
                    assert {*response["content"]} == {"application/json", MSGPACK}
            if "requestBody" in operation:
                assert {"415", "422"} <= {*operation["responses"]}
    references = json.dumps(described).split('"$ref": "')[1:]
    names = {reference.partition('"')[0].rpartition("/")[2] for reference in references}
    assert names == {*described["components"]["schemas"]} & names
    assert "ErrorOut" in names


def test_the_token_is_part_of_it(serving):
    service = serving(mrgym.make("math_multi_reward"), token="a-token-for-tests-0123456789")
    described = service.http.get("/openapi.json").json()
    assert described["security"] == [{"token": []}]
    assert described["paths"]["/health"]["get"]["security"] == []
