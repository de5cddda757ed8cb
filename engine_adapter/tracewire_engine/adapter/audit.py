"""Writes an engine's decisions to the audit trail. No trace waits for that.

Entries wait in memory while Redis does not answer, up to a limit. Then the oldest is dropped, and counted in the log.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from typing import Any, Final

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
#: How long entries wait for others, to be written together, and then for a round trip that is made anyway, in seconds.
_GATHER_S: Final = 0.02
_RIDE_S: Final = 0.01


class Audit:
    """The decisions of one engine. `most` is how many entries the trail keeps; 0 for no trail."""

    def __init__(self, bus: Bus, info: EngineInfo, most: int) -> None:
        self._log = AuditLog(bus)
        self._info = info
        self._most = most
        self._entries: deque[AuditEntry] = deque()
        self._codes: deque[tuple[str, str]] = deque()
        #: The hashes of code that the trail has from this engine, the latest last.
        self._known: OrderedDict[str, None] = OrderedDict()
        self._dropped = 0
        self._new = Signal()
        self._done = Signal()

    def accepted(self, kind: str, name: str, key: Key | None, **fields: Any) -> None:
        """Note that the engine does what was asked of it. `fields` are those of an `AuditEntry`."""
        self._note(kind, name, "accepted", key, fields)

    def refused(self, kind: str, name: str, reason: str, key: Key | None = None, **fields: Any) -> None:
        """Note that the engine refuses what was asked of it, and why."""
        self._note(kind, name, "refused", key, {**fields, "reason": reason[:_TEXT]})

    def _note(self, kind: str, name: str, decision: Any, key: Key | None, fields: dict[str, Any]) -> None:
        if not self._most:
            return
        if len(self._entries) >= _WAITING:
            self._entries.popleft()
            self._dropped += 1
        fields["by"] = fields.get("by", "")[:_TEXT]
        self._entries.append(
            AuditEntry(
                kind=kind,
                name=name[:_TEXT],
                decision=decision,
                time=time.time(),
                engine=self._info.engine,
                model=self._info.model,
                key="" if key is None else key.id,
                tenant="" if key is None else key.tenant,
                **fields,
            )
        )
        self._new.notify()

    def keep(self, hash: str, block: Block) -> None:
        """Keep the source of a block beside the trail, if it is not there yet."""
        if not self._most:
            return
        if hash in self._known:
            self._known.move_to_end(hash)
            return
        self._known[hash] = None
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        if len(block.source) <= CODE_CHARACTERS and len(self._codes) < _REMEMBERED:
            self._codes.append((hash, described(block)))
            self._new.notify()

    async def flushed(self) -> None:
        """Wait until Redis has all entries. Only one task at a time may wait."""
        while self._entries or self._codes:
            await self._done.wait()

    async def run(self) -> None:
        """Write entries as they come. Never ends by itself."""
        backoff = Backoff()
        while True:
            while not self._entries and not self._codes:
                self._done.notify()
                await self._new.wait()
            if len(self._entries) < _AT_ONCE:
                await anyio.sleep(_GATHER_S)
            try:
                while self._codes:
                    await self._log.keep_code(*self._codes[0])
                    self._codes.popleft()
                some = [self._entries[index] for index in range(min(_AT_ONCE, len(self._entries)))]
                await self._log.append(some, self._most, _RIDE_S)
                for entry in some:
                    # The oldest may have been dropped meanwhile.
                    if self._entries and self._entries[0] is entry:
                        self._entries.popleft()
                if self._dropped:
                    logger.error(
                        "%d entries of the audit trail were dropped: Redis took them too slowly", self._dropped
                    )
                    self._dropped = 0
                backoff.reset()
            except BusError as error:
                logger.log(backoff.level, "the audit trail waits for Redis: %s", error)
                await anyio.sleep(backoff.next())
