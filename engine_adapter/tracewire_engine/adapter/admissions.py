"""Admits submissions by their signatures: once each, and within the quota of the key's tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tracewire_bus.bus import Bus, Taken

from .engine_api import Rejection
from .gate import Admitted, Gate, refused
from .nonces import Nonces

__all__ = ["Admissions"]


class Admissions:
    """The submissions that one engine has admitted."""

    def __init__(self, bus: Bus, gate: Gate) -> None:
        self._gate = gate
        self._nonces = Nonces(bus)
        #: How many traces of each tenant run here.
        self._running: Counter[str] = Counter()

    async def admit(self, trace: str, entry: Taken) -> Admitted:
        """Verify who has submitted an entry, before anything of the submission is decoded.

        Raises:
            Rejection: it is not accepted.
            LimitExceeded: it is too large.
        """
        admitted = await self._gate.submission(trace, entry.fields.get(b"d", b""), entry.queued_at)
        key = admitted.key
        if key is None or admitted.envelope is None:
            return admitted
        if not await self._nonces.take(trace, admitted.envelope, entry.attempt):
            raise refused(f"the submission of key {key.id!r} was replayed: an engine has taken it before")
        most = key.quotas.get("traces")
        if most is not None and self._running[key.tenant] >= most:
            message = f"{self._running[key.tenant]} traces of tenant {key.tenant!r} run here, its key's quota is {most}"
            raise Rejection("signature", message, type="QuotaExceeded")
        return admitted

    @contextmanager
    def running(self, admitted: Admitted) -> Iterator[None]:
        """Count a trace of its tenant while it runs."""
        tenant = "" if admitted.key is None else admitted.key.tenant
        self._running[tenant] += 1
        try:
            yield
        finally:
            self._running[tenant] -= 1

    def end(self, admitted: Admitted) -> None:
        """Note that the trace of a submission runs here no longer: it has ended, or another engine gets it."""
        if admitted.envelope is not None:
            self._nonces.end(admitted.envelope)
