"""Reading traces' streams: first what is there, then what comes, without a gap or a repeat.

A `Subscription` goes through two states. Behind the stream's end it *pulls*: it
fetches pages by itself when its consumer asks for more. At the end it is *attached* to the bus's one reader, whose
connection blocks on all attached streams at once and puts new entries into each subscription's buffer. A buffer is
bounded: the reader detaches a subscription whose buffer is full, and the subscription pulls again when its consumer has
emptied the buffer. So a slow consumer costs one page of memory, holds up no other consumer, and loses nothing.

One rule joins the two states. The reader has read each stream up to a *position*; a subscription may attach if it has
come at least that far, and takes only entries after its own last.

An engine may have trimmed entries. An attempt's ids are consecutive, so a subscription sees by the next entry whether
some are gone. In their place it hands out a `Gap` with the folded state after them.

A whole trace may be gone: its retention was over, or an engine dropped it to make room. Redis writes nothing then that
would end a blocked read, so the reader checks every few seconds that the traces which it reads still exist.

On a cluster one command can block on the streams of one slot only, so each slot of traces has a reader of its own.
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

#: How often the reader checks that its traces exist, in seconds.
LOOK_S: float = 5.0
#: How long one read blocks, in seconds.
_BLOCK_S: Final = 5.0

#: Likewise on a cluster, in seconds: a read that blocks at a node misses writes to a key that moves to another node.
_BLOCK_SLOT_S: Final = 1.0


class _Stream:
    """One stream that the reader reads: its position and its subscriptions, to which it holds weak references."""

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
        """The attached subscriptions that their consumers still hold."""
        return [one for reference in list(self._references.values()) if (one := reference()) is not None]


class Reader:
    """Reads all streams at whose end a subscription waits, on one connection.

    A read that blocks does not know of streams that are added meanwhile. `CLIENT UNBLOCK` from another connection ends
    the read; where Redis does not allow that command, the reader closes its connection and opens it anew.

    On a cluster all its streams share the slot of the key `near`.
    """

    def __init__(self, connections: Connections, near: str = "") -> None:
        self._connections = connections
        self._link = connections.link(near)
        self._block_s = _BLOCK_SLOT_S if near else _BLOCK_S
        self._streams: dict[str, _Stream] = {}
        self._all: weakref.WeakSet[Subscription] = weakref.WeakSet()
        self._wanted = anyio.Event()
        self._poked = anyio.Event()
        #: How many streams were ever added, and how many of these the read under way covers.
        self._taken_up = 0
        self._known = 0
        self._wait: anyio.CancelScope | None = None
        self._looked = -math.inf
        #: Redis's id of the connection, and the count of `Link.opened` at which it was asked for.
        self._client_id: Any = None
        self._identified = 0
        self._may_unblock = True
        self._task: OwnedTask | None = None

    def start(self) -> None:
        """Start its task."""
        self._task = OwnedTask(self._run, "that reads traces")

    async def connect(self) -> None:
        """Open the connection ahead of need. After a failure the reader connects when it has a stream to read."""
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
        """End the reader's task, and close its connection and every subscription."""
        for subscription in list(self._all):
            await subscription.aclose()
        task, self._task = self._task, None
        if task is not None:
            await task.aclose()
        await self._link.drop()

    # --- subscriptions ------------------------------------------------------------------------------------------------

    def subscribe(self, key: str, since: str, resync: Resync | None = None, record: str = "") -> Subscription:
        """A new subscription to the stream `key`, from `since` on. `aclose` closes it if its consumer has not.

        `resync` finds the stream's snapshot. Without it, the subscription passes over entries that are gone. `record`
        is the key of the trace's record, which tells a trace that is gone from one that has not begun.
        """
        subscription = Subscription(self, self._connections, key, since, resync, record)
        self._all.add(subscription)
        return subscription

    def position(self, key: str) -> Id | None:
        """The id up to which a stream has been read; `None` if the reader does not read it."""
        stream = self._streams.get(key)
        return stream.position if stream is not None else None

    def attach(self, subscription: Subscription) -> None:
        """Attach a subscription, unless the reader has read past its last entry: then it must pull once more."""
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
        """Detach a subscription. Does nothing if it is not attached."""
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
                # Consumers take what has come before the reader asks for more.
                await checkpoint()
            except Exception as error:
                await self._failed(error, backoff)

    async def _look(self) -> None:
        """Detach subscriptions whose traces are gone: each finds that out by itself when it pulls."""
        now = anyio.current_time()
        if not self._streams or now - self._looked < LOOK_S:
            return
        self._looked = now
        waiting = [
            one for stream in self._streams.values() for one in stream.subscriptions() if one.record and one.known
        ]
        if not waiting:
            return
        # One command tells that all exist, as they nearly always do.
        records = {one.record for one in waiting}
        (count,) = await self._link.ask(("EXISTS", *records))
        if count == len(records):
            return
        found = await self._link.ask(*(("EXISTS", key) for one in waiting for key in (one.key, one.record)))
        for one, events, record in zip(waiting, found[::2], found[1::2], strict=True):
            if events == record == 0:
                self.detach(one)

    async def _block(self) -> tuple[Any, dict[str, Id]]:
        """Read until any stream has new entries.

        Returns Redis's reply, and the position of each stream that was asked.
        """
        for key in [key for key, stream in self._streams.items() if not stream]:
            # The consumer of its last subscription has let go of it without closing it.
            del self._streams[key]
        if not self._streams:
            self._wanted = anyio.Event()
            await self._wanted.wait()
        if not self._link.connected or self._link.opened != self._identified:
            await self._identify()
        # No await stands between here and the read, so every stream that is added later is unknown to the read.
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
        # While a cluster moves a slot, its streams lie on two nodes, and no one command reads them all. A reply with
        # the
        # entries of all streams may also take longer than the time limit.
        apart = isinstance(error, (TryAgainError, TimeoutError))
        if is_transient(error) and not apart:
            logger.log(backoff.level, "the reader waits for Redis: %s", error)
        else:
            # One of the keys may hold no stream. Each subscription that pulls finds out whether it is its own.
            level = logging.DEBUG if isinstance(error, TryAgainError) else logging.WARNING
            logger.log(level, "the reader lets go of %d streams: %r", len(self._streams), error)
            for stream in list(self._streams.values()):
                for subscription in stream.subscriptions():
                    self.detach(subscription)
        await anyio.sleep(pause)

    def _deliver(self, key: str, asked: Id, entries: list[tuple[Id, Entry]]) -> None:
        stream = self._streams.get(key)
        if stream is None or not entries or asked > stream.position:
            # Detached meanwhile, or attached again from an earlier position, after which this reply would leave a gap.
            return
        stream.position = max(stream.position, entries[-1][0])
        for subscription in stream.subscriptions():
            if not subscription.take(entries):
                self.detach(subscription)

    async def _wake(self) -> None:
        """End the blocked read whenever a stream was added that it does not cover."""
        while True:
            await self._poked.wait()
            self._poked = anyio.Event()
            backoff = Backoff(0.001, 0.5)
            # Redis may get this before the read that it should end. Then it has no effect, and is sent again.
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
    """The readers of a cluster: one for each slot with subscriptions."""

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
        """Close all readers."""
        readers = list(self._readers.values())
        self._readers.clear()
        for reader in readers:
            await reader.aclose()
