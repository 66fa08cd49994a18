"""The service's OpenAPI: bodies and answers as they are checked and sent, in both formats."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from mrgym.server import schemas
from mrgym.server.codec import JSON, MSGPACK

__all__ = ["body_of", "responses_of", "use_schemas"]

_REF = "#/components/schemas/{name}"
_ERRORS = {
    400: "The body is no JSON or msgpack, or the connection broke.",
    401: "The token is missing or wrong.",
    408: "The body took too long.",
    413: "The body is too large.",
    422: "The request does not fit; `subject` names the part.",
    500: "The environment failed or broke its reward contract.",
    429: "There is too much to do, or no place; ask again after `Retry-After` seconds.",
    503: "The service is about to end; ask another, or again after `Retry-After` seconds.",
    404: "There is no such session, split or path.",
    405: "The path has other methods.",
    409: "The request is out of turn.",
    410: "The session's environment does not answer any more.",
    415: "The body is in another format than JSON or msgpack.",
    504: "The environment took too long.",
}
_ALWAYS = (400, 401, 408, 413, 500, 503)


def body_of(record: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the ``openapi_extra`` of a route whose body is a record."""
    return {"requestBody": {"required": True, "content": _content(record)}}


def responses_of(record: type[msgspec.Struct] | None, *errors: int) -> dict[int | str, Any]:
    """Return the ``responses`` of a route that answers with a record, or an error."""
    out: dict[int | str, Any] = {}
    if record is not None:
        description = (record.__doc__ or "").partition("\n")[0]
        out[200] = {"description": description, "content": _content(record)}
    for status in sorted({*_ALWAYS, *errors}):
        out[status] = {"description": _ERRORS[status], "content": _content(schemas.ErrorOut)}
        if status in (429, 503):
            out[status]["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    return out


def use_schemas(app: FastAPI, with_token: bool) -> None:
    """Make an application describe itself with the records of :mod:`mrgym.server.schemas`."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _described(app, with_token)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _described(app: FastAPI, with_token: bool) -> dict[str, Any]:
    out = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    records = [value for value in vars(schemas).values() if _is_record(value)]
    _, components = msgspec.json.schema_components(records, ref_template=_REF)
    out["components"] = {"schemas": components}
    if with_token:
        out["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        out["security"] = [{"token": []}]
        out["paths"]["/health"]["get"]["security"] = []
    return out


def _is_record(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, msgspec.Struct)


def _content(record: type[msgspec.Struct]) -> dict[str, Any]:
    schema = {"$ref": _REF.format(name=record.__name__)}
    return {media: {"schema": schema} for media in (JSON, MSGPACK)}
