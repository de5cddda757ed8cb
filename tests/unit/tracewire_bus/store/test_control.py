"""Control streams: an order comes with the fields that it was given, or is passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.redis.durable import server
from tests.support.until import until
from tracewire_bus.bus import Bus
from tracewire_bus.store.control import ControlReader, Order, SlotControlReaders, drain_command

#: An id that a server gives whose clock is a day ahead.
_AHEAD_MS = 24 * 3600 * 1000


async def _next(reader: ControlReader | SlotControlReaders, number: int) -> list[Order]:
    """So many orders, over as many reads as they take."""
    orders: list[Order] = []

    async def read() -> bool:
        orders.extend(await reader.read(100))
        return len(orders) >= number

    await until(read)
    return orders


async def _now(bus: Bus) -> int:
    seconds, microseconds = await bus.command("TIME")
    return int(seconds) * 1000 + int(microseconds) // 1000


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


@pytest.mark.parametrize("kind", ["cancel", "drain"])
async def test_orders_of_a_server_whose_clock_is_behind_arrive(tmp_path: Path, kind: str) -> None:
    """A replica without the last order takes over, and gives the next orders ids below it."""
    async with server(tmp_path / "redis") as redis, Bus.open(redis.url) as bus:
        key = bus.keys.operate("e") if kind == "drain" else bus.keys.control(bus.keys.tags[5], "e")
        order: tuple[Any, ...] = ("k", kind, "t", "" if kind == "drain" else "t", "b")
        reader = bus.control("e")
        await bus.command("XADD", key, "*", *order, "kept")
        assert [one.by for one in await _next(reader, 1)] == ["kept"]
        written = redis.written
        await bus.command("XADD", key, f"{await _now(bus) + _AHEAD_MS}-0", *order, "lost")
        assert [one.by for one in await _next(reader, 1)] == ["lost"]
        await redis.lose(written)
        # The last one is above what the reader has read, and hides no earlier one.
        for by, id_ in ("first", "*"), ("second", "*"), ("third", f"{await _now(bus) + 2 * _AHEAD_MS}-0"):
            await bus.command("XADD", key, id_, *order, by)
        assert [one.by for one in await _next(reader, 3)] == ["first", "second", "third"]
        await reader.aclose()


async def test_a_new_connection_repeats_no_order(bus: Bus) -> None:
    """The server still has the orders of the last read, which only the next one trims."""
    key = bus.keys.control(bus.keys.tags[5], "e")
    reader = bus.control("e")
    for by in "a", "b":
        await bus.command("XADD", key, "*", "k", "cancel", "t", "t", "b", by)
    assert [one.by for one in await _next(reader, 2)] == ["a", "b"]
    await reader.aclose()  # It connects again.
    await bus.command("XADD", key, "*", "k", "cancel", "t", "t", "b", "c")
    assert [one.by for one in await _next(reader, 1)] == ["c"]
    await reader.read(1)
    assert await bus.command("XLEN", key) == 0
    await reader.aclose()
