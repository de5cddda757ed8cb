"""The bus on a real Redis: nothing is lost, repeated or reordered, and nobody waits for anybody else."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.support.redis.proxy import proxy
from tests.support.until import until
from tracewire_bus.bus import (
    FINAL_ID,
    Bus,
    BusError,
    BusUnavailable,
    Entry,
    EntryTooLarge,
    Fenced,
    Keys,
    Subscription,
)
from tracewire_bus.events.appends import _AFTER, ENTRY_BYTES
from tracewire_bus.events.writer import Writer
from tracewire_bus.transport.link import Link
from tracewire_bus.wire.codec import decode_engine, encode, schema_text
from tracewire_bus.wire.ids import parse_id
from tracewire_bus.wire.messages import EngineInfo, Invoke, ModuleInfo, Submission


async def rest(subscription: Subscription) -> list[Entry]:
    """All entries to the end."""
    with anyio.fail_after(60):
        return [entry async for entry in subscription]


async def write(writer: Writer, trace: str, count: int, *, attempt: int = 1) -> None:
    """A trace of `count` events and a final."""
    for seq in range(count):
        await writer.append(trace, attempt, seq, f"{trace} {seq}".encode())
    await writer.append(trace, attempt, count, f"{trace} {count}".encode(), final=True)


def assert_whole(entries: list[Entry], trace: str, count: int, first: int = 0) -> None:
    assert [entry.data.decode() for entry in entries] == [f"{trace} {seq}" for seq in range(first, count + 1)]
    assert [entry.id for entry in entries] == [*(f"1-{seq}" for seq in range(first, count)), FINAL_ID]
    assert [entry.final for entry in entries] == [False] * (count - first) + [True]


def submission(trace: str = "t", model: str = "demo") -> Submission:
    return Submission(trace=trace, model=model, invokes=[Invoke(prompt="hello")])


# --- reading ----------------------------------------------------------------------------------------------------------


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


async def test_a_trace_that_does_not_exist_yet_is_waited_for(bus: Bus) -> None:
    found: list[list[Entry]] = []

    async def follow() -> None:
        found.append(await rest(bus.read("later")))

    async with bus.writer() as writer, anyio.create_task_group() as group:
        group.start_soon(follow)
        await until_blocked(bus)
        await write(writer, "later", 3)
    assert_whole(found[0], "later", 3)


async def clients(bus: Bus) -> list[dict[str, str]]:
    text = (await bus.command("CLIENT", "LIST")).decode()
    return [dict(field.partition("=")[::2] for field in line.split()) for line in text.splitlines()]


async def until_blocked(bus: Bus) -> None:
    """Until a connection waits in XREAD."""
    await until(lambda: _blocked(bus))


async def _blocked(bus: Bus) -> bool:
    return any(client["cmd"] == "xread" and "b" in client["flags"] for client in await clients(bus))


async def calls_of_xread(bus: Bus) -> int:
    stats = (await bus._connections.command("INFO", "commandstats")).decode()
    found = [line.partition("calls=")[2] for line in stats.splitlines() if line.startswith("cmdstat_xread:")]
    return int(found[0].partition(",")[0]) if found else 0


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


async def test_what_is_too_much_for_the_reader_at_once_is_read_one_by_one(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = Link.ask

    async def ask(self: Link, *commands: Sequence[Any], **options: Any) -> list[Any]:
        # "XREAD COUNT n BLOCK t STREAMS key... id...": of no more than four streams the reply comes in time.
        if commands[0][0] == "XREAD" and "BLOCK" in commands[0] and len(commands[0]) > 6 + 2 * 4:
            raise TimeoutError
        return await asks(self, *commands, **options)

    monkeypatch.setattr(Link, "ask", ask)
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


async def reads(watcher: Bus, bus: Bus, streams: int) -> bool:
    assert bus._reader is not None
    reader = bus._reader
    return len(reader._streams) == streams and reader._known == reader._taken_up and await _blocked(watcher)


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


async def anext_is_waited_for(bus: Bus, subscription: Subscription) -> None:
    """Bring a subscription to its stream's end, then stop asking."""
    with anyio.move_on_after(10) as scope:
        async with anyio.create_task_group() as group:

            async def ask() -> None:
                await anext(subscription)

            group.start_soon(ask)
            await until_blocked(bus)
            group.cancel_scope.cancel()
    assert not scope.cancelled_caught


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


async def test_closing_the_bus_closes_its_subscriptions(embedded: str, prefix: str) -> None:
    async with anyio.create_task_group() as group, Bus.open(embedded, prefix=prefix) as bus:
        subscription = bus.read("t")

        async def wait() -> None:
            with pytest.raises(anyio.ClosedResourceError):
                await anext(subscription)

        group.start_soon(wait)
        await until_blocked(bus)
    for use in (lambda: anext(subscription), lambda: bus.tail_id("t"), lambda: bus.submit(submission())):
        with pytest.raises(anyio.ClosedResourceError):
            await use()
    with pytest.raises(anyio.ClosedResourceError):
        bus.read("t")


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


# --- writing ----------------------------------------------------------------------------------------------------------


async def test_a_stale_attempt_is_fenced_and_so_is_everything_after_the_final(bus: Bus) -> None:
    async with bus.writer() as writer:
        assert await writer.append("t", 1, 0, b"a") == "1-0"
        assert await writer.append("t", 2, 0, b"b") == "2-0"
        for attempt, seq, what in [(1, 1, "a stale attempt"), (2, 0, "a repeat"), (1, 0, "both")]:
            with pytest.raises(Fenced):
                await writer.append("t", attempt, seq, what.encode())
        assert await writer.append("t", 2, 1, b"end", final=True) == FINAL_ID
        for final in (False, True):
            with pytest.raises(Fenced):
                await writer.append("t", 3, 0, b"too late", final=final)
    assert [entry.data for entry in await rest(bus.read("t"))] == [b"a", b"b", b"end"]


async def test_one_fenced_append_does_not_touch_the_others(bus: Bus) -> None:
    outcomes: dict[str, object] = {}

    async def append(trace: str, seq: int) -> None:
        try:
            outcomes[f"{trace}{seq}"] = await writer.append(trace, 1, seq, b"")
        except Fenced:
            outcomes[f"{trace}{seq}"] = Fenced

    async with bus.writer() as writer:
        await writer.append("a", 1, 5, b"")
        async with anyio.create_task_group() as group:
            for trace in ("a", "b"):
                for seq in range(5, 8):
                    group.start_soon(append, trace, seq)
    assert outcomes == {"a5": Fenced, "a6": "1-6", "a7": "1-7", "b5": "1-5", "b6": "1-6", "b7": "1-7"}


async def test_what_follows_an_event_that_is_not_there_is_refused(bus: Bus) -> None:
    """In a pipeline an event before it may have been refused, and memory be there again by the time it comes."""
    key = bus.keys.events("t")

    async def after(behind: str, id_: str) -> None:
        await bus.command(*_AFTER((key,), id_, schema_text(), b"x", behind))

    async with bus.writer() as writer:
        await writer.append("t", 1, 0, b"begun")
        await after("1-0", "1-1")
        for behind in ("1-2", "1-0"):
            with pytest.raises(BusError, match=f"BEHIND {behind}"):
                await after(behind, "1-3")
    assert [id_ for id_, _ in await bus.command("XRANGE", key, "-", "+")] == [b"1-0", b"1-1"]


async def test_appends_that_wait_together_share_a_round_trip(bus: Bus) -> None:
    async def calls() -> int:
        text = (await bus.command("INFO", "stats")).decode()
        return int(text.partition("total_reads_processed:")[2].split()[0]) if "total_reads_processed" in text else -1

    async with bus.writer() as writer:
        await writer.append("warm", 1, 0, b"")
        before = await calls()
        async with anyio.create_task_group() as group:
            for trace in range(200):
                group.start_soon(writer.append, f"t{trace}", 1, 0, b"x")
        if before >= 0:
            assert await calls() - before < 40


async def test_events_of_one_trace_keep_their_order_though_nobody_waits(bus: Bus) -> None:
    async with bus.writer() as writer, anyio.create_task_group() as group:
        for seq in range(1000):
            group.start_soon(writer.append, "t", 1, seq, str(seq).encode())
    async with bus.writer() as writer:
        await writer.append("t", 1, 1000, b"1000", final=True)
    assert [int(entry.data) for entry in await rest(bus.read("t"))] == list(range(1001))


async def test_a_cancelled_append_is_carried_out_all_the_same(bus: Bus) -> None:
    async with bus.writer() as writer:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await writer.append("t", 1, 0, b"")
        assert scope.cancelled_caught
        await writer.append("t", 1, 1, b"", final=True)
    assert len(await rest(bus.read("t"))) == 2


async def test_the_final_lets_the_trace_expire(embedded: str, prefix: str) -> None:
    async with Bus.open(embedded, prefix=prefix, retention_s=100) as bus, bus.writer() as writer:
        await bus.submit(submission())
        await writer.append("t", 1, 0, b"")
        assert await bus.command("TTL", bus.keys.events("t")) > 6 * 24 * 3600
        await writer.append("t", 1, 1, b"", final=True)
        for key in (bus.keys.events("t"), bus.keys.record("t")):
            assert 0 < await bus.command("TTL", key) <= 100


async def test_bad_appends_are_refused_before_they_are_sent(bus: Bus) -> None:
    async with bus.writer() as writer:
        for attempt, seq in ((0, 0), (1, -1)):
            with pytest.raises(ValueError, match="attempts count from 1"):
                await writer.append("t", attempt, seq, b"")
        with pytest.raises(EntryTooLarge, match="an entry holds"):
            await writer.append("t", 1, 0, bytes(ENTRY_BYTES + 1))
    with pytest.raises(anyio.ClosedResourceError):
        await writer.append("t", 1, 0, b"")
    assert not await bus.exists("t")


async def test_what_redis_refuses_is_an_error_of_that_append(bus: Bus) -> None:
    await bus.command("SET", bus.keys.events("t"), "no stream")
    async with bus.writer() as writer:
        with pytest.raises(BusError, match="WRONGTYPE"):
            await writer.append("t", 1, 0, b"")
        await writer.append("other", 1, 0, b"")
    with pytest.raises(BusError, match="WRONGTYPE"):
        await anext(bus.read("t"))


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


# --- faults -----------------------------------------------------------------------------------------------------------


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


async def test_an_append_whose_answer_was_lost_succeeds_once(bus: Bus, prefix: str, tmp_path: Path) -> None:
    async with proxy(bus.url, tmp_path) as way, Bus.open(way.url, prefix=prefix) as far, far.writer() as writer:
        way.swallow = b"precious"
        assert await writer.append("t", 1, 0, b"precious") == "1-0"
        assert way.swallowed.is_set()
        way.swallow = b"the end"
        assert await writer.append("t", 1, 1, b"the end", final=True) == FINAL_ID
        with pytest.raises(Fenced):
            await writer.append("t", 1, 2, b"more")
        # Someone else's event under the same id is not taken for ours.
        await bus.command("XADD", bus.keys.events("u"), "1-0", "v", "1.0", "d", "other")
        way.swallow = b"mine"
        with pytest.raises(Fenced):
            await writer.append("u", 1, 0, b"mine")
    assert [entry.data for entry in await rest(bus.read("t"))] == [b"precious", b"the end"]


async def test_while_redis_is_away_reading_and_appending_wait(bus: Bus, prefix: str, tmp_path: Path) -> None:
    async with proxy(bus.url, tmp_path) as way, Bus.open(way.url, prefix=prefix, patience_s=0.2) as far:
        subscription = far.read("t")
        async with far.writer() as writer, anyio.create_task_group() as group:
            await anext_is_waited_for(bus, subscription)
            way.away = True
            await way.cut()
            with pytest.raises(BusUnavailable, match="is away"):
                await far.exists("t")
            with pytest.raises(BusUnavailable):
                await far.submit(submission())
            assert await far.queue.take("demo", "e", 1, 10) == []
            group.start_soon(write, writer, "t", 5)
            late: list[list[Entry]] = []

            async def follow() -> None:
                late.append(await rest(far.read("t")))

            group.start_soon(follow)
            # Long enough for the patience of a short command to end.
            with anyio.move_on_after(0.5):
                await anext(subscription)
                pytest.fail("nothing can come")
            way.away = False
            assert_whole(await rest(subscription), "t", 5)
        assert_whole(late[0], "t", 5)


async def test_nobody_there_is_said_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(BusUnavailable, match="no Redis answers at unix:///nowhere"):
        async with Bus.open("unix:///nowhere"):
            pytest.fail("not reached")
    with pytest.raises(ConnectionError, match=r"redis://user:\*\*\*@127\.0\.0\.1:1"):
        async with Bus.open("redis://user:secret@127.0.0.1:1"):
            pytest.fail("not reached")
    assert time.monotonic() - started < 5


async def test_a_wrong_password_is_said_without_it(bus: Bus) -> None:
    url = bus.url.replace("unix://", "unix://nobody@") + "?password=guess"
    with pytest.raises(BusError, match="credentials") as caught:
        async with Bus.open(url):
            pytest.fail("not reached")
    assert "guess" not in str(caught.value)
    assert not isinstance(caught.value, BusUnavailable)


def test_a_url_of_another_kind_is_refused() -> None:
    for url in ("http://localhost", "localhost:6379", ""):
        with pytest.raises(ValueError, match="begins with redis://"):
            Bus.open(url)


# --- nothing is left behind -------------------------------------------------------------------------------------------


async def test_no_task_and_no_connection_outlives_a_bus(bus: Bus, prefix: str) -> None:
    await bus.exists("t")
    tasks, connections = asyncio.all_tasks(), {client["id"] for client in await clients(bus)}
    async with Bus.open(bus.url, prefix=prefix) as other:
        waiting = [other.read(f"t{number}") for number in range(5)]
        async with other.writer() as writer:
            await write(writer, "t0", 3)
            for subscription in waiting:
                await anext_is_waited_for_or_over(bus, subscription)
            await other.queue.take("demo", "e", 1, 0)
        assert len(asyncio.all_tasks()) > len(tasks)
    assert asyncio.all_tasks() == tasks
    await until(lambda: same_connections(bus, connections))


async def anext_is_waited_for_or_over(bus: Bus, subscription: Subscription) -> None:
    if subscription.key.endswith("t0"):
        await rest(subscription)
    else:
        await anext_is_waited_for(bus, subscription)


async def same_connections(bus: Bus, expected: set[str]) -> bool:
    return {client["id"] for client in await clients(bus)} == expected


async def test_a_bus_may_be_closed_by_another_task(embedded: str, prefix: str) -> None:
    buses: list[Bus] = []

    async def enter() -> None:
        buses.append(await Bus.open(embedded, prefix=prefix).__aenter__())

    async with anyio.create_task_group() as group:
        group.start_soon(enter)
    async with buses[0].writer() as writer:
        await write(writer, "t", 2)
    assert len(await rest(buses[0].read("t"))) == 3
    await buses[0].aclose()
    await buses[0].aclose()


async def test_commands_cancelled_at_any_moment_break_nothing(bus: Bus) -> None:
    async with bus.writer() as writer:
        await write(writer, "t", 3)
    for step in range(200):
        with anyio.move_on_after(step * 0.00001):
            await bus.tail_id("t")
    assert await bus.tail_id("t") == FINAL_ID
    assert len(await clients(bus)) < 30


# --- registry ---------------------------------------------------------------------------------------------------------


async def test_engines_are_listed_while_they_live(bus: Bus) -> None:
    infos = [
        EngineInfo(engine=name, model=model, started_at=started)
        for name, model, started in [("z", "a", 1.0), ("y", "a", 2.0), ("x", "b", 0.0)]
    ]
    for info in reversed(infos):
        await bus.registry.register(info)
    assert await bus.registry.list() == infos
    infos[0].running = 3
    await bus.registry.register(infos[0])
    assert await bus.registry.list() == infos
    await bus.registry.unregister("y")
    assert [info.engine for info in await bus.registry.list()] == ["z", "x"]


async def test_an_engine_without_a_heartbeat_expires_and_may_come_back(bus: Bus) -> None:
    gone, alive = EngineInfo(engine="gone", model="m"), EngineInfo(engine="alive", model="m")
    await bus.registry.register(alive)
    await bus.registry.register(gone, ttl_s=0.05)

    async def only_alive() -> bool:
        return await bus.registry.list() == [alive]

    await until(only_alive)
    assert await bus.command("SMEMBERS", bus.keys.engines()) == [b"alive"]
    await bus.registry.register(gone)
    assert len(await bus.registry.list()) == 2


async def test_a_heartbeat_carries_no_tree_and_a_tree_is_read_once(bus: Bus, embedded: str, prefix: str) -> None:
    tree = {"modules": [ModuleInfo(f"m.{number}", "M") for number in range(1000)], "attributes": {"M": ["weight"]}}
    infos = [EngineInfo(engine=f"e{number}", model="m", started_at=float(number), **tree) for number in range(5)]
    async with Bus.open(embedded, prefix=prefix) as reader:

        async def read_and_written(action: Callable[[], Awaitable[Any]]) -> tuple[int, int]:
            before = await _network(bus)
            await action()
            after = await _network(bus)
            return after[1] - before[1], after[0] - before[0]

        async def beat() -> None:
            for info in infos:
                info.running += 1
                await bus.registry.register(info)

        _, first = await read_and_written(beat)
        _, again = await read_and_written(beat)
        size = len(encode(infos[0]))
        assert first > 5 * size
        assert again < size
        looked, _ = await read_and_written(reader.registry.list)
        assert size < looked < 2 * size
        looked, _ = await read_and_written(reader.registry.list)
        assert looked < size
        assert await reader.registry.list() == infos

        # What earlier versions read is renewed as well, and written anew when more than a number changes.
        assert decode_engine(await bus.command("GET", bus.keys.engine("e0"))).running == 1
        infos[0].state = "draining"
        await bus.registry.register(infos[0])
        assert decode_engine(await bus.command("GET", bus.keys.engine("e0"))) == infos[0]
        # A Redis that has lost it is told everything.
        await bus.command("DEL", *(bus.keys.engine(info.engine) for info in infos), bus.keys.heartbeat("e1"))
        await beat()
        assert await reader.registry.list() == infos
        assert decode_engine(await bus.command("GET", bus.keys.engine("e1"))) == infos[1]

        # The tree that one engine no longer has is read from another, and one that changes under a name anew.
        await bus.registry.unregister("e0")
        infos[1].modules = [ModuleInfo("n", "N")]
        await bus.registry.register(infos[1])
        assert await reader.registry.list() == infos[1:]


async def _network(bus: Bus) -> tuple[int, int]:
    """Bytes that Redis has read from and written to the network."""
    stats = bytes(await bus.command("INFO", "stats")).decode()
    lines = dict(line.split(":", 1) for line in stats.splitlines() if ":" in line)
    return int(lines["total_net_input_bytes"]), int(lines["total_net_output_bytes"])


async def test_an_engine_of_an_earlier_version_is_listed_too(bus: Bus) -> None:
    early, late = EngineInfo(engine="early", model="m"), EngineInfo(engine="late", model="m", started_at=1.0)
    await bus.command("SET", bus.keys.engine("early"), encode(early))
    await bus.command("SADD", bus.keys.engines(), "early")
    await bus.registry.register(late)
    assert await bus.registry.list() == [early, late]
    assert await bus.registry.alive("early", "late") == {"early", "late"}


async def test_an_engine_that_nobody_understands_is_left_out(bus: Bus) -> None:
    await bus.command("SADD", bus.keys.engines(), "strange")
    await bus.command("SET", bus.keys.engine("strange"), b"\xc1")
    await bus.registry.register(EngineInfo(engine="e", model="m"))
    assert [info.engine for info in await bus.registry.list()] == ["e"]


def test_keys_of_a_trace_share_a_tag_and_so_do_those_of_a_queue() -> None:
    keys = Keys("p")

    def tag(key: str) -> str:
        return key[key.index("{") : key.index("}")]

    for trace in ("a", "b", "täxt", "{x}"):
        assert tag(keys.events(trace)) == tag(keys.record(trace))
    assert len({tag(keys.events(str(number))) for number in range(2000)}) == 64
    parts = ("entries", "data", "taken", "state", "turns", "bell", "leases", "client:c", "lease:l", "engine:e")
    queue = [*(keys.queue("m", part) for part in parts), keys.submitted("m", "t")]
    assert {tag(key) for key in queue} == {"{m"}
    assert all(key.startswith("p:") for key in (*queue, keys.events("t"), keys.engines(), keys.dead()))
