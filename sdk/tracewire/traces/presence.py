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

from .large import without_large

if TYPE_CHECKING:
    from tracewire_bus.bus import Bus
    from tracewire_bus.recovery import Recovery
    from tracewire_bus.wire.messages import Submission

__all__ = ["Presence"]

logger = logging.getLogger("tracewire")

#: How long after its deadline a trace is looked at again, in seconds: engines have had their time by then.
_AGAIN_S = 5.5
#: How often a client looks for engines that are gone, in seconds, about.
RECOVER_S = 2.0
_SOON_S = 0.05
#: How often a client that waits for engines to accept its traces looks whether Redis was away, in seconds.
LOOK_S = 1.0
#: For how long a trace that was submitted may have to be submitted again, in seconds in which Redis was there.
EXPECT_S = 60.0


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
        self._held = False
        #: When it was last asked for, by the event loop's clock.
        self._held_at = -math.inf
        #: Set when whoever asks Redis for it has been answered.
        self._asked: anyio.Event | None = None
        self._due: list[tuple[float, str, bool]] = []
        self._changed = anyio.Event()
        #: One for each thing that is looked after: what takes its time, or fails, must cost none of the others.
        self._tasks: list[OwnedTask] = []
        #: What was submitted and no engine has accepted yet, as far as was read; and when Redis was last found away.
        self._expected: dict[str, tuple[float, Submission]] = {}
        self._broken_at = bus.broken_at
        self._recoveries: dict[str, Recovery] = {}
        self._closed = False
        #: Traces to be cancelled: by whom and why, and whether Redis was asked and did not know it.
        self._abandoned: dict[str, tuple[str, str, bool]] = {}

    def expect(self, submission: Submission) -> None:
        """Submit a trace again should Redis have forgotten it after an outage, until `content`, or for a minute."""
        self._expected[submission.trace] = anyio.current_time(), submission
        self._run()
        if len(self._expected) == 1:
            self._changed.set()

    def content(self, trace_id: str) -> None:
        """A trace needs that no more."""
        self._expected.pop(trace_id, None)

    def abandon(self, trace_id: str, by: str, reason: str) -> None:
        """Cancel a trace as soon as Redis answers, if it is there then, unless it is taken back by `reclaim`."""
        self._abandoned[trace_id] = by, reason, False
        self._run()
        self._changed.set()

    def reclaim(self, trace_id: str) -> None:
        """A trace is not to be cancelled after all."""
        self._abandoned.pop(trace_id, None)

    def look_after(self, model: str) -> None:
        """See to it that traces of this model whose engines are lost wait again or end, also with no engine alive."""
        if model not in self._recoveries:
            self._recoveries[model] = self._bus.recovery(model)
        self._run()

    async def lease(self) -> str:
        """The client's lease, held from now on."""
        if self._asked is not None:
            await self._asked.wait()
        if self._held:
            return self._lease
        # Who asked for it did so in vain, or there was nobody.
        asked = self._asked = anyio.Event()
        try:
            self._held_at = anyio.current_time()
            await self._bus.records.hold(self._lease, self._lease_s * 2 / 3)
        finally:
            asked.set()
            if self._asked is asked:
                self._asked = None
        if not self._held:
            self._held = True
            self._run()
        return self._lease

    def watch(self, trace_id: str, seconds: float) -> None:
        """See to it that a trace ends, `seconds` from now."""
        heapq.heappush(self._due, (anyio.current_time() + seconds + _SOON_S, trace_id, True))
        self._run()
        self._changed.set()

    async def aclose(self) -> None:
        """Give the lease up. Whatever hangs on it ends by that."""
        self._closed = True
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            await task.aclose()
        if self._held:
            with anyio.move_on_after(2, shield=True):
                try:
                    await self._bus.records.release(self._lease)
                except BusError as error:
                    logger.debug("the lease could not be given up, and ends by itself: %s", error)

    def _run(self) -> None:
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
                if not self._held:
                    await anyio.sleep(every)
                    continue
                await anyio.sleep(max(_SOON_S, self._held_at + every - anyio.current_time()))
                self._held_at = anyio.current_time()
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
            wait_s = self._due[0][0] - anyio.current_time() if self._due else math.inf
            if self._expected or self._abandoned:
                wait_s = min(wait_s, LOOK_S)
            with anyio.move_on_after(max(0.0, wait_s)):
                await self._changed.wait()
            try:
                await self._cancel()
                await self._sweep(anyio.current_time())
                if self._expected:
                    await self._look()
            except BusError as error:
                logger.warning("deadlines or traces could not be looked after: %s", error)

    async def _cancel(self) -> None:
        """Cancel what was abandoned."""
        for trace_id, (by, reason, missed) in list(self._abandoned.items()):
            if trace_id not in self._abandoned:
                continue
            try:
                await self._bus.cancel(trace_id, by=by, reason=reason)
            except BusUnavailable:
                raise
            except TraceMissing:
                if not missed:
                    # The submission may be under way still, over a connection that was given up.
                    self._abandoned[trace_id] = by, reason, True
                    continue
            except TraceEnded:
                pass
            except BusError as error:
                logger.warning("trace %s, which its submitter has left, could not be cancelled: %s", trace_id, error)
            self._abandoned.pop(trace_id, None)

    async def _look(self) -> None:
        """Submit again what Redis does not know any more since it was away."""
        if self._bus.broken_at == self._broken_at:
            # Whether the servers are there that have the queues.
            await self._bus.submitted(*{one.model: one.trace for _, one in self._expected.values()}.items())
        # Taken before anything is asked: what breaks from now on is looked at the next time.
        broken_at = self._bus.broken_at
        if broken_at == self._broken_at:
            # In the order in which they were submitted.
            while self._expected:
                trace_id, (since, _) = next(iter(self._expected.items()))
                if since > anyio.current_time() - EXPECT_S:
                    break
                del self._expected[trace_id]
            return
        expected = [submission for _, submission in self._expected.values()]
        for start in range(0, len(expected), 100):
            some = expected[start : start + 100]
            known = await self._bus.submitted(*((one.model, one.trace) for one in some))
            for one in some:
                if one.trace in known or one.trace not in self._expected:
                    continue
                logger.warning("Redis came back without trace %s, which is submitted again", one.trace)
                # It was admitted once.
                try:
                    await self._bus.submit(await without_large(one, self._bus))
                except (TraceElsewhere, TraceEnded):
                    self.content(one.trace)
        self._broken_at = broken_at

    async def _sweep(self, now: float) -> None:
        due: list[tuple[float, str, bool]] = []
        while self._due and self._due[0][0] <= now:
            due.append(heapq.heappop(self._due))
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
                heapq.heappush(self._due, (later, trace_id, again))
            raise
        for _, trace_id, again in due:
            if again:
                heapq.heappush(self._due, (now + _AGAIN_S, trace_id, False))
