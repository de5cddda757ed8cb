"""Traces between two attempts, and engines that Redis kept waiting: each has its end, and nobody is taken for dead."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio
import pytest

import tracewire
from tests.support.scripted_engine import ScriptedEngine, acts, info, serving
from tracewire import Client
from tracewire_bus import recovery
from tracewire_bus.bus import Bus
from tracewire_bus.wire.messages import Submission

PATIENCE = 60


@pytest.fixture
async def client(embedded: str, prefix: str) -> AsyncIterator[Client]:
    """A client on the session's Redis."""
    async with tracewire.connect(embedded, prefix=prefix) as client:
        yield client


async def test_a_client_that_goes_while_its_trace_waits_for_a_second_attempt(bus: Bus) -> None:
    """Its record names the engine that was lost, which nobody asks any more."""
    submission = Submission(trace="a", model="tiny", invokes=[], lease="client.6", client="c")
    await bus.submit(submission)
    await bus.queue.take("tiny", "gone", 1, 100)
    await bus.records.open("a", "gone", 1)
    assert await bus.queue.put_back("tiny", "gone", "it was lost", lost=True) == 1
    await bus.cancel_orphans("tiny", "client.6", by="the bus")
    assert await bus.records.ended("a")
    assert await bus.command("HLEN", bus.keys.queue("tiny", "entries")) == 0


async def test_an_engine_whose_entry_ran_out_while_it_was_renewed_takes_again(
    client: Client, bus: Bus, embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer came late, and all later ones in time."""
    async with Bus.open(embedded, prefix=prefix) as own:
        engine = ScriptedEngine(partial(anyio.sleep, 0))
        async with serving(own, engine, heartbeat_s=10_000, lease_s=1.0, poll_s=0.01) as adapter:
            with anyio.fail_after(PATIENCE):
                while adapter._lifecycle.valid_until < 0:
                    await anyio.lowlevel.checkpoint()
            register = own.registry.register
            ran_out = adapter._lifecycle.valid_until

            async def late(*arguments: Any) -> None:
                # Until the intake has seen it.
                while anyio.current_time() < ran_out + 0.05:
                    await anyio.lowlevel.checkpoint()
                await register(*arguments)

            await anyio.sleep(ran_out - 0.5 - anyio.current_time())
            monkeypatch.setattr(own.registry, "register", late)
            await adapter._renew()
            monkeypatch.setattr(own.registry, "register", register)

            async def renewing() -> None:
                while True:
                    await adapter._renew()
                    await anyio.sleep(0.02)

            async with anyio.create_task_group() as group:
                group.start_soon(renewing)
                with anyio.fail_after(PATIENCE):
                    async with client.trace("tiny", "hello", acts, max_tokens=3, detach=True) as trace:
                        await trace.result()
                group.cancel_scope.cancel()


async def test_an_engine_renews_its_entry_however_much_there_is_to_look_after(
    client: Client, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed = 0
    register = bus.registry.register

    async def counted(*arguments: Any) -> None:
        nonlocal renewed
        await register(*arguments)
        renewed += 1

    looking = anyio.Event()

    async def for_ever(*arguments: Any) -> list[str]:
        looking.set()
        await anyio.sleep_forever()
        return []

    monkeypatch.setattr(bus.registry, "register", counted)
    async with serving(bus, ScriptedEngine(partial(anyio.sleep, 0))) as adapter:
        monkeypatch.setattr(bus.queue, "leases", for_ever)
        with anyio.fail_after(PATIENCE):
            await looking.wait()
            before = renewed
            while renewed < before + 3:
                await anyio.lowlevel.checkpoint()
        assert not adapter.lost


async def test_a_redis_that_kept_all_waiting_takes_nobodys_traces(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answered late, but it did answer: no connection broke."""
    monkeypatch.setattr(recovery, "CERTAIN_S", 0.001)
    monkeypatch.setattr(recovery, "STALL_S", 0.1)
    described = info()
    await bus.registry.register(described, 60)
    await bus.queue.put("tiny", "a", b"d")
    await bus.queue.take("tiny", described.engine, 1, 100)
    look = bus.recovery("tiny")
    assert await look.look() == []
    alive = bus.registry.alive

    async def stalled(*engines: str) -> set[str]:
        begun = anyio.current_time()
        while anyio.current_time() - begun < 0.2:
            await anyio.lowlevel.checkpoint()
        # Its entry ran out, and Redis came to this question before it came to the entry's renewal.
        return set()

    monkeypatch.setattr(bus.registry, "alive", stalled)
    assert await look.look() == []
    monkeypatch.setattr(bus.registry, "alive", alive)
    assert await look.look() == []
    assert await bus.queue.waiting("tiny") == 0
    # One that is gone is missed as ever.
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.0)
    await bus.registry.unregister(described.engine)
    assert await look.look() == [described.engine]


async def test_what_is_put_back_by_an_attempt_is_no_later_one(bus: Bus) -> None:
    """A fenced attempt costs no try of the one that its engine took since."""
    await bus.queue.put("tiny", "a", b"d", tries=3)
    await bus.queue.take("tiny", "one", 1, 100)
    await bus.queue.put_back("tiny", "one", "slow", lost=True)
    (again,) = await bus.queue.take("tiny", "one", 1, 100)
    assert await bus.queue.put_back("tiny", "one", "fenced", lost=True, trace="a", attempt=again.attempt - 1) == 0
    assert await bus.queue.waiting("tiny") == 0
    assert await bus.queue.put_back("tiny", "one", "fenced", lost=True, trace="a", attempt=again.attempt) == 1


async def test_a_trace_whose_takes_redis_has_forgotten_runs(client: Client, bus: Bus) -> None:
    """Its record is of a later attempt than its entry says, as after a failover of one node of several."""
    trace = client.trace("tiny", "hello", acts, max_tokens=3, detach=True, trace_id="t")
    await bus.submit(trace._submission)
    await bus.records.open("t", "gone", 2)
    async with serving(bus, ScriptedEngine(partial(anyio.sleep, 0))):
        with anyio.fail_after(PATIENCE):
            state = await client.get_state("t")
            while state.status is None:
                await anyio.lowlevel.checkpoint()
                state = await client.get_state("t")
    assert state.status == "finished"
    assert await bus.command("HLEN", bus.keys.queue("tiny", "entries")) == 0
