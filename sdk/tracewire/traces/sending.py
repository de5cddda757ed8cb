"""Sends a submission: first the arrays that travel beside it, then the submission itself."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import msgspec

from tracewire_bus.domain.limits import LimitExceeded
from tracewire_bus.transport.errors import BusError, BusUnavailable

from .large import offload_large_arrays

if TYPE_CHECKING:
    from tracewire_bus.bus import Bus
    from tracewire_bus.wire.messages import Submission
    from tracewire_bus.wire.refs import ArrayRef

    from .vectors import ReferredArrays

__all__ = ["Sending", "new_owner"]


class Sending:
    """One submission, which may be sent several times. Large arrays of its interventions travel by `arrays`.

    Attributes:
        submission: with all of its arrays.
        sent: as it was last queued, with references in place of a block's large arrays.
        asked: whether Redis may have it: it was asked at least once.
    """

    def __init__(self, bus: Bus, submission: Submission, arrays: ReferredArrays | None = None, owner: str = "") -> None:
        self._bus = bus
        self._arrays = arrays
        self._owner = owner
        self.submission = submission
        self.sent = submission
        self.asked = False

    async def send(self, queue_limit: int | None = None, retention_s: float | None = None) -> bool:
        """Send it. Returns whether the trace is this submission's: another one may have its id.

        If the bus refuses it, the arrays that were sent for it are removed.

        Raises:
            LimitExceeded: it is too large.
            BusError: as `Bus.submit`.
        """
        stored: list[ArrayRef] = []
        try:
            await self._bus.memory.check_reserve()
            sent = await offload_large_arrays(self.submission, self._bus, stored)
            referring = sent
            if self._arrays is not None:
                referring = msgspec.structs.replace(sent, interventions=await self._arrays.store())
            self.asked = True
            is_own = await self._bus.submit(referring, queue_limit, retention_s, owner=self._owner)
        except (BusError, LimitExceeded) as error:
            if not isinstance(error, BusUnavailable):
                await self._bus.blobs.remove(self.submission.trace, stored)
            raise
        self.sent = sent
        return is_own


def new_owner() -> str:
    """A random text by which a trace's record says whose it is."""
    return secrets.token_hex(8)
