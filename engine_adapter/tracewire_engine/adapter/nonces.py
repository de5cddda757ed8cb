"""Marks on Redis of the signed submissions that engines have taken, so that none runs twice.

A submission comes again when its engine was lost or has left: then Redis hands it out as a later attempt. It comes
again to the same engine, as the same attempt, when Redis did not answer while the engine began it. It must not come
again otherwise. So its nonce has a mark with the attempt.
"""

from __future__ import annotations

from tracewire_bus.bus import Bus
from tracewire_bus.store.queue_entries import REMEMBER_S
from tracewire_bus.transport.guard import integer
from tracewire_bus.wire.signing import Envelope

__all__ = ["Nonces"]


class Nonces:
    """The marks of one bus, as one engine makes them."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        #: The submissions that this engine has taken, and whose traces have not ended here.
        self._open: set[bytes] = set()

    async def take(self, trace: str, envelope: Envelope, attempt: int) -> bool:
        """Mark a submission as taken by this attempt. Returns whether it may run.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        if envelope.nonce in self._open:
            return True
        if not await self._mark(self._bus.keys.nonce(trace, envelope.key, envelope.nonce), attempt):
            return False
        self._open.add(envelope.nonce)
        return True

    async def _mark(self, mark: str, attempt: int) -> bool:
        """Set a mark to an attempt. Returns False if one as late has set it."""
        if await self._bus.command("SET", mark, attempt, "NX", "EX", REMEMBER_S) is not None:
            return True
        taken = self._bus.guard.read(integer, await self._bus.command("GET", mark) or 0, key=mark, entry="attempt")
        if taken is None or taken >= attempt:
            return False
        await self._bus.command("SET", mark, attempt, "EX", REMEMBER_S)
        return True

    def end(self, envelope: Envelope) -> None:
        """Note that the trace of a submission runs here no longer."""
        self._open.discard(envelope.nonce)
