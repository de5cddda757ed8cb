"""Where bulk stores are, as Redis knows it."""

from __future__ import annotations

from tracewire_bus.bulk.stores import StorePlace
from tracewire_bus.bus import Bus


async def test_a_store_is_found_until_it_is_removed(bus: Bus) -> None:
    stores = bus.bulk.stores
    assert await stores.find("one") is None
    here, served = StorePlace("/dev/shm/one"), StorePlace("/dev/shm/öne", "host:7400", "token")
    await stores.register("one", here)
    assert await stores.find("one") == here
    await stores.register("one", served)
    assert await stores.find("one") == served
    assert await stores.find("other") is None
    # It is forgotten by itself if no engine says any more where it is.
    assert 6 * 24 * 3600 < await bus.command("TTL", bus.keys.bulk_store("one")) <= 7 * 24 * 3600
    await stores.unregister("one")
    assert await stores.find("one") is None
