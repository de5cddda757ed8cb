"""Errors as HTTP answers: in OpenAI's shape under `/v1`, as problem details (RFC 9457) elsewhere."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from tracewire import (
    ClosedError,
    ConflictError,
    ConnectError,
    EditConflict,
    EditFailed,
    EntryConflict,
    IntegrityError,
    InterventionError,
    InvalidRequestError,
    LibraryMissing,
    NotFoundError,
    Overloaded,
    PermissionDeniedError,
    RetryableError,
    TraceCancelled,
    TraceExpired,
    TracewireError,
    VersionConflict,
)
from tracewire.chats import CHAT_NAMES

__all__ = ["RETRY_AFTER_S", "Problem", "of_error", "of_validation"]

#: `Retry-After` in seconds, where the error has no better estimate.
RETRY_AFTER_S = 2.0

_TITLES = {
    400: "Invalid request",
    401: "No valid API key",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    406: "No such form",
    408: "Too late",
    409: "Conflict",
    412: "Another version",
    413: "Too large",
    422: "Invalid request",
    429: "Too many requests",
    500: "Internal error",
    501: "A library is missing",
    502: "The bus refuses the gateway",
    503: "Not available now",
}
#: OpenAI's words for the kind of an error, by status.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    412: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
#: What pydantic puts into a path for an alternative of a type, or for a key.
_ALTERNATIVE = re.compile(r"\[key\]|str|int|float|bool|list\[.*\]|function-.*")
#: Prefixes of the SDK's fields that an OpenAI body does not have.
_SAMPLING = "sampling."


class Problem(Exception):
    """An error as the gateway answers it.

    Attributes:
        status: the HTTP status.
        message: what was observed and what was expected.
        code: the kind of the error, in snake case.
        field: the part of the request at fault, as the caller wrote it, or None.
        retry_after: seconds after which the caller can try again, or None where another attempt would fail, too.
        more: further members of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        field: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.field = field
        self.retry_after = retry_after
        self.headers = dict(headers or {})
        self.more = {name: value for name, value in more.items() if value is not None}

    def openai(self) -> dict[str, Any]:
        """The body in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.field, "code": self.code}
        return {"error": {**error, **({"tracewire": self.more} if self.more else {})}}

    def details(self) -> dict[str, Any]:
        """The body as problem details. `retry_after`, in seconds, is there too: a stream has no header for it."""
        named: dict[str, Any] = {"field": self.field} if self.field is not None else {}
        if self.retry_after is not None:
            named["retry_after"] = self.retry_after
        known = {"type": f"urn:tracewire:{self.code}", "title": _TITLES.get(self.status, "Error")}
        return {**known, "status": self.status, "detail": self.message, **named, **self.more}

    def response(self, path: str) -> Response:
        """The answer to a request for `path`."""
        openai = path.startswith("/v1/")
        headers = dict(self.headers)
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        if openai:
            headers["X-Should-Retry"] = "false" if self.retry_after is None else "true"
        # ASCII: a text may have half of a surrogate pair, which UTF-8 has no form for.
        body = json.dumps(self.openai() if openai else self.details()).encode()
        media = "application/json" if openai else "application/problem+json"
        return Response(body, self.status, headers, media)


def of_error(error: TracewireError, *, openai: bool = False) -> Problem:
    """The HTTP problem for an error of the SDK. With `openai`, its field is one of an OpenAI body."""
    status, retry_after = _status(error, openai)
    field = getattr(error, "field", None)
    if openai and field is not None:
        field = _openai_field(field)
    message = getattr(error, "message", None)
    more = {name: getattr(error, name, None) for name in ("filename", "line", "trace_id", "nearest")}
    if isinstance(error, VersionConflict | EditConflict | EntryConflict):
        more["version"] = error.version
    if isinstance(error, TraceCancelled):
        more |= {"by": error.by, "reason": error.reason}
    if isinstance(error, InterventionError | EditFailed):
        more["exception"] = error.type
    text = message if isinstance(message, str) and field is not None else str(error)
    return Problem(status, text, code=_code(error), field=field, retry_after=retry_after, **more)


def _status(error: TracewireError, openai: bool) -> tuple[int, float | None]:
    """The status, and after how many seconds another attempt may succeed."""
    invalid = 400 if openai else 422
    match error:
        case Overloaded():
            return 503, error.retry_after
        case RetryableError():
            return 503, error.retry_after or RETRY_AFTER_S
        case InterventionError():
            return invalid, None
        case LibraryMissing():
            return 501, None
        case ClosedError():
            return 503, RETRY_AFTER_S
        case TraceCancelled() | ConflictError():
            return 409, None
        case TraceExpired():
            # It was the caller's own deadline.
            return 408, None
        case PermissionDeniedError() | ConnectError():
            return 502, None
        case NotFoundError():
            return 404, None
        case InvalidRequestError():
            return invalid, None
        case IntegrityError():
            return 500, None
        case _:
            return 500, None


def _code(error: TracewireError) -> str:
    return _WORD.sub("_", type(error).__name__).lower()


#: Fields of a trace that stand beside the prompt in an OpenAI body, and not under `tracewire`.
_PLAIN = frozenset({"model", "prompt", "prompts", "messages", "priority", *CHAT_NAMES})


def _openai_field(field: str) -> str:
    """The name in an OpenAI body of a field as the SDK calls it."""
    if field.startswith(_SAMPLING):
        return field.removeprefix(_SAMPLING)
    head = re.split(r"[.\[]", field, maxsplit=1)[0]
    if head == "lora":
        # The adapter's name stands there.
        return "model"
    if head in _PLAIN or not head:
        return field
    return f"tracewire.{field}"


def of_validation(errors: Sequence[Any], *, openai: bool) -> Problem:
    """What is wrong with a request that does not fit its route, by its first fault.

    The value itself is not repeated: it may be what JSON cannot hold.
    """
    first = errors[0]
    where, *path = (str(part) for part in first["loc"])
    status = 400 if openai else 422
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return Problem(400, f"the body is not JSON: {reason}", code="invalid_json", field=where)
    if first["type"] == "model_attributes_type" and isinstance(first.get("input"), bytes):
        # FastAPI reads no other body as JSON, so that a page cannot post one without asking first.
        expected = "expected a JSON body with the header Content-Type: application/json"
        return Problem(status, expected, code="invalid_request", field="Content-Type")
    unknown = first["type"] == "extra_forbidden"
    message = "unknown field: the gateway does not have it" if unknown else str(first["msg"])
    field = ".".join(one for one in path if not _ALTERNATIVE.fullmatch(one)) or where
    return Problem(status, f"{field}: {message}", code="invalid_request", field=field)
