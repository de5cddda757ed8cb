"""What the OpenAPI document says beside what FastAPI finds: the forms of answers, errors by status, and examples."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path

from .downloads import FORMATS
from .examples import EXAMPLES
from .schemas import INTERVENTION, components

__all__ = [
    "COMMON",
    "OPENAI_COMMON",
    "EditName",
    "EngineName",
    "EntryId",
    "ModelPath",
    "ResponseId",
    "TraceId",
    "ValueDigest",
    "answers",
    "completed",
    "files",
    "problems",
    "stream",
]

_REF = "#/components/schemas/"
_STATUSES = {
    400: "The body is not JSON.",
    401: "The request has no valid API key.",
    403: "The key lacks a right.",
    404: "There is none of this name or id.",
    406: "No form that `Accept` asks for is served.",
    408: "The trace's deadline has passed.",
    409: "The request conflicts with what holds now.",
    412: "Another version holds than `If-Match` names.",
    413: "The body is too large for the key.",
    422: "The request can never be executed as it is.",
    429: "The key has reached a limit. `Retry-After` says when to try again.",
    500: "The gateway has a defect, or the bus has damaged data.",
    501: "The gateway lacks a library that this needs.",
    502: "The bus refuses the gateway.",
    503: "The gateway, the bus or the engines cannot do it now. `Retry-After` says when to try again.",
}


def problems(*statuses: int, openai: bool = False) -> dict[int | str, Any]:
    """Errors of a route, by status: problem details, or OpenAI's form."""
    media = "application/json" if openai else "application/problem+json"
    content = {"schema": {"$ref": _REF + ("OpenAIError" if openai else "Problem")}}
    said = {**_STATUSES, 400: _STATUSES[422]} if openai else _STATUSES
    return {status: {"description": said[status], "content": {media: content}} for status in statuses}


#: The errors that all routes under `/v1` have, and all the others.
OPENAI_COMMON = problems(400, 401, 403, 413, 429, 500, 502, 503, openai=True)
COMMON = problems(401, 403, 413, 422, 429, 500, 502, 503)


def answers(description: str, form: str, status: int = 200) -> dict[int | str, Any]:
    """A JSON answer of a form in `schemas`."""
    content = {"schema": {"$ref": _REF + form}}
    return {status: {"description": description, "content": {"application/json": content}}}


def stream(description: str, example: str, other: dict[int | str, Any] | None = None) -> dict[int | str, Any]:
    """A stream of server-sent events; `other` is the same status in another form."""
    event = {"schema": {"$ref": _REF + "ServerSentEvent"}, "example": example}
    content = {**(other[200]["content"] if other else {}), "text/event-stream": event}
    return {200: {"description": description, "content": content}}


def files() -> dict[int | str, Any]:
    """An array in each of its formats."""
    content = {media: {"schema": {"type": "string", "format": "binary"}} for media in FORMATS.values()}
    return {
        200: {"description": "The array.", "content": content},
        304: {"description": "The client has the array already."},
    }


# --- parameters -------------------------------------------------------------------------------------------------------

TraceId = Annotated[str, Path(description="the trace's id", examples=["mine"])]
ResponseId = Annotated[str, Path(description="the response's id", examples=["resp_mine"])]
EngineName = Annotated[str, Path(description="the engine's name", examples=["gpu-0"])]
ModelPath = Annotated[str, Path(description="the model's name", examples=["demo"])]
EditName = Annotated[str, Path(description="the standing intervention's name", examples=["calm"])]
EntryId = Annotated[str, Path(description="the entry's name, `calm`, `calm@3` or `red:calm`", examples=["calm"])]
ValueDigest = Annotated[
    str,
    Path(
        description="the array's digest, as references have it",
        pattern="^[0-9a-f]{32}$",
        examples=["e0d110f13c1226990d4b0b7662e2e3cf"],
    ),
]


# --- the document -----------------------------------------------------------------------------------------------------


def completed(document: dict[str, Any]) -> dict[str, Any]:
    """The document that FastAPI makes, with the forms of answers and of what requests have in lists and dicts."""
    schemas = document["components"]["schemas"]
    schemas |= components()
    for name, example in EXAMPLES.items():
        # Not beside the answers: FastAPI drops what is null there.
        schemas[name]["examples"] = [example]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for schema in schemas.values():
        properties: dict[str, Any] = schema.get("properties", {})
        for name in [name for name, one in properties.items() if one.get("type") == "null"]:
            # A field that is not served.
            del properties[name]
        for name, form in (("interventions", INTERVENTION), ("block", "BlockBody")):
            if name in properties and schema.get("additionalProperties") is False:
                _refer(properties[name], _REF + form)
    for path, item in document["paths"].items():
        for operation in item.values():
            if path.startswith("/v1/"):
                # A request under /v1 that is wrong has the status 400.
                operation["responses"].pop("422", None)
    document["components"]["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "A key of the gateway's file, if it has one."}
    }
    document["security"] = [{"key": []}, {}]
    return document


def _refer(schema: dict[str, Any], target: str) -> None:
    """Have an array's items, or an object, be what `target` names."""
    for one in (schema, *schema.get("anyOf", ())):
        if one.get("type") == "array":
            one["items"] = {"$ref": target}
        elif one.get("type") == "object":
            one.clear()
            one["$ref"] = target
