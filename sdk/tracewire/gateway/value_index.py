"""The arrays of the traces whose values are being downloaded, by digest.

An array's digest is its content's, so that what was found once stays right. Only what is not found takes the trace's
events again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Final

import anyio

from tracewire import State

from .downloads import Download

__all__ = ["ValueIndex"]

#: What a reference, and a key, take of the index's memory.
_REF_BYTES: Final = 500
#: What a trace takes of it, even one without arrays.
_TRACE_BYTES: Final = 1000


class _Trace:
    """The arrays of one trace."""

    def __init__(self, now: float) -> None:
        self.read_at = now
        self.nbytes = _TRACE_BYTES
        self.found: dict[bytes, Download] = {}
        #: Held while the events are read, which one reader does for all.
        self.lock = anyio.Lock()


class ValueIndex:
    """The arrays of the latest traces, up to `most_bytes` of those that came within events.

    A trace's arrays are forgotten `age_s` seconds after its events were read: they may have expired by then.
    """

    def __init__(
        self, *, most_bytes: int = 64 * 1024 * 1024, age_s: float = 60.0, clock: Callable[[], float] = monotonic
    ) -> None:
        self._most_bytes = most_bytes
        self._age_s = age_s
        self._clock = clock
        #: The traces, the one that was asked for last at the end, and what they take together.
        self._traces: OrderedDict[str, _Trace] = OrderedDict()
        self._nbytes = 0
        #: How often events were read.
        self.reads = 0

    async def find(self, trace_id: str, key: bytes, read: Callable[[], Awaitable[State]]) -> Download | None:
        """The array of a trace with this digest, or None. `read` folds the trace's events.

        Raises:
            TracewireError: as `read` does.
        """
        trace = self._traces.get(trace_id)
        if trace is None or self._is_old(trace):
            self._forget(trace_id)
            trace = self._traces[trace_id] = _Trace(self._clock())
            self._nbytes += trace.nbytes
        self._traces.move_to_end(trace_id)
        # The trace that was asked for is the last one.
        while (first := next(iter(self._traces))) != trace_id and self._is_old(self._traces[first]):
            self._forget(first)
        if key not in trace.found:
            async with trace.lock:
                # Another request may have read the events meanwhile.
                if key not in trace.found:
                    await self._read(trace_id, trace, read)
        return trace.found.get(key)

    async def _read(self, trace_id: str, trace: _Trace, read: Callable[[], Awaitable[State]]) -> None:
        try:
            state = await read()
        except BaseException:
            if not trace.found and self._traces.get(trace_id) is trace:
                self._forget(trace_id)
            raise
        self.reads += 1
        trace.found = Download.all_of(state)
        trace.read_at = self._clock()
        before, trace.nbytes = trace.nbytes, _TRACE_BYTES + sum(_REF_BYTES + one.held for one in trace.found.values())
        if self._traces.get(trace_id) is not trace:
            # It was forgotten meanwhile.
            return
        self._nbytes += trace.nbytes - before
        while len(self._traces) > 1 and self._nbytes > self._most_bytes:
            self._forget(next(iter(self._traces)))
        if trace.nbytes > self._most_bytes:
            # Alone it is too large to be kept.
            self._forget(trace_id)

    def _is_old(self, trace: _Trace) -> bool:
        return self._clock() - trace.read_at > self._age_s

    def _forget(self, trace_id: str) -> None:
        trace = self._traces.pop(trace_id, None)
        if trace is not None:
            self._nbytes -= trace.nbytes
