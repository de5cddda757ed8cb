"""Control of any trace by its id: steer, pause, resume and cancel it, and read its live parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tracewire.checks import Duration, check_seconds, check_text, is_sendable_text, shown
from tracewire.error_mapping import bus_errors
from tracewire.errors import InvalidChange, SteerRejected, TooManyChanges, TraceEnded, UnknownTrace, VersionConflict
from tracewire_bus.store.trace_records import LiveState, SteerRefused, TraceMissing
from tracewire_bus.store.trace_records import TraceEnded as RecordEnded
from tracewire_bus.wire.ids import is_encodable

if TYPE_CHECKING:
    from .session import Session

__all__ = ["PauseEnd", "cancel", "check_trace_id", "live_state", "pause", "pause_end", "resume", "steer"]

#: The longest pause with an end of its own, in seconds: 30 days.
_LONGEST_PAUSE_S = 30 * 24 * 3600


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


class PauseEnd(NamedTuple):
    """When a pause ends by itself, in seconds from now, and what becomes of the trace then: `resume` or `cancel`."""

    seconds: float | None = None
    then: str = ""


_NO_END = PauseEnd()


def pause_end(timeout: Duration | None, on_timeout: str) -> PauseEnd:
    """The end of a pause, as the caller gives it.

    Raises:
        TypeError, ValueError: one of the arguments is none.
    """
    if on_timeout not in ("resume", "cancel"):
        raise ValueError(f"on_timeout: expected 'resume' or 'cancel', got {shown(on_timeout)}")
    if timeout is None:
        return PauseEnd()
    seconds = check_seconds("timeout", timeout)
    if not 0 < seconds <= _LONGEST_PAUSE_S:
        raise ValueError(f"timeout: expected more than 0 and at most {_LONGEST_PAUSE_S} seconds, got {seconds:g}")
    return PauseEnd(seconds, on_timeout)


async def pause(session: Session, trace_id: str, *, by: str | None = None, end: PauseEnd = _NO_END) -> bool:
    """Pause a trace. Returns whether that changes anything."""
    return await _pause(session, trace_id, by, within_s=end.seconds, then=end.then)


async def resume(session: Session, trace_id: str, *, by: str | None = None, paused_by: str | None = None) -> bool:
    """Resume a trace. Returns whether that changes anything."""
    of = "" if paused_by is None else check_text("paused_by", paused_by)
    return await _pause(session, trace_id, by, resume=True, of=of)


async def _pause(session: Session, trace_id: str, by: str | None, **options: Any) -> bool:
    check_trace_id(trace_id)
    author = session.name if by is None else check_text("by", by)
    with bus_errors():
        try:
            return await session.open_bus().records.pause(trace_id, by=author, **options)
        except RecordEnded:
            raise TraceEnded(trace_id) from None
        except TraceMissing:
            raise UnknownTrace(trace_id) from None
