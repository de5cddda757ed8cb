"""Values that the blocks of a trace share, as the adapter sends and publishes them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import anyio
import msgspec

from tracewire_bus.wire.messages import SHARED_INVOKE, RawShared
from tracewire_engine.protocol.messages import FinishRecord, SharedValues

from .engine_api import Engine
from .pending import PendingRecords, ReportSource
from .running_request import RunningRequest
from .trace_end import UNREPORTED
from .trace_stream import UNNUMBERED

__all__ = ["SharedSaves"]

logger = logging.getLogger("tracewire")

_NO_DELTAS = msgspec.Raw(msgspec.msgpack.encode([]))
#: How long the call that has the workers drop shared values may take, in seconds.
_FORGET_S = 10.0


class SharedSaves:
    """The shared values of the run of `trace`, which the workers report as the request `name`."""

    def __init__(self, name: str, trace: str, pending: dict[str, PendingRecords], reports: ReportSource) -> None:
        self._name = name
        self._trace = trace
        self._pending = pending
        #: The names of the requests whose blocks share the values.
        self._members: set[str] = set()
        self._records = pending[name] = PendingRecords(1, trace, reports=reports)

    def sent(self, members: dict[str, int], values: bytes) -> bytes:
        """The shared values that are sent with each request. `members` has the names and numbers of choices."""
        self._members = set(members)
        return msgspec.msgpack.encode(SharedValues(self._name, members, values))

    def events(self) -> list[RawShared]:
        """The changes of the shared values since the last call, as an event, if there are any."""
        gains = self._records.take_new()
        if not gains:
            return []
        return [RawShared(**UNNUMBERED, invoke=SHARED_INVOKE, deltas=gains, time=self._records.choices[0].time)]

    async def end(self, requests: Sequence[RunningRequest]) -> FinishRecord | None:
        """The workers' report of the shared values at the end of the trace's last request.

        `None` if the workers owe no such report: no request has run a step, or not every choice of those that share has
        ended. If a report was lost, the record has the error `UNREPORTED`.
        """
        records = [request.pending for request in requests if request.pending is not None]
        if not any(choice.stepped for one in records for choice in one.choices):
            return None
        self._records.ending = True
        await self._records.wait_finished()
        choice = self._records.choices[0]
        end = choice.finish
        if end is None or not self._records.choice_complete(0):
            logger.warning("the workers did not report the final shared values of trace %s", self._trace)
            ended = {one.name for one in requests if one.pending is not None and one.pending.ended}
            due = self._members <= ended
            lost = due or choice.has_gap(False)
            return FinishRecord(self._name, 0, _NO_DELTAS, error=UNREPORTED) if lost else None
        choice.digests.complete(end.deltas, end.manifest)
        return end

    async def forget(self, engine: Engine, begun: bool) -> None:
        """Have the workers drop the values, if requests have `begun` and the workers did not report the values' end.

        The workers report the end once all of the trace's requests have ended, and never if some did not start.
        """
        self._pending.pop(self._name, None)
        if self._records.choices[0].finish is None and begun:
            with anyio.move_on_after(_FORGET_S, shield=True):
                try:
                    await engine.steer({}, [self._name], time.time())
                except Exception as error:
                    logger.debug("the workers could not drop the shared values of trace %s: %s", self._trace, error)
