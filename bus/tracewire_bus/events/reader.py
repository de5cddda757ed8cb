"""Reading traces' streams: first what is there, then what comes, without a gap or a repeat.

A `Subscription` goes through two states. Behind the stream's end it *pulls*: it
fetches pages by itself when its consumer asks for more. At the end it is *attached* to the bus's one reader, whose
connection blocks on all attached streams at once and puts what comes into each subscription's buffer. A buffer is
bounded: one that is full is detached, and its subscription pulls again when its consumer has caught up with it. So a
slow consumer costs a page of memory and no one's time, and nothing is ever dropped.

The two meet in one rule. The reader has read each stream up to a *position*; a subscription may attach if it has come
at least that far, and takes only entries after its own last.

Entries may have been trimmed. An attempt's ids are consecutive, so a subscription sees by the next entry whether some
are gone. In their place it hands out a `Gap` with the folded state after them.

A whole trace may be gone: it had ended, and its time was over, or it was dropped to make room. Nothing is written then
that would wake who waits, so the reader looks at times whether the traces that it reads are there still.

On a cluster, where one command waits for streams of one slot, there is a reader for each slot of traces.
"""

from __future__ import annotations

import logging
import math
import weakref
from typing import Any, Final

import anyio
from anyio.lowlevel import checkpoint

from tracewire_bus.transport.backoff import Backoff
from tracewire_bus.transport.errors import is_transient
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.tasks import OwnedTask

from .subscription import PAGE, PAGES, Entry, Id, Resync, Subscription, parse_entries

__all__ = ["Reader", "SlotReaders"]

logger = logging.getLogger("tracewire")

#: How often the reader looks whether its traces are there, in seconds.
LOOK_S: float = 5.0
#: How long one read blocks, in seconds.
_BLOCK_S: Final = 5.0

#: On a cluster: what waits at a node does not hear of what is written to a key that is being moved from there.
_BLOCK_SLOT_S: Final = 1.0


class _Stream:
    """One stream that the reader reads: how far it is, and for whom. It keeps no subscription alive."""

    __slots__ = ("_references", "position")

    def __init__(self, position: Id) -> None:
        self.position = position
        self._references: dict[int, weakref.ref[Subscription]] = {}

    def __bool__(self) -> bool:
        return bool(self._references)

    def add(self, subscription: Subscription) -> None:
        key, references = id(subscription), self._references
        references[key] = weakref.ref(subscription, lambda _: references.pop(key, None))

    def discard(self, subscription: Subscription) -> None:
        self._references.pop(id(subscription), None)

    def subscriptions(self) -> list[Subscription]:
        """Those that are still there."""
        return [one for reference in list(self._references.values()) if (one := reference()) is not None]


class Reader:
    """Reads all streams at whose end a subscription waits, on one connection.

    While that connection blocks, it cannot be told of another stream. `CLIENT UNBLOCK` from another connection ends the
    wait; where Redis does not allow that command, the connection is closed and opened anew.

    On a cluster all its streams share the slot of `near`, a key.
    """

    def __init__(self, connections: Connections, near: str = "") -> None:
        self._connections = connections
        self._link = connections.link(near)
        self._block_s = _BLOCK_SLOT_S if near else _BLOCK_S
        self._streams: dict[str, _Stream] = {}
        self._all: weakref.WeakSet[Subscription] = weakref.WeakSet()
        self._wanted = anyio.Event()
        self._poked = anyio.Event()
        #: Counts the streams ever taken up; and how many of them the wait under way knows.
        self._taken_up = 0
        self._known = 0
        self._wait: anyio.CancelScope | None = None
        self._looked = -math.inf
        #: Its connection's name to Redis, and as the how manyth it was opened.
        self._client_id: Any = None
        self._identified = 0
        self._may_unblock = True
        self._task: OwnedTask | None = None

    def start(self) -> None:
        """Start its task."""
        self._task = OwnedTask(self._run, "that reads traces")

    async def connect(self) -> None:
        """Connect before it has anything to read. If that fails, it connects when it has."""
        try:
            await self._identify()
        except Exception as error:
            logger.debug("the reader did not connect ahead: %r", error)
            await self._link.drop()

    async def _identify(self) -> None:
        (self._client_id,) = await self._link.ask(("CLIENT", "ID"))
        self._identified = self._link.opened
        self._may_unblock = self._may_unblock and not isinstance(self._client_id, Exception)

    async def aclose(self) -> None:
        """End its task, close its connection and every subscription."""
        for subscription in list(self._all):
            await subscription.aclose()
        task, self._task = self._task, None
        if task is not None:
            await task.aclose()
        await self._link.drop()

    # --- subscriptions ------------------------------------------------------------------------------------------------

    def subscribe(self, key: str, since: str, resync: Resync | None = None, record: str = "") -> Subscription:
        """A new subscription, which it will close in the end if its consumer does not.

        `resync` finds the stream's snapshot. Without it, entries that are gone are passed over. `record` is the key of
        the trace's record, by which a trace that is gone is told from one that has not begun.
        """
        subscription = Subscription(self, self._connections, key, since, resync, record)
        self._all.add(subscription)
        return subscription

    def position(self, key: str) -> Id | None:
        """How far a stream has been read, if it is being read."""
        stream = self._streams.get(key)
        return stream.position if stream is not None else None

    def attach(self, subscription: Subscription) -> None:
        """Take up a subscription, unless its stream has been read further than it is: then it must pull once more."""
        stream = self._streams.get(subscription.key)
        if stream is None:
            stream = self._streams[subscription.key] = _Stream(subscription.last)
            self._taken_up += 1
            self._wanted.set()
            self._poked.set()
        elif stream.position > subscription.last:
            return
        stream.add(subscription)
        subscription.attached(True)

    def detach(self, subscription: Subscription) -> None:
        """Let a subscription go. Harmless if it is not attached."""
        stream = self._streams.get(subscription.key)
        if stream is not None:
            stream.discard(subscription)
            if not stream:
                del self._streams[subscription.key]
        subscription.attached(False)

    # --- its task -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._wake)
            await self._read()

    async def _read(self) -> None:
        backoff = Backoff()
        while True:
            try:
                await self._look()
                reply, asked = await self._block()
                backoff.reset()
                for key, entries in reply:
                    name = key.decode()
                    self._deliver(name, asked[name], parse_entries(entries))
                # Those who got something have it before more is asked for.
                await checkpoint()
            except Exception as error:
                await self._failed(error, backoff)

    async def _look(self) -> None:
        """Let go of those whose traces are gone: each finds out by itself, when it pulls."""
        now = anyio.current_time()
        if not self._streams or now - self._looked < LOOK_S:
            return
        self._looked = now
        waiting = [
            one for stream in self._streams.values() for one in stream.subscriptions() if one.record and one.known
        ]
        if not waiting:
            return
        # Nearly always all are there, which one command tells.
        records = {one.record for one in waiting}
        (count,) = await self._link.ask(("EXISTS", *records))
        if count == len(records):
            return
        found = await self._link.ask(*(("EXISTS", key) for one in waiting for key in (one.key, one.record)))
        for one, events, record in zip(waiting, found[::2], found[1::2], strict=True):
            if events == record == 0:
                self.detach(one)

    async def _block(self) -> tuple[Any, dict[str, Id]]:
        """Wait for entries of any stream taken up. Returns the reply and the positions it begins after."""
        for key in [key for key, stream in self._streams.items() if not stream]:
            # Its last subscription was dropped without being closed.
            del self._streams[key]
        if not self._streams:
            self._wanted = anyio.Event()
            await self._wanted.wait()
        if not self._link.connected or self._link.opened != self._identified:
            await self._identify()
        # Nothing awaits between here and the wait: a stream taken up from now on is one that the wait does not know.
        asked = {key: stream.position for key, stream in self._streams.items()}
        if not asked:
            return (), asked
        self._known = self._taken_up
        reply: Any = None
        try:
            with anyio.CancelScope() as self._wait:
                (reply,) = await self._link.ask(
                    (
                        *("XREAD", "COUNT", max(2, min(PAGE, PAGES // len(asked)))),
                        *("BLOCK", round(self._block_s * 1000), "STREAMS"),
                        *asked,
                        *(f"{attempt}-{seq}" for attempt, seq in asked.values()),
                    ),
                    timeout_s=self._block_s + 10,
                )
        finally:
            self._wait = None
        if isinstance(reply, Exception):
            raise reply
        return reply or (), asked

    async def _failed(self, error: Exception, backoff: Backoff) -> None:
        from redis.exceptions import TryAgainError

        await self._link.drop()
        pause = backoff.next()
        # While a slot is being moved its streams lie on two nodes: each is to be had, but not all at once. Nor may
        # what all have be, in the time that there is.
        apart = isinstance(error, (TryAgainError, TimeoutError))
        if is_transient(error) and not apart:
            logger.log(backoff.level, "the reader waits for Redis: %s", error)
        else:
            # Perhaps one stream is no stream. Each subscription finds out by itself whether it is its own.
            level = logging.DEBUG if isinstance(error, TryAgainError) else logging.WARNING
            logger.log(level, "the reader lets go of %d streams: %r", len(self._streams), error)
            for stream in list(self._streams.values()):
                for subscription in stream.subscriptions():
                    self.detach(subscription)
        await anyio.sleep(pause)

    def _deliver(self, key: str, asked: Id, entries: list[tuple[Id, Entry]]) -> None:
        stream = self._streams.get(key)
        if stream is None or not entries or asked > stream.position:
            # Let go meanwhile; or taken up again from further back, where this reply would leave a gap.
            return
        stream.position = max(stream.position, entries[-1][0])
        for subscription in stream.subscriptions():
            if not subscription.take(entries):
                self.detach(subscription)

    async def _wake(self) -> None:
        """End the reader's wait whenever a stream was taken up that it does not know."""
        while True:
            await self._poked.wait()
            self._poked = anyio.Event()
            backoff = Backoff(0.001, 0.5)
            # Redis may get this before the command it should end: then it has no effect, and is sent again.
            while self._wait is not None and self._known < self._taken_up:
                await self._interrupt(self._wait)
                await anyio.sleep(backoff.next())

    async def _interrupt(self, wait: anyio.CancelScope) -> None:
        if self._may_unblock:
            try:
                (reply,) = await self._connections.once(("CLIENT", "UNBLOCK", self._client_id), beside=self._link)
            except Exception as error:
                logger.debug("the reader could not be woken: %r", error)
                return
            if not isinstance(reply, Exception):
                return
            logger.info("Redis does not let the reader be woken (%s); it reconnects instead", reply)
            self._may_unblock = False
        wait.cancel()


class SlotReaders:
    """A reader for each slot of a cluster that somebody reads from."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._readers: dict[int | None, Reader] = {}

    def subscribe(self, key: str, since: str, resync: Resync | None = None, record: str = "") -> Subscription:
        """A new subscription, of its slot's reader."""
        slot = self._connections.slot(key)
        reader = self._readers.get(slot)
        if reader is None:
            reader = self._readers[slot] = Reader(self._connections, key)
            reader.start()
        return reader.subscribe(key, since, resync, record)

    async def aclose(self) -> None:
        """Close them all."""
        readers = list(self._readers.values())
        self._readers.clear()
        for reader in readers:
            await reader.aclose()
