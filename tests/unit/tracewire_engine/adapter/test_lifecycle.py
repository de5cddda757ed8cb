"""Engines that are asked to leave while there is work."""

# ruff: noqa: ASYNC110

# ruff: noqa: ASYNC110
from __future__ import annotations

from functools import partial

import anyio
import anyio.to_thread
import pytest

import tracewire
from tests.support.drained import engine, in_state, runs, started, whole
from tests.support.stepping import Gate
from tracewire import Client, Restarted
from tracewire_bus.bus import Bus

PATIENCE = 60


async def test_a_draining_engine_takes_nothing_new_finishes_and_leaves(client: Client, bus: Bus) -> None:
    gate = Gate()
    async with engine(bus, "leaving", gate) as leaving:
        await client.models.get("tiny", timeout=PATIENCE)
        first = await started(client, "first")
        gate.step(3)
        await runs(first)
        drain = await client.engines.drain("leaving")
        assert (drain.engine.name, drain.others, drain.waiting) == ("leaving", (), 0)
        await in_state(client, "leaving", "draining")
        # It takes none of these: they wait, until another comes.
        later = [await started(client, f"later {number}") for number in range(5)]
        assert await bus.queue.waiting("tiny") == 5
        assert not leaving.ended.is_set()
        async with Bus.open(bus.url, prefix=bus.keys.prefix) as other, engine(other, "staying"):
            for number, trace in enumerate(later):
                events = await whole(client, trace.id, f"later {number}")
                assert {event.engine for event in events if isinstance(event, tracewire.Accepted)} == {"staying"}
            gate.open()
            events = await whole(client, first.id, "first")
            assert not any(isinstance(event, Restarted) for event in events)
            with anyio.fail_after(PATIENCE):
                await drain.wait()
                await leaving.ended.wait()
            assert [one.name for one in await client.engines.list()] == ["staying"]
            assert leaving.draining.is_set()
            assert not leaving.lost
    for trace in (first, *later):
        await trace.aclose()


async def test_what_has_not_ended_in_time_runs_anew_elsewhere(client: Client, bus: Bus) -> None:
    async with engine(bus, "leaving", partial(anyio.sleep, 0.02)) as leaving:
        await client.models.get("tiny", timeout=PATIENCE)
        trace = await started(client, "slow", 2000, max_attempts=2)
        only = await started(client, "once", 2000, on_engine_loss="fail")
        await runs(trace)
        await runs(only)
        drain = await client.engines.drain("leaving", timeout=0.05)
        with anyio.fail_after(PATIENCE):
            await drain.wait()
            await leaving.ended.wait()
        assert await bus.queue.waiting("tiny") == 1
    async with engine(bus, "next"):
        events = await whole(client, trace.id, "slow", 2000)
    (restart,) = [event for event in events if isinstance(event, Restarted)]
    assert (restart.attempt, restart.seq) == (2, 0)
    assert "shut down" in restart.reason
    state = await client.get_state(only.id)
    assert state.status == "failed"
    assert state.error is not None
    assert state.error.type == "EngineShutdown"
    for one in (trace, only):
        await one.aclose()


async def test_asking_again_does_no_harm_and_the_earliest_end_counts(client: Client, bus: Bus) -> None:
    async with engine(bus, "leaving", Gate()) as leaving:
        await client.models.get("tiny", timeout=PATIENCE)
        trace = await started(client, "never steps")
        with anyio.fail_after(PATIENCE):
            while not leaving.busy:
                await anyio.sleep(0.01)
        for timeout in (None, 3600, None):
            await client.engines.drain("leaving", timeout=timeout)
        await in_state(client, "leaving", "draining")
        drain = await client.engines.drain("leaving", timeout=0)
        with anyio.fail_after(PATIENCE):
            await leaving.ended.wait()
            await drain.wait()
        with pytest.raises(tracewire.UnknownEngine):
            await client.engines.drain("leaving")
    assert await bus.queue.waiting("tiny") == 1
    await client.cancel(trace.id)
    await trace.aclose()


async def test_a_signal_ends_a_drain_that_has_no_end(client: Client, bus: Bus) -> None:
    async with engine(bus, "leaving", Gate(), drain_s=0.05) as leaving:
        await client.models.get("tiny", timeout=PATIENCE)
        trace = await started(client, "never steps")
        with anyio.fail_after(PATIENCE):
            while not leaving.busy:
                await anyio.sleep(0.01)
        await client.engines.drain("leaving")
        await in_state(client, "leaving", "draining")
        leaving.stop()
        with anyio.fail_after(PATIENCE):
            await leaving.ended.wait()
    await client.cancel(trace.id)
    await trace.aclose()
