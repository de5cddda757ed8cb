"""A submission is admitted while its tenant and its client have room, also among entries that come together."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.support.identities import Identities
from tracewire_bus.domain.limits import LimitExceeded
from tracewire_bus.store.proofs import Proofs
from tracewire_bus.store.queue_entries import Taken
from tracewire_engine.adapter.admissions import Admissions, ClientFull, Seat, TenantFull
from tracewire_engine.adapter.engine_api import Rejection
from tracewire_engine.adapter.gate import Admitted, Gate


def entry(keys: Identities, id: str, trace: str) -> Taken:
    data = Proofs(keys.signer(id), prefix="tw").content("submit", "m", trace, b"x")
    return Taken(trace, {b"d": data}, keys.ring.path.stat().st_mtime)


async def admit(admissions: Admissions, entry: Taken, seat: Seat) -> Admitted:
    """As the intake does."""
    admitted = await admissions.admit(entry.trace, entry)
    admissions.admit_tenant(admitted.key, seat)
    return admitted


async def test_a_tenant_s_traces_are_counted_from_their_admission_on(tmp_path: Path) -> None:
    keys = Identities(tmp_path)
    keys.ring.write([msgspec.structs.replace(key, quotas={"traces": 1}) for key in keys.ring.listed()])
    admissions = Admissions(Gate(keys.strict, "tw", "m", "e"))
    with admissions.seat() as seat:
        admitted = await admit(admissions, entry(keys, "alice", "t"), seat)
        # The first one does not run yet.
        says = "1 traces of tenant 'red' run here, its key's quota is 1"
        with admissions.seat() as late, pytest.raises(Rejection, match=says) as refused:
            await admit(admissions, entry(keys, "ann", "u"), late)
        assert refused.value.failure.type == "QuotaExceeded"
        assert isinstance(refused.value, TenantFull)
        with admissions.seat() as other:
            await admit(admissions, entry(keys, "bob", "v"), other)
    with admissions.seat() as seat:
        await admit(admissions, entry(keys, "ann", "u"), seat)
    # No tenant that has gone is remembered.
    assert not admissions._of_tenants
    assert admitted.content == b"x"


async def test_a_tenant_that_may_run_no_traces_waits_for_no_place(tmp_path: Path) -> None:
    keys = Identities(tmp_path)
    keys.ring.write([msgspec.structs.replace(key, quotas={"traces": 0}) for key in keys.ring.listed()])
    admissions = Admissions(Gate(keys.strict, "tw", "m", "e"))
    with admissions.seat() as seat, pytest.raises(Rejection, match="its key's quota is 0") as refused:
        await admit(admissions, entry(keys, "alice", "t"), seat)
    assert not isinstance(refused.value, TenantFull)


async def test_a_client_s_traces_are_counted_from_their_admission_on(tmp_path: Path) -> None:
    admissions = Admissions(Gate(Identities(tmp_path).strict, "tw", "m", "e"), client_traces=1)
    with admissions.seat() as seat, admissions.seat() as late:
        admissions.admit_client("me", seat)
        with pytest.raises(LimitExceeded, match="has 1 traces running on this engine, and may have 1") as refused:
            admissions.admit_client("me", late)
        assert isinstance(refused.value, ClientFull)
        admissions.admit_client("another", late)
        # One that waits for its place keeps no other.
        late.leave()
        assert dict(admissions._of_clients) == {"me": 1}
    assert not admissions._of_clients


async def test_a_signed_submission_has_one_mark_until_it_ends(tmp_path: Path) -> None:
    keys = Identities(tmp_path)
    admissions = Admissions(Gate(keys.strict, "tw", "m", "e"))
    with admissions.seat() as seat:
        admitted = await admit(admissions, entry(keys, "alice", "t"), seat)
    mark = admissions.mark(admitted)
    assert mark is not None
    assert admissions.mark(admitted) == mark
    admissions.end(admitted)
    assert admissions.mark(admitted) != mark
    assert admissions.mark(Admitted(b"x")) is None
