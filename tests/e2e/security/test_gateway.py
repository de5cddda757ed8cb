"""A gateway signs what its callers submit, for the tenants of their keys."""

from __future__ import annotations

from pathlib import Path

from tests.support.gateways import serving
from tests.support.identities import Identities
from tracewire.gateway.keys import RIGHTS, entry_of, new_key
from tracewire_bus.bus import Bus
from tracewire_bus.store.audit import AuditLog


async def test_a_tenant_s_submissions_and_orders_are_the_tenant_s_at_the_engine(bus: Bus, tmp_path: Path) -> None:
    keys = Identities(tmp_path)
    red, blue = new_key(), new_key()
    file = tmp_path / "keys.toml"
    file.write_text(entry_of(red, "rita", RIGHTS, "red") + entry_of(blue, "bruno", RIGHTS, "blue"))
    body = {"model": "tiny", "prompt": "valid", "live": {"alpha": 1.0}, "sampling": {"max_tokens": 100_000}}
    async with (
        keys.served(bus, audit=1000),
        serving(bus.url, bus.keys.prefix, keys=file, signing_key=keys.path("door")) as gateway,
        gateway.http(red) as rita,
        gateway.http(blue) as bruno,
    ):
        made = await rita.post("/traces", json=body)
        assert made.status_code in (200, 201, 202), made.text
        trace = made.json()["id"]
        assert trace.startswith("red:")
        assert (await bruno.post(f"/traces/{trace}/cancel", json={})).status_code in (403, 404)
        assert (await rita.post(f"/traces/{trace}/cancel", json={})).status_code == 200
        assert (await bruno.post("/traces", json={**body, "sampling": {"max_tokens": 2}})).is_success
    found = [(one.kind, one.decision, one.key, one.tenant) async for one in AuditLog(bus).read()]
    assert ("submit", "accepted", "door", "red") in found
    assert ("submit", "accepted", "door", "blue") in found
    assert ("cancel", "accepted", "door", "red") in found
    assert not [one for one in found if one[1] == "refused"]
