"""Groups of readers that share the lifecycle entries of all traces.

Each entry goes to one reader of a group, and is acknowledged when that reader asks for the next. What a reader has not
acknowledged for some time goes to another. So each entry is handled at least once, and twice if a reader dies, or is
slow, in the middle of one.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from typing import Final

import anyio

from tracewire_bus.transport.errors import BusError, NotAllowed
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.scripts import Script

from .keys import TAGS, Keys
from .lifecycle import BLOCK_S, KEEP_S, PAGE, Id, Lifecycle, LifecycleReader, entry_id, parse_places

__all__ = ["GroupRemoved", "GroupWatch", "Groups"]

logger = logging.getLogger("tracewire")


#: How many of each stream's entries one look takes over from readers that are gone.
_TAKE_OVER: Final = 8

#: By how much what a leaving reader held is made to look older, in milliseconds.
_AGED_MS: Final = 3_600_000

_FORGET: Final = Script("watch_group_forget")

#: After how many of its `idle` times a silent reader that has nothing is forgotten; how many takeovers lie between two
#: looks for such.
_SILENT: Final = 10

_SWEEP_EVERY: Final = 10


class GroupRemoved(BusError):
    """The group was removed while this reader was one of it."""


class Groups:
    """The groups that readers share entries in. A group is kept until it is removed; its streams may expire."""

    def __init__(self, connections: Connections, keys: Keys) -> None:
        self._connections = connections
        self._keys = keys

    async def names(self) -> list[str]:
        """All groups.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        found = await self._connections.command("HKEYS", self._keys.watch_groups())
        return sorted(name.decode("utf-8", "replace") for name in found)

    async def remove(self, group: str) -> bool:
        """Forget a group, with what its readers have not acknowledged. Returns whether there was one.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        # Asked on its own: a removal whose reply was lost is sent again and finds nothing.
        there = await self._connections.command("HEXISTS", self._keys.watch_groups(), group)
        await self._connections.command("HDEL", self._keys.watch_groups(), group)
        names = [self._keys.firehose(tag) for tag in self._keys.tags]
        found = await self._connections.commands(*(("EXISTS", name) for name in names))
        for name, exists in zip(names, found, strict=True):
            if exists:
                try:
                    await self._connections.command("XGROUP", "DESTROY", name, group)
                except BusError as error:
                    # It has expired just now.
                    logger.debug("group %s of %s was gone already: %s", group, name, error)
        return bool(there)


class GroupWatch(LifecycleReader):
    """An async iterator over the entries that fall to `consumer`, one of the readers of `group`.

    The first reader of a group makes it, from `since` on; for all others `since` says nothing. What `consumer` had not
    acknowledged when it was last here comes first. `idle_s` is how long a reader may be busy with an entry, in seconds:
    after that another takes it over.
    """

    def __init__(
        self, connections: Connections, keys: Keys, group: str, consumer: str, since: str, idle_s: float
    ) -> None:
        super().__init__(connections, keys)
        self._group = group
        self._consumer = consumer
        self._idle_s = idle_s
        self._first = ["$"] * TAGS if since == "now" else ["0-0"] * TAGS
        if since not in ("now", "start"):
            self._first = [entry_id(place) for place in parse_places(since)]
        self._token = f"{int(time.time())}.{secrets.token_hex(8)}"
        self._joined = False
        #: What is ours is to be read again: perhaps we have some that we do not know of.
        self._again = True
        self._current: tuple[str, Id] | None = None
        self._read_at = 0.0
        self._claim_at = 0.0
        self._cursors = dict.fromkeys(self._names, b"0-0")
        #: Takeovers until others that are gone are looked for.
        self._sweep_in = 1

    async def start(self) -> None:
        """Join the group, which is made if there is none. Idempotent. While Redis is away it waits.

        Raises:
            anyio.ClosedResourceError: it is closed.
            BusError: Redis refuses.
        """
        if not self._joined:
            # Who was first says so: an answer may be lost.
            named = (self._keys.watch_groups(), self._group)
            _, maker = await self._insist(("HSETNX", *named, self._token), ("HGET", *named))
            await self._make(self._first if maker == self._token.encode() else ["0-0"] * TAGS)
            self._joined = True

    async def _make(self, first: Sequence[str]) -> None:
        """Make the group on every stream that does not know it."""
        for name, id_ in zip(self._names, first, strict=True):
            while True:
                try:
                    made = await self._ask(
                        ("XGROUP", "CREATE", name, self._group, id_, "MKSTREAM"), ("EXPIRE", name, KEEP_S)
                    )
                except BusError as error:
                    if "BUSYGROUP" not in str(error):
                        raise
                    break
                if made is not None:
                    break

    async def __anext__(self) -> Lifecycle:
        """Acknowledge the last entry, and return the next, when there is one. While Redis is away it waits.

        Raises:
            GroupRemoved: somebody removed the group.
            anyio.ClosedResourceError: the watch or its bus is closed.
            anyio.BusyResourceError: another task waits for the next entry.
            BusError: Redis refuses.
        """
        with self._guard:
            await self.start()
            if self._current is not None:
                name, id_ = self._current
                await self._insist(("XACK", name, self._group, entry_id(id_)))
                self._current = None
            while True:
                if self._buffer and anyio.current_time() - self._read_at > self._idle_s / 2:
                    # Somebody else may think that we are gone.
                    self._buffer.clear()
                    self._again = True
                if self._buffer:
                    name, id_, event = self._buffer.popleft()
                    self._current = name, id_
                    return event
                await self._fetch()

    async def _fetch(self) -> None:
        now = anyio.current_time()
        if not self._link.connected:
            # An answer may have been lost.
            self._again = True
        reading = ("XREADGROUP", "GROUP", self._group, self._consumer, "COUNT")
        try:
            if self._again:
                own = await self._from_all((*reading, PAGE), ["0"] * TAGS)
                if own is not None:
                    gone = self._take(own)
                    if gone:
                        # Trimmed before anybody came to it.
                        await self._ask(*(("XACK", name, self._group, entry_id(id_)) for name, id_ in gone))
                    self._again = bool(self._buffer or gone)
            elif now >= self._claim_at:
                await self._take_over()
            else:
                # Taken for granted only once its reply is here.
                self._again = True
                reply = await self._from_all((*reading, 1), [">"] * TAGS, min(BLOCK_S, self._idle_s / 2))
                if reply is not None:
                    self._again = False
                    self._take(reply)
        except BusError as error:
            if "NOGROUP" not in str(error) and "UNBLOCKED" not in str(error):
                raise
            await self._rejoin()
        self._read_at = now

    async def _take_over(self) -> None:
        """Take over what others have held for too long."""
        idle_ms = max(1, round(self._idle_s * 1000))
        replies = await self._ask(
            *(
                ("XAUTOCLAIM", name, self._group, self._consumer, idle_ms, cursor, "COUNT", _TAKE_OVER)
                for name, cursor in self._cursors.items()
            )
        )
        if replies is None:
            return
        self._claim_at = anyio.current_time() + self._idle_s / 2
        for name, reply in zip(self._names, replies, strict=True):
            self._cursors[name] = reply[0]
            if reply[1]:
                # They are ours now, whole or not.
                self._again = True
        self._sweep_in -= 1
        if self._sweep_in <= 0:
            self._sweep_in = _SWEEP_EVERY
            await self._forget_silent()

    async def _forget_silent(self) -> None:
        """Forget readers that have said nothing for long, and hold nothing. One that lives is made anew as it reads."""
        try:
            replies = await self._ask(*(("XINFO", "CONSUMERS", name, self._group) for name in self._names))
            calls = []
            for name, consumers in zip(self._names, replies or [], strict=bool(replies)):
                for flat in consumers:
                    said = dict(zip(flat[::2], flat[1::2], strict=True))
                    silent = said[b"idle"] >= _SILENT * self._idle_s * 1000 and not said[b"pending"]
                    if silent and said[b"name"] != self._consumer.encode("utf-8", "surrogatepass"):
                        calls.append(_FORGET((name,), self._group, said[b"name"]))
            if calls:
                await self._ask(*calls)
        except NotAllowed as error:
            logger.debug("readers of %s that are gone are not this one's to forget: %s", self._group, error)

    async def _rejoin(self) -> None:
        """A stream of the group has expired: what comes into it anew is all new to the group."""
        (there,) = await self._insist(("HEXISTS", self._keys.watch_groups(), self._group))
        if not there:
            raise GroupRemoved(f"the group {self._group!r} was removed")
        await self._make(["0-0"] * TAGS)

    async def aclose(self) -> None:
        """Stop reading. What was not acknowledged goes to the others soon. Idempotent."""
        closed, self._closed = self._closed, True
        if self._wait is not None:
            self._wait.cancel()
        held = [(name, id_) for name, id_, _ in self._buffer]
        if self._current is not None:
            held.append(self._current)
        if not closed and self._joined and self._wait is None:
            age = ("IDLE", round(self._idle_s * 1000) + _AGED_MS, "JUSTID")
            with anyio.move_on_after(1, shield=True):
                try:
                    await self._link.ask(
                        *(("XCLAIM", name, self._group, self._consumer, 0, entry_id(id_), *age) for name, id_ in held),
                        *(_FORGET((name,), self._group, self._consumer) for name in self._names),
                    )
                except Exception as error:
                    logger.debug("what a watch held goes to others in a while only: %r", error)
        self._buffer.clear()
        await super().aclose()
