"""One consumer's place in a trace's stream: from any position, with a bounded buffer."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import anyio
import pytest

from tests.support.redis.proxy import proxy
from tests.support.streams import anext_is_waited_for, assert_whole, rest, until_blocked, write
from tests.support.until import until
from tracewire_bus.bus import FINAL_ID, Bus, Entry
from tracewire_bus.events.subscription import PAGE, RECENT
from tracewire_bus.transport.backoff import Backoff
from tracewire_bus.wire.codec import schema_text


async def test_reading_from_any_position(bus: Bus) -> None:
    async with bus.writer() as writer:
        await write(writer, "t", 5)
    assert_whole(await rest(bus.read("t")), "t", 5)
    assert_whole(await rest(bus.read("t", since="1-2")), "t", 5, first=3)
    assert len(await rest(bus.read("t", since="0-7"))) == 6
    assert len(await rest(bus.read("t", since="1-999"))) == 1
    for over in ("now", FINAL_ID):
        assert await rest(bus.read("t", since=over)) == []
    for nothing in ("", "1", "1-", "end", "-1-2", "1-2-3", f"{2**64}-0"):
        with pytest.raises(ValueError, match="event id"):
            bus.read("t", since=nothing)


async def test_now_is_when_the_subscription_starts(bus: Bus) -> None:
    async with bus.writer() as writer:
        await writer.append("t", 1, 0, b"before")
        async with bus.read("t", since="now") as subscription:
            await writer.append("t", 1, 1, b"after")
            entry = await anext(subscription)
            assert (entry.id, entry.data, entry.schema) == ("1-1", b"after", schema_text())
            assert subscription.position == "1-1"


async def test_recent_is_what_came_last_and_what_comes(bus: Bus) -> None:
    async with bus.writer() as writer:
        for seq in range(RECENT - 2):
            await writer.append("t", 1, seq, f"t {seq}".encode())
        async with bus.read("t", since="recent") as few:
            assert (await anext(few)).id == "1-0"
        for seq in range(RECENT - 2, RECENT + 8):
            await writer.append("t", 1, seq, f"t {seq}".encode())
        async with bus.read("t", since="recent") as subscription:
            assert subscription.position == ""
            assert (await anext(subscription)).id == "1-8"
            await writer.append("t", 1, RECENT + 8, f"t {RECENT + 8}".encode(), final=True)
            assert_whole(await rest(subscription), "t", RECENT + 8, first=9)
    # The final is one of the last entries.
    assert_whole(await rest(bus.read("t", since="recent")), "t", RECENT + 8, first=9)
    async with bus.writer() as writer, bus.read("later", since="recent") as later:
        await writer.append("later", 1, 0, b"", final=True)
        assert [entry.id for entry in await rest(later)] == [FINAL_ID]


async def test_a_trace_that_does_not_exist_yet_is_waited_for(bus: Bus) -> None:
    found: list[list[Entry]] = []

    async def follow() -> None:
        found.append(await rest(bus.read("later")))

    async with bus.writer() as writer, anyio.create_task_group() as group:
        group.start_soon(follow)
        await until_blocked(bus)
        await write(writer, "later", 3)
    assert_whole(found[0], "later", 3)


async def test_a_subscriber_that_never_reads_stops_nobody(bus: Bus) -> None:
    count = 5000
    async with bus.writer() as writer, anyio.create_task_group() as group:
        asleep = bus.read("t")
        await writer.append("t", 1, 0, b"t 0")
        await anext(asleep)
        found: list[list[Entry]] = []

        async def follow() -> None:
            found.append(await rest(bus.read("t")))

        group.start_soon(follow)
        async with anyio.create_task_group() as writers:
            for seq in range(1, count):
                writers.start_soon(writer.append, "t", 1, seq, f"t {seq}".encode())
        await writer.append("t", 1, count, f"t {count}".encode(), final=True)
        await until(lambda: _is(found))
        assert_whole(found[0], "t", count)
        # It holds a bounded part, and still gets the rest when it asks.
        assert len(asleep._buffer) <= 512
        assert_whole(await rest(asleep), "t", count, first=1)


async def _is(value: object) -> bool:
    return bool(value)


async def test_large_entries_fill_a_buffer_by_their_size(bus: Bus) -> None:
    data = b"x" * (1024 * 1024)
    async with bus.writer() as writer:
        await writer.append("t", 1, 0, data)
        asleep = bus.read("t")
        await anext(asleep)
        await anext_is_waited_for(bus, asleep)
        for seq in range(1, 80):
            await writer.append("t", 1, seq, data)
        await writer.append("t", 1, 80, b"", final=True)
        # Another subscriber's end says that the reader has had it all.
        assert len(await rest(bus.read("t"))) == 81
        assert sum(len(entry.data) for _, entry in asleep._buffer) <= 17 * 1024 * 1024
        assert [len(entry.data) for entry in await rest(asleep)] == [len(data)] * 79 + [0]


async def test_a_buffer_that_is_full_takes_no_more_and_says_so(bus: Bus) -> None:
    """The reader then lets its subscription go, which fetches the rest by itself."""
    async with bus.writer() as writer:
        for seq in range(400):
            await writer.append("t", 1, seq, b"x")
        asleep = bus.read("t", "1-0")
        await asleep.start()
        entries = [((1, seq), Entry(f"1-{seq}", b"x", schema_text())) for seq in range(1, 400)]
        assert asleep.take(entries[:100])
        assert not asleep.take(entries[100:])
        assert asleep.last == (1, len(asleep._buffer)) == (1, 256)
        await writer.append("t", 1, 400, b"", final=True)
        assert [entry.id for entry in await rest(asleep)] == [*(f"1-{seq}" for seq in range(1, 400)), FINAL_ID]


async def test_a_cancelled_wait_loses_nothing(bus: Bus) -> None:
    count = 300
    entries: list[Entry] = []
    async with bus.writer() as writer, anyio.create_task_group() as group:
        group.start_soon(write, writer, "t", count)
        subscription = bus.read("t")
        impatience = 0.0
        with anyio.fail_after(60):
            while True:
                try:
                    with anyio.move_on_after(impatience):
                        entries.append(await anext(subscription))
                except StopAsyncIteration:
                    break
                impatience = (impatience + 0.0001) % 0.002
    assert_whole(entries, "t", count)


async def test_closing_wakes_who_waits(bus: Bus) -> None:
    subscription = bus.read("t")
    async with anyio.create_task_group() as group:

        async def wait() -> None:
            with pytest.raises(anyio.ClosedResourceError):
                await anext(subscription)

        group.start_soon(wait)
        await until_blocked(bus)
        with pytest.raises(anyio.BusyResourceError):
            await anext(subscription)
        await subscription.aclose()
        await subscription.aclose()
    with pytest.raises(anyio.ClosedResourceError):
        await anext(subscription)


async def test_a_subscription_that_was_dropped_is_forgotten(bus: Bus) -> None:
    subscription = bus.read("t")
    await anext_is_waited_for(bus, subscription)
    reader = bus._reader
    assert reader is not None
    assert len(reader._all) == 1
    del subscription
    gc.collect()
    assert len(reader._all) == 0
    async with bus.writer() as writer:
        await writer.append("t", 1, 0, b"")
        await until(lambda: _is(not reader._streams))


async def test_a_consumer_without_patience_pauses_before_it_asks_an_absent_redis_again(
    bus: Bus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tracewire.outages")
    async with bus.writer() as writer:
        await write(writer, "t", 2 * PAGE)
    entries: list[Entry] = []
    async with (
        proxy(bus.url, tmp_path) as way,
        Bus.open(way.url, prefix=bus.keys.prefix, patience_s=0.0) as far,
        far.read("t") as subscription,
        anyio.create_task_group() as group,
    ):
        # One more makes the consumer ask for the next page.
        entries += [await anext(subscription) for _ in range(PAGE)]
        way.away = True
        await way.cut()

        async def read_on() -> None:
            entries.extend(await rest(subscription))

        group.start_soon(read_on)
        pauses = Backoff()
        for _ in range(5):
            await anyio.sleep(pauses.next())
        tries = [one for one in caplog.records if "waits for Redis" in one.getMessage()]
        assert 1 <= len(tries) <= 10
        way.away = False
    assert_whole(entries, "t", 2 * PAGE)


async def test_a_consumer_that_waits_for_redis_can_be_closed(bus: Bus, tmp_path: Path) -> None:
    async with bus.writer() as writer:
        await write(writer, "t", 2 * PAGE)
    async with (
        proxy(bus.url, tmp_path) as way,
        Bus.open(way.url, prefix=bus.keys.prefix, patience_s=0.0) as far,
        far.read("t") as subscription,
        anyio.create_task_group() as group,
    ):
        for _ in range(PAGE):
            await anext(subscription)
        way.away = True
        await way.cut()
        # The longest pause there is.
        subscription._outage = Backoff(600.0, 600.0)

        async def read_on() -> None:
            with pytest.raises(anyio.ClosedResourceError):
                await anext(subscription)

        group.start_soon(read_on)
        await until(lambda: subscription._outage.failures > 0)
        with anyio.fail_after(60):
            await subscription.aclose()
