"""The reader: delivers new entries of all subscribed streams over one connection, without gaps or repeats.

A `Subscription` has two states. Behind the stream's end it *pulls*: it fetches pages when its consumer asks for the
next entry. At the end it is *attached* to the bus's reader. The reader's connection blocks on all attached streams at
once, and the reader puts new entries into each subscription's buffer. Buffers are bounded: the reader detaches a
subscription whose buffer is full, and the subscription pulls again after its consumer has emptied the buffer. So a slow
consumer costs a page of memory, delays no other consumer, and misses no entry.

The reader has read each stream up to a *position*. A subscription may attach if it has read at least that far, and
takes only entries after its own last.

Redis may have trimmed entries. The ids of an attempt are consecutive, so a subscription sees by the next entry whether
entries are missing. In their place it yields a `Gap` with the folded state after them.

A whole trace may expire, or be dropped for newer ones. Redis writes nothing then that would wake a waiting reader, so
the reader checks at times whether its traces still exist.

On a cluster, one command can wait for streams of one slot only, so there is a reader for each slot.
"""

from __future__ import annotations

import logging
import math
import weakref
from typing import Any, Final

import anyio
from anyio.lowlevel import checkpoint

from tracewire_bus.transport.backoff import Backoff, outages
from tracewire_bus.transport.errors import is_transient
from tracewire_bus.transport.link import pack_arguments
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.tasks import OwnedTask

from .subscription import PAGE, PAGES, Entry, Id, Resync, Subscription, parse_entries

__all__ = ["Reader", "SlotReaders"]

logger = logging.getLogger("tracewire")

#: How often the reader checks whether its traces still exist, in seconds.
CHECK_S: float = 5.0
#: How long one read blocks, in seconds.
_BLOCK_S: Final = 5.0

#: The same on a cluster, where a waiting read does not see entries of a slot that moves to another node.
_BLOCK_SLOT_S: Final = 1.0

#: Of an interval that grows with the number of streams: what each stream adds, and the longest one; in seconds.
_STREAM_INTERVAL_S: Final = 0.0005
_LONGEST_INTERVAL_S: Final = 0.04


class _Stream:
    """The reader's position in one stream, and weak references to its subscriptions."""

    __slots__ = ("after", "packed_after", "packed_key", "position", "references")

    def __init__(self, key: str, position: Id) -> None:
        self.references: dict[int, weakref.ref[Subscription]] = {}
        self.packed_key = pack_arguments(key)
        self._move(position, f"{position[0]}-{position[1]}")

    def _move(self, position: Id, after: str) -> None:
        #: The position, and the same as an entry's id. The id is packed here, and not for all streams with each read.
        self.position, self.after, self.packed_after = position, after, pack_arguments(after)

    def advance(self, position: Id, after: str) -> None:
        """Note that the stream was read up to this entry, unless it was read further."""
        if position > self.position:
            self._move(position, after)

    def add(self, subscription: Subscription) -> None:
        key, references = id(subscription), self.references
        references[key] = weakref.ref(subscription, lambda _: references.pop(key, None))

    def discard(self, subscription: Subscription) -> None:
        self.references.pop(id(subscription), None)

    def subscriptions(self) -> list[Subscription]:
        """The subscriptions that still exist."""
        return [one for reference in list(self.references.values()) if (one := reference()) is not None]


class Reader:
    """Reads the streams of all attached subscriptions over one connection.

    To add a stream while that connection blocks, the reader ends the wait with `CLIENT UNBLOCK` over another
    connection. If Redis does not allow that command, the reader reconnects.

    On a cluster, `near` is a key, and all streams of this reader share its slot. The reader waits `interval_s` seconds
    from the end of one read to the next, so that a read finds the entries of several steps. With `None` it waits the
    longer, the more streams there are: a read costs most where few of many streams have an entry.
    """

    def __init__(self, connections: Connections, near: str = "", *, interval_s: float | None = 0.0) -> None:
        self._connections = connections
        self._interval_s = interval_s
        self._link = connections.link(near)
        self._block_s = _BLOCK_SLOT_S if near else _BLOCK_S
        self._streams: dict[str, _Stream] = {}
        self._all: weakref.WeakSet[Subscription] = weakref.WeakSet()
        self._wanted = anyio.Event()
        self._poked = anyio.Event()
        #: Number of streams ever added, and how many of them the wait under way includes.
        self._added = 0
        self._known = 0
        self._wait: anyio.CancelScope | None = None
        self._checked_at = -math.inf
        #: The connection's id in Redis, and the number (`Link.opened`) of that connection.
        self._client_id: Any = None
        self._identified = 0
        self._may_unblock = True
        self._task: OwnedTask | None = None

    def start(self) -> None:
        """Start the task that reads."""
        self._task = OwnedTask(self._run, "that reads traces")

    async def connect(self) -> None:
        """Connect before the first subscription attaches. If that fails, the reader connects later."""
        try:
            await self._identify()
        except Exception as error:
            logger.debug("the reader did not connect ahead: %r", error)
            await self._link.drop()

    async def _identify(self) -> None:
        (self._client_id,) = await self._link.execute(("CLIENT", "ID"))
        self._identified = self._link.opened
        self._may_unblock = self._may_unblock and not isinstance(self._client_id, Exception)

    async def aclose(self) -> None:
        """Close all subscriptions, end the task and close the connection."""
        for subscription in list(self._all):
            await subscription.aclose()
        task, self._task = self._task, None
        if task is not None:
            await task.aclose()
        await self._link.drop()

    # --- subscriptions ------------------------------------------------------------------------------------------------

    def subscribe(self, key: str, since: str, resync: Resync | None = None, record: str = "") -> Subscription:
        """A new subscription to the stream `key` from `since` on. `aclose` closes it if its consumer does not.

        `resync` reads the trace's snapshot; without it, the subscription skips trimmed entries without a `Gap`.
        `record` is the key of the trace's record, by which the subscription notices that the trace has expired.
        """
        subscription = Subscription(self, self._connections, key, since, resync, record)
        self._all.add(subscription)
        return subscription

    def position(self, key: str) -> Id | None:
        """The position in a stream; None if no subscription to it is attached."""
        stream = self._streams.get(key)
        return stream.position if stream is not None else None

    def attach(self, subscription: Subscription) -> None:
        """Attach a subscription, unless the reader's position is beyond the subscription's: then it must pull first."""
        stream = self._streams.get(subscription.key)
        if stream is None:
            stream = self._streams[subscription.key] = _Stream(subscription.key, subscription.last)
            self._added += 1
            self._wanted.set()
            self._poked.set()
        elif stream.position > subscription.last:
            return
        stream.add(subscription)
        subscription.attached(True)

    def detach(self, subscription: Subscription) -> None:
        """Detach a subscription. No effect if it is not attached."""
        stream = self._streams.get(subscription.key)
        if stream is not None:
            stream.discard(subscription)
            if not stream.references:
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
                await self._check()
                reply, asked = await self._block()
                backoff.reset()
                for key, entries in reply:
                    name = key.decode()
                    self._deliver(name, asked[name], parse_entries(entries))
                # Lets consumers handle these entries before the next read.
                interval = self._interval()
                await (anyio.sleep(interval) if interval else checkpoint())
            except Exception as error:
                await self._failed(error, backoff)

    def _interval(self) -> float:
        if self._interval_s is not None:
            return self._interval_s
        return min(_LONGEST_INTERVAL_S, len(self._streams) * _STREAM_INTERVAL_S)

    async def _check(self) -> None:
        """Detach the subscriptions whose traces have expired. Each finds that out when it pulls."""
        now = anyio.current_time()
        if not self._streams or now - self._checked_at < CHECK_S:
            return
        self._checked_at = now
        waiting = [
            one for stream in self._streams.values() for one in stream.subscriptions() if one.record and one.known
        ]
        if not waiting:
            return
        # Usually all of them exist, which one command shows.
        records = {one.record for one in waiting}
        (count,) = await self._link.execute(("EXISTS", *records))
        if count == len(records):
            return
        found = await self._link.execute(*(("EXISTS", key) for one in waiting for key in (one.key, one.record)))
        for one, events, record in zip(waiting, found[::2], found[1::2], strict=True):
            if events == record == 0:
                self.detach(one)

    async def _block(self) -> tuple[Any, dict[str, Id]]:
        """Wait for entries of any attached stream. Returns the reply and the positions after which it begins."""
        for key in [key for key, stream in self._streams.items() if not stream.references]:
            # The last subscription was garbage-collected without being closed.
            del self._streams[key]
        if not self._streams:
            self._wanted = anyio.Event()
            await self._wanted.wait()
        if not self._link.connected or self._link.opened != self._identified:
            await self._identify()
        # No await between here and the wait, so `_known` counts exactly the streams that the wait includes.
        asked = {key: stream.position for key, stream in self._streams.items()}
        if not asked:
            return (), asked
        self._known = self._added
        command, packed = self._command()
        reply: Any = None
        try:
            with anyio.CancelScope() as self._wait:
                (reply,) = await self._link.execute(command, timeout_s=self._block_s + 10, packed=packed)
        finally:
            self._wait = None
        if isinstance(reply, Exception):
            raise reply
        return reply or (), asked

    def _command(self) -> tuple[tuple[str, ...], bytes]:
        """The command that waits for entries of all streams, and the same packed."""
        streams = self._streams.values()
        count = max(2, min(PAGE, PAGES // len(streams)))
        head = ("XREAD", "COUNT", str(count), "BLOCK", str(round(self._block_s * 1000)), "STREAMS")
        command = (*head, *self._streams, *[stream.after for stream in streams])
        packed = [b"*%d\r\n" % len(command), pack_arguments(*head)]
        packed += [stream.packed_key for stream in streams]
        packed += [stream.packed_after for stream in streams]
        return command, b"".join(packed)

    async def _failed(self, error: Exception, backoff: Backoff) -> None:
        from redis.exceptions import TryAgainError

        await self._link.drop()
        pause = backoff.next()
        # While a slot is being moved, its streams are on two nodes, and one command cannot read all of them. After a
        # timeout, one reply with entries of all streams may be too large.
        apart = isinstance(error, (TryAgainError, TimeoutError))
        if is_transient(error) and not apart:
            outages.log(backoff.level, "the reader waits for Redis: %s", error)
        else:
            # One key may not be a stream. Each subscription pulls and finds out whether it is its own.
            level = logging.DEBUG if isinstance(error, TryAgainError) else logging.WARNING
            logger.log(level, "the reader detaches %d streams: %r", len(self._streams), error)
            for stream in list(self._streams.values()):
                for subscription in stream.subscriptions():
                    self.detach(subscription)
        await anyio.sleep(pause)

    def _deliver(self, key: str, asked: Id, entries: list[tuple[Id, Entry]]) -> None:
        stream = self._streams.get(key)
        if stream is None or not entries or asked > stream.position:
            # Detached meanwhile; or attached again at an earlier position, after which this reply would leave a gap.
            return
        last, entry = entries[-1]
        stream.advance(last, entry.id)
        for subscription in stream.subscriptions():
            if not subscription.take(entries):
                self.detach(subscription)

    async def _wake(self) -> None:
        """End the wait under way whenever a stream was added that the wait does not include."""
        while True:
            await self._poked.wait()
            self._poked = anyio.Event()
            backoff = Backoff(0.001, 0.5)
            # Redis may execute CLIENT UNBLOCK before the read, without effect, so it is repeated.
            while self._wait is not None and self._known < self._added:
                await self._interrupt(self._wait)
                await anyio.sleep(backoff.next())

    async def _interrupt(self, wait: anyio.CancelScope) -> None:
        if self._may_unblock:
            try:
                (reply,) = await self._connections.execute_once(
                    ("CLIENT", "UNBLOCK", self._client_id), on_node_of=self._link
                )
            except Exception as error:
                logger.debug("CLIENT UNBLOCK failed: %r", error)
                return
            if not isinstance(reply, Exception):
                return
            logger.info("Redis does not allow CLIENT UNBLOCK (%s); the reader reconnects instead", reply)
            self._may_unblock = False
        wait.cancel()


class SlotReaders:
    """The readers of a cluster: one for each slot with a subscription."""

    def __init__(self, connections: Connections, *, interval_s: float | None = 0.0) -> None:
        self._connections = connections
        self._interval_s = interval_s
        self._readers: dict[int | None, Reader] = {}

    def subscribe(self, key: str, since: str, resync: Resync | None = None, record: str = "") -> Subscription:
        """A new subscription of the reader of its slot: see `Reader.subscribe`."""
        slot = self._connections.slot(key)
        reader = self._readers.get(slot)
        if reader is None:
            reader = self._readers[slot] = Reader(self._connections, key, interval_s=self._interval_s)
            reader.start()
        return reader.subscribe(key, since, resync, record)

    async def aclose(self) -> None:
        """Close all readers."""
        readers = list(self._readers.values())
        self._readers.clear()
        for reader in readers:
            await reader.aclose()
