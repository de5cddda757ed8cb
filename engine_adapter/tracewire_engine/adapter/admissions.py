"""Admits submissions by their signatures, within the limits on the traces of a tenant and of a client."""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Self

from tracewire_bus.bus import Taken
from tracewire_bus.domain.identity import Key
from tracewire_bus.domain.limits import LimitExceeded
from tracewire_bus.store.trace_records import NonceMark

from .engine_api import Rejection
from .gate import Admitted, Gate
from .nonces import Nonces

__all__ = ["Admissions", "ClientFull", "Seat", "TenantFull"]


class TenantFull(Rejection):
    """As many traces of a tenant run here as may. There is a place when one of them ends."""


class ClientFull(LimitExceeded):
    """As many traces of a client run here as may. There is a place when one of them ends."""


class Admissions:
    """The submissions that one engine has admitted. `client_traces` is how many traces a client may run; 0 for any."""

    def __init__(self, gate: Gate, client_traces: int = 0) -> None:
        self._gate = gate
        self._client_traces = client_traces
        self._nonces = Nonces()
        #: How many traces of each tenant, and of each client, are being checked or run here.
        self._of_tenants: Counter[str] = Counter()
        self._of_clients: Counter[str] = Counter()

    def seat(self) -> Seat:
        """A seat for one queue entry, which holds places while it is entered."""
        return Seat()

    async def admit(self, trace: str, entry: Taken) -> Admitted:
        """Verify who has submitted an entry, before anything of the submission is decoded.

        Raises:
            Rejection: it is not accepted.
            LimitExceeded: it is too large.
        """
        return await self._gate.submission(trace, entry.fields.get(b"d", b""), entry.queued_at)

    def admit_tenant(self, key: Key | None, seat: Seat) -> None:
        """Take a place of the tenant whose key has signed a submission.

        Raises:
            TenantFull: as many of the tenant's traces run here as may.
            Rejection: the tenant may run none.
        """
        if key is None:
            return
        # Nothing is awaited between the comparison and the count: entries that come together are counted, too.
        running, most = self._of_tenants[key.tenant], key.quotas.get("traces")
        if most is not None and running >= most:
            message = f"{running} traces of tenant {key.tenant!r} run here, its key's quota is {most}"
            # No engine has a place for a tenant that may run none.
            raise (TenantFull if most else Rejection)("signature", message, type="QuotaExceeded")
        seat.take(self._of_tenants, key.tenant)

    def admit_client(self, client: str, seat: Seat) -> None:
        """Take a place of a submission's client.

        Raises:
            ClientFull: as many of the client's traces run here as may.
        """
        running = self._of_clients[client]
        if self._client_traces and running >= self._client_traces:
            message = f"{client[:80]!r} has {running} traces running on this engine, and may have {self._client_traces}"
            raise ClientFull("client", message, "client_traces")
        seat.take(self._of_clients, client)

    def mark(self, admitted: Admitted) -> NonceMark | None:
        """The mark by which Redis knows a copy of a signed submission; None if it is not signed."""
        return None if admitted.envelope is None else self._nonces.mark(admitted.envelope)

    def end(self, admitted: Admitted) -> None:
        """Note that the trace of a submission runs here no longer: it has ended, or another engine gets it."""
        if admitted.envelope is not None:
            self._nonces.end(admitted.envelope)


class Seat:
    """The places that one queue entry has among those of its tenant and of its client."""

    def __init__(self) -> None:
        self._taken: list[tuple[Counter[str], str]] = []

    def take(self, among: Counter[str], name: str) -> None:
        """Take a place."""
        among[name] += 1
        self._taken.append((among, name))

    def leave(self) -> None:
        """Give the places back."""
        while self._taken:
            among, name = self._taken.pop()
            among[name] -= 1
            if not among[name]:
                del among[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
