"""Errors of the bus and of engines as errors of the SDK."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from tracewire_bus.domain.limits import LimitExceeded
from tracewire_bus.store.queue_entries import QueueFull, SubmissionRefused
from tracewire_bus.store.trace_records import TraceElsewhere, TraceEnded
from tracewire_bus.store.watch_groups import GroupRemoved
from tracewire_bus.transport.errors import BusError, NotAllowed, NotAuthenticated, WrongTopology, is_full
from tracewire_bus.transport.errors import BusFull as NoMemory
from tracewire_bus.transport.errors import BusUnavailable as Away
from tracewire_bus.transport.guard import Malformed
from tracewire_bus.wire.messages import Failure

from .errors import (
    BusFull,
    BusRefused,
    BusUnavailable,
    ClientClosed,
    CodeRefused,
    InvalidUrl,
    MalformedRecord,
    Overloaded,
    TraceIdTaken,
    TraceRejected,
    TracewireError,
    UnexpectedReply,
    UnknownModulePath,
    UnknownWatchGroup,
)

__all__ = ["bus_errors", "connect_error", "refusals", "rejection"]


def rejection(failure: Failure, trace_id: str) -> TraceRejected:
    """The error for a rejection that an engine published, of the same class as if the SDK had found it itself."""
    field = failure.field or "submission"
    error: TraceRejected
    if failure.type == "UnknownModulePath":
        error = UnknownModulePath(
            "",
            None,
            message=failure.message,
            filename=failure.filename,
            line=failure.line,
            source=failure.source,
        )
    elif failure.type == "CodeRefused":
        error = CodeRefused(failure.message, field=field)
    else:
        error = TraceRejected(
            field,
            failure.message,
            type=failure.type,
            filename=failure.filename,
            line=failure.line,
            source=failure.source,
        )
    error.trace_id = trace_id
    return error


#: Each error of the bus, the SDK's class for it, and the advice that the SDK adds to its message.
_CAUSES: tuple[tuple[type[BusError], type[TracewireError], str], ...] = (
    (Away, BusUnavailable, ""),
    (NotAllowed, BusRefused, " (docs/redis.md shows what users need)"),
    (NotAuthenticated, BusRefused, ""),
    (WrongTopology, InvalidUrl, ""),
    (Malformed, MalformedRecord, ""),
)


@contextmanager
def bus_errors() -> Iterator[None]:
    """Raise errors of the bus as errors of the SDK."""
    try:
        yield
    except (anyio.ClosedResourceError, BusError) as error:
        raise connect_error(error) from error


def connect_error(error: anyio.ClosedResourceError | BusError, before: str = "") -> TracewireError:
    """The SDK's error for an error of the bus. Its message begins with `before`."""
    if isinstance(error, anyio.ClosedResourceError):
        return ClientClosed("the client is closed: make another one")
    message = f"{before}{error}"
    if isinstance(error, NoMemory) or is_full(error.__cause__):
        return BusFull(f"{message}: give Redis more memory, or keep fewer finished traces")
    if isinstance(error, GroupRemoved):
        return UnknownWatchGroup(f"{message}: a watch with the same name creates it again")
    for cause, kind, advice in _CAUSES:
        if isinstance(error, cause):
            return kind(message + advice)
    return UnexpectedReply(f"{message} (docs/redis.md says which servers are supported)")


@contextmanager
def refusals(model: str, trace_id: str) -> Iterator[None]:
    """Raise errors of the bus for the submission of a trace to `model` as errors of the SDK."""
    with bus_errors():
        try:
            yield
        except (TraceElsewhere, TraceEnded) as error:
            raise TraceIdTaken(trace_id, str(error)) from None
        except QueueFull as error:
            raise Overloaded(model, error.waiting, error.limit, error.retry_after_s) from None
        except NoMemory as error:
            raise BusFull(
                f"{error}: start it again later, keep finished traces for a shorter time "
                "or fewer of them (tracewire engine --retention, --retain-total-bytes), or give Redis more memory"
            ) from None
        except LimitExceeded as error:
            raise TraceRejected(error.field, error.message) from None
        except SubmissionRefused as error:
            message = f"the engines of {model!r} do not take it: {error} (tracewire engine --limit)"
            raise TraceRejected("submission", message) from None
