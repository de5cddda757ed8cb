"""What becomes of a client's traces where a reply is lost, or Redis is away as they are left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

import tracewire
from tests.support.bus_engine import ScriptedEngine, Stage, engine_info, tiny
from tests.support.redis.proxy import Proxy, proxy
from tests.support.redis.servers import until, until_so
from tracewire import Client, ConnectError
from tracewire_bus.bus import Bus
from tracewire_bus.recovery import Recovery
from tracewire_bus.store import submission_queue as queue
from tracewire_bus.transport.link import Link
from tracewire_bus.wire.messages import Invoke, Submission

PATIENCE = 30


@asynccontextmanager
async def far(bus: Bus, folder: Path) -> AsyncIterator[tuple[Proxy, Client]]:
    """A client without patience, by a way to the bus's Redis that can be cut; a model is known that nobody serves."""
    await bus.registry.register(engine_info(), ttl_s=600)
    # The scripts are known.
    await bus.submit(Submission(trace="any", model="another", invokes=[Invoke(prompt="x")]))
    async with (
        proxy(bus.url, folder) as way,
        tracewire.connect(way.url, prefix=bus.keys.prefix, name="one", retry_timeout=0.0, lease_ttl=600) as client,
    ):
        await client.models.get("tiny")
        yield way, client


def cut_off(way: Proxy) -> None:
    """Have Redis take the next submission, and the client hear nothing of it or anything else."""

    def cut() -> None:
        way.away = True

    way.swallow, way.on_swallow = queue._PUT.digest.encode(), cut


async def _is_cancelled(bus: Bus, trace: str) -> bool:
    return await bus.records.failed_as(trace) == "Cancelled"


async def test_a_submission_whose_reply_was_lost_is_cancelled_when_redis_answers(bus: Bus, tmp_path: Path) -> None:
    async with far(bus, tmp_path) as (way, client):
        await client._session.presence.lease()
        cut_off(way)
        trace = client.trace("tiny", "hello")
        with pytest.raises(ConnectError):
            await trace.start()
        assert way.swallowed.is_set()
        assert await bus.queue.waiting("tiny") == 1
        # Another one that fails meanwhile knows no better.
        with pytest.raises(ConnectError):
            await trace.start()
        way.away = False
        # The client lives on.
        await until(lambda: _is_cancelled(bus, trace.id))

        async def withdrawn() -> bool:
            return await bus.queue.waiting("tiny") == 0

        await until(withdrawn)
        final = (await client.get_state(trace.id)).error
        assert final is not None
        assert "not confirmed" in final.message


async def test_a_submission_whose_reply_was_lost_runs_once_where_it_is_started_again(bus: Bus, tmp_path: Path) -> None:
    async with far(bus, tmp_path) as (way, client):
        await client._session.presence.lease()
        # Before the client comes to cancel it.
        client._session.presence._watch = anyio.sleep_forever  # type: ignore[method-assign]
        await client._session.presence.aclose()
        cut_off(way)
        trace = client.trace("tiny", "hello")
        with pytest.raises(ConnectError):
            await trace.start()
        assert client._session.presence._to_cancel
        way.away = False
        async with ScriptedEngine.running(bus.url, bus.keys.prefix, tiny, engine_info()) as engine, trace:
            assert not client._session.presence._to_cancel
            assert (await trace.result()).status == "finished"
            assert [one.trace for one in engine.taken] == [trace.id]


async def test_a_detached_submission_whose_reply_was_lost_is_left_alone(bus: Bus, tmp_path: Path) -> None:
    async with far(bus, tmp_path) as (way, client):
        cut_off(way)
        trace = client.trace("tiny", "hello", detach=True)
        with pytest.raises(ConnectError):
            await trace.start()
        assert not client._session.presence._to_cancel
        way.away = False
        async with ScriptedEngine.running(bus.url, bus.keys.prefix, tiny, engine_info()):
            events = [event async for event in client.subscribe(trace.id)]
        assert events[-1].status == "finished"


async def test_what_is_left_while_redis_is_away_is_cancelled_when_it_is_back(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with far(bus, tmp_path) as (way, client):
        monkeypatch.setattr("tracewire.traces.trace._LEAVE_S", 0.05)

        async def endless(stage: Stage) -> None:
            await stage.accept()
            await anyio.sleep_forever()

        async with ScriptedEngine.running(bus.url, bus.keys.prefix, endless, engine_info()):
            trace = client.trace("tiny", "hello")
            await trace.start()
            await trace.accepted()
            way.away = True
            await way.cut()
            await trace.aclose()
            way.away = False
            await until(lambda: _is_cancelled(bus, trace.id))


async def test_a_lease_is_renewed_whatever_else_a_client_fails_at(
    bus: Bus, embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tracewire.traces.presence.RECOVER_S", 0.001)

    async def look(self: Recovery, but: str = "") -> list[str]:
        raise ValueError("what no Redis says")

    monkeypatch.setattr(Recovery, "look", look)
    await bus.registry.register(engine_info(), ttl_s=600)
    async with tracewire.connect(embedded, prefix=prefix, lease_ttl=1) as client:
        leases = client._session.open_bus().leases
        usual, renewed = leases.renew, []

        async def hold(lease: str, seconds: float, link: Link | None = None) -> None:
            renewed.append(link)
            if len(renewed) == 3:
                raise TypeError("what no lease does")
            await usual(lease, seconds, link)

        monkeypatch.setattr(leases, "renew", hold)
        async with client.trace("tiny", "hello") as trace:
            await until_so(lambda: len(renewed) > 5)
            assert await bus.leases.held([trace._submission.lease])
    said = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert any("that looks for lost engines failed" in one and "what no Redis says" in one for one in said)
    assert any("that renews a client's lease failed" in one and "what no lease does" in one for one in said)


async def test_what_is_left_after_its_client_leaves_no_task(bus: Bus, embedded: str, prefix: str) -> None:
    await bus.registry.register(engine_info(), ttl_s=600)
    before = asyncio.all_tasks()
    async with tracewire.connect(embedded, prefix=prefix) as client:
        trace = client.trace("tiny", "hello")
        await trace.start()
    await trace.aclose()
    left = [task for task in asyncio.all_tasks() - before if not task.done()]
    assert not left


def _queued(model: tracewire.Model, count: int, **options: Any) -> list[tracewire.Tracer]:
    """So many traces that were written as a `with` each."""
    tracers = []
    for _ in range(count):
        with model.trace("hello", **options) as tracer:
            logits = model.logits.save()
        tracers.append(tracer)
    return tracers


async def _refusals(tracers: list[tracewire.Tracer]) -> list[str]:
    found = []
    for tracer in tracers:
        with pytest.raises(tracewire.TracewireError) as refused:
            await tracer.result()
        found.append(str(refused.value))
    return found


async def _tries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The traces that are submitted from now on."""
    tried, start = [], tracewire.Trace.start

    async def counted(self: tracewire.Trace) -> None:
        tried.append(self.id)
        await start(self)

    monkeypatch.setattr(tracewire.Trace, "start", counted)
    return tried


async def test_leaving_a_client_waits_for_all_that_is_queued_as_long_as_for_one(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = await _tries(monkeypatch)
    async with far(bus, tmp_path) as (way, client):
        model = await client.models.get("tiny")
        await client._session.presence.lease()
        way.away = True
        await way.cut()
        tracers = _queued(model, 50, detach=True)
    # The first found Redis away for as long as they all had waited.
    assert tried == [tracers[0].id]
    assert all("is away" in one for one in await _refusals(tracers))


async def test_a_client_that_waits_for_what_is_queued_can_be_cancelled(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracewire.traces.trace._LEAVE_S", 0.05)
    monkeypatch.setattr("tracewire.traces.background._LEAVE_S", 0.05)
    await bus.registry.register(engine_info(), ttl_s=600)
    async with proxy(bus.url, tmp_path) as way:
        with anyio.fail_after(PATIENCE), anyio.CancelScope() as scope:
            async with tracewire.connect(way.url, prefix=bus.keys.prefix, retry_timeout=10_000) as client:
                model = await client.models.get("tiny")
                way.away = True
                await way.cut()
                tracers = _queued(model, 50)
                scope.cancel()
        assert scope.cancelled_caught
        assert await _refusals(tracers) == ["the client is closed: make another one"] * 50


async def test_closing_a_trace_that_waits_to_be_submitted_waits_for_no_other(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracewire.traces.trace._LEAVE_S", 0.05)
    tried = await _tries(monkeypatch)
    await bus.registry.register(engine_info(), ttl_s=600)
    async with (
        proxy(bus.url, tmp_path) as way,
        tracewire.connect(way.url, prefix=bus.keys.prefix, retry_timeout=10_000) as client,
    ):
        model = await client.models.get("tiny")
        way.away = True
        await way.cut()
        tracers = _queued(model, 3)
        await until_so(lambda: len(tried) == 1)
        with anyio.fail_after(PATIENCE):
            # The last waits for its turn; the first is being submitted.
            for tracer in reversed(tracers):
                await tracer.aclose()
            refused = await _refusals(tracers)
        assert all("was closed before it was submitted" in one for one in refused)
        way.away = False
    assert tried == [tracers[0].id]
    assert await bus.queue.waiting("tiny") == 0
