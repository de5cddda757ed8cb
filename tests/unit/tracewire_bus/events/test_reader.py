"""Readers of streams on a real Redis: nothing is lost, repeated or reordered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.support.redis.proxy import proxy
from tests.support.streams import (
    anext_is_waited_for,
    assert_whole,
    calls_of_xread,
    clients,
    reads,
    rest,
    until_blocked,
    write,
)
from tests.support.until import until
from tracewire_bus.bus import FINAL_ID, Bus, BusError, Entry
from tracewire_bus.transport.link import Link
from tracewire_bus.wire.ids import parse_id


async def test_replaying_then_tailing_leaves_no_gap_and_no_repeat(bus: Bus) -> None:
    traces, count = [f"trace{number}" for number in range(6)], 400
    found: list[tuple[str, list[Entry]]] = []

    async def follow(trace: str, after: str) -> None:
        # Begins when the trace has come this far, and reads from its beginning.
        async for entry in bus.read(trace):
            if entry.id == after:
                break
        found.append((trace, await rest(bus.read(trace))))

    async with bus.writer() as writer, anyio.create_task_group() as group:
        for trace in traces:
            for after in ("1-0", "1-3", "1-100", "1-250", "1-399", FINAL_ID):
                group.start_soon(follow, trace, after)
            group.start_soon(write, writer, trace, count)
    assert len(found) == 6 * len(traces)
    for trace, entries in found:
        assert_whole(entries, trace, count)


async def test_subscribers_that_pause_at_random_get_everything_too(bus: Bus) -> None:
    count = 3000
    found = []

    async def follow(pause_every: int) -> None:
        entries = []
        async for entry in bus.read("t"):
            entries.append(entry)
            if len(entries) % pause_every == 0:
                # Long enough for the buffer to fill.
                await until(lambda: has_passed(len(entries) + 500))
        found.append(entries)

    async def has_passed(seq: int) -> bool:
        return parse_id(await bus.tail_id("t")) >= min((1, seq), (1, count - 1))

    async with bus.writer() as writer, anyio.create_task_group() as group:
        for pause_every in (1000, 300, 77):
            group.start_soon(follow, pause_every)
        group.start_soon(write, writer, "t", count)
    for entries in found:
        assert_whole(entries, "t", count)
    assert len(found) == 3


async def test_new_traces_are_read_without_a_look_at_each(bus: Bus) -> None:
    """However far each of them has come by then, or another has read it."""
    count = 40
    before = await calls_of_xread(bus)
    async with bus.writer() as writer:
        subscriptions = [bus.read(f"t{number}", "start") for number in range(count)]
        for subscription in subscriptions:
            subscription.expect(new=True)
        for number in range(count):
            # From none to more than a buffer holds.
            await write(writer, f"t{number}", number * 12)
        found: dict[int, list[Entry]] = {}

        async def read(number: int) -> None:
            found[number] = await rest(subscriptions[number])

        async with anyio.create_task_group() as group:
            for number in range(count):
                group.start_soon(read, number)
        assert await calls_of_xread(bus) - before < count
        late = bus.read("t30", "start")
        late.expect(new=True)
        found[count] = await rest(late)
    for number in range(count):
        assert_whole(found[number], f"t{number}", number * 12)
    assert found[count] == found[30]


@pytest.mark.parametrize(("interval_s", "beside", "fewer"), [(0.0, 0, False), (0.3, 0, True), (None, 99, True)])
async def test_a_reader_with_an_interval_reads_seldom(
    embedded: str, prefix: str, interval_s: float | None, beside: int, fewer: bool
) -> None:
    """Without a number, the interval grows with the streams that are followed: `beside` this one."""
    count = 300
    async with Bus.open(embedded, prefix=prefix, read_interval_s=interval_s) as bus, Bus.open(embedded) as other:
        found: list[Entry] = []

        async def follow() -> None:
            found.extend(await rest(bus.read("t", "start")))
            group.cancel_scope.cancel()

        async def wait_beside(number: int, *, task_status: anyio.abc.TaskStatus[None]) -> None:
            """Follow a stream that has one entry, and no end."""
            subscription = bus.read(f"beside{number}", "start")
            await anext(subscription)
            task_status.started()
            await anext(subscription)

        async with bus.writer() as writer, anyio.create_task_group() as group:
            for number in range(beside):
                await writer.append(f"beside{number}", 1, 0, b"0")
                await group.start(wait_beside, number)
            group.start_soon(follow)
            await until_blocked(other)
            before = await calls_of_xread(other)
            for seq in range(count):
                # Redis has an entry before the next is written.
                await writer.append("t", 1, seq, f"t {seq}".encode())
                await other.command("PING")
            await writer.append("t", 1, count, f"t {count}".encode(), final=True)
        assert_whole(found, "t", count)
        assert (await calls_of_xread(other) - before < count / 5) is fewer


async def test_what_is_too_much_for_the_reader_at_once_is_read_one_by_one(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Link.execute

    async def execute(self: Link, *commands: Sequence[Any], **options: Any) -> list[Any]:
        # "XREAD COUNT n BLOCK t STREAMS key... id...": of no more than four streams the reply comes in time.
        if commands[0][0] == "XREAD" and "BLOCK" in commands[0] and len(commands[0]) > 6 + 2 * 4:
            raise TimeoutError
        return await usual(self, *commands, **options)

    monkeypatch.setattr(Link, "execute", execute)
    async with bus.writer() as writer:
        subscriptions = [bus.read(f"t{number}", "start") for number in range(12)]
        found: dict[int, list[Entry]] = {}

        async def read(number: int) -> None:
            found[number] = await rest(subscriptions[number])

        async with anyio.create_task_group() as group:
            for number, subscription in enumerate(subscriptions):
                subscription.expect(new=True)
                group.start_soon(read, number)
                await write(writer, f"t{number}", 20)
    for number in range(12):
        assert_whole(found[number], f"t{number}", 20)


async def test_many_subscriptions_share_one_connection(
    embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its wait is not over between two looks at it.
    monkeypatch.setattr("tracewire_bus.events.reader._BLOCK_S", 3600.0)
    async with Bus.open(embedded, prefix=prefix) as bus, Bus.open(embedded, prefix=prefix) as watcher:
        before = {client["id"] for client in await clients(watcher)} | {client["id"] for client in await clients(bus)}
        found: list[list[Entry]] = []

        async def follow(trace: str) -> None:
            found.append(await rest(bus.read(trace)))

        async with watcher.writer() as writer, anyio.create_task_group() as group:
            for number in range(300):
                group.start_soon(follow, f"t{number % 100}")
            await until_blocked(watcher)
            # All have come to their stream's end: the reader asks for a hundred streams at once.
            await until(lambda: reads(watcher, bus, 100))
            now = [client for client in await clients(watcher) if client["id"] not in before]
            assert sum(client["cmd"] == "xread" and "b" in client["flags"] for client in now) == 1
            # The writer's own, the reader's, and those of short commands.
            assert len(now) <= 2 + 8
            async with anyio.create_task_group() as writers:
                for number in range(100):
                    writers.start_soon(write, writer, f"t{number}", 3)
        assert len(found) == 300
        assert all(len(entries) == 4 for entries in found)


async def _is(value: object) -> bool:
    return bool(value)


async def test_a_reader_that_may_not_be_woken_reconnects(
    bus: Bus, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracewire_bus.events.reader._BLOCK_S", 3600.0)
    await bus.command("ACL", "SETUSER", "reader", "reset", "on", ">secret", "~*", "+@all", "-client")
    url = bus.url.replace("unix://", "unix://reader@") + "?password=secret"
    async with Bus.open(url, prefix=prefix) as other, bus.writer() as writer, anyio.create_task_group() as group:
        found: list[list[Entry]] = []

        async def follow(trace: str) -> None:
            found.append(await rest(other.read(trace)))

        for trace in ("a", "b", "c"):
            group.start_soon(follow, trace)
            await until_blocked(bus)
        for trace in ("a", "b", "c"):
            await write(writer, trace, 3)
        # And not when one wait of the reader is over.
        await until(lambda: _is(len(found) == 3))


async def test_a_stream_that_breaks_under_a_reader_hurts_nobody_else(bus: Bus) -> None:
    good, bad = bus.read("good"), bus.read("bad")
    await anext_is_waited_for(bus, good)
    await anext_is_waited_for(bus, bad)
    await bus.command("SET", bus.keys.events("bad"), "no stream")
    async with bus.writer() as writer, anyio.create_task_group() as group:

        async def fail() -> None:
            with pytest.raises(BusError, match="WRONGTYPE"):
                await anext(bad)

        group.start_soon(fail)
        group.start_soon(write, writer, "good", 3)
        assert_whole(await rest(good), "good", 3)


async def test_connections_that_break_lose_and_repeat_nothing(bus: Bus, prefix: str, tmp_path: Path) -> None:
    count = 2000
    async with proxy(bus.url, tmp_path) as way, Bus.open(way.url, prefix=prefix) as far:
        found: list[list[Entry]] = []

        async def follow(since: str) -> None:
            found.append(await rest(far.read("t", since)))

        async def disturb() -> None:
            for seq in range(200, count, 300):
                await until(lambda wanted=seq: has_come_to(wanted))
                await way.cut()

        async def has_come_to(seq: int) -> bool:
            return parse_id(await bus.tail_id("t")) >= (1, seq)

        async with far.writer() as writer, anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(follow, "start")
            group.start_soon(disturb)
            group.start_soon(write, writer, "t", count)
        assert len(found) == 3
        for entries in found:
            assert_whole(entries, "t", count)
