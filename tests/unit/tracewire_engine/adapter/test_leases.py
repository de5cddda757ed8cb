"""Traces whose client is gone end; an outage, a failing call or an odd name ends no other."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import tracewire
from tests.support.played_engine import PlayedEngine, adapted
from tests.support.scripted_engine import ScriptedEngine, acts, info, serving
from tests.support.served import counted, runs, served
from tests.support.stepping import Gate
from tracewire import Client
from tracewire_bus.bus import Bus
from tracewire_engine.adapter.leases import LeaseWatch
from tracewire_engine.adapter.trace_run import TraceRun

PATIENCE = 60


@pytest.mark.usefixtures("registered")
async def test_the_reaper_outlives_a_call_that_fails(client: Client, embedded: str, prefix: str) -> None:
    """Pausing one trace fails: the others, and the adapter, go on."""

    class Failing(PlayedEngine):
        async def pause(self, request: str) -> bool:
            raise RuntimeError("utility call failed")

    engine = Failing()
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, engine),
            client.trace("tiny", "hello", detach=True) as trace,
            client.trace("tiny", "hello", detach=True) as other,
        ):
            await trace.accepted()
            await other.accepted()
            await trace.pause()
            assert await other.cancel()
            with pytest.raises(tracewire.TraceFailed):
                await other.result()
            engine.finish(next(iter(engine.requests)))
            result = await trace.result()
            assert result.text == "x"


@pytest.mark.usefixtures("registered")
async def test_an_outage_is_no_absence_of_a_client(client: Client, bus: Bus, embedded: str, prefix: str) -> None:
    """A lease was missing when Redis went away; when it is back its client has the time that it always has."""
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, engine, heartbeat_s=3600) as adapter,
            client.trace("tiny", "hello") as trace,
        ):
            await trace.accepted()
            run = adapter._claims.runs[trace.id]
            assert isinstance(run, TraceRun)
            await bus.leases.release(run.lease)
            await adapter._leases.end_abandoned()
            # A minute ago.
            adapter._leases._missing[run.lease] -= 60
            adapter._leases._looked -= 60 + 3600
            await adapter._leases.end_abandoned()
            assert run._ending is None
            # Who stays away while Redis is there is gone.
            adapter._leases._missing[run.lease] -= 60
            await adapter._leases.end_abandoned()
            assert run._ending is not None
            with pytest.raises(tracewire.TraceFailed, match="submitter has gone"):
                await trace.result()


async def events_of(client: Client, trace: str) -> list[Any]:
    """All events of a trace, which ends."""
    return [event async for event in client.subscribe(trace)]


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize(("trace", "lease"), [(b"odd", b"\xff.1"), (b"\xff", b"gone.1")])
async def test_an_engine_outlives_odd_names_on_its_queue(
    client: Client, bus: Bus, trace: bytes, lease: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever wrote them: bytes that are no text, in a trace's id or a lease's name."""
    gate, looked = Gate(), asyncio.Semaphore(0)
    look = LeaseWatch.end_abandoned
    failures: list[BaseException] = []

    async def looking(leases: LeaseWatch) -> None:
        try:
            await look(leases)
        except Exception as error:
            failures.append(error)
            raise
        finally:
            looked.release()

    monkeypatch.setattr(LeaseWatch, "end_abandoned", looking)
    monkeypatch.setattr("tracewire_engine.adapter.leases._patience_of", lambda lease: 0.0)
    with anyio.fail_after(PATIENCE):
        async with (
            serving(bus, ScriptedEngine(gate), info(capacity=1)),
            client.trace("tiny", "hang", acts, detach=True) as running,
        ):
            await running.accepted()
            await bus.queue.put("tiny", trace, b"junk", lease=lease)  # type: ignore[arg-type]
            # Withdrawn under a lease that is held.
            await bus.command("HSET", bus.keys.queue("tiny", "taken"), b"x", b"\0\xff" + lease)
            await bus.command("SET", bus.keys.lease("").encode() + b"\xff" + lease, "1")
            for _ in range(20):
                await looked.acquire()
            gate.open()
            assert await running.cancel()
            assert (await events_of(client, running.id))[-1].status == "cancelled"
    assert not failures


async def test_holders_and_running_records_that_are_malformed_end_no_engine(
    bus: Bus, embedded: str, prefix: str
) -> None:
    async with served(bus, embedded, prefix) as (adapter, client):
        await bus.command("SADD", bus.keys.queue("tiny", "holders"), b"\xff\xfe")
        async with client.trace("tiny", "hang", acts(), max_tokens=5) as trace:
            await trace.accepted()
            await bus.command("HSET", bus.keys.record(trace.id), "a", "no number")
            await counted(client, 2)
            await runs(client)
        assert not adapter.lost


@pytest.mark.usefixtures("registered")
async def test_traces_of_a_client_that_came_back_while_they_were_ended_run(
    client: Client, bus: Bus, embedded: str, prefix: str
) -> None:
    """The process that was ending them has died. No other process finds their entries."""
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with client.trace("tiny", "hello") as trace:
            (lease,) = await bus.queue.leases("tiny")
            assert len(await bus.queue.withdraw_lease("tiny", lease)) == 1
            async with adapted(embedded, prefix, engine, heartbeat_s=0.05):
                await trace.accepted()
                engine.finish(next(iter(engine.requests)))
                assert (await trace.result()).text == "x"
