"""Control streams: an order comes with the fields that it was given, or is passed over."""

from __future__ import annotations

from tracewire_bus.bus import Bus
from tracewire_bus.store.control import drain_command


async def test_an_order_without_a_time_has_none_and_one_with_a_malformed_time_is_passed_over(bus: Bus) -> None:
    key = bus.keys.operate("e")
    await bus.command(*drain_command(bus.keys, "e", "nobody", None, 60))
    for malformed in ("soon", "-1", "nan"):
        await bus.command("XADD", key, "*", "k", "drain", "t", "", "b", "", "w", malformed)
    await bus.command("XADD", key, "*", "k", "drain", "t", "", "b", "")
    await bus.command(*drain_command(bus.keys, "e", "somebody", 2.5, 60))
    reader = bus.control("e")
    orders = await reader.read(1000)
    await reader.aclose()
    assert [(order.kind, order.within_s) for order in orders] == [("drain", None), ("drain", None), ("drain", 2.5)]
    assert orders[-1].by == "somebody"
    assert 0 < await bus.command("TTL", key) <= 60


async def test_who_may_write_to_control_streams_drains_no_engine(bus: Bus) -> None:
    """A user who steers traces writes there; orders to a whole engine have a stream of their own."""
    await bus.command("XADD", bus.keys.control(bus.keys.tags[0], "e"), "*", "k", "drain", "t", "", "b", "me")
    await bus.command("XADD", bus.keys.operate("e"), "*", "k", "cancel", "t", "t", "b", "me")
    await bus.command("XADD", bus.keys.control(bus.keys.tags[0], "e"), "*", "k", "pause", "t", "t", "b", "me")
    reader = bus.control("e")
    orders = await reader.read(1000)
    await reader.aclose()
    assert [order.kind for order in orders] == ["pause"]
    assert bus.guard.malformed == 2
