"""Groups of readers that share the lifecycle events of all traces.

Each entry goes to one reader of a group. The reader acknowledges it when it asks for the next. An entry that a reader
has not acknowledged for some time goes to another reader. So each entry is handled at least once. It is handled twice
if a reader dies or is slow in the middle of it.

A reader may *keep* an entry while it reads on, and acknowledge it later (`GroupWatch.keep`). The reader renews its kept
entries as long as it reads, so that they go to another reader only if this one dies or hangs.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import anyio

from tracewire_bus.transport.errors import BusError, NotAllowed
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.scripts import Script

from .keys import TAGS, Keys
from .lifecycle import BLOCK_S, KEEP_S, PAGE, Id, Lifecycle, LifecycleReader, entry_id, parse_places

__all__ = ["GroupRemoved", "GroupWatch", "Groups"]

logger = logging.getLogger("tracewire")

#: How many entries of each stream one call takes over from other readers.
_TAKE_OVER: Final = 8

#: How much idle time a leaving reader adds to its unacknowledged entries, so that others take them over, in
#: milliseconds.
_AGED_MS: Final = 3_600_000

_FORGET: Final = Script("watch_group_forget")

#: The multiple of `idle_s` after which a silent reader without entries is removed.
_SILENT: Final = 10

#: The number of takeovers from one search for silent readers to the next.
_SWEEP_EVERY: Final = 10


#: After which part of `idle_s` without renewal a reader takes its kept entries for another's.
_SURE: Final = 0.9

#: Number of entries that one command renews or acknowledges.
_MANY: Final = 512


class GroupRemoved(BusError):
    """The group was removed while this reader was in it."""


class Groups:
    """The groups of one bus. A group exists until it is removed, even if its streams expire."""

    def __init__(self, connections: Connections, keys: Keys) -> None:
        self._connections = connections
        self._keys = keys

    async def names(self) -> list[str]:
        """The names of all groups, sorted.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        found = await self._connections.command("HKEYS", self._keys.watch_groups())
        return sorted(name.decode("utf-8", "replace") for name in found)

    async def remove(self, group: str) -> bool:
        """Remove a group with its unacknowledged entries. Returns False if there is no such group.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        # If the reply of HDEL is lost, the link sends HDEL again, which then finds nothing: its reply cannot be used.
        there = await self._connections.command("HEXISTS", self._keys.watch_groups(), group)
        await self._connections.command("HDEL", self._keys.watch_groups(), group)
        names = [self._keys.firehose(tag) for tag in self._keys.tags]
        found = await self._connections.commands(*(("EXISTS", name) for name in names))
        for name, exists in zip(names, found, strict=True):
            if exists:
                try:
                    await self._connections.command("XGROUP", "DESTROY", name, group)
                except BusError as error:
                    # The stream has expired meanwhile.
                    logger.debug("group %s of %s was gone already: %s", group, name, error)
        return bool(there)


class GroupWatch(LifecycleReader):
    """An async iterator over the entries for `consumer`, one of the readers of `group`.

    The first reader of a group creates it, from `since` on; for later readers `since` has no effect. Entries that an
    earlier reader named `consumer` has not acknowledged come first. `idle_s` is how long a reader may handle an entry,
    in seconds; after that another reader takes the entry over.
    """

    def __init__(
        self, connections: Connections, keys: Keys, group: str, consumer: str, since: str, idle_s: float
    ) -> None:
        super().__init__(connections, keys)
        self._connections = connections
        self._group = group
        self._consumer = consumer
        self._idle_s = idle_s
        self._first = ["$"] * TAGS if since == "now" else ["0-0"] * TAGS
        if since not in ("now", "start"):
            self._first = [entry_id(place) for place in parse_places(since)]
        self._token = f"{int(time.time())}.{secrets.token_hex(8)}"
        self._joined = False
        #: Whether Redis may have assigned entries to this reader that it has not got: then it reads them again.
        self._reread = True
        self._current: tuple[str, Id] | None = None
        #: The entries that the caller has kept, and when they were renewed last.
        self._kept: dict[tuple[str, Id], None] = {}
        self._renewed_at = 0.0
        self._read_at = 0.0
        self._claim_at = 0.0
        self._cursors = dict.fromkeys(self._names, b"0-0")
        #: Number of takeovers until the next search for silent readers.
        self._sweep_in = 1

    async def start(self) -> None:
        """Join the group, and create it if there is none. Idempotent. Waits while Redis does not answer.

        Raises:
            anyio.ClosedResourceError: the watch is closed.
            BusError: Redis refuses.
        """
        if not self._joined:
            # Reads back whose token was first, since the reply of HSETNX may be lost.
            named = (self._keys.watch_groups(), self._group)
            _, maker = await self._ask_until_answered(("HSETNX", *named, self._token), ("HGET", *named))
            await self._make(self._first if maker == self._token.encode() else ["0-0"] * TAGS)
            self._joined = True

    async def _make(self, first: Sequence[str]) -> None:
        """Create the group on every stream that does not have it, from the ids `first` on."""
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
        """Acknowledge the last entry, and return the next. Waits until there is one.

        Raises:
            GroupRemoved: the group was removed.
            anyio.ClosedResourceError: the watch or its bus is closed.
            anyio.BusyResourceError: another task waits for the next entry.
            BusError: Redis refuses.
        """
        with self._guard:
            await self.start()
            if self._current is not None:
                name, id_ = self._current
                await self._ask_until_answered(("XACK", name, self._group, entry_id(id_)))
                self._current = None
            while True:
                if self._buffer and anyio.current_time() - self._read_at > self._idle_s / 2:
                    # Another reader may have taken over the buffered entries.
                    self._buffer.clear()
                    self._reread = True
                if self._buffer:
                    name, id_, event = self._buffer.popleft()
                    self._current = name, id_
                    return event
                await self._fetch()

    def keep(self) -> tuple[str, Id]:
        """Keep the last entry: it stays this reader's while it reads on, until `acknowledge`.

        Returns the entry's place, for `acknowledge` and `is_kept`.

        Raises:
            ValueError: no entry was returned, or the last one is kept already.
        """
        if self._current is None:
            raise ValueError("keep: expected to be called once for each event, after it was returned")
        place, self._current = self._current, None
        if not self._kept:
            self._renewed_at = anyio.current_time()
        self._kept[place] = None
        return place

    def is_kept(self, place: tuple[str, Id]) -> bool:
        """Whether an entry is this reader's. It is not once it was acknowledged, or this reader was silent too long."""
        return place in self._kept

    async def acknowledge(self, place: tuple[str, Id]) -> None:
        """Acknowledge a kept entry. Does nothing for one that is no longer kept.

        Raises:
            BusUnavailable: Redis does not answer. The entry stays kept.
            BusRefused: Redis refuses.
        """
        if place in self._kept:
            await self._connections.command("XACK", place[0], self._group, entry_id(place[1]))
            self._kept.pop(place, None)

    async def _renew(self, now: float) -> None:
        """Renew the kept entries, so that no other reader takes them over; or give them up, if one may have."""
        if now - self._renewed_at > self._idle_s * _SURE:
            logger.warning(
                "a watch of group %s was silent for %.1f s: others take over its %d kept entries",
                *(self._group, now - self._renewed_at, len(self._kept)),
            )
            self._kept.clear()
            return
        by_name: dict[str, list[str]] = {}
        for name, id_ in self._kept:
            by_name.setdefault(name, []).append(entry_id(id_))
        claims = [
            ("XCLAIM", name, self._group, self._consumer, 0, *ids[start : start + _MANY], "JUSTID")
            for name, ids in by_name.items()
            for start in range(0, len(ids), _MANY)
        ]
        if await self._ask(*claims) is not None:
            self._renewed_at = now

    async def _fetch(self) -> None:
        now = anyio.current_time()
        if self._kept and now - self._renewed_at > self._idle_s / 4:
            await self._renew(now)
        if not self._link.connected:
            # The reply of the last read may have been lost.
            self._reread = True
        reading = ("XREADGROUP", "GROUP", self._group, self._consumer, "COUNT")
        try:
            if self._reread:
                await self._read_own((*reading, PAGE))
            elif now >= self._claim_at:
                await self._take_over()
            else:
                # Until the reply is here: a lost reply may have entries for this reader.
                self._reread = True
                reply = await self._read_all((*reading, 1), [">"] * TAGS, min(BLOCK_S, self._idle_s / 4))
                if reply is not None:
                    self._reread = False
                    self._take(reply)
        except BusError as error:
            if "NOGROUP" not in str(error) and "UNBLOCKED" not in str(error):
                raise
            await self._rejoin()
        self._read_at = now

    async def _read_own(self, reading: Sequence[Any]) -> None:
        """Read the entries again that are this reader's, but those that the caller keeps."""
        places = dict.fromkeys(self._names, "0")
        while True:
            own = await self._read_all(reading, places.values())
            if own is None:
                return
            gone = [place for place in self._take(own) if place not in self._kept]
            self._buffer = deque(entry for entry in self._buffer if entry[:2] not in self._kept)
            if gone:
                # They were trimmed before a reader got them.
                await self._ask(*(("XACK", name, self._group, entry_id(id_)) for name, id_ in gone))
            self._reread = bool(self._buffer or gone)
            full = {key.decode(): entries[-1][0].decode() for key, entries in own if len(entries) == PAGE}
            if self._reread or not full:
                return
            # The caller keeps all entries of these pages.
            places.update(full)

    async def _take_over(self) -> None:
        """Take over entries that other readers have not acknowledged for `idle_s` seconds."""
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
                # They belong to this reader now, which reads them next.
                self._reread = True
        self._sweep_in -= 1
        if self._sweep_in <= 0:
            self._sweep_in = _SWEEP_EVERY
            await self._forget_silent()

    async def _forget_silent(self) -> None:
        """Remove readers that are long silent and have no entries. Redis adds a reader again when that reads."""
        try:
            replies = await self._ask(*(("XINFO", "CONSUMERS", name, self._group) for name in self._names))
            calls = []
            for name, consumers in zip(self._names, replies or [], strict=bool(replies)):
                for flat in consumers:
                    info = dict(zip(flat[::2], flat[1::2], strict=True))
                    silent = info[b"idle"] >= _SILENT * self._idle_s * 1000 and not info[b"pending"]
                    if silent and info[b"name"] != self._consumer.encode("utf-8", "surrogatepass"):
                        calls.append(_FORGET((name,), self._group, info[b"name"]))
            if calls:
                await self._ask(*calls)
        except NotAllowed as error:
            logger.debug("Redis does not allow this reader to remove silent readers of %s: %s", self._group, error)

    async def _rejoin(self) -> None:
        """Create the group again on streams that have expired. Their new entries are all new to the group.

        Raises:
            GroupRemoved: the group was removed.
        """
        (there,) = await self._ask_until_answered(("HEXISTS", self._keys.watch_groups(), self._group))
        if not there:
            raise GroupRemoved(f"the group {self._group!r} was removed")
        await self._make(["0-0"] * TAGS)

    async def aclose(self) -> None:
        """Stop reading. Other readers soon take over the unacknowledged entries. Idempotent."""
        closed, self._closed = self._closed, True
        if self._wait is not None:
            self._wait.cancel()
        held = [(name, id_) for name, id_, _ in self._buffer]
        if self._current is not None:
            held.append(self._current)
        held += self._kept
        if not closed and self._joined and self._wait is None:
            age = ("IDLE", round(self._idle_s * 1000) + _AGED_MS, "JUSTID")
            with anyio.move_on_after(1, shield=True):
                try:
                    await self._link.execute(
                        *(("XCLAIM", name, self._group, self._consumer, 0, entry_id(id_), *age) for name, id_ in held),
                        *(_FORGET((name,), self._group, self._consumer) for name in self._names),
                    )
                except Exception as error:
                    logger.debug("the entries of a watch go to other readers only after its idle time: %r", error)
        self._buffer.clear()
        self._kept.clear()
        await super().aclose()
