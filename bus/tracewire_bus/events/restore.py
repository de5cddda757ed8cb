"""The restorer: appends events again that a restarted server had acknowledged and has lost."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import anyio

from tracewire_bus.store.keys import Keys
from tracewire_bus.transport.backoff import Backoff
from tracewire_bus.transport.errors import as_bus_error, is_full, is_transient
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.scripts import Script, with_text
from tracewire_bus.wire.codec import schema_text
from tracewire_bus.wire.ids import parse_id

from .appends import Append, Stream, field_of, is_away, is_moving, texted
from .deferred import DeferredCommands

__all__ = ["Restorer"]

logger = logging.getLogger("tracewire")

#: How long the writer keeps acknowledged events, in seconds in which Redis answered, and how many bytes of them. With
#: `appendfsync everysec`, Redis loses at most half of these seconds.
KEEP_S: float = 5.0
KEEP_BYTES: int = 64 * 1024 * 1024
#: How often a writer that sends nothing, or that has several servers, checks its connection, in seconds.
CHECK_S: float = 1.0
#: Most bytes of events of one round trip.
_ROUND_BYTES: Final = 8 * 1024 * 1024

_RESTORE: Final = Script("append_lost")


class Restorer:
    """A writer's connection, and the recently acknowledged events.

    On each new connection, the restorer first appends the kept events that the server lacks. `before` is awaited before
    that, and writes other data again.
    """

    def __init__(
        self, connections: Connections, deferred: DeferredCommands, before: Callable[[], Awaitable[None]] | None
    ) -> None:
        self.link = connections.link()
        self.streams: dict[str, Stream] = {}
        #: Makes the commands that claim traces again on a server that may have lost the claims, before any event; and
        #: the function to call after they were executed.
        self.claims: Callable[[], Iterable[tuple[Any, ...]]] = tuple
        self.claimed: Callable[[], None] = lambda: None
        #: The number (`Link.opened`) of the connection whose server has all acknowledged events; 0 before the first.
        self.restored = 0
        #: When to check the connection next, by the event loop's clock; 0 for never.
        self.check_at = 0.0
        self._connections = connections
        self._deferred = deferred
        self._before = before
        self._schema = schema_text()
        #: The acknowledged events, oldest first.
        self._kept: deque[Append] = deque()
        self._kept_bytes = 0

    def stream(self, key: str, keys: Keys, trace: str) -> Stream:
        """The state of a trace's stream, whose key is `key`."""
        found = self.streams.get(key)
        if found is None:
            found = self.streams[key] = Stream(trace, keys.record(trace), keys.firehose(keys.tag(trace)))
            self._schedule_check(anyio.current_time())
        return found

    def drop(self, key: str, stream: Stream) -> None:
        """Drop the state of a stream if no more events come and none are kept or under way."""
        if stream.over and not stream.kept and not stream.under_way and self.streams.get(key) is stream:
            del self.streams[key]

    def _schedule_check(self, now: float) -> None:
        if self.check_at == 0.0:
            self.check_at = now + CHECK_S

    def keep(self, item: Append, now: float) -> None:
        """Keep an append that Redis has acknowledged at `now`, by the event loop's clock."""
        item.refused = False
        item.kept_at = now
        item.stream.kept.append(item)
        self._kept.append(item)
        self._kept_bytes += item.size
        self._schedule_check(now)

    def prune(self, *, checked: bool) -> None:
        """Drop kept events beyond `KEEP_BYTES`, and, if all servers were just checked, those older than `KEEP_S`."""
        now = anyio.current_time()
        safe = now - KEEP_S if checked else -math.inf
        while self._kept and (self._kept[0].kept_at <= safe or self._kept_bytes > KEEP_BYTES):
            item = self._kept.popleft()
            self._kept_bytes -= item.size
            stream = item.stream
            stream.base = item.id
            stream.kept.popleft()
            if stream.over:
                self.drop(item.key, stream)
        if checked:
            self.check_at = now + CHECK_S if self.streams else 0.0

    async def execute_until_answered(self, *commands: tuple[Any, ...], moving: bool = False) -> list[Any]:
        """Execute idempotent commands, again and again until Redis answers. Returns the replies.

        With `moving`, the reply to a command whose slot is being moved may be a `TryAgainError`; otherwise the call
        waits for the move.

        Raises:
            BusError: Redis refuses.
        """
        backoff = Backoff()
        while True:
            try:
                await self.connect()
                replies = await self.link.execute(*commands, wait=False)
                if self.link.opened != self.restored:
                    # The replies came from a server that may lack acknowledged events.
                    continue
                if any(map(is_away, replies)):
                    await self.link.drop()
                elif moving or not any(map(is_moving, replies)):
                    return replies
            except Exception as error:
                if not is_transient(error):
                    raise as_bus_error(error) from error
            await anyio.sleep(backoff.next())

    async def holds(self, item: Append) -> bool:
        """Whether the stream holds exactly this event."""
        (found,) = await self.execute_until_answered(("XRANGE", item.key, item.id, item.id))
        return isinstance(found, list) and bool(found) and field_of(found[0][1], b"d") == item.data

    async def connect(self) -> None:
        """Connect, and append acknowledged events that the server lacks. Returns once the server has all of them."""
        await self.link.connect()
        while self.restored != (opened := self.link.opened):
            # On a cluster, restoring may open further connections.
            if self.restored != 0:
                await self._restore()
            self.restored = opened

    async def check(self, pending: Callable[[], bool]) -> None:
        """Check that all servers of the streams answer and have all acknowledged events, and prune the kept ones.

        Waits while Redis does not answer, but returns once `pending` says that the writer has appends to send.
        """
        backoff = Backoff()
        while True:
            try:
                await self.connect()
                # On a cluster, one command for each slot that has a stream.
                probes = {self._connections.slot(key): ("EXISTS", key) for key in self.streams}
                for reply in await self.link.execute(*probes.values()) if probes else ():
                    if isinstance(reply, Exception):
                        raise reply
                if self.link.opened != self.restored:
                    continue
            except Exception as error:
                logger.log(backoff.level, "the writer waits for Redis: %s", error)
                if not is_transient(error):
                    logger.warning("the writer cannot check its streams: %s", error)
                await anyio.sleep(backoff.next())
                if pending():
                    self.check_at = anyio.current_time() + CHECK_S
                    return
                continue
            self.prune(checked=True)
            return

    async def _restore(self) -> None:
        """Append the kept events that a new server lacks, and repeat the effects of all kept events.

        Raises:
            redis.exceptions.RedisError: the connection failed.
        """
        if claims := list(self.claims()):
            for reply in await self._ask_all([with_text(claim) or claim for claim in claims]):
                # A claim whose slot is being moved fails, too. At worst, another engine then takes the trace.
                if isinstance(reply, Exception):
                    logger.warning("a trace could not be claimed again: %s", reply)
            self.claimed()
        if self._before is not None:
            await self._before()
        lacking = 0
        deferred = self._deferred.commands()
        streams = list(self.streams.items())
        while streams:
            some: list[tuple[str, Stream]] = []
            size = 0
            while streams and len(some) < 64 and size < _ROUND_BYTES:
                some.append(streams.pop())
                size += sum(item.size for item in some[-1][1].kept)
            some = [(key, stream) for key, stream in some if stream.attempt > stream.lost and _acknowledged(stream)]
            after: list[tuple[Any, ...]] = []
            for (key, stream), reply in zip(
                some, await self._ask_all([self._restoring(key, stream) for key, stream in some]), strict=True
            ):
                if is_moving(reply):
                    reply = await self._check_moving(key, stream, reply)
                if isinstance(reply, Exception) or reply in (b"fenced", b"gap"):
                    logger.warning("the lost events of stream %s cannot be appended again: %s", key, reply)
                    stream.lost = stream.attempt
                    continue
                lacking += reply if isinstance(reply, int) else 0
                # `_RESTORE` has published the lifecycle entries, so only the other effects are repeated.
                after += [item.with_effects("", b"", "") for item in stream.kept if item.with_effects is not None]
                after += [item.settle for item in stream.kept if item.settle is not None]
            for command, reply in zip(after, await self._ask_all(after), strict=True):
                if (is_moving(reply) or is_full(reply)) and command not in deferred:
                    self._deferred.add(command, None, None)
        if lacking:
            logger.warning("Redis had lost %d acknowledged events; they were appended again", lacking)
        # The new server may fail, too, so the kept events count as acknowledged now.
        now = anyio.current_time()
        for item in self._kept:
            item.kept_at = now

    def _restoring(self, key: str, stream: Stream) -> tuple[Any, ...]:
        kept = stream.kept
        whole = "1" if kept and kept[-1].final else ""
        parts = [part for item in kept for part in (item.id, item.data, item.lifecycle)]
        names = key, stream.record, stream.firehose
        return texted(_RESTORE(names, self._schema, stream.base, whole, stream.attempt, *parts))

    async def _check_moving(self, key: str, stream: Stream, problem: Exception) -> Any:
        """Compare a stream whose slot is being moved with the kept events, since `_RESTORE` needs several keys.

        Returns the reply that `_RESTORE` would have given.

        Raises:
            redis.exceptions.RedisError: the stream lacks events, which can be appended after the move (`problem`); or
                the connection failed.
        """
        (entries,) = await self._ask_all([("XREVRANGE", key, "+", "-", "COUNT", 1)])
        if is_moving(entries):
            raise entries
        if isinstance(entries, Exception):
            return entries
        last = stream.kept[-1] if stream.kept else None
        found = entries[0][0].decode() if entries else "0-0"
        if parse_id(found) < parse_id(last.id if last else stream.base):
            raise problem
        if last is not None and found == last.id and field_of(entries[0][1], b"d") != last.data:
            return b"fenced"
        return 0

    async def _ask_all(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        if not commands:
            return []
        replies = await self.link.execute(*commands, wait=False)
        for reply in replies:
            if is_away(reply):
                raise reply
        return replies


def _acknowledged(stream: Stream) -> bool:
    """Whether Redis has acknowledged any event of the stream."""
    return bool(stream.kept or stream.base)
