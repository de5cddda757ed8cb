"""Errors as an HTTP status and a JSON body that names the field at fault."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from tracewire import (
    ConnectError,
    RetryableError,
    SteerRejected,
    TraceEnded,
    TraceRejected,
    TracewireError,
    UnknownModel,
    UnknownTrace,
    VersionConflict,
)

__all__ = ["Problem", "of_bus", "of_request", "within"]

#: `Retry-After` in seconds, where the error has no better estimate.
RETRY_AFTER_S = 2
#: Fields that a caller knows by another name than Tracewire.
_FIELDS = {"prompt": "text"}
_PREFIXES = ("live.", "sampling.")


class Problem(Exception):
    """An answer that is none: its HTTP status, what was observed, and what to do instead."""

    def __init__(
        self, status: int, message: str, *, field: str | None = None, retry_after: float | None = None, **more: Any
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.field = field
        self.retry_after = retry_after
        self.more = more

    def response(self) -> JSONResponse:
        """As the client gets it."""
        named = {"field": self.field} if self.field is not None else {}
        headers = {"Retry-After": str(max(1, math.ceil(self.retry_after)))} if self.retry_after is not None else None
        return JSONResponse({"error": {"message": self.message, **named, **self.more}}, self.status, headers)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Give what is asked of the bus this long; a person waits for the answer."""
    try:
        with anyio.fail_after(seconds):
            yield
    except TimeoutError:
        raise Problem(
            503,
            f"the bus did not answer within {seconds:g} s; it may have taken the request",
            retry_after=RETRY_AFTER_S,
        ) from None


def of_bus(error: TracewireError) -> Problem:
    """The HTTP problem for an error of the SDK."""
    match error:
        case RetryableError():
            return Problem(503, str(error), retry_after=error.retry_after)
        case VersionConflict():
            return Problem(409, error.message, field="if_version", version=error.version)
        case SteerRejected():
            return Problem(422, error.message, field=_field(error.field))
        case TraceRejected() if error.field == "prompt" or error.field.startswith(_PREFIXES):
            return Problem(422, error.message, field=_field(error.field))
        case TraceEnded():
            return Problem(409, "the answer has ended: it cannot be bent any more")
        case UnknownTrace():
            return Problem(404, "there is no such answer, or it has been forgotten")
        case ConnectError() | UnknownModel():
            return Problem(503, str(error), retry_after=RETRY_AFTER_S)
        case _:
            # What this service submits is its own: a fault there is not the caller's.
            return Problem(500, f"{type(error).__name__}: {error}")


def _field(field: str) -> str:
    for prefix in _PREFIXES:
        field = field.removeprefix(prefix)
    return _FIELDS.get(field, field)


def of_request(error: RequestValidationError) -> Problem:
    """What is wrong with a request, by its first fault.

    The value itself is not repeated: it may be what no JSON can hold.
    """
    first = error.errors()[0]
    where, *path = (str(part) for part in first["loc"])
    if first["type"] == "json_invalid":
        return Problem(422, f"the body is not JSON: {first.get('ctx', {}).get('error', '')}", field=where)
    return Problem(422, first["msg"], field=".".join(path) or where)
