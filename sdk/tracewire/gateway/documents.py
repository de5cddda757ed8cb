"""What the OpenAPI document says of answers, with examples."""

from __future__ import annotations

from typing import Any

from .downloads import FORMATS

__all__ = ["ERRORS", "OPENAI_ERRORS", "answers", "files", "stream"]

_TEXT = {"type": "string"}
_PROBLEM = {
    "title": "Problem",
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": _TEXT,
        "title": _TEXT,
        "status": {"type": "integer"},
        "detail": _TEXT,
        "field": _TEXT,
    },
    "example": {
        "type": "urn:tracewire:unknown_trace",
        "title": "Not found",
        "status": 404,
        "detail": "no trace 'mine': it was never submitted here, or its events have expired",
    },
}
_OPENAI = {
    "title": "Error",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": _TEXT,
                "tracewire": {"type": "object"},
            },
        }
    },
    "example": {
        "error": {
            "message": "temperature: expected a number",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "invalid_request",
        }
    },
}


def _errors(media: str, schema: dict[str, Any], invalid: int) -> dict[int | str, dict[str, Any]]:
    content = {media: {"schema": schema}}
    return {
        invalid: {"description": "The request can never be executed as it is.", "content": content},
        # Without this, FastAPI describes a form that the gateway does not use.
        422: {"description": "The request can never be executed as it is.", "content": content},
        "default": {"description": "An error. With `Retry-After`, another attempt may succeed.", "content": content},
    }


#: The errors of routes under `/v1`, and of the others.
OPENAI_ERRORS = _errors("application/json", _OPENAI, 400)
ERRORS = _errors("application/problem+json", _PROBLEM, 422)


def answers(description: str, example: Any, status: int = 200, **more: dict[str, Any]) -> dict[int | str, Any]:
    """A JSON answer with an example; `more` has other answers of the route, as `_204={...}`."""
    schema = {"type": "object"}
    found: dict[int | str, Any] = {
        status: {
            "description": description,
            "content": {"application/json": {"schema": schema, "example": example}},
        }
    }
    return found | {int(name.removeprefix("_")): answer for name, answer in more.items()}


def stream(description: str, example: str, other: dict[str, Any] | None = None) -> dict[int | str, Any]:
    """A stream of server-sent events; `other` is the content of the same status in another form."""
    content: dict[str, Any] = {"text/event-stream": {"schema": _TEXT, "example": example}}
    return {200: {"description": description, "content": content | (other or {})}}


def files() -> dict[int | str, Any]:
    """An array in each of its formats."""
    content = {media: {"schema": {"type": "string", "format": "binary"}} for media in FORMATS.values()}
    return {
        200: {"description": "The array.", "content": content},
        304: {"description": "The client has the array already."},
    }
