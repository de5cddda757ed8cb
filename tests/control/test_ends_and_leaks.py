"""How traces end while something else happens to them, and what they leave: on the bus, in adapters and in clients."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import msgspec
import pytest

import tracewire
from tests.faults.test_engine_loss import Gate
from tests.support.redis.proxy import proxy
from tests.support.redis.servers import until_so
from tests.support.scripted_engine import ScriptedEngine, acts, info, serving
from tracewire import Client, Final, Steered
from tracewire_bus.bus import Bus, QueueFull
from tracewire_bus.transport.errors import BusUnavailable
from tracewire_bus.transport.pool import CONCURRENT
from tracewire_bus.wire.messages import Failure, Invoke, Submission
from tracewire_engine.adapter.control import Control
from tracewire_engine.adapter.leases import LeaseWatch
from tracewire_engine.adapter.trace_run import TraceRun

PATIENCE = 10


@pytest.fixture
async def client(embedded: str, prefix: str, bus: Bus) -> AsyncIterator[Client]:
    """A client, of a bus on which a model is known."""
    await bus.registry.register(info(), ttl_s=600)
    async with tracewire.connect(embedded, prefix=prefix, name="one") as client:
        yield client


async def events_of(client: Client, trace: str) -> list[Any]:
    """All events of a trace, which ends."""
    return [event async for event in client.subscribe(trace)]


async def deadlines(bus: Bus, trace: str) -> int:
    """How many deadlines are kept beside a trace's."""
    return int(await bus.command("ZCARD", bus.keys.deadlines(bus.keys.tag(trace))))


async def test_a_deadline_goes_with_its_trace(client: Client, bus: Bus) -> None:
    """However far it is: one that ran, one that was cancelled on the queue, and one that never got there."""
    gate = Gate()
    gate.open()
    with anyio.fail_after(PATIENCE):
        async with client.trace("tiny", "queued", deadline=1e6, detach=True) as queued:
            assert await deadlines(bus, queued.id) == 1
            assert await queued.cancel()
            assert await deadlines(bus, queued.id) == 0
        async with (
            serving(bus, ScriptedEngine(gate)),
            client.trace("tiny", "hello", acts, deadline=1e6, detach=True) as trace,
        ):
            await trace.result()
            assert await deadlines(bus, trace.id) == 0


async def test_what_a_trace_brought_goes_with_it_and_not_with_a_garbage_collection(client: Client, bus: Bus) -> None:
    """A collection that had to free what many traces brought would hold the event loop."""
    gate = Gate()
    gate.open()
    runs: list[weakref.ref[TraceRun]] = []
    begin = TraceRun.__init__

    def noted(self: TraceRun, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        runs.append(weakref.ref(self))

    with anyio.fail_after(PATIENCE), mock.patch.object(TraceRun, "__init__", noted):
        async with serving(bus, ScriptedEngine(gate)):
            gc.collect()
            gc.disable()
            try:
                for _ in range(3):
                    async with client.trace("tiny", "hello", acts, live={"alpha": 1.0}) as trace:
                        await trace.result()
                # The engine's task of a trace ends behind the final event.
                await until_so(lambda: not any(run() for run in runs))
            finally:
                gc.enable()
    assert len(runs) == 3


async def test_closing_a_forgotten_trace_leaves_no_record(client: Client, bus: Bus) -> None:
    """An engine that was cut off closes what was ended from outside long ago."""
    async with client.trace("tiny", "hello", live={"alpha": 0.0}, detach=True) as trace:
        await bus.records.open(trace.id, "cut off")
        assert await bus.records.end(trace.id, "failed", Failure(type="EngineLost", message="lost"))
        record = bus.keys.record(trace.id)
        # As if its time were over.
        await bus.command("DEL", record)
        assert await bus.records.close(trace.id, 1) == []
        assert not await bus.command("EXISTS", record)


async def test_a_trace_that_is_cancelled_while_it_closes_ends_cancelled(
    client: Client, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever cancelled it was told that it will."""
    gate, heard = Gate(), anyio.Event()
    gate.open()
    end, close = Control.end, bus.records.close

    def ending(control: Control, *args: Any) -> None:
        end(control, *args)
        heard.set()

    async def closing(trace: str, attempt: int) -> list[bytes]:
        changes = await close(trace, attempt)
        assert await client.cancel(trace, "too late?")
        await heard.wait()
        return changes

    monkeypatch.setattr(Control, "end", ending)
    monkeypatch.setattr(bus.records, "close", closing)
    with anyio.fail_after(PATIENCE):
        async with (
            serving(bus, ScriptedEngine(gate)),
            client.trace("tiny", "hello", acts, live={"alpha": 0.0}, detach=True) as trace,
        ):
            events = await events_of(client, trace.id)
    assert isinstance(events[-1], Final)
    assert events[-1].status == "cancelled"


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


class Forgetting(ScriptedEngine):
    """Keeps the runs that it was told to forget."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate)
        self.steered, self.forgotten = anyio.Event(), anyio.Event()

    async def steer(self, changes: Any, over: list[str], since: float) -> None:
        """Take it."""
        if changes:
            self.steered.set()
        if over:
            self.forgotten.set()


async def test_workers_forget_a_run_whose_end_cannot_be_looked_at(client: Client, bus: Bus) -> None:
    """Somebody else ended it, and Redis goes away at that."""
    gate = Gate()
    engine = Forgetting(gate)
    ended = bus.records.ended

    async def away(trace: str) -> bool:
        bus.records.ended = ended  # type: ignore[method-assign]
        raise BusUnavailable("away")

    with anyio.fail_after(PATIENCE):
        async with (
            serving(bus, engine),
            client.trace("tiny", "hello", acts, live={"alpha": 0.0}, detach=True) as trace,
        ):
            await trace.accepted()
            await trace.steer(alpha=1.0)
            await engine.steered.wait()
            bus.records.ended = away  # type: ignore[method-assign]
            assert await bus.records.end(trace.id, "failed", Failure(type="EngineLost", message="lost"))
            gate.open()
            await engine.forgotten.wait()


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
            for _ in range(20):
                await looked.acquire()
            gate.open()
            assert await running.cancel()
            assert (await events_of(client, running.id))[-1].status == "cancelled"
    assert not failures


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
                    await stack.enter_async_context(client._session.open_bus()._connections._turn)
                await bus.leases.release(lease)
                while not await bus.leases.held([lease]):
                    pass
                await stack.aclose()


async def test_a_trace_that_two_submit_at_once_keeps_its_record(embedded: str, prefix: str, bus: Bus) -> None:
    """One is refused, since too many wait; before it takes its record back, there is room for the other."""
    one = Submission(trace="one", model="tiny", invokes=[Invoke(prompt="x")], deadline_s=1e6)
    async with Bus.open(embedded, prefix=prefix) as other:
        full = [msgspec.structs.replace(one, trace=f"full{number}") for number in range(2)]
        for submission in full:
            await bus.submit(submission)
        forget = bus.records.forget

        async def forgetting(trace: str, model: str) -> None:
            for submission in full:
                assert await other.queue.withdraw("tiny", submission.trace)
            await other.submit(one, 1)
            await forget(trace, model)

        bus.records.forget = forgetting  # type: ignore[method-assign]
        with pytest.raises(QueueFull):
            await bus.submit(one, 1)
        assert await other.queue.waiting("tiny") == 1
        assert await other.records.left("one") != (False, None)
        await other.cancel("one", by="somebody")
        assert await other.queue.waiting("tiny") == 0


@pytest.mark.parametrize("odd", ["\ud800", 5, None, [1], b"text"])
async def test_odd_words_are_named(client: Client, odd: Any) -> None:
    """What is no text is refused by the name of its argument, before anything is sent."""
    async with client.trace("tiny", "hello", live={"alpha": 0.0}, detach=True) as trace:
        with pytest.raises((TypeError, ValueError), match=r"^reason: expected text"):
            await trace.cancel(odd)
        if odd is not None:
            for call in (client.cancel, client.pause, client.resume):
                with pytest.raises((TypeError, ValueError), match=r"^by: expected text"):
                    await call(trace.id, by=odd)
        assert (await client.get_live(trace.id)).version == 0
    if odd is not None:
        with pytest.raises((TypeError, ValueError), match=r"^name: expected text"):
            async with tracewire.connect("embedded://", name=odd):
                pass
    calls: list[Any] = [client.get_live, client.cancel, client.pause, client.resume, client.get_state]
    for call in [*calls, lambda name: client.steer(name, alpha=1.0)]:
        with pytest.raises(tracewire.UnknownTrace if isinstance(odd, str) else TypeError, match=r"trace"):
            await call(odd)
