"""What a client does for its traces in the background: leases, deadlines, and cancelling what it has left."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.lowlevel import checkpoint

import tracewire
from tests.support.bus_engine import BusEngine, Stage, engine_info, tiny
from tests.support.clients import events_of
from tests.support.redis.proxy import Proxy, proxy
from tests.support.scripted_engine import info
from tests.support.tasks import all_tasks
from tests.support.until import until
from tracewire import Client, ConnectError
from tracewire.traces.presence import Presence
from tracewire_bus.bus import Bus
from tracewire_bus.recovery import Recovery
from tracewire_bus.store import submission_queue as queue
from tracewire_bus.transport.errors import BusUnavailable
from tracewire_bus.transport.link import Link
from tracewire_bus.transport.pool import CONCURRENT
from tracewire_bus.wire.messages import Invoke, Submission


async def test_the_first_traces_of_a_client_share_its_lease(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.final()

    bus = client._session.open_bus()
    usual = bus.leases.renew
    asked: list[str] = []

    async def hold(lease: str, seconds: float) -> None:
        asked.append(lease)
        await usual(lease, seconds)
        # Whatever else renews it.
        bus.leases.renew = usual  # type: ignore[method-assign]

    bus.leases.renew = hold  # type: ignore[method-assign]
    async with engine(script), anyio.create_task_group() as group:
        traces = [client.trace("tiny", "p") for _ in range(8)]
        for trace in traces:
            group.start_soon(trace.start)
    (lease,) = {trace._submission.lease for trace in traces}
    assert asked == [lease]
    assert await bus.command("KEYS", bus.keys.lease("*")) == [bus.keys.lease(lease).encode()]
    for trace in traces:
        await trace.aclose()


async def test_a_lease_that_is_asked_for_in_vain_is_asked_for_again(client: Client) -> None:
    presence, bus = client._session.presence, client._session.open_bus()
    asked: list[str] = []
    usual = bus.leases.renew

    async def hold(lease: str, _: float) -> None:
        asked.append(lease)
        await checkpoint()
        raise BusUnavailable("away")

    async def fail() -> None:
        with pytest.raises(BusUnavailable, match="away"):
            await presence.lease()

    bus.leases.renew = hold  # type: ignore[method-assign]
    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(fail)
    scope = anyio.CancelScope()

    async def cancelled() -> None:
        with scope:
            await presence.lease()

    async def held(lease: str, seconds: float) -> None:
        bus.leases.renew = usual  # type: ignore[method-assign]
        scope.cancel()
        await anyio.sleep_forever()

    bus.leases.renew = held  # type: ignore[method-assign]
    found: list[str] = []

    async def get() -> None:
        found.append(await presence.lease())

    async with anyio.create_task_group() as group:
        group.start_soon(cancelled)
        group.start_soon(get)
        group.start_soon(get)
    assert {*asked, *found} == {found[0]}
    assert await bus.command("KEYS", bus.keys.lease("*")) == [bus.keys.lease(found[0]).encode()]


async def test_a_lease_is_of_one_tenant(bus: Bus) -> None:
    presence = Presence(bus, 0.6)
    names = [await presence.lease(tenant) for tenant in ("", "red", "blue", "red")]
    assert names == [names[0], f"red:{names[0]}", f"blue:{names[0]}", f"red:{names[0]}"]
    kept = {*names}

    async def all_are_renewed() -> bool:
        left = [await bus.command("PTTL", bus.keys.lease(name)) for name in kept]
        return min(left) > 350

    await bus.commands(*(("PEXPIRE", bus.keys.lease(name), 300) for name in kept))
    await until(all_are_renewed)
    await presence.aclose()
    assert not await bus.leases.held([*kept])


PATIENCE = 60


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


async def test_a_trace_that_is_left_in_an_outage_is_cancelled_though_its_record_was_made_again(
    bus: Bus, tmp_path: Path
) -> None:
    """By its engine, after Redis had lost the record: an engine names no owner."""
    async with far(bus, tmp_path) as (way, client):
        trace = client.trace("tiny", "hello")
        await trace.start()
        await bus.command("HDEL", bus.keys.record(trace.id), "o")
        way.away = True
        await way.cut()
        await trace.aclose()
        assert client._session.presence._to_cancel
        way.away = False
        await until(lambda: _is_cancelled(bus, trace.id))


async def test_a_submission_in_doubt_cancels_no_trace_of_another_owner(bus: Bus, tmp_path: Path) -> None:
    async with far(bus, tmp_path) as (way, client):
        await client._session.presence.lease()
        await bus.submit(Submission(trace="mine", model="tiny", invokes=[Invoke(prompt="x")]), owner="another")
        cut_off(way)
        trace = client.trace("tiny", "hello", trace_id="mine")
        with pytest.raises(ConnectError):
            await trace.start()
        way.away = False
        await until(lambda: not client._session.presence._to_cancel)
        assert not await bus.records.ended("mine")


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
        async with BusEngine.running(bus.url, bus.keys.prefix, tiny, engine_info()) as engine, trace:
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
        async with BusEngine.running(bus.url, bus.keys.prefix, tiny, engine_info()):
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

        async with BusEngine.running(bus.url, bus.keys.prefix, endless, engine_info()):
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
                raise ArithmeticError("what no lease does")
            await usual(lease, seconds, link)

        monkeypatch.setattr(leases, "renew", hold)
        async with client.trace("tiny", "hello") as trace:
            await until(lambda: len(renewed) > 5)
            assert await bus.leases.held([trace._submission.lease])
    said = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert any("that looks for lost engines failed" in one and "what no Redis says" in one for one in said)
    assert any("that renews a client's lease failed" in one and "what no lease does" in one for one in said)


async def test_what_is_left_after_its_client_leaves_no_task(bus: Bus, embedded: str, prefix: str) -> None:
    await bus.registry.register(engine_info(), ttl_s=600)
    before = all_tasks()
    async with tracewire.connect(embedded, prefix=prefix) as client:
        trace = client.trace("tiny", "hello")
        await trace.start()
    await trace.aclose()
    left = all_tasks() - before
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
        await until(lambda: len(tried) == 1)
        with anyio.fail_after(PATIENCE):
            # The last waits for its turn; the first is being submitted.
            for tracer in reversed(tracers):
                await tracer.aclose()
            refused = await _refusals(tracers)
        assert all("was closed before it was submitted" in one for one in refused)
        way.away = False
    assert tried == [tracers[0].id]
    assert await bus.queue.waiting("tiny") == 0


def running(embedded: str, prefix: str, script: Any = tiny) -> Any:
    """A scripted engine."""
    return BusEngine.running(embedded, prefix, script, engine_info())


async def test_a_deadline_passes_with_no_engine(
    client: Client, bus: Bus, embedded: str, prefix: str, registered: str
) -> None:
    """Its submitter sees to it; or, when that has gone, whoever follows the trace."""
    with anyio.fail_after(PATIENCE):
        async with client.trace("tiny", "hello", deadline=0.2) as trace:
            with pytest.raises(tracewire.TraceFailed) as caught:
                await trace.result()
        assert caught.value.status == "expired"
        async with (
            tracewire.connect(embedded, prefix=prefix) as gone,
            gone.trace("tiny", "hello", deadline=0.2, detach=True) as left,
        ):
            pass
        (final,) = await events_of(client, left.id)
        assert final.status == "expired"
        assert final.error.field == "deadline"
        # It leaves the queue right after it has ended.
        while await bus.queue.waiting("tiny"):
            pass
    async with running(embedded, prefix), client.trace("tiny", "other") as other:
        await other.result()


async def test_a_closed_client_holds_no_lease(bus: Bus, embedded: str, prefix: str, registered: str) -> None:
    async with tracewire.connect(embedded, prefix=prefix) as client, client.trace("tiny", "hello") as trace:
        (lease,) = [lease for lease in await bus.queue.leases("tiny") if lease]
        await trace.cancel()
    assert await bus.leases.held([lease]) == set()
    with pytest.raises(ValueError, match="lease"):
        async with tracewire.connect(embedded, lease_ttl=0.5):
            pass


async def test_a_deadline_is_seen_to_after_an_outage(
    bus: Bus, embedded: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both of the times that a client looks at it Redis is away, for longer than the client is patient."""
    monkeypatch.setattr("tracewire.traces.presence._SECOND_LOOK_S", 0.05)
    with anyio.fail_after(PATIENCE):
        async with proxy(embedded, tmp_path) as way, Bus.open(way.url, prefix=prefix, patience_s=0.05) as away:
            failures = 0
            plain = away.sweep

            async def sweep(tags: Any) -> None:
                nonlocal failures
                try:
                    await plain(tags)
                except Exception:
                    failures += 1
                    if failures == 3:
                        way.away = False
                    raise

            away.sweep = sweep  # type: ignore[method-assign]
            await bus.submit(Submission(trace="late", model="tiny", invokes=[Invoke(prompt="x")], deadline_s=0.01))
            presence = Presence(away, 1)
            way.away = True
            await way.cut()
            _watch = presence.watch_deadline("late", 0.01)
            async with bus.read("late") as entries:
                await anext(entries)
            await presence.aclose()


async def test_deadlines_are_kept_no_longer_than_a_handle_waits(
    client: Client, engine: Callable[..., Any], bus: Bus
) -> None:
    presence = client._session.presence
    async with engine():
        for number in range(300):
            trace = client.trace("tiny", "hello", deadline=1e6, trace_id=f"t{number % 100}-{number}")
            if number % 2:
                await trace.result()
            else:
                async with trace:
                    pass
            await client.subscribe(trace.id).until_done()
        async with client.subscribe(trace.id) as subscription:
            assert [event async for event in subscription][-1].type == "final"
    # One that waits is looked at all the same.
    watches = [presence.watch_deadline("waits", 1e6) for _ in range(200)]
    assert sum(one.watch() is not None for one in presence._deadlines) == len(watches)
    assert len(presence._deadlines) < 400


async def test_a_lease_is_renewed_past_a_connection_that_says_nothing(embedded: str, prefix: str, bus: Bus) -> None:
    """And past a look at deadlines that takes its time."""
    await bus.registry.register(info(), ttl_s=600)
    async with tracewire.connect(embedded, prefix=prefix, lease_ttl=1) as client:
        own = client._session.open_bus()
        hold, calls, renewed, swept = own.leases.renew, 0, anyio.Event(), anyio.Event()

        async def holding(lease: str, seconds: float, *more: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                await anyio.sleep_forever()
            await hold(lease, seconds, *more)
            if calls > 3 and swept.is_set():
                renewed.set()

        async def sweeping(tags: Any) -> None:
            swept.set()
            await anyio.sleep_forever()

        own.leases.renew = holding  # type: ignore[method-assign]
        own.sweep = sweeping  # type: ignore[method-assign]
        with anyio.fail_after(PATIENCE):
            async with client.trace("tiny", "hello", deadline=0.01):
                await renewed.wait()


async def test_a_lease_is_renewed_beside_calls_that_hang(embedded: str, prefix: str, bus: Bus) -> None:
    """As many as a client has connections for."""
    await bus.registry.register(info(), ttl_s=600)
    async with tracewire.connect(embedded, prefix=prefix, lease_ttl=1) as client, AsyncExitStack() as stack:
        with anyio.fail_after(PATIENCE):
            async with client.trace("tiny", "hello", detach=False):
                lease = await client._session.presence.lease()
                for _ in range(CONCURRENT):
                    await stack.enter_async_context(client._session.open_bus()._connections._limit)
                await bus.leases.release(lease)
                while not await bus.leases.held([lease]):
                    pass
                await stack.aclose()
