"""A client's background work for its traces: it renews their lease and watches their deadlines.

An engine cancels a trace that is not detached when its submitter's lease is gone. So a client renews the lease, from
its first such trace until it closes. The engine that runs a trace ends it at its deadline; if no engine does, a client
that waits for the trace has the bus end it. While Redis is away a client can neither cancel a trace that its caller
leaves nor learn whether a submission arrived: it cancels such a trace when Redis is back.
"""

from __future__ import annotations

import heapq
import logging
import math
import random
import secrets
import weakref
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import anyio

from tracewire_bus.domain.limits import LimitExceeded
from tracewire_bus.store.queue_entries import QueueFull
from tracewire_bus.store.trace_records import TraceEnded, TraceMissing
from tracewire_bus.transport.backoff import outages
from tracewire_bus.transport.errors import BusError, BusFull, BusUnavailable, NotAllowed
from tracewire_bus.transport.tasks import OwnedTask

if TYPE_CHECKING:
    from tracewire_bus.bus import Bus
    from tracewire_bus.recovery import Recovery

    from .sending import Sending

__all__ = ["Overdue", "Presence"]

logger = logging.getLogger("tracewire")

#: How long after a trace's deadline a client checks it a second time, in seconds. Engines have ended it by then.
_SECOND_LOOK_S = 5.5
#: A client looks for lost engines about this often, in seconds.
RECOVER_S = 2.0
#: Added to a deadline before the client acts on it, in seconds; also the shortest pause between two renewals.
_MARGIN_S = 0.05
#: A client whose traces no engine has accepted yet checks this often whether Redis was away, in seconds.
GUARD_POLL_S = 1.0
#: How long a client guards a submission, in seconds in which Redis answered.
GUARD_S = 60.0


#: The client drops entries of handles that wait no longer when there are this many, and as many again.
_DEADLINES = 64


class Overdue:
    """A handle that waits for a trace keeps this, and the client looks at the trace's deadline while it exists."""

    __slots__ = ("__weakref__",)


class _Deadline(NamedTuple):
    """When to look at a trace, the entry's number, the watch of the handle that waits, and whether to look twice."""

    at: float
    number: int
    trace_id: str
    watch: weakref.ref[Overdue]
    again: bool


def _log_of(error: BusError) -> logging.Logger:
    return outages if isinstance(error, BusUnavailable) else logger


class Presence:
    """One client's lease and deadlines. Its tasks start with the first of either.

    Engines take the client for dead when it has not renewed its lease for `lease_s` seconds. The lease expires after
    two thirds of that time; engines give the client the last third to renew it.
    """

    def __init__(self, bus: Bus, lease_s: float) -> None:
        self._bus = bus
        self._lease_s = lease_s
        # The name ends in the lease's length, from which engines know when to give the client up.
        self._lease = f"{secrets.token_hex(12)}.{lease_s:g}"
        #: The leases that the client holds: one for each tenant of its traces, since the users of Redis of a tenant may
        #: use the leases of that tenant only.
        self._held: set[str] = set()
        #: When the client last asked Redis for a lease, by the event loop's clock.
        self._renewed_at = -math.inf
        #: Set when Redis has answered the task that asks for the lease.
        self._lease_request: anyio.Event | None = None
        self._deadlines: list[_Deadline] = []
        self._numbers = count()
        self._most_deadlines = _DEADLINES
        self._changed = anyio.Event()
        #: Renewal, recovery and deadlines each have a task: one that is slow, or fails, does not hold up the others.
        self._tasks: list[OwnedTask] = []
        #: Submissions that no engine has accepted yet, as far as the client has read; and the last outage it knows of.
        self._guarded: dict[str, tuple[float, Sending]] = {}
        self._broken_at = bus.broken_at
        self._recoveries: dict[str, Recovery] = {}
        self._closed = False
        #: Traces to cancel: the author, the reason, the owner that the record must name (None: any), and whether Redis
        #: was asked once and did not know the trace.
        self._to_cancel: dict[str, tuple[str, str, str | None, bool]] = {}

    def guard(self, sending: Sending) -> None:
        """Submit a trace again if Redis loses it in an outage, until `unguard`, or for a minute."""
        self._guarded[sending.submission.trace] = anyio.current_time(), sending
        self._start_tasks()
        if len(self._guarded) == 1:
            self._changed.set()

    def unguard(self, trace_id: str) -> None:
        """Stop guarding a trace: an engine has accepted it, or its caller has closed it."""
        self._guarded.pop(trace_id, None)

    def cancel_when_back(self, trace_id: str, by: str, reason: str, owner: str | None) -> None:
        """Cancel a trace as soon as Redis answers and if it has the trace, unless `do_not_cancel` is called before.

        A trace whose record names another owner than `owner` goes on; None stands for any.
        """
        self._to_cancel[trace_id] = by, reason, owner, False
        self._start_tasks()
        self._changed.set()

    def do_not_cancel(self, trace_id: str) -> None:
        """Take back `cancel_when_back`, because the caller starts the trace again."""
        self._to_cancel.pop(trace_id, None)

    def recover_engines_of(self, model: str) -> None:
        """Return traces of lost engines of this model to its queue, or end them, even if no engine is alive."""
        if model not in self._recoveries:
            self._recoveries[model] = self._bus.recovery(model)
        self._start_tasks()

    async def lease(self, tenant: str = "") -> str:
        """The name of the client's lease for traces of this tenant, which the client renews from now on."""
        name = f"{tenant}:{self._lease}" if tenant else self._lease
        if self._lease_request is not None:
            await self._lease_request.wait()
        if name in self._held:
            return name
        # The task that asked before has failed, or no task has asked yet.
        asked = self._lease_request = anyio.Event()
        try:
            if not self._held:
                self._renewed_at = anyio.current_time()
            await self._bus.leases.renew(name, self._lease_s * 2 / 3)
        finally:
            asked.set()
            if self._lease_request is asked:
                self._lease_request = None
        self._held.add(name)
        self._start_tasks()
        return name

    def watch_deadline(self, trace_id: str, seconds: float) -> Overdue:
        """Have the bus end a trace `seconds` from now, unless an engine has, while the returned object exists."""
        watch = Overdue()
        if len(self._deadlines) >= self._most_deadlines:
            self._deadlines = [one for one in self._deadlines if one.watch() is not None]
            heapq.heapify(self._deadlines)
            self._most_deadlines = 2 * len(self._deadlines) + _DEADLINES
        self._look_later(anyio.current_time() + seconds + _MARGIN_S, trace_id, weakref.ref(watch), again=True)
        self._start_tasks()
        self._changed.set()
        return watch

    def _look_later(self, at: float, trace_id: str, watch: weakref.ref[Overdue], *, again: bool) -> None:
        heapq.heappush(self._deadlines, _Deadline(at, next(self._numbers), trace_id, watch, again))

    async def aclose(self) -> None:
        """Release the leases, which ends all traces that depend on them."""
        self._closed = True
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            await task.aclose()
        if self._held:
            with anyio.move_on_after(2, shield=True):
                try:
                    for name in self._held:
                        await self._bus.leases.release(name)
                except BusError as error:
                    logger.debug("a lease could not be given up, and ends by itself: %s", error)

    def _start_tasks(self) -> None:
        if not self._tasks and not self._closed:
            self._tasks = [
                OwnedTask(self._renew, "that renews a client's lease"),
                OwnedTask(self._recover, "that looks for lost engines"),
                OwnedTask(self._watch, "that watches deadlines and submissions"),
            ]

    async def _renew(self) -> None:
        """Renew the lease in an endless loop, over a connection of its own, which no other call can hold up."""
        every = self._lease_s / 6
        link = self._bus.link()
        failing = False
        try:
            while True:
                if not self._held:
                    await anyio.sleep(every)
                    continue
                await anyio.sleep(max(_MARGIN_S, self._renewed_at + every - anyio.current_time()))
                self._renewed_at = anyio.current_time()
                try:
                    # A connection that does not answer for so long is replaced by the next attempt.
                    with anyio.move_on_after(every * 2) as trying:
                        for name in sorted(self._held):
                            await self._bus.leases.renew(name, self._lease_s * 2 / 3, link)
                    failing = failing and trying.cancelled_caught
                except BusError as error:
                    # Once while Redis is away.
                    level = logging.DEBUG if failing else logging.WARNING
                    _log_of(error).log(level, "a client's lease could not be renewed: %s", error)
                    failing = True
        finally:
            await link.drop()

    async def _recover(self) -> None:
        """Look for lost engines in an endless loop. Engines do so more often; a client is needed when none is alive."""
        while True:
            await anyio.sleep(RECOVER_S * random.uniform(0.75, 1.25))
            for model, recovery in list(self._recoveries.items()):
                try:
                    await recovery.look()
                except NotAllowed as error:
                    logger.debug("Redis does not permit this client's user to look for lost engines: %s", error)
                    del self._recoveries[model]
                except BusError as error:
                    logger.debug("the client could not look for lost engines: %s", error)

    async def _watch(self) -> None:
        """Watch deadlines, guarded submissions and traces to cancel, in an endless loop."""
        while True:
            self._changed = anyio.Event()
            wait_s = self._deadlines[0].at - anyio.current_time() if self._deadlines else math.inf
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
                _log_of(error).warning("the client could not check deadlines or submissions: %s", error)

    async def _cancel_abandoned(self) -> None:
        """Cancel the traces that `cancel_when_back` named."""
        for trace_id, (by, reason, owner, missed) in list(self._to_cancel.items()):
            if trace_id not in self._to_cancel:
                continue
            try:
                if owner is None or await self._bus.records.owner(trace_id) in (owner, None):
                    await self._bus.cancel(trace_id, by=by, reason=reason)
            except BusUnavailable:
                raise
            except TraceMissing:
                if trace_id not in self._to_cancel:
                    # The caller starts it again.
                    continue
                if not missed:
                    # The submission may still be under way, over a connection that the client has dropped.
                    self._to_cancel[trace_id] = by, reason, owner, True
                    continue
            except TraceEnded:
                pass
            except BusError as error:
                logger.warning("trace %s, which its submitter has left, could not be cancelled: %s", trace_id, error)
            self._to_cancel.pop(trace_id, None)

    async def _resubmit_lost(self) -> None:
        """Submit again the guarded submissions that Redis lost while it was away."""
        if self._bus.broken_at == self._broken_at:
            # This call fails if the servers that hold the queues are away.
            some_trace = {one.submission.model: one.submission.trace for _, one in self._guarded.values()}
            await self._bus.queue.submitted(*some_trace.items())
        # Read before the first request: the next round covers an outage that begins during this one.
        broken_at = self._bus.broken_at
        if broken_at == self._broken_at:
            # In the order in which they were submitted.
            while self._guarded:
                trace_id, (since, _) = next(iter(self._guarded.items()))
                if since > anyio.current_time() - GUARD_S:
                    break
                del self._guarded[trace_id]
            return
        expected = [one for _, one in self._guarded.values()]
        are_all_back = True
        for start in range(0, len(expected), 100):
            some = {one.submission.trace: one for one in expected[start : start + 100]}
            known = await self._bus.queue.submitted(*((one.submission.model, trace) for trace, one in some.items()))
            for trace, one in some.items():
                if trace not in known and trace in self._guarded:
                    are_all_back &= await self._submit_again(trace, one)
        if are_all_back:
            self._broken_at = broken_at

    async def _submit_again(self, trace: str, sending: Sending) -> bool:
        """Submit a trace again that Redis has lost. Returns False if Redis has no room for it yet."""
        logger.warning("Redis came back without trace %s, which is submitted again", trace)
        try:
            # Without a queue limit: the queue has admitted it once.
            await sending.send()
        except BusUnavailable:
            raise
        except (BusFull, QueueFull) as error:
            outages.warning("trace %s, which Redis has lost, waits: %s", trace, error)
            return False
        except (BusError, LimitExceeded) as error:
            logger.warning("trace %s, which Redis has lost, cannot be submitted again: %s", trace, error)
            self.unguard(trace)
        return True

    async def _end_overdue(self, now: float) -> None:
        due: list[_Deadline] = []
        while self._deadlines and self._deadlines[0].at <= now:
            one = heapq.heappop(self._deadlines)
            if one.watch() is not None:
                due.append(one)
        if not due:
            return
        try:
            await self._bus.sweep(sorted({self._bus.keys.tag(one.trace_id) for one in due}))
        except NotAllowed as error:
            # The client's user may only read; engines end overdue traces.
            logger.debug("this client's user may not end overdue traces: %s", error)
            return
        except BusError:
            # The client tries again: there may be no engine that ends them.
            later = anyio.current_time() + self._lease_s / 6
            for one in due:
                self._look_later(later, one.trace_id, one.watch, again=one.again)
            raise
        for one in due:
            if one.again:
                self._look_later(now + _SECOND_LOOK_S, one.trace_id, one.watch, again=False)
