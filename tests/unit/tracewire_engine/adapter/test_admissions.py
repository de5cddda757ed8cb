"""A submission is admitted until its trace has ended, and while its tenant has room."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.support.identities import Identities
from tracewire_bus.bus import Bus
from tracewire_bus.store.proofs import Proofs
from tracewire_bus.store.queue_entries import Taken
from tracewire_engine.adapter.admissions import Admissions
from tracewire_engine.adapter.engine_api import Rejection
from tracewire_engine.adapter.gate import Gate


async def test_a_tenant_s_traces_are_counted_while_they_run(bus: Bus, tmp_path: Path) -> None:
    keys = Identities(tmp_path)
    keys.ring.write([msgspec.structs.replace(key, quotas={"traces": 1}) for key in keys.ring.listed()])
    admissions = Admissions(bus, Gate(keys.strict, bus.keys.prefix, "m", "e"))

    def entry(id: str, trace: str) -> Taken:
        data = Proofs(keys.signer(id), prefix=bus.keys.prefix).content("submit", "m", trace, b"x")
        return Taken(trace, {b"d": data}, keys.ring.path.stat().st_mtime)

    first = entry("alice", "t")
    admitted = await admissions.admit("t", first)
    with admissions.running(admitted):
        with pytest.raises(Rejection, match="1 traces of tenant 'red' run here, its key's quota is 1") as refused:
            await admissions.admit("u", entry("ann", "u"))
        assert refused.value.failure.type == "QuotaExceeded"
        await admissions.admit("v", entry("bob", "v"))
    # It comes again while the engine has it, and not when its trace has ended.
    assert (await admissions.admit("t", first)).content == b"x"
    admissions.end(admitted)
    with pytest.raises(Rejection, match="the submission of key 'alice' was replayed"):
        await admissions.admit("t", first)
    await admissions.admit("u", entry("ann", "u"))
