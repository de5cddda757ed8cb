"""Control of any trace by its id: steer, pause, resume and cancel it, and read its live parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tracewire.checks import check_text, is_sendable_text, shown
from tracewire.error_mapping import bus_errors
from tracewire.errors import InvalidChange, SteerRejected, TooManyChanges, TraceEnded, UnknownTrace, VersionConflict
from tracewire_bus.store.trace_records import LiveState, SteerRefused, TraceMissing
from tracewire_bus.store.trace_records import TraceEnded as RecordEnded
from tracewire_bus.wire.ids import is_encodable

if TYPE_CHECKING:
    from .session import Session

__all__ = ["cancel", "check_trace_id", "live_state", "pause", "steer"]


def check_trace_id(trace_id: Any) -> None:
    """Refuse a value that cannot be a trace's id.

    Raises:
        TypeError: it is not a string.
        UnknownTrace: it cannot be sent as text, so that no trace has it.
    """
    if not isinstance(trace_id, str):
        raise TypeError(f"expected a trace's id, got {shown(trace_id)}")
    if not is_encodable(trace_id):
        raise UnknownTrace(trace_id)


async def live_state(session: Session, trace_id: str) -> LiveState:
    """The version and the values of a trace's live parameters."""
    check_trace_id(trace_id)
    with bus_errors():
        try:
            return await session.open_bus().records.live(trace_id)
        except TraceMissing:
            raise UnknownTrace(trace_id) from None


async def steer(
    session: Session,
    trace_id: str,
    values: Mapping[str, Any] | None,
    more: Mapping[str, Any],
    *,
    if_version: int | None,
    by: str | None,
) -> int:
    """Change live parameters of a trace: those in `values` and in `more`. See `Client.steer`."""
    from tracewire_bus.wire.live_values import LiveError, cast_to, live_values

    check_trace_id(trace_id)
    if values is not None and not isinstance(values, Mapping):
        raise InvalidChange(trace_id, "live", f"expected a dict of live parameters, got {shown(values)}")
    given = {**(values or {}), **more}
    if not given:
        raise InvalidChange(trace_id, "live", "expected at least one live parameter to change, got none")
    if if_version is not None and (isinstance(if_version, bool) or not isinstance(if_version, int)):
        raise InvalidChange(trace_id, "if_version", f"expected a version's number, got {shown(if_version)}")
    if by is not None and not is_sendable_text(by):
        raise InvalidChange(trace_id, "by", f"expected the author's name as text, got {shown(by)}")
    try:
        prepared = live_values(given)
    except LiveError as error:
        raise InvalidChange(trace_id, f"live.{error.name}" if error.name else "live", error.message) from None
    author = session.name if by is None else by
    with bus_errors():
        while True:
            try:
                return await session.open_bus().records.steer(trace_id, prepared, by=author, if_version=if_version)
            except SteerRefused as error:
                converted = cast_to(prepared[error.name], error.declared) if error.reason == "form" else None
                if converted is not None:
                    prepared[error.name] = converted
                    continue
                raise _rejection(trace_id, error) from None
            except RecordEnded:
                raise TraceEnded(trace_id) from None
            except TraceMissing:
                raise UnknownTrace(trace_id) from None


def _rejection(trace_id: str, error: SteerRefused) -> SteerRejected:
    if error.reason == "version":
        return VersionConflict(trace_id, str(error), error.version)
    if error.reason == "busy":
        return TooManyChanges(trace_id, f"{error}: change them again later")
    field = f"live.{error.name}" if error.name else "live"
    return InvalidChange(trace_id, field, str(error), reason=error.reason)


async def cancel(session: Session, trace_id: str, reason: str = "", *, by: str | None = None) -> bool:
    """Cancel a trace: it ends as `cancelled`. Returns `False` if it had ended already."""
    check_trace_id(trace_id)
    check_text("reason", reason)
    author = session.name if by is None else check_text("by", by)
    bus = session.open_bus()
    with bus_errors():
        try:
            await bus.cancel(trace_id, by=author, reason=reason)
        except RecordEnded:
            return False
        except TraceMissing:
            raise UnknownTrace(trace_id) from None
    return True


async def pause(session: Session, trace_id: str, *, by: str | None = None, resume: bool = False) -> bool:
    """Pause a trace, or resume it. Returns whether that changes anything."""
    check_trace_id(trace_id)
    author = session.name if by is None else check_text("by", by)
    with bus_errors():
        try:
            return await session.open_bus().records.pause(trace_id, by=author, resume=resume)
        except RecordEnded:
            raise TraceEnded(trace_id) from None
        except TraceMissing:
            raise UnknownTrace(trace_id) from None
