"""Changes of live parameters: published once, and never before the workers have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

import tracewire
from tests.support.played_engine import PlayedEngine, adapted
from tests.support.redis.proxy import proxy
from tests.support.redis_loss import HeldOrders
from tests.support.scripted_engine import ScriptedEngine, acts, serving
from tests.support.served import ENGINE, counted, served
from tests.support.stepping import Gate
from tests.support.until import until
from tracewire import Client, Final, FirstToken, Output, Steered
from tracewire_bus.bus import Bus
from tracewire_bus.transport.errors import BusUnavailable
from tracewire_bus.wire.live_values import live_values, pack_live
from tracewire_bus.wire.packing import unpack
from tracewire_engine.adapter import live_changes
from tracewire_engine.adapter.live_changes import LiveTrace
from tracewire_engine.adapter.trace_run import TraceRun
from tracewire_engine.protocol.messages import Applied, Changes, Report

PATIENCE = 60


@pytest.mark.usefixtures("registered")
async def test_a_change_that_names_nobody_readable_ends_no_trace(
    client: Client, bus: Bus, embedded: str, prefix: str
) -> None:
    """Whoever wrote it (another client, say): the trace gets its final."""
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, engine),
            client.trace("tiny", "hello", live={"alpha": 0.0}, detach=True) as trace,
        ):
            await trace.accepted()
            await bus.records.steer(trace.id, live_values({"alpha": 1.0}), by=5)  # type: ignore[arg-type]
            assert await trace.steer(alpha=2.0) == 2
            (request,) = engine.requests
            engine.finish(request)
            assert (await trace.result()).text == "x"
        with pytest.raises(tracewire.SteerRejected) as caught:
            await client.steer(trace.id, alpha=1.0, by=5)  # type: ignore[arg-type]
        assert caught.value.field == "by"


@pytest.mark.usefixtures("registered")
async def test_a_change_is_not_told_as_applied_before_it_was_sent(client: Client, embedded: str, prefix: str) -> None:
    """A call fails while a later change waits for the next one: that one's own report counts."""
    failing, fail, calls = anyio.Event(), anyio.Event(), anyio.Event()

    class Failing(PlayedEngine):
        async def steer(self, changes: Changes, over: list[str], since: float) -> None:
            if not changes:
                return
            if not failing.is_set():
                failing.set()
                await fail.wait()
                raise RuntimeError("it was not taken")
            await super().steer(changes, over, since)
            calls.set()

    engine = Failing()
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, engine) as adapter,
            client.trace("tiny", "hello", live={"alpha": 0.0, "beta": 0.0}, detach=True) as trace,
        ):
            await trace.accepted()
            (request,) = engine.requests
            engine.requests[request].put("a")
            assert isinstance(await anext(trace), Output)
            await trace.steer(alpha=1.0)
            await failing.wait()
            await trace.steer(beta=2.0)
            run = adapter._claims.runs[trace.id]
            assert isinstance(run, TraceRun)
            assert run.live is not None
            while run.live.sent < 2:
                await anyio.lowlevel.checkpoint()
            fail.set()
            await calls.wait()
            ((_, changes),) = [asked for asked in engine.asked if asked[0] == "steer"]
            ((name, (version, values)),) = changes.items()
            assert version == 2
            # What had not reached the workers goes along.
            assert {key: unpack(bytes(value)) for key, value in values.items()} == {"alpha": 1.0, "beta": 2.0}
            engine.report(Report(applied=[Applied(name, 2, [(request, 0, 1)])]))
            engine.finish(request)
            events = [event async for event in client.subscribe(trace.id)]
    told = [event for event in events if isinstance(event, Steered)]
    assert [(event.version, event.first) for event in told] == [(2, [FirstToken(invoke=0, choice=0, index=1)])]
    assert events.index(told[0]) < len(events) - 2


async def begun(engine: PlayedEngine) -> tuple[str, Any]:
    """The one request that was started."""
    await engine.started.wait()
    ((request, outputs),) = engine.requests.items()
    return request, outputs


@pytest.mark.usefixtures("registered")
async def test_a_change_that_reached_no_step_is_told_once(client: Client, embedded: str, prefix: str) -> None:
    """Its engine has it by the control stream, and finds it once more as it ends the trace."""

    class Told(PlayedEngine):
        def __init__(self) -> None:
            super().__init__()
            self.steered = anyio.Event()

        async def steer(self, *args: Any) -> None:
            self.steered.set()

    engine = Told()
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, engine),
            client.trace("tiny", "hello", live={"alpha": 0.0}, detach=True) as trace,
        ):
            await trace.accepted()
            request, _ = await begun(engine)
            assert await trace.steer(alpha=1.0) == 1
            await engine.steered.wait()
            engine.finish(request)
            events = [event async for event in client.subscribe(trace.id)]
    told = [change.version for event in events if isinstance(event, Steered) for change in event.changes]
    assert told == [1]


async def events_of(client: Client, trace: str) -> list[Any]:
    """All events of a trace, which ends."""
    return [event async for event in client.subscribe(trace)]


@pytest.mark.usefixtures("roomy")
async def test_what_is_accepted_in_an_outage_at_the_end_is_told(
    client: Client, embedded: str, prefix: str, tmp_path: Path
) -> None:
    """The adapter alone does not reach Redis when it closes a trace, for longer than its bus is patient."""
    gate = Gate()
    gate.open()
    with anyio.fail_after(PATIENCE):
        async with (
            proxy(embedded, tmp_path) as way,
            Bus.open(way.url, prefix=prefix, patience_s=0.1) as bus,
        ):
            close, calls = bus.records.close, 0

            async def closing(trace: str, attempt: int) -> list[bytes]:
                nonlocal calls
                calls += 1
                if calls > 1:
                    return await close(trace, attempt)
                way.away = True
                await way.cut()
                assert await client.steer(trace, alpha=1.0) == 1
                try:
                    return await close(trace, attempt)
                except BusUnavailable:
                    way.away = False
                    raise

            bus.records.close = closing  # type: ignore[method-assign]
            async with (
                serving(bus, ScriptedEngine(gate)),
                client.trace("tiny", "hello", acts, live={"alpha": 0.0}, detach=True) as trace,
            ):
                events = await events_of(client, trace.id)
    assert [change.version for event in events if isinstance(event, Steered) for change in event.changes] == [1]
    assert isinstance(events[-1], Final)
    assert events[-1].status == "finished"


async def test_a_change_that_does_not_fit_reaches_no_worker(bus: Bus, embedded: str, prefix: str) -> None:
    """In the workers it would fail for all traces that are steered with it."""
    changes = [{"alpha": "text"}, {"beta": 1.0}, {"alpha": msgspec.Raw(b"\xd4\x7f\x00")}]
    async with (
        served(bus, embedded, prefix) as (adapter, client),
        client.trace("tiny", "hang", acts(), live={"alpha": 0.0}) as trace,
    ):
        await trace.accepted()
        key = bus.keys.control(bus.keys.tag(trace.id), ENGINE)
        for number, values in enumerate(changes, 1):
            change = msgspec.msgpack.encode([number, "me", 1, values])
            await bus.command("XADD", key, "*", "k", "steer", "t", trace.id, "d", change)
        await counted(client, len(changes))
        run: Any = adapter._claims.runs[trace.id]
        assert run.live.version == 0


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("claimed", [True, False])
@pytest.mark.parametrize("lost", [1, 3])
async def test_a_change_with_the_version_of_a_lost_one_takes_effect(
    client: Client, bus: Bus, monkeypatch: pytest.MonkeyPatch, lost: int, claimed: bool
) -> None:
    """Redis has lost the last changes, and gives their versions again. The engine says before what it runs, or not."""
    gate, orders = Gate(), HeldOrders(monkeypatch)
    with anyio.fail_after(PATIENCE):
        async with (
            serving(bus, ScriptedEngine(gate)) as adapter,
            client.trace("tiny", "hello", acts, max_tokens=9, live={"alpha": 0.0, "beta": 0.0}, detach=True) as trace,
        ):
            await trace.accepted()
            record = bus.keys.record(trace.id)
            before = await bus.command("HMGET", record, "v", "l:alpha")
            for number in range(lost):
                await trace.steer(alpha=number + 1.0)
            run = adapter._claims.runs[trace.id]
            assert isinstance(run, TraceRun)
            await until(lambda: run.live is not None and run.live.version == lost)
            await orders.close()
            await bus.command("HSET", record, "v", before[0], "l:alpha", before[1])
            await bus.command("DEL", bus.keys.changes(trace.id))
            assert [await trace.steer(beta=8.0), await trace.steer(beta=9.0)] == [1, 2]
            if claimed:
                for command in adapter._claims.commands():
                    await bus.command(*command)
            orders.open()

            async def recorded() -> bool:
                now = await bus.records.live(trace.id)
                return (now.version, now.values) == (lost + 2, {"alpha": float(lost), "beta": 9.0})

            await until(recorded)
            gate.open()
            events = await events_of(client, trace.id)
    told = [(one.version, one.values) for event in events if isinstance(event, Steered) for one in event.changes]
    alphas = [(number + 1, {"alpha": number + 1.0}) for number in range(lost)]
    assert told == [*alphas, (lost + 1, {"beta": 8.0}), (lost + 2, {"beta": 9.0})]


def change(version: int, alpha: float) -> bytes:
    """As Redis keeps it."""
    return msgspec.msgpack.encode([version, "me", 1000, {"alpha": alpha}, b"its signature"])


def test_a_change_is_known_by_its_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_changes, "_KNOWN", 3)
    declared = pack_live({"alpha": live_values({"alpha": 0.0})["alpha"].packed})
    live = LiveTrace("r", declared, 2, [change(2, 0.5)], [])
    assert not live.take(change(2, 0.5))
    assert live.take(change(3, 1.0))
    assert not live.take(change(3, 1.0))
    assert not live.renumbered
    # Another one of the same version, and one of a version from before the run.
    assert live.take(change(3, 2.0))
    assert live.renumbered
    assert live.take(change(1, 3.0))
    assert live.version == 5
    # From the record these may be what an earlier attempt has told.
    assert not live.take(change(2, 0.25), kept=True)
    assert live.take(change(5, 4.0), kept=True)
    # The run has forgotten what had the first versions.
    assert not live.take(change(3, 1.0))
    (event,) = live.last_events()
    told = [unpack(bytes(raw)) for raw in event.changes]
    assert [(one[0], one[3]["alpha"]) for one in told] == [(2, 0.5), (3, 1.0), (4, 2.0), (5, 3.0), (6, 4.0)]
    assert {one[4] for one in told} == {b"its signature"}


@pytest.mark.parametrize("version", [-1, 2**53 + 1])
def test_a_change_of_no_sensible_version_is_refused(version: int) -> None:
    declared = pack_live({"alpha": live_values({"alpha": 0.0})["alpha"].packed})
    with pytest.raises(ValueError, match="expected an integer"):
        LiveTrace("r", declared, 0, [], []).take(change(version, 1.0))
