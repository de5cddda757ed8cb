"""What a writer appends again to a server that came back with less than it had acknowledged."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import anyio

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

#: What was acknowledged is kept for so many seconds in which Redis answered, and so many bytes. Twice what Redis loses
#: at most with `appendfsync everysec`.
KEEP_S: float = 5.0
KEEP_BYTES: int = 64 * 1024 * 1024
#: How often a writer looks whether its server is still the same, in seconds: one that sends nothing, or has several.
LOOK_S: float = 1.0
#: How many bytes of events one round trip brings at most.
_ROUND_BYTES: Final = 8 * 1024 * 1024

_RESTORE: Final = Script("append_lost")


class Restorer:
    """A writer's connection, and what Redis acknowledged over it of late.

    A server that comes back may have less than it had acknowledged. The restorer appends what is missing again, on each
    new connection before anything else is sent.
    """

    def __init__(
        self, connections: Connections, deferred: DeferredCommands, before: Callable[[], Awaitable[None]] | None
    ) -> None:
        self.link = connections.link()
        self.streams: dict[str, Stream] = {}
        #: Makes the commands that write again what else a server may have lost, before any event; and is told that they
        #: were carried out.
        self.claims: Callable[[], Iterable[tuple[Any, ...]]] = tuple
        self.claimed: Callable[[], None] = lambda: None
        #: Which of the link's connections is known to have all that was acknowledged; and when to look again.
        self.whole = 0
        self.look_at = 0.0
        self._connections = connections
        self._deferred = deferred
        self._before = before
        self._schema = schema_text()
        #: What was acknowledged, in that order, and when.
        self._kept: deque[tuple[float, Append]] = deque()
        self._kept_bytes = 0

    def stream(self, key: str, record: str, lifecycle: str) -> Stream:
        """The stream of this key, of which something is to be appended."""
        found = self.streams.get(key)
        if found is None:
            found = self.streams[key] = Stream(record, lifecycle)
            self._look_soon()
        return found

    def drop(self, key: str, stream: Stream) -> None:
        """Forget a stream of which nothing more comes and nothing is kept."""
        if stream.over and not stream.kept and not stream.under_way and self.streams.get(key) is stream:
            del self.streams[key]

    def _look_soon(self) -> None:
        if self.look_at == 0.0:
            self.look_at = anyio.current_time() + LOOK_S

    def keep(self, item: Append) -> None:
        """Redis has it."""
        item.refused = False
        item.stream.kept.append(item)
        self._kept.append((anyio.current_time(), item))
        self._kept_bytes += item.size
        self._look_soon()

    def prune(self, *, looked: bool) -> None:
        """All of Redis answers, if we have looked, and what it acknowledged longer ago is safe."""
        now = anyio.current_time()
        safe = now - KEEP_S if looked else -math.inf
        while self._kept and (self._kept[0][0] <= safe or self._kept_bytes > KEEP_BYTES):
            _, item = self._kept.popleft()
            self._kept_bytes -= item.size
            stream = item.stream
            stream.base = item.id
            stream.kept.popleft()
            self.drop(item.key, stream)
        if looked:
            self.look_at = now + LOOK_S if self.streams else 0.0

    async def execute_until_answered(self, *commands: tuple[Any, ...], moving: bool = False) -> list[Any]:
        """The replies to commands that may be carried out twice, whatever it takes.

        With `moving`, a `TryAgainError` for those whose slots are being moved.
        """
        backoff = Backoff()
        while True:
            try:
                await self.connect()
                replies = await self.link.ask(*commands, wait=False)
                if self.link.opened != self.whole:
                    # They came from a server that was not brought up to date.
                    continue
                if any(map(is_away, replies)):
                    await self.link.drop()
                elif moving or not any(map(is_moving, replies)):
                    return replies
            except Exception as error:
                if not is_transient(error):
                    raise as_bus_error(error) from error
            await anyio.sleep(backoff.next())

    async def connect(self) -> None:
        """Be connected to a server that has all that was acknowledged."""
        await self.link.connect()
        while self.whole != (opened := self.link.opened):
            # On a cluster that may open more of them.
            if self.whole != 0:
                await self._restore()
            self.whole = opened

    async def look(self, pending: Callable[[], bool]) -> None:
        """See whether the server is still there, and bring the one that is there up to date."""
        backoff = Backoff()
        while True:
            try:
                await self.connect()
                # On a cluster, every server that has any of them.
                looks = {self._connections.slot(key): ("EXISTS", key) for key in self.streams}
                for reply in await self.link.ask(*looks.values()) if looks else ():
                    if isinstance(reply, Exception):
                        raise reply
                if self.link.opened != self.whole:
                    continue
            except Exception as error:
                logger.log(backoff.level, "the writer waits for Redis: %s", error)
                if not is_transient(error):
                    logger.warning("the writer cannot look after its streams: %s", error)
                await anyio.sleep(backoff.next())
                if pending():
                    self.look_at = anyio.current_time() + LOOK_S
                    return
                continue
            self.prune(looked=True)
            return

    async def _restore(self) -> None:
        """Append again what a new server lacks, with all that goes with it.

        Raises:
            redis.exceptions.RedisError: the connection failed.
        """
        if claims := list(self.claims()):
            # In their order. What is short of memory among them is no more so than the events.
            for reply in await self._ask_all([with_text(claim) or claim for claim in claims]):
                # Also of one whose slot is being moved: what has been lost of it as well fences it, at worst.
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
                    reply = await self._see_whole(key, stream, reply)
                if isinstance(reply, Exception) or reply in (b"fenced", b"gap"):
                    logger.warning("stream %s cannot be brought up to date: %s", key, reply)
                    stream.lost = stream.attempt
                    continue
                lacking += reply if isinstance(reply, int) else 0
                # The firehose was told with the events.
                after += [item.with_effects("", b"", "") for item in stream.kept if item.with_effects is not None]
                after += [item.settle for item in stream.kept if item.settle is not None]
            for command, reply in zip(after, await self._ask_all(after), strict=True):
                # What settles an entry is not sent where anything before it was refused for now.
                if (is_moving(reply) or is_full(reply)) and command not in deferred:
                    self._deferred.add(command, None, None)
        if lacking:
            logger.warning("Redis came back without %d events that it had acknowledged; it has them again", lacking)
        # This server may be gone in the next moment.
        now = anyio.current_time()
        self._kept = deque((now, item) for _, item in self._kept)

    def _restoring(self, key: str, stream: Stream) -> tuple[Any, ...]:
        kept = stream.kept
        whole = "1" if kept and kept[-1].final else ""
        parts = [part for item in kept for part in (item.id, item.data, item.lifecycle)]
        names = key, stream.record, stream.firehose
        return texted(_RESTORE(names, self._schema, stream.base, whole, stream.attempt, *parts))

    async def _see_whole(self, key: str, stream: Stream, problem: Exception) -> Any:
        """See what a stream lacks of which several keys cannot be asked for while its slot is being moved.

        Returns what `_RESTORE` would have replied.

        Raises:
            redis.exceptions.RedisError: it lacks something, and gets it when the slot has been moved; or the connection
                failed.
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
        replies = await self.link.ask(*commands, wait=False)
        for reply in replies:
            if is_away(reply):
                raise reply
        return replies


def _acknowledged(stream: Stream) -> bool:
    """Whether Redis has ever acknowledged anything of it."""
    return bool(stream.kept or stream.base)
