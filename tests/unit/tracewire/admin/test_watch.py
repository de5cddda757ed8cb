"""Watching all traces, and many of them at once."""

from __future__ import annotations

from collections import Counter

import anyio
import pytest

import tracewire
from tests.support.bus_engine import BusEngine, Stage, engine_info, tiny
from tracewire import Client, ConnectError, Final, Gap, Lifecycle, Watch
from tracewire_bus.bus import Bus
from tracewire_bus.domain.fold import Fold
from tracewire_bus.wire.messages import Failure

PATIENCE = 60


async def some(watch: Watch, count: int) -> list[Lifecycle]:
    """The next so many events."""
    with anyio.fail_after(PATIENCE):
        return [await anext(watch) for _ in range(count)]


async def test_a_watch_tells_what_becomes_of_every_trace(client: Client, redis_url: str, prefix: str) -> None:
    async def script(stage: Stage) -> None:
        if stage.submission.invokes[0].prompt == "restart":
            await stage.accept()
            await stage.restart("for once")
        await tiny(stage)

    async with BusEngine.running(redis_url, prefix, script) as engine, client.watch() as watch:
        async with client.trace("tiny", "hello") as trace:
            await trace.result()
        assert [event.type for event in await some(watch, 3)] == ["queued", "accepted", "final"]
        async with client.trace("tiny", "restart") as trace:
            await trace.result()
        events = await some(watch, 5)
        assert [(event.type, event.attempt) for event in events] == [
            ("queued", 0),
            ("accepted", 1),
            ("restarted", 2),
            ("accepted", 2),
            ("final", 2),
        ]
        assert {event.trace_id for event in events} == {trace.id}
        assert (events[-1].status, events[-1].tokens, events[-1].engine) == ("finished", 3, engine.info.engine)
        assert events[-1].client == client._session.name
        # From where this one is, in another client.
        async with tracewire.connect(redis_url, prefix=prefix) as other:
            async with client.trace("tiny", "hello") as third:
                await third.result()
            async with other.watch(since=watch.position) as later:
                assert [event.trace_id for event in await some(later, 3)] == [third.id] * 3
            async with other.watch(since="start") as all_:
                assert Counter(event.type for event in await some(all_, 11))["final"] == 3


async def test_a_watch_of_one_model(client: Client, redis_url: str, prefix: str) -> None:
    async with (
        BusEngine.running(redis_url, prefix, tiny),
        BusEngine.running(redis_url, prefix, tiny, engine_info("other")),
        client.watch(model="other") as watch,
        client.watch(model="other", group="g") as member,
    ):
        for model in ("tiny", "other", "tiny"):
            async with client.trace(model, "hello") as trace:
                await trace.result()
        for one in (watch, member):
            assert [(event.model, event.type) for event in await some(one, 3)] == [
                ("other", "queued"),
                ("other", "accepted"),
                ("other", "final"),
            ]


async def test_closing_ends_a_watch_and_so_does_its_client(redis_url: str, prefix: str) -> None:
    async with tracewire.connect(redis_url, prefix=prefix) as client:
        watch = client.watch(since="start")
        await watch.aclose()
        assert [event async for event in watch] == []
        left = client.watch(since="start")
    with pytest.raises(ConnectError, match="closed"):
        await anext(left)
    with pytest.raises(ConnectError, match="closed"):
        client.watch()


async def test_groups(client: Client, redis_url: str, prefix: str) -> None:
    with pytest.raises(ValueError, match="a watch begins at"):
        client.watch(since="yesterday")
    with pytest.raises(ValueError, match="group: expected a name"):
        client.watch(group="")
    async with BusEngine.running(redis_url, prefix, tiny):
        async with client.trace("tiny", "hello") as trace:
            await trace.result()
        async with client.watch(group="dashboards", consumer="a", since="start") as watch:
            assert watch.position == ""
            assert [event.type for event in await some(watch, 3)] == ["queued", "accepted", "final"]
            assert await client.watch_groups.list() == ["dashboards"]
            assert await client.watch_groups.remove("dashboards")
            with pytest.raises(tracewire.UnknownWatchGroup, match="removed"), anyio.fail_after(PATIENCE):
                await anext(watch)
    assert await client.watch_groups.list() == []


async def test_two_hundred_traces_need_few_connections(client: Client, bus: Bus, redis_url: str, prefix: str) -> None:
    """Every other one is trimmed under its subscriptions. All folds are what the engine collected."""
    traces = [f"t{number}" for number in range(200)]
    gates = {trace: anyio.Event() for trace in traces}
    ready = anyio.Event()
    waiting = 0

    async def script(stage: Stage) -> None:
        nonlocal waiting
        await stage.accept()
        for step in range(3):
            await stage.save(f" {step}", {"x": step})
        waiting += 1
        if waiting == 200:
            ready.set()
        await gates[stage.trace].wait()
        for step in range(3, 6):
            await stage.save(f" {step}", {"x": step})
        if int(stage.trace[1:]) % 2:
            await bus.snapshots.take(stage.trace, 1)
        await stage.final()

    async def connections() -> set[bytes]:
        return {line.split()[0] for line in (await bus.command("CLIENT", "LIST")).splitlines()}

    verified = 0
    gaps = 0

    async def follow(subscription: tracewire.Subscription, fold: Fold) -> None:
        nonlocal verified, gaps
        async for event in subscription:
            if isinstance(event, Gap):
                gaps += 1
                fold.resume(event.snapshot())
            else:
                fold.apply(event)
        assert isinstance(event, Final)
        fold.verify()
        assert len(fold.choices[0, 0].saves["x"]) == 6
        verified += 1

    with anyio.fail_after(120):
        async with BusEngine.running(redis_url, prefix, script, engine_info(capacity=300)):
            for trace in traces:
                await client.trace("tiny", "hello", trace_id=trace, detach=True).start()
            await ready.wait()
            before = await connections()
            async with tracewire.connect(redis_url, prefix=prefix) as dashboard, anyio.create_task_group() as group:
                for number, trace in enumerate(traces):
                    subscription, fold = dashboard.subscribe(trace), Fold()
                    # Some wait at the end of their streams, some read nothing until all is over.
                    if number % 3:
                        fold.apply(await anext(subscription))  # type: ignore[arg-type]
                        group.start_soon(follow, subscription, fold)
                    else:
                        await subscription.start()
                        gates[trace].set()
                        await until_ended(bus, trace)
                        group.start_soon(follow, subscription, fold)
                # The reader's, those for short commands, and those for snapshots.
                assert len(await connections() - before) <= 1 + 8 + 8
                for gate in gates.values():
                    gate.set()
    assert verified == 200
    assert gaps >= 33


async def until_ended(bus: Bus, trace: str) -> None:
    """Wait for a trace's final."""
    while not await bus.records.ended(trace):
        await anyio.lowlevel.checkpoint()


async def test_a_rejected_trace_is_told_with_its_error(client: Client, redis_url: str, prefix: str) -> None:
    async def script(stage: Stage) -> None:
        await stage.final("rejected", Failure(type="TraceRejected", message="no", field="prompt"))

    async with BusEngine.running(redis_url, prefix, script), client.watch() as watch:
        async with client.trace("tiny", "hello") as trace:
            with pytest.raises(tracewire.TraceRejected):
                await trace.result()
        events = await some(watch, 2)
        assert (events[1].type, events[1].status, events[1].error) == ("final", "rejected", "TraceRejected")
