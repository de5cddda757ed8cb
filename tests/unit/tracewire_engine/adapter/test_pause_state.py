"""A trace's pauses, while Redis is away and while another order comes."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

import tracewire
from tests.support.played_engine import PlayedEngine, adapted
from tests.support.redis.proxy import proxy
from tests.support.redis_loss import HeldOrders
from tests.support.until import until
from tracewire import Accepted, Client, Final, Output, Paused, Resumed
from tracewire_bus.bus import Bus
from tracewire_bus.store.control import Order
from tracewire_engine.adapter.service import Adapter
from tracewire_engine.adapter.trace_run import TraceRun

PATIENCE = 60


@pytest.mark.usefixtures("registered")
async def test_an_abort_does_not_wait_for_the_word_of_a_pause(
    client: Client, embedded: str, prefix: str, tmp_path: Path
) -> None:
    """While Redis is away nothing can be told; what is past its deadline is aborted all the same."""
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with (
            proxy(embedded, tmp_path) as way,
            adapted(way.url, prefix, engine) as adapter,
            client.trace("tiny", "hello", detach=True) as trace,
            client.trace("tiny", "hello", detach=True) as other,
        ):
            await trace.accepted()
            await other.accepted()
            one, two = (adapter._claims.runs[id_] for id_ in (trace.id, other.id))
            assert isinstance(one, TraceRun)
            assert isinstance(two, TraceRun)
            way.away = True
            await way.cut()
            adapter._control.obey(Order("pause", trace.id, by="me"))
            while ("pause", one.requests[0].name) not in engine.asked:
                await anyio.lowlevel.checkpoint()
            adapter._control.obey(Order("cancel", other.id, by="me"))
            while ("abort", two.requests[0].name) not in engine.asked:
                await anyio.lowlevel.checkpoint()
            way.away = False
            with pytest.raises(tracewire.TraceFailed, match="cancelled by me"):
                await other.result()
            engine.finish(one.requests[0].name)
            await trace.result()


@pytest.mark.usefixtures("registered")
async def test_a_pause_that_is_under_way_is_told_before_what_follows(
    client: Client, embedded: str, prefix: str
) -> None:
    """It was asked for while the trace began; the engine takes its time; then it is resumed."""
    pausing, go = anyio.Event(), anyio.Event()

    class Slow(PlayedEngine):
        async def pause(self, request: str) -> bool:
            pausing.set()
            await go.wait()
            return await super().pause(request)

    engine = Slow()
    with anyio.fail_after(PATIENCE):
        async with client.trace("tiny", "hello", detach=True) as trace:
            # Still queued.
            assert await trace.pause(by="me")
            assert not await trace.pause()
            async with adapted(embedded, prefix, engine) as adapter:
                await trace.accepted()
                await pausing.wait()
                assert await trace.resume(by="you")
                run = adapter._claims.runs[trace.id]
                assert isinstance(run, TraceRun)
                while run.pause.wanted_by is not None:
                    await anyio.lowlevel.checkpoint()
                go.set()
                assert isinstance(await anext(trace), Paused)
                assert isinstance(await anext(trace), Resumed)
                assert [kind for kind, _ in engine.asked] == ["pause", "resume"]
                (request,) = engine.requests
                engine.finish(request)
                await trace.result()
            events = [event async for event in client.subscribe(trace.id)]
    assert [type(event) for event in events] == [Accepted, Paused, Resumed, Output, Final]
    assert (events[1].by, events[2].by) == ("me", "you")


@pytest.mark.usefixtures("registered")
async def test_an_engine_that_has_not_heard_of_a_resumption_does_not_undo_it(
    client: Client, bus: Bus, embedded: str, prefix: str, tmp_path: Path
) -> None:
    """It says again what it runs, on a new connection, before it reads what was asked of it meanwhile."""
    engine = PlayedEngine()

    async def told(adapter: Adapter) -> tuple[bool, int]:
        """Whether the record has the trace paused, and how often it knows that to have changed."""
        for command in adapter._claims.commands():
            await bus.command(*command)
        paused, number = await bus.command("HMGET", bus.keys.record(trace.id), "z", "zn")
        return paused is not None, int(number)

    with anyio.fail_after(PATIENCE):
        async with (
            proxy(embedded, tmp_path) as way,
            adapted(way.url, prefix, engine) as adapter,
            client.trace("tiny", "hello", detach=True) as trace,
        ):
            await trace.accepted()
            assert await trace.pause()
            assert isinstance(await anext(trace), Paused)
            assert await told(adapter) == (True, 1)
            way.away = True
            await way.cut()
            assert await trace.resume()
            assert await told(adapter) == (False, 2)
            way.away = False
            assert isinstance(await anext(trace), Resumed)
            # A server that has forgotten it hears of it, either way.
            await bus.command("HSET", bus.keys.record(trace.id), "z", "me", "zn", 1)
            assert await told(adapter) == (False, 2)
            assert await trace.pause()
            assert isinstance(await anext(trace), Paused)
            await bus.command("HDEL", bus.keys.record(trace.id), "z", "zn")
            assert await told(adapter) == (True, 3)
            assert await trace.resume()
            engine.finish(next(iter(engine.requests)))
            await trace.result()


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("claimed", ["before", "after"])
async def test_a_pause_with_the_number_of_a_lost_one_is_ended_by_a_resumption(
    client: Client, bus: Bus, embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch, claimed: str
) -> None:
    """Redis has lost a pause and its end. The engine says what it runs before, or after, it reads the next pause."""
    engine, orders = PlayedEngine(), HeldOrders(monkeypatch)
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, engine) as adapter,
            client.trace("tiny", "hello", detach=True) as trace,
        ):
            await trace.accepted()
            record = bus.keys.record(trace.id)
            for _ in range(2):
                assert await trace.pause(by="me")
                assert isinstance(await anext(trace), Paused)
                assert await trace.resume(by="me")
                assert isinstance(await anext(trace), Resumed)
            await orders.close()
            await bus.command("HDEL", record, "z", "zn")
            assert await trace.pause(by="you")

            async def claim() -> None:
                for command in adapter._claims.commands():
                    await bus.command(*command)

            if claimed == "before":
                await claim()
            orders.open()
            assert isinstance(await anext(trace), Paused)
            if claimed == "after":
                await claim()

            async def told() -> bool:
                return list(await bus.command("HMGET", record, "z", "zn")) == [b"you", b"5"]

            await until(told)
            assert await trace.resume()
            assert isinstance(await anext(trace), Resumed)
            engine.finish(next(iter(engine.requests)))
            await trace.result()


@pytest.mark.usefixtures("registered")
async def test_a_pause_that_is_read_twice_is_made_once(client: Client, embedded: str, prefix: str) -> None:
    """A server that takes over may still have orders that the engine has read."""
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, engine) as adapter,
            client.trace("tiny", "hello", detach=True) as trace,
        ):
            await trace.accepted()
            orders = [Order("pause", trace.id, by="me", number=1, id="a"), Order("resume", trace.id, number=2, id="b")]
            for order, event in zip(orders, (Paused, Resumed), strict=True):
                adapter._control.obey(order)
                assert isinstance(await anext(trace), event)
            run = adapter._claims.runs[trace.id]
            assert isinstance(run, TraceRun)
            adapter._control.obey(orders[0])
            assert (run.pause.wanted_by, run.pause.number) == (None, 2)
            engine.finish(next(iter(engine.requests)))
            await trace.result()
