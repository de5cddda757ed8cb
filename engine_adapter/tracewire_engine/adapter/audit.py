"""Writes an engine's decisions to the audit trail. No trace waits for that.

Entries go with the next round trip in which the engine's writer appends events. Without one they soon go by themselves.
Entries wait in memory while Redis does not answer, up to a limit. Then the oldest is dropped, and counted in the log.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, Final, Literal

import anyio

from tracewire_bus.bus import Bus, BusError
from tracewire_bus.domain.code_identity import described
from tracewire_bus.domain.identity import Key
from tracewire_bus.store.audit import CODE_CHARACTERS, AuditEntry, AuditLog
from tracewire_bus.transport.backoff import Backoff
from tracewire_bus.transport.tasks import Signal
from tracewire_bus.wire.messages import Block, EngineInfo

__all__ = ["Audit"]

logger = logging.getLogger("tracewire")

_WAITING: Final = 20_000
_AT_ONCE: Final = 64
_REMEMBERED: Final = 1024
_TEXT: Final = 500
#: After how long the source of code that is still in use is written again, in seconds, so that Redis keeps it on.
_RENEW_S: Final = 24 * 3600.0
#: How many refused sources are kept in that time, and how many characters they have together at most.
_REFUSED: Final = 256
_REFUSED_CHARACTERS: Final = 4 * 1024 * 1024
#: How long entries wait for a round trip of the writer, and then for another one that is made anyway, in seconds.
_GATHER_S: Final = 0.02
_RIDE_S: Final = 0.01


class Audit:
    """The decisions of one engine. `most` is how many entries the trail keeps; 0 for no trail."""

    def __init__(self, bus: Bus, info: EngineInfo, most: int) -> None:
        self._log = AuditLog(bus)
        self._info = info
        self._most = most
        self._entries: deque[AuditEntry] = deque()
        self._codes: deque[tuple[str, str, bool]] = deque()
        #: The hashes of code that the trail has from this engine, the latest last: since when, and whether as refused.
        self._known: OrderedDict[str, tuple[float, bool]] = OrderedDict()
        #: The refused sources that were kept lately: when, and how many characters.
        self._refused: deque[tuple[float, int]] = deque()
        self._dropped = 0
        #: Since when the oldest entry waits, by the monotonic clock, or for a round trip that carries it.
        self._since = 0.0
        #: The entries that a round trip carries now, and whether the last one that was the writer's has failed.
        self._under_way: list[AuditEntry] = []
        self._apart = False
        self._new = Signal()
        self._done = Signal()

    def accepted(self, kind: str, name: str, key: Key | None, *, by: str = "", code: Sequence[str] = ()) -> None:
        """Note that the engine does what was asked of it. `by` and `code` are those of an `AuditEntry`."""
        self._note(kind, name, "accepted", key, "", by, code)

    def refused(self, kind: str, name: str, reason: str, key: Key | None = None, *, by: str = "") -> None:
        """Note that the engine refuses what was asked of it, and why."""
        self._note(kind, name, "refused", key, reason, by)

    def _note(
        self,
        kind: str,
        name: str,
        decision: Literal["accepted", "refused"],
        key: Key | None,
        reason: str,
        by: str,
        code: Sequence[str] = (),
    ) -> None:
        if not self._most:
            return
        entries, info = self._entries, self._info
        if len(entries) >= _WAITING:
            entries.popleft()
            self._dropped += 1
        id, tenant = ("", "") if key is None else (key.id, key.tenant)
        texts = reason[:_TEXT], [*code], by[:_TEXT]
        # By position: this is done for each submission.
        entry = AuditEntry(kind, name[:_TEXT], decision, time.time(), info.engine, info.model, id, tenant, *texts)
        if not entries:
            self._since = time.monotonic()
        entries.append(entry)
        self._new.notify()

    def keep(self, hash: str, block: Block, *, refused: bool = False) -> None:
        """Keep the source of a block beside the trail, if it is not there yet.

        A `refused` one is kept only if there is room: everybody who may submit can have blocks refused.
        """
        if not self._most:
            return
        now = time.monotonic()
        since, was_refused = self._known.get(hash, (-_RENEW_S, True))
        if hash in self._known and now - since < _RENEW_S and (refused or not was_refused):
            self._known.move_to_end(hash)
            return
        if len(block.source) > CODE_CHARACTERS or len(self._codes) >= _REMEMBERED:
            return
        text = described(block)
        if refused and not self._has_room(now, len(text)):
            return
        self._known[hash] = now, refused
        self._known.move_to_end(hash)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        self._codes.append((hash, text, refused))
        self._new.notify()

    def _has_room(self, now: float, characters: int) -> bool:
        """Whether a refused source of so many characters may be kept. Counts it."""
        while self._refused and now - self._refused[0][0] >= _RENEW_S:
            self._refused.popleft()
        if len(self._refused) >= _REFUSED or sum(one for _, one in self._refused) + characters > _REFUSED_CHARACTERS:
            return False
        self._refused.append((now, characters))
        return True

    async def flushed(self) -> None:
        """Wait until Redis has all entries. Only one task at a time may wait."""
        while self._entries or self._codes:
            await self._done.wait()

    # --- as riders of the writer --------------------------------------------------------------------------------------

    def board(self) -> Sequence[tuple[Any, ...]]:
        """The commands that append the entries that wait, unless `run` appends them. `landed` follows if there are any.

        Code stands in Redis before the entries that name it, so `run` writes both.
        """
        if not self._entries or self._under_way or self._apart or self._codes:
            return ()
        self._under_way = self._first()
        return self._log.append_commands(self._under_way, self._most)

    def landed(self, replies: Sequence[Any]) -> None:
        """Take the replies. Entries that Redis refused, or may not have, are left to `run`."""
        some, self._under_way = self._under_way, []
        self._apart = not replies or any(isinstance(one, Exception) for one in replies)
        if not self._apart:
            self._written(some)
        self._new.notify()

    def _first(self) -> list[AuditEntry]:
        return list(islice(self._entries, _AT_ONCE))

    def _written(self, some: Sequence[AuditEntry]) -> None:
        for entry in some:
            # The oldest may have been dropped meanwhile.
            if self._entries and self._entries[0] is entry:
                self._entries.popleft()
        self._since = time.monotonic()
        if self._dropped:
            logger.error("%d entries of the audit trail were dropped: Redis took them too slowly", self._dropped)
            self._dropped = 0

    # --- its task -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write entries as they come, if the writer does not take them along. Never ends by itself."""
        backoff = Backoff()
        while True:
            await self._due()
            try:
                while self._codes:
                    hash, text, refused = self._codes[0]
                    await self._log.keep_code(hash, text, refused=refused)
                    self._codes.popleft()
                if self._under_way or not self._entries:
                    continue
                self._under_way = some = self._first()
                try:
                    await self._log.append(some, self._most, _RIDE_S)
                finally:
                    self._under_way = []
                self._written(some)
                self._apart = False
                backoff.reset()
            except BusError as error:
                logger.log(backoff.level, "the audit trail waits for Redis: %s", error)
                await anyio.sleep(backoff.next())

    async def _due(self) -> None:
        """Wait until there is code, or entries that the writer has not taken along for a while."""
        while True:
            if not self._entries and not self._codes:
                self._done.notify()
            elif not self._under_way:
                left_s = _GATHER_S - (time.monotonic() - self._since)
                if self._codes or self._apart or left_s <= 0 or len(self._entries) >= _AT_ONCE:
                    return
                await anyio.sleep(left_s)
                continue
            await self._new.wait()
