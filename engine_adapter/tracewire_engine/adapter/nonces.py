"""Marks on Redis of the signed submissions that engines have taken, so that none runs twice.

A submission comes again when its engine was lost, and another one takes it. It must not come again once its trace has
ended. So its nonce has a mark, which says whether the trace has ended.
"""

from __future__ import annotations

from typing import Final

from tracewire_bus.bus import Bus
from tracewire_bus.store.queue_entries import REMEMBER_S
from tracewire_bus.wire.signing import Envelope

__all__ = ["Nonces"]

_OPEN: Final = b"open"
_ENDED: Final = b"ended"


class Nonces:
    """The marks of one bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def _key(self, trace: str, envelope: Envelope) -> str:
        return self._bus.keys.nonce(trace, envelope.key, envelope.nonce)

    async def take(self, trace: str, envelope: Envelope) -> bool:
        """Mark a submission as taken. Returns whether its trace may run: it has not ended.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        key = self._key(trace, envelope)
        new = await self._bus.command("SET", key, _OPEN, "NX", "EX", REMEMBER_S)
        return new is not None or await self._bus.command("GET", key) != _ENDED

    async def end(self, trace: str, envelope: Envelope) -> None:
        """Mark that the trace of a submission has ended.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        await self._bus.command("SET", self._key(trace, envelope), _ENDED, "EX", REMEMBER_S)
