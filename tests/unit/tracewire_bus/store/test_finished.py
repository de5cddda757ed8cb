"""Finished traces in all: what is counted, what is dropped, and what is said to those who still read it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

import tracewire
from tests.support.redis.servers import BINARIES, running_servers
from tests.support.scripted_engine import acts, info, serving
from tests.support.stepping import free
from tests.support.until import until
from tracewire import Client, TraceForgotten
from tracewire_bus.bus import Bus, BusError, StreamGone
from tracewire_bus.events import reader, subscription
from tracewire_bus.wire.messages import Failure

PATIENCE = 60


FAILURE = Failure(type="Test", message="for a test")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is gone is looked for often, and taken for gone soon."""
    monkeypatch.setattr(reader, "CHECK_S", 0.05)
    monkeypatch.setattr(reader, "_BLOCK_S", 0.2)
    monkeypatch.setattr(subscription, "GONE_S", 0.2)


@pytest.fixture
async def client(embedded: str, prefix: str) -> AsyncIterator[Client]:
    """A client on the session's Redis."""
    async with tracewire.connect(embedded, prefix=prefix) as client:
        yield client


async def taken(bus: Bus, *traces: str) -> int:
    """What Redis says that these take, in bytes."""
    keys, total = bus.keys, 0
    for trace in traces:
        for key in (keys.events(trace), keys.record(trace), keys.snapshot(trace), keys.blobs(trace)):
            total += await bus.command("MEMORY", "USAGE", key, "SAMPLES", 0) or 0
    return total


async def there(bus: Bus, *traces: str) -> list[str]:
    """Which of these are there."""
    return [trace for trace in traces if await bus.exists(trace)]


@pytest.mark.parametrize("clustered", [False, True], ids=["one server", "cluster"])
async def test_the_oldest_go_first_and_no_more_than_must(embedded: str, prefix: str, clustered: bool) -> None:
    """By number and by bytes, over all hash tags, whoever ended them."""
    async with running_servers(next(iter(BINARIES))) as servers:
        url = (await servers.cluster(3)).url if clustered else embedded
        async with Bus.open(url, prefix=prefix) as bus:
            names = [f"t{number}" for number in range(150)]
            async with bus.writer() as writer:
                for number, name in enumerate(names):
                    if number % 3:
                        await writer.append(name, 1, 0, b"x" * 500)
                        await writer.append(name, 1, 1, b"the end", final=True)
                    else:
                        await bus.records.end(name, "failed", FAILURE)
                    # The clock that orders them counts milliseconds.
                    await anyio.sleep(0.002)
                await writer.append("running", 1, 0, b"begun")
            count, size = await bus.finished.total()
            assert count == len(names)
            assert size == await taken(bus, *names)
            assert await bus.finished.drop_beyond(0, 0) == 0
            assert await bus.finished.drop_beyond(len(names), size) == 0
            assert await bus.finished.drop_beyond(100, 0) == 50
            assert await there(bus, *names) == names[50:]
            least = await taken(bus, *names[-20:])
            assert await bus.finished.drop_beyond(0, least) == 80
            assert await there(bus, *names) == names[-20:]
            assert await bus.finished.total() == (20, least)
            assert await there(bus, "running") == ["running"]
            assert await bus.finished.drop_beyond(1, 1) == 20
            assert await bus.finished.total() == (0, 0)
            assert await there(bus, "running") == ["running"]


async def test_what_has_expired_is_counted_no_more(embedded: str, prefix: str) -> None:
    async with Bus.open(embedded, prefix=prefix, retention_s=1) as bus:
        for number in range(20):
            await bus.records.end(f"t{number}", "failed", FAILURE)
        await until(lambda: _none(bus))
        assert await bus.finished.total() == (0, 0)
        # Nor is anything left of the lists, should nobody look.
        await until(lambda: _no_lists(bus))


async def _none(bus: Bus) -> bool:
    return not await there(bus, *(f"t{number}" for number in range(20)))


async def _no_lists(bus: Bus) -> bool:
    lists = [name for tag in bus.keys.tags for name in (bus.keys.ended(tag), bus.keys.ended_bytes(tag))]
    return not await bus.command("EXISTS", *lists)


async def test_ends_by_themselves_let_out_what_has_expired(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list grows no longer than what is there, though nobody has set a bound, and so nobody looks."""
    same = [name for name in (f"t{number}" for number in range(5000)) if bus.keys.tag(name) == "t7"][:40]
    async with Bus.open(bus.url, prefix=bus.keys.prefix, retention_s=1) as brief:
        for name in same[:-5]:
            await brief.records.end(name, "failed", FAILURE)
        await until(lambda: _gone(bus, same))
        # Somebody who keeps them for longer has kept the list.
        for name in same[-5:]:
            await bus.records.end(name, "failed", FAILURE)
    assert await bus.command("ZCARD", bus.keys.ended("t7")) <= len(same) - 4 * 5 + 5


async def _gone(bus: Bus, names: list[str]) -> bool:
    return not await there(bus, *names)


async def test_two_who_drop_at_once_drop_no_more_than_one(bus: Bus, embedded: str, prefix: str) -> None:
    names = [f"t{number}" for number in range(200)]
    for name in names:
        await bus.records.end(name, "failed", FAILURE)
        await anyio.sleep(0.001)
    dropped: list[int] = []

    async def drop(one: Bus) -> None:
        dropped.append(await one.finished.drop_beyond(120, 0))

    async with Bus.open(embedded, prefix=prefix) as other, anyio.create_task_group() as group:
        for one in (bus, other, bus, other):
            group.start_soon(drop, one)
    assert sum(dropped) == 80
    assert len(await there(bus, *names)) == 120


async def test_a_trace_that_runs_is_never_dropped_whatever_the_list_says(bus: Bus) -> None:
    async with bus.writer() as writer:
        await writer.append("running", 1, 0, b"begun")
        await bus.records.end("over", "failed", FAILURE)
        tag = bus.keys.tag("running")
        # As if it had ended, and were the first to go.
        seconds, _ = await bus.command("TIME")
        await bus.command("ZADD", bus.keys.ended(tag), (int(seconds) + 60) * 1000, "running")
        assert (await bus.finished.total())[0] == 2
        assert await bus.finished.drop_beyond(1, 0) == 0
        assert (await bus.finished.total())[0] == 1
        assert await there(bus, "running", "over") == ["running", "over"]


async def test_who_reads_on_is_told_and_does_not_wait_for_ever(bus: Bus) -> None:
    """One in the middle of it, one that had not begun to read, and one at its end whom its end never reached."""
    async with bus.writer() as writer:
        for seq in range(600):
            await writer.append("t", 1, seq, b"%d" % seq)
        middle, unread, waiting = bus.read("t"), bus.read("t"), bus.read("t", "1-599")
        assert (await anext(middle)).id == "1-0"
        unread.expect()
        told: list[str] = []

        async def wait() -> None:
            with pytest.raises(StreamGone) as gone:
                await anext(waiting)
            told.append(gone.value.since)

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await until(lambda: _attached(waiting))
            # As if it went in the moment in which it ended.
            await bus.command("DEL", bus.keys.events("t"))
    assert told == ["1-599"]
    with anyio.fail_after(PATIENCE), pytest.raises(StreamGone) as gone:
        async for _ in middle:
            pass
    # What it had in its buffer it got.
    assert gone.value.since.startswith("1-")
    with anyio.fail_after(PATIENCE), pytest.raises(StreamGone, match="its retention was over"):
        await anext(unread)


async def _attached(subscription: object) -> bool:
    return bool(subscription._attached)  # type: ignore[attr-defined]


async def test_one_that_has_not_begun_is_still_waited_for(bus: Bus) -> None:
    async with bus.writer() as writer, anyio.create_task_group() as group:
        waiting = bus.read("t")
        found: list[str] = []

        async def wait() -> None:
            found.append((await anext(waiting)).id)

        group.start_soon(wait)
        await anyio.sleep(3 * subscription.GONE_S)
        await writer.append("t", 1, 0, b"begun")
    assert found == ["1-0"]


async def test_engines_drop_what_is_too_much_and_readers_are_told_by_name(client: Client, bus: Bus) -> None:
    """Traces that run stay; a consumer that is too slow for what is kept gets an error, as do those who come late."""
    async with serving(bus, free(), retain_traces=3), serving(bus, free(), retain_traces=3):
        await client.models.get("tiny", timeout=PATIENCE)
        # Never gets a second token.
        running = client.trace("tiny", "hang", acts, max_tokens=9, trace_id="running", detach=True)
        await running.start()
        names = [f"t{number}" for number in range(7)]
        unread = client.subscribe("t0")
        for name in names:
            async with client.trace("tiny", "a", acts, max_tokens=3, trace_id=name, detach=True) as trace:
                with anyio.fail_after(PATIENCE):
                    if name == "t0":
                        await unread.start()
                    await trace.result()
        await until(lambda: _left(bus, names, 3))
        assert await there(bus, *names) == names[-3:]
        with anyio.fail_after(PATIENCE), pytest.raises(TraceForgotten, match="its retention was over") as forgotten:
            await anext(unread)
        assert (forgotten.value.trace_id, forgotten.value.since) == ("t0", "start")
        for late in (client.get_state("t0"), anext(client.subscribe("t0", since="1-1"))):
            with pytest.raises(tracewire.UnknownTrace):
                await late
        again = client.trace("tiny", "a", acts, max_tokens=3, trace_id="t0", detach=True)
        with pytest.raises(tracewire.TraceIdTaken, match="remembers only its id"):
            await again.start()
        assert await there(bus, "running") == ["running"]
        await client.cancel("running")
        with anyio.fail_after(PATIENCE), pytest.raises(tracewire.TraceFailed, match="cancelled"):
            await running.result()
        await running.aclose()


async def _left(bus: Bus, names: list[str], count: int) -> bool:
    return len(await there(bus, *names)) <= count


async def test_what_a_client_ends_is_kept_as_long_as_the_engines_keep_theirs(embedded: str, prefix: str) -> None:
    async with (
        Bus.open(embedded, prefix=prefix, retention_s=77) as bus,
        tracewire.connect(embedded, prefix=prefix) as client,
        serving(bus, free(), info(capacity=0)),
    ):
        model = await client.models.get("tiny", timeout=PATIENCE)
        assert model.info.retention_s == 77
        trace = client.trace("tiny", "hello", acts, max_tokens=2, detach=True)
        await trace.start()
        await client.cancel(trace.id)
        assert 70 <= await bus.command("TTL", bus.keys.events(trace.id)) <= 77
        assert 70 <= await bus.command("TTL", bus.keys.record(trace.id)) <= 77
        await trace.aclose()


async def test_who_may_not_ask_for_bytes_is_refused_at_start() -> None:
    async with running_servers(next(iter(BINARIES))) as servers:
        server = await servers.start()
        await server.ask("ACL", "SETUSER", "default", "-memory")
        async with Bus.open(server.url) as bus:
            with pytest.raises(BusError, match="MEMORY USAGE"):
                await bus.finished.check()
            # Traces end all the same.
            assert await bus.records.end("t", "failed", FAILURE)
            assert await bus.finished.total() == (1, 0)
