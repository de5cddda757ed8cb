"""A lease takes what waits under it along."""

from __future__ import annotations

import pytest

from tests.support.queue import left_behind, put, take, traces
from tracewire_bus.bus import Bus
from tracewire_bus.store import submission_queue as queue
from tracewire_bus.wire.codec import request_schema_text


async def test_a_lease_takes_what_waits_under_it_along(bus: Bus) -> None:
    await put(bus, "A", range(3), lease="one")
    await put(bus, "B", range(3), lease="one")
    await put(bus, "A", range(3, 5), lease="two")
    await put(bus, "A", range(5, 6))
    assert await take(bus, 2) == ["A-0", "B-0"]
    assert set(await bus.queue.leases("demo")) == {"one", "two"}
    found = await bus.queue.withdraw_lease("demo", "one")
    assert traces(found) == ["A-1", "A-2", "B-1", "B-2"]
    assert found[0].fields == {b"v": request_schema_text().encode(), b"t": b"A-1", b"d": b"d"}
    assert found[0].queued_at > 0
    assert await bus.queue.withdraw_lease("demo", "") == []
    assert await bus.queue.clients("demo") == {"A": 3}
    assert await bus.queue.waiting("demo") == 3
    # Until they are settled they are not forgotten.
    await bus.queue.done("demo", "A-1")
    assert not await bus.queue.withdraw("demo", "A-2")
    assert set(await bus.queue.leases("demo")) == {"one", "two"}
    assert traces(await bus.queue.withdraw_lease("demo", "one")) == ["A-2", "B-1", "B-2"]
    assert await take(bus, 10) == ["A-3", "A-4", "A-5"]
    for trace in ("A-2", "B-1", "B-2"):
        await bus.queue.done("demo", trace)
    assert await bus.queue.withdraw_lease("demo", "one") == []
    assert await bus.queue.leases("demo") == []


async def test_large_entries_of_a_lease_are_not_returned(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "TAKE_BYTES", 100)
    for number, size in enumerate((60, 30, 20, 100_000, 10)):
        await bus.queue.put("demo", f"t{number}", b"x" * size, lease="l")
    found = await bus.queue.withdraw_lease("demo", "l")
    assert traces(found) == [f"t{number}" for number in range(5)]
    assert [one.trace for one in found if b"d" in one.fields] == ["t0", "t1", "t4"]
    for one in found:
        await bus.queue.done("demo", one.trace)
    assert await left_behind(bus) == {"state"}


async def test_entries_that_were_withdrawn_with_a_lease_wait_again(bus: Bus) -> None:
    await put(bus, "A", range(3), lease="one")
    await put(bus, "A", range(3, 4), lease="two")
    await bus.queue.withdraw_lease("demo", "one")
    await bus.queue.done("demo", "A-0")
    assert await bus.queue.withdrawn("demo") == ["one"]
    assert await bus.queue.reinstate_lease("demo", "one") == 2
    assert await bus.queue.withdrawn("demo") == []
    assert sorted(await take(bus, 10)) == ["A-1", "A-2", "A-3"]
