"""The control of any trace by its id, as the client has it: its live parameters, pauses, end and state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import anyio

from tracewire.traces import control
from tracewire.traces.control import check_trace_id
from tracewire.traces.event_reader import EventReader
from tracewire.traces.session import Session
from tracewire.traces.state import State
from tracewire_bus.domain.fold import Fold
from tracewire_bus.store.trace_records import LiveState
from tracewire_bus.wire.ids import parse_id

from .checks import Duration
from .error_mapping import bus_errors
from .errors import UnknownTrace

__all__ = ["ControlMethods"]


class ControlMethods:
    """The methods of `Client` that control a trace by its id."""

    _session: Session

    async def get_live(self, trace_id: str) -> LiveState:
        """A trace's live parameters as they are now: their version (0: as declared) and their values.

        Raises:
            UnknownTrace: no such trace was submitted, or it has expired.
        """
        return await control.live_state(self._session, trace_id)

    async def steer(
        self,
        trace_id: str,
        values: Mapping[str, Any] | None = None,
        /,
        *,
        if_version: int | None = None,
        by: str | None = None,
        **more: Any,
    ) -> int:
        """Change live parameters of a trace, all of them at once, and return the new version.

        Any client may steer any trace; changes apply in the order in which Redis took them. The change is accepted on
        return. A `Steered` event then names the first token for which the change holds: the first one sampled in a step
        that begins after the engine has received the change. With `if_version`, Redis accepts the change only if the
        live parameters are still at that version. `by` names the author, by default this client. Floating-point arrays
        of another precision are converted to the declared one. A live parameter called `if_version` or `by` goes into
        `values`.

        Raises:
            SteerRejected: a name was not declared, or a value is not finite or not of the declared type and shape.
            VersionConflict: the live parameters are at another version than `if_version`.
            TraceEnded: the trace has ended, or is about to.
            UnknownTrace: no such trace was submitted, or it has expired.
            BusUnavailable: Redis does not answer; the change may have been accepted.
        """
        return await control.steer(self._session, trace_id, values, more, if_version=if_version, by=by)

    async def cancel(self, trace_id: str, reason: str = "", *, by: str | None = None) -> bool:
        """Cancel a trace, queued or running: it ends as `cancelled`. Its error has the `reason` and the author.

        Any client may cancel any trace. The engine stops within two steps. Consumers can still read all that was
        generated and saved until then. Returns `False` if the trace had ended already.

        Raises:
            UnknownTrace: no such trace was submitted, or it has expired.
        """
        return await control.cancel(self._session, trace_id, reason, by=by)

    async def pause(
        self,
        trace_id: str,
        *,
        by: str | None = None,
        timeout: Duration | None = None,
        on_timeout: Literal["resume", "cancel"] = "resume",
    ) -> bool:
        """Pause a trace within two steps, until it is resumed. Other traces are unaffected.

        With a `timeout`, in seconds or as a timedelta, the engine ends the pause by itself when that time is over, even
        if the client that paused the trace has died: it resumes or cancels the trace, as `on_timeout` says. The same
        author may pause again to move that end. A pause without a `timeout` replaces one that has one.

        A `Paused` event follows. The deadline keeps counting, and the trace can be steered and cancelled meanwhile. The
        trace's KV cache stays in the engine's memory until another trace needs the room; then the engine computes the
        cache again when the trace is resumed. A queued trace pauses right after it begins. Returns `False` if the trace
        was paused already.

        Raises:
            TraceEnded: the trace has ended, or is about to.
            UnknownTrace: no such trace was submitted, or it has expired.
            ValueError: `timeout` is not positive, or above 30 days, or `on_timeout` is another word.
        """
        return await control.pause(self._session, trace_id, by=by, end=control.pause_end(timeout, on_timeout))

    async def resume(self, trace_id: str, *, by: str | None = None, paused_by: str | None = None) -> bool:
        """Resume a paused trace; a `Resumed` event follows. Returns whether it was paused.

        With `paused_by`, the call resumes the trace only if the author of its pause has that name.

        Raises:
            TraceEnded: the trace has ended, or is about to.
            UnknownTrace: no such trace was submitted, or it has expired.
        """
        return await control.resume(self._session, trace_id, by=by, paused_by=paused_by)

    async def get_state(self, trace_id: str) -> State:
        """A trace's state: its events up to the last one at the time of the call, folded.

        Raises:
            ValueMissing: saves of the trace are in a bulk store that cannot be read.
            UnknownTrace: no such trace was submitted, or it has expired.
        """
        check_trace_id(trace_id)
        bus = self._session.open_bus()
        with bus_errors():
            tail = await bus.tail_id(trace_id)
            if parse_id(tail) == (0, 0) and not await bus.exists(trace_id):
                raise UnknownTrace(trace_id)
            reader = EventReader(trace_id, bus, "0-0")
            reader.assume_exists()
        fold = Fold()
        try:
            while parse_id(reader.position) < parse_id(tail) and await reader.next(fold) is not None:
                pass
        finally:
            with anyio.CancelScope(shield=True):
                await reader.aclose()
        return State(trace_id, fold)
