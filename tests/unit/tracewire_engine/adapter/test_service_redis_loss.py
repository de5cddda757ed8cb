"""A Redis that dies, comes back with less, is replaced by a replica that lagged, or has no memory left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

import tracewire
from tests.support.redis.durable import Server, server
from tests.support.redis.process import free_port
from tests.support.redis.proxy import proxy
from tests.support.redis_loss import _settled, ids, limit, played
from tests.support.scripted_engine import ScriptedEngine, acts, info, serving
from tests.support.stepping import Gate, free, some, whole
from tests.support.until import until
from tracewire import Final, Output, Restarted
from tracewire.traces.presence import Presence
from tracewire_bus import recovery
from tracewire_bus.bus import Bus
from tracewire_bus.events import restore

PATIENCE = 60


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a while waits less."""
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.1)
    monkeypatch.setattr(restore, "CHECK_S", 0.05)
    monkeypatch.setattr("tracewire.traces.presence.GUARD_POLL_S", 0.05)


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[Server]:
    """A server with a log that is on the disk every second."""
    async with server(tmp_path / "redis") as one:
        yield one


@pytest.mark.usefixtures("_soon")
async def test_with_every_write_on_the_disk_nothing_is_lost(tmp_path: Path) -> None:
    async with (
        server(tmp_path / "redis", appendfsync="always") as redis,
        played(redis.url) as (gate, client, _, _),
        client.trace("tiny", "hello", acts, max_tokens=60, detach=True) as trace,
    ):
        for _ in range(3):
            gate.step(15)
            await some(trace, 15)
            redis.kill()
            gate.step(3)
            await redis.start()
            await some(trace, 3)
        gate.open()
        assert not any(isinstance(event, Restarted) for event in await whole(client, trace.id, "hello", 60))


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("what", ["events", "everything", "end"])
async def test_what_a_killed_redis_lost_is_appended_again(redis: Server, what: str) -> None:
    """Also the record and the queue entry, if it forgot those, and when nothing more was to be appended."""
    described = info()
    async with (
        played(redis.url, described) as (gate, client, bus, adapter),
        tracewire.connect(redis.url) as late,
    ):
        before = redis.written
        trace = client.trace(
            "tiny", "hello", acts, max_tokens=30, detach=True, live={"alpha": 1.0}, deadline=600, trace_id="t"
        )
        await trace.start()
        gate.step(5)
        await some(trace, 5)
        if what != "everything":
            before = redis.written
        gate.step(10)
        await some(trace, 10)
        if what == "end":
            gate.open()
            await trace.result()
            await redis.lose(before)
            await until(lambda: bus.records.ended("t"))
            await until(lambda: not adapter.busy)
        else:
            await trace.steer(alpha=2.0)
            await until(lambda: adapter._claims.runs["t"].live.version == 1)
            await trace.pause(by="me")
            await until(lambda: adapter._claims.runs["t"].pause.paused)
            await redis.lose(before)
            keys = bus.keys

            async def claimed() -> bool:
                taken = await bus.command("HGET", keys.queue("tiny", "taken"), "t")
                record = await bus.command("HMGET", keys.record("t"), "e", "a", "s", "v")
                name = described.engine.encode()
                return taken == name and record == [name, b"1", b"running", b"1"]

            await until(claimed)
            assert (await client.get_live("t")).values == {"alpha": 2.0}
            assert await trace.resume()
            assert await bus.queue.waiting("tiny") == 0
            assert await bus.command("ZCARD", keys.deadlines(keys.tag("t"))) == 1
            gate.open()
        events = await whole(late, "t", "hello", 30)
        assert not any(isinstance(event, Restarted) for event in events)
        # Who read on meanwhile has the same.
        result = await trace.result()
        assert result.token_ids == (await late.get_state("t")).token_ids
        await until(lambda: _settled(bus))
        assert await bus.command("TTL", bus.keys.events("t")) <= 3600
        await trace.aclose()


@pytest.mark.usefixtures("_soon")
async def test_a_redis_that_keeps_dying_among_many_traces(redis: Server) -> None:
    count, tokens = 20, 40
    async with played(redis.url) as (gate, client, _, _):
        traces = [client.trace("tiny", f"prompt {one}", acts, max_tokens=tokens, detach=True) for one in range(count)]
        for trace in traces:
            await trace.start()
        for trace in traces:
            await trace.accepted()
        for _ in range(3):
            since = redis.written
            gate.step(8)
            for trace in traces[::3]:
                await some(trace, 4)
            await redis.lose(since)
        gate.open()
        for one, trace in enumerate(traces):
            events = await whole(client, trace.id, f"prompt {one}", tokens)
            assert not any(isinstance(event, Restarted) for event in events)
            assert (await trace.result()).token_ids == (await client.get_state(trace.id)).token_ids
            await trace.aclose()


@pytest.mark.usefixtures("_soon")
async def test_a_replica_that_lagged_gets_what_it_lacks(tmp_path: Path) -> None:
    gate = Gate()
    port = free_port()
    async with (
        server(tmp_path / "one", port=port) as one,
        server(tmp_path / "two", replicaof=("127.0.0.1", port)) as two,
        proxy(one.url, tmp_path) as way,
        Bus.open(two.url) as replica,
        tracewire.connect(way.url) as client,
        Bus.open(way.url) as bus,
        serving(bus, ScriptedEngine(gate)),
    ):
        await client.models.get("tiny", timeout=PATIENCE)
        trace = client.trace("tiny", "hello", acts, max_tokens=30, detach=True)
        await trace.start()
        gate.step(5)
        await some(trace, 5)

        async def followed() -> bool:
            return await replica.tail_id(trace.id) == await bus.tail_id(trace.id)

        await until(followed)
        # It hears of nothing that follows.
        await replica.command("REPLICAOF", "NO", "ONE")
        gate.step(10)
        await some(trace, 10)
        assert not await followed()
        one.kill()
        way.address = str(two.socket)
        await way.cut()
        gate.open()
        events = await whole(client, trace.id, "hello", 30)
        assert not any(isinstance(event, Restarted) for event in events)
        await trace.result()
        await trace.aclose()


@pytest.mark.usefixtures("_soon")
async def test_a_trace_of_which_too_much_is_lost_runs_again(redis: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "KEEP_BYTES", 1500)
    async with (
        played(redis.url) as (gate, client, _, _),
        client.trace("tiny", "hello", acts, max_tokens=30, detach=True) as trace,
    ):
        gate.step(5)
        await some(trace, 5)
        since = redis.written
        for _ in range(10):
            gate.step()
            await some(trace, 1)
        await redis.lose(since)
        gate.open()
        events = await whole(client, trace.id, "hello", 30)
        assert [event.attempt for event in events if isinstance(event, Restarted)] == [2]
        assert (await trace.result()).token_ids == (await client.get_state(trace.id)).token_ids


@pytest.mark.usefixtures("_soon")
async def test_what_redis_forgot_before_an_engine_took_it_is_submitted_again(redis: Server) -> None:
    async with tracewire.connect(redis.url) as client, Bus.open(redis.url) as bus:
        async with serving(bus, ScriptedEngine(Gate())):
            await client.models.get("tiny", timeout=PATIENCE)
        since = redis.written
        await bus.registry.register(info(), 600)
        async with client.trace("tiny", "hello", acts, max_tokens=5, live={"alpha": 1.0}) as trace:
            await redis.lose(since)
            async with serving(bus, free()):
                assert len((await trace.result()).token_ids) == 5
            presence: Presence = client._session.presence
            assert not presence._guarded


@pytest.mark.usefixtures("_soon")
async def test_while_redis_is_away_the_engine_is_held_and_loses_nothing(redis: Server, tmp_path: Path) -> None:
    gate, paces = Gate(), 0

    async def pace() -> None:
        nonlocal paces
        await gate()
        paces += 1

    engine = ScriptedEngine(pace)
    async with (
        proxy(redis.url, tmp_path) as way,
        tracewire.connect(redis.url) as client,
        Bus.open(way.url, patience_s=0.2) as bus,
        serving(bus, engine, buffer_bytes=20_000) as adapter,
    ):
        await client.models.get("tiny", timeout=PATIENCE)
        traces = [client.trace("tiny", f"prompt {one}", acts, max_tokens=3000, detach=True) for one in range(3)]
        for trace in traces:
            await trace.start()
            await trace.accepted()
        gate.step(5)
        for trace in traces:
            await some(trace, 5)
        way.away = True
        await way.cut()
        gate.open()
        await until(lambda: adapter.engine_paused)
        steps, paced = engine.steps, paces
        await until(lambda: paces > paced + 100)
        assert engine.steps == steps
        assert steps < 3000
        # One that is cancelled ends all the same.
        await client.cancel(traces[0].id)
        way.away = False
        for one, trace in enumerate(traces[1:], 1):
            await whole(client, trace.id, f"prompt {one}", 3000)
        final = [event async for event in client.subscribe(traces[0].id)][-1]
        assert isinstance(final, Final)
        assert final.status == "cancelled"
        # It is held again if the last events come faster than Redis takes them.
        await until(lambda: not adapter.engine_paused)
        for trace in traces:
            await trace.aclose()


@pytest.mark.usefixtures("_soon")
async def test_the_registry_says_that_an_engine_is_held(redis: Server) -> None:
    async with (
        played(redis.url, buffer_bytes=20_000, memory_patience_s=1000) as (gate, client, bus, adapter),
        client.trace("tiny", "hello", acts, max_tokens=2000, detach=True) as trace,
    ):
        gate.step(5)
        await some(trace, 5)
        await limit(bus, 1)
        gate.open()

        async def held() -> bool:
            return [one.state for one in await bus.registry.list()] == ["holding"]

        await until(held)
        assert adapter.engine_paused
        await limit(bus, 0)
        await whole(client, trace.id, "hello", 2000)


@pytest.mark.usefixtures("_soon")
async def test_traces_wait_for_memory_and_go_on(redis: Server) -> None:
    async with (
        played(redis.url, memory_patience_s=1000) as (gate, client, bus, _),
        client.trace("tiny", "hello", acts, max_tokens=20) as trace,
    ):
        gate.step(5)
        await some(trace, 5)
        last = await bus.tail_id(trace.id)
        await limit(bus, 1)
        gate.step(10)
        async with bus.writer() as other:
            # Somebody else's end fits, large or not.
            await other.append("a", 1, 0, b"begun")
            await other.append("a", 1, 1, b"the end", final=True)
            await other.append("b", 1, 0, b"x" * 100_000, final=True)
        assert await bus.tail_id(trace.id) == last
        await limit(bus, 0)
        gate.open()
        await whole(client, trace.id, "hello", 20)


@pytest.mark.usefixtures("_soon")
async def test_a_trace_that_waits_too_long_for_memory_ends_and_its_end_fits(redis: Server) -> None:
    async with played(redis.url, memory_patience_s=0.2) as (gate, client, bus, _):
        async with client.trace("tiny", "hello", acts, max_tokens=1000, live={"alpha": 1.0}) as trace:
            gate.step(5)
            await some(trace, 5)
            await limit(bus, 1)
            gate.open()
            with anyio.fail_after(PATIENCE), pytest.raises(tracewire.TraceFailed) as caught:
                await trace.result()
        assert caught.value.type == "BusFull"
        events = [event async for event in client.subscribe(trace.id)]
        assert ids(events) == [(1, seq) for seq in range(len(events))]
        assert sum(len(event.token_ids) for event in events if isinstance(event, Output)) >= 5
        assert await _settled(bus)
        await limit(bus, 0)
        async with client.trace("tiny", "again", acts, max_tokens=10, detach=True) as trace:
            await whole(client, trace.id, "again", 10)


@pytest.mark.usefixtures("_soon")
async def test_a_trace_that_waits_for_memory_can_be_cancelled(redis: Server) -> None:
    async with played(redis.url, memory_patience_s=1000) as (gate, client, bus, _):
        async with client.trace("tiny", "hello", acts, max_tokens=1000, detach=True) as trace:
            gate.step(5)
            await some(trace, 5)
            await limit(bus, 1)
            gate.step(5)
            assert await trace.cancel("why not")
            gate.open()
            events = [event async for event in client.subscribe(trace.id)]
        assert events[-1].status == "cancelled"
        assert ids(events) == [(1, seq) for seq in range(len(events))]
        assert await _settled(bus)


@pytest.mark.usefixtures("_soon")
async def test_an_engine_that_takes_what_redis_forgot_was_taken_does_no_harm(redis: Server) -> None:
    """The one that ran it and the one that found it waiting sort it out, and each trace ends once and is whole."""
    async with played(redis.url) as (gate, client, bus, _), Bus.open(redis.url) as far:
        traces = [client.trace("tiny", f"prompt {one}", acts, max_tokens=12, detach=True) for one in range(6)]
        for trace in traces[:3]:
            await trace.start()
        for trace in traces[:3]:
            await trace.accepted()
        since = redis.written
        for trace in traces[3:]:
            await trace.start()
        for trace in traces[3:]:
            await trace.accepted()
        gate.step(4)
        for trace in traces:
            await some(trace, 4)
        async with serving(far, free()):
            await redis.lose(since)
            gate.open()
            for one, trace in enumerate(traces):
                await whole(client, trace.id, f"prompt {one}", 12)
        await until(lambda: _settled(bus))
        for trace in traces:
            await trace.aclose()
