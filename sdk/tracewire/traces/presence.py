"""What a client keeps up while it lives: the lease that its traces hang on, and the deadlines of the traces it knows.

A trace that was not detached is cancelled when its submitter's lease is gone, so a client renews it, from its first
such trace until it closes. A trace past its deadline is ended by the engine that runs it; where none does, any client
that waits for it has the bus do it. A trace that nobody could cancel as it was left, or of which nobody knows whether
it was submitted, because Redis was away, is cancelled when Redis is back.
"""

from __future__ import annotations

import heapq
import logging
import math
import random
import secrets
from typing import TYPE_CHECKING

import anyio

from tracewire_bus.store.trace_records import TraceElsewhere, TraceEnded, TraceMissing
from tracewire_bus.transport.errors import BusError, BusUnavailable, NotAllowed
from tracewire_bus.transport.tasks import OwnedTask

from .large import offload_large_arrays

if TYPE_CHECKING:
    from tracewire_bus.bus import Bus
    from tracewire_bus.recovery import Recovery
    from tracewire_bus.wire.messages import Submission

__all__ = ["Presence"]

logger = logging.getLogger("tracewire")

#: How long after its deadline a trace is looked at again, in seconds: engines have had their time by then.
_SECOND_LOOK_S = 5.5
#: How often a client looks for engines that are gone, in seconds, about.
RECOVER_S = 2.0
_MARGIN_S = 0.05
#: How often a client that waits for engines to accept its traces looks whether Redis was away, in seconds.
GUARD_POLL_S = 1.0
#: For how long a trace that was submitted may have to be submitted again, in seconds in which Redis was there.
GUARD_S = 60.0


class Presence:
    """One client's lease and deadlines. Its tasks run from the first of either on.

    `lease_s` is how long engines wait before they take the client for gone. They see its absence after two thirds of
    that, and give it the last third to come back.
    """

    def __init__(self, bus: Bus, lease_s: float) -> None:
        self._bus = bus
        self._lease_s = lease_s
        # How long it is stands in its name, for engines to know when to give its client up.
        self._lease = f"{secrets.token_hex(12)}.{lease_s:g}"
        self._has_lease = False
        #: When it was last asked for, by the event loop's clock.
        self._renewed_at = -math.inf
        #: Set when whoever asks Redis for it has been answered.
        self._lease_request: anyio.Event | None = None
        self._deadlines: list[tuple[float, str, bool]] = []
        self._changed = anyio.Event()
        #: One for each thing that is looked after: what takes its time, or fails, must cost none of the others.
        self._tasks: list[OwnedTask] = []
        #: What was submitted and no engine has accepted yet, as far as was read; and when Redis was last found away.
        self._guarded: dict[str, tuple[float, Submission]] = {}
        self._broken_at = bus.broken_at
        self._recoveries: dict[str, Recovery] = {}
        self._closed = False
        #: Traces to be cancelled: by whom and why, and whether Redis was asked and did not know it.
        self._to_cancel: dict[str, tuple[str, str, bool]] = {}

    def guard(self, submission: Submission) -> None:
        """Submit a trace again should Redis have forgotten it after an outage, until `content`, or for a minute."""
        self._guarded[submission.trace] = anyio.current_time(), submission
        self._start_tasks()
        if len(self._guarded) == 1:
            self._changed.set()

    def unguard(self, trace_id: str) -> None:
        """A trace needs that no more."""
        self._guarded.pop(trace_id, None)

    def cancel_when_back(self, trace_id: str, by: str, reason: str) -> None:
        """Cancel a trace as soon as Redis answers, if it is there then, unless it is taken back by `reclaim`."""
        self._to_cancel[trace_id] = by, reason, False
        self._start_tasks()
        self._changed.set()

    def do_not_cancel(self, trace_id: str) -> None:
        """A trace is not to be cancelled after all."""
        self._to_cancel.pop(trace_id, None)

    def recover_engines_of(self, model: str) -> None:
        """See to it that traces of this model whose engines are lost wait again or end, also with no engine alive."""
        if model not in self._recoveries:
            self._recoveries[model] = self._bus.recovery(model)
        self._start_tasks()

    async def lease(self) -> str:
        """The client's lease, held from now on."""
        if self._lease_request is not None:
            await self._lease_request.wait()
        if self._has_lease:
            return self._lease
        # Who asked for it did so in vain, or there was nobody.
        asked = self._lease_request = anyio.Event()
        try:
            self._renewed_at = anyio.current_time()
            await self._bus.records.hold(self._lease, self._lease_s * 2 / 3)
        finally:
            asked.set()
            if self._lease_request is asked:
                self._lease_request = None
        if not self._has_lease:
            self._has_lease = True
            self._start_tasks()
        return self._lease

    def watch_deadline(self, trace_id: str, seconds: float) -> None:
        """See to it that a trace ends, `seconds` from now."""
        heapq.heappush(self._deadlines, (anyio.current_time() + seconds + _MARGIN_S, trace_id, True))
        self._start_tasks()
        self._changed.set()

    async def aclose(self) -> None:
        """Give the lease up. Whatever hangs on it ends by that."""
        self._closed = True
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            await task.aclose()
        if self._has_lease:
            with anyio.move_on_after(2, shield=True):
                try:
                    await self._bus.records.release(self._lease)
                except BusError as error:
                    logger.debug("the lease could not be given up, and ends by itself: %s", error)

    def _start_tasks(self) -> None:
        if not self._tasks and not self._closed:
            self._tasks = [
                OwnedTask(self._renew, "that renews a client's lease"),
                OwnedTask(self._recover, "that looks for lost engines"),
                OwnedTask(self._watch, "that sees to deadlines and submissions"),
            ]

    async def _renew(self) -> None:
        """Renew the lease for ever, over a connection that no other call can hold up."""
        every = self._lease_s / 6
        link = self._bus.link()
        try:
            while True:
                if not self._has_lease:
                    await anyio.sleep(every)
                    continue
                await anyio.sleep(max(_MARGIN_S, self._renewed_at + every - anyio.current_time()))
                self._renewed_at = anyio.current_time()
                try:
                    # No longer: what hangs on a connection that says nothing tries anew.
                    with anyio.move_on_after(every * 2):
                        await self._bus.records.hold(self._lease, self._lease_s * 2 / 3, link)
                except BusError as error:
                    logger.warning("a client's lease could not be renewed: %s", error)
        finally:
            await link.drop()

    async def _recover(self) -> None:
        """Look for engines that are gone, for ever. Engines do so more often: this is for when there is none."""
        while True:
            await anyio.sleep(RECOVER_S * random.uniform(0.75, 1.25))
            for model, recovery in list(self._recoveries.items()):
                try:
                    await recovery.look()
                except NotAllowed as error:
                    logger.debug("engines that are gone are not this client's to find: %s", error)
                    del self._recoveries[model]
                except BusError as error:
                    logger.debug("engines could not be looked for: %s", error)

    async def _watch(self) -> None:
        """See to deadlines, and to what was submitted, for ever."""
        while True:
            self._changed = anyio.Event()
            wait_s = self._deadlines[0][0] - anyio.current_time() if self._deadlines else math.inf
            if self._guarded or self._to_cancel:
                wait_s = min(wait_s, GUARD_POLL_S)
            with anyio.move_on_after(max(0.0, wait_s)):
                await self._changed.wait()
            try:
                await self._cancel_abandoned()
                await self._end_overdue(anyio.current_time())
                if self._guarded:
                    await self._resubmit_lost()
            except BusError as error:
                logger.warning("deadlines or traces could not be looked after: %s", error)

    async def _cancel_abandoned(self) -> None:
        """Cancel what was abandoned."""
        for trace_id, (by, reason, missed) in list(self._to_cancel.items()):
            if trace_id not in self._to_cancel:
                continue
            try:
                await self._bus.cancel(trace_id, by=by, reason=reason)
            except BusUnavailable:
                raise
            except TraceMissing:
                if not missed:
                    # The submission may be under way still, over a connection that was given up.
                    self._to_cancel[trace_id] = by, reason, True
                    continue
            except TraceEnded:
                pass
            except BusError as error:
                logger.warning("trace %s, which its submitter has left, could not be cancelled: %s", trace_id, error)
            self._to_cancel.pop(trace_id, None)

    async def _resubmit_lost(self) -> None:
        """Submit again what Redis does not know any more since it was away."""
        if self._bus.broken_at == self._broken_at:
            # Whether the servers are there that have the queues.
            await self._bus.submitted(*{one.model: one.trace for _, one in self._guarded.values()}.items())
        # Taken before anything is asked: what breaks from now on is looked at the next time.
        broken_at = self._bus.broken_at
        if broken_at == self._broken_at:
            # In the order in which they were submitted.
            while self._guarded:
                trace_id, (since, _) = next(iter(self._guarded.items()))
                if since > anyio.current_time() - GUARD_S:
                    break
                del self._guarded[trace_id]
            return
        expected = [submission for _, submission in self._guarded.values()]
        for start in range(0, len(expected), 100):
            some = expected[start : start + 100]
            known = await self._bus.submitted(*((one.model, one.trace) for one in some))
            for one in some:
                if one.trace in known or one.trace not in self._guarded:
                    continue
                logger.warning("Redis came back without trace %s, which is submitted again", one.trace)
                # It was admitted once.
                try:
                    await self._bus.submit(await offload_large_arrays(one, self._bus))
                except (TraceElsewhere, TraceEnded):
                    self.unguard(one.trace)
        self._broken_at = broken_at

    async def _end_overdue(self, now: float) -> None:
        due: list[tuple[float, str, bool]] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            due.append(heapq.heappop(self._deadlines))
        if not due:
            return
        try:
            await self._bus.sweep(sorted({self._bus.keys.tag(trace_id) for _, trace_id, _ in due}))
        except NotAllowed as error:
            # It may only read: engines do it.
            logger.debug("a deadline is not this client's to keep: %s", error)
            return
        except BusError:
            # They are looked at again: there may be no engine that does.
            later = anyio.current_time() + self._lease_s / 6
            for _, trace_id, again in due:
                heapq.heappush(self._deadlines, (later, trace_id, again))
            raise
        for _, trace_id, again in due:
            if again:
                heapq.heappush(self._deadlines, (now + _SECOND_LOOK_S, trace_id, False))
