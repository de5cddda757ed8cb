"""A pause with an end: the engine resumes or cancels the trace, whether or not the pause's author lives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

import tracewire
from tests.support.played_engine import PlayedEngine, adapted
from tests.support.redis.durable import server
from tests.support.redis.proxy import proxy
from tests.support.until import until
from tracewire import Client, Paused, Resumed
from tracewire_bus.bus import BusError
from tracewire_engine.adapter.pause_ends import PauseEnds
from tracewire_engine.adapter.service import Adapter
from tracewire_engine.adapter.trace_run import TraceRun

PATIENCE = 60

pytestmark = pytest.mark.usefixtures("registered")


def _run(adapter: Adapter, trace: str) -> TraceRun:
    run = adapter._claims.runs[trace]
    assert isinstance(run, TraceRun)
    return run


@asynccontextmanager
async def _paused(trace: Any, **end: Any) -> AsyncIterator[None]:
    await trace.accepted()
    assert await trace.pause(by="guard", **end)
    assert isinstance(await anext(trace), Paused)
    yield


async def test_the_trace_goes_on_when_its_pause_ends(client: Client, embedded: str, prefix: str) -> None:
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with adapted(embedded, prefix, engine), client.trace("tiny", "hello", detach=True) as trace:
            async with _paused(trace, timeout=0.05):
                resumed = await anext(trace)
            assert isinstance(resumed, Resumed)
            assert resumed.by == "timeout of guard"
            # The record knows it, too: the trace can be paused again.
            assert await trace.pause(by="guard")
            assert await trace.resume()
            engine.finish(next(iter(engine.requests)))
            await trace.result()


async def test_the_trace_is_cancelled_when_its_pause_ends(client: Client, embedded: str, prefix: str) -> None:
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, PlayedEngine()),
            client.trace("tiny", "hello", detach=True) as trace,
            _paused(trace, timeout=0.05, on_timeout="cancel"),
        ):
            with pytest.raises(tracewire.TraceCancelled, match="timeout of guard: its pause was not ended in time"):
                await trace.result()


@pytest.mark.parametrize("then", ["resume", "cancel"])
async def test_a_pause_ends_while_redis_is_full(tmp_path: Path, then: str) -> None:
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with (
            server(tmp_path) as redis,
            adapted(redis.url, "full", engine) as adapter,
            tracewire.connect(redis.url, prefix="full") as client,
        ):
            await client.models.get("tiny", timeout=PATIENCE)
            bus, ends = adapter._bus, PauseEnds(adapter._bus, adapter._claims, adapter._control)
            await bus.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
            async with client.trace("tiny", "hello", detach=True) as trace:
                await trace.accepted()
                assert await trace.pause(by="guard", timeout=60, on_timeout=then)
                await until(lambda: _run(adapter, trace.id).pause.due is not None)
                await bus.command("CONFIG", "SET", "maxmemory", "1")
                await ends.check(anyio.current_time() + 61)
                await bus.command("CONFIG", "SET", "maxmemory", "0")
                if then == "cancel":
                    with pytest.raises(tracewire.TraceCancelled, match="timeout of guard"):
                        await trace.result()
                else:
                    engine.finish(next(iter(engine.requests)))
                    await trace.result()


async def test_an_end_that_was_moved_or_dropped_does_nothing(client: Client, embedded: str, prefix: str) -> None:
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with adapted(embedded, prefix, engine) as adapter, client.trace("tiny", "x", detach=True) as trace:
            async with _paused(trace, timeout=300, on_timeout="cancel"):
                run = _run(adapter, trace.id)
                assert run.pause.due is not None
                due = run.pause.due
                assert await trace.pause(by="guard", timeout=600)
                await until(lambda: run.pause.due != due)
                ends = PauseEnds(adapter._bus, adapter._claims, adapter._control)
                await ends.check(due + 1)
                assert run.pause.paused
                # A person's pause has no end.
                assert await trace.pause(by="person")
                await until(lambda: run.pause.due is None)
                await ends.check(due + 1000)
                assert run.pause.paused
                assert not await trace.resume(paused_by="guard")
                assert await trace.resume(paused_by="person")
                assert isinstance(await anext(trace), Resumed)
            engine.finish(next(iter(engine.requests)))
            await trace.result()


async def test_the_next_engine_knows_the_end(client: Client, embedded: str, prefix: str) -> None:
    """The pause came while the trace was queued, and its end passed before an engine ran the trace."""
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with client.trace("tiny", "hello", detach=True) as trace:
            assert await trace.pause(by="guard", timeout=0.01)
            async with adapted(embedded, prefix, engine):
                assert isinstance(await anext(trace), Paused)
                assert isinstance(await anext(trace), Resumed)
                engine.finish(next(iter(engine.requests)))
                await trace.result()


async def test_an_end_waits_for_redis(client: Client, embedded: str, prefix: str, tmp_path: Path) -> None:
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with (
            proxy(embedded, tmp_path) as way,
            adapted(way.url, prefix, engine) as adapter,
            client.trace("tiny", "hello", detach=True) as trace,
        ):
            async with _paused(trace, timeout=300):
                way.away = True
                await way.cut()
                run = _run(adapter, trace.id)
                run.pause.due = anyio.current_time()
                ends = PauseEnds(adapter._bus, adapter._claims, adapter._control)
                with pytest.raises(BusError):
                    await ends.check(anyio.current_time())
                assert run.pause.due is not None
                way.away = False
                assert isinstance(await anext(trace), Resumed)
            engine.finish(next(iter(engine.requests)))
            await trace.result()


async def test_a_trace_that_was_resumed_is_not_cancelled_by_the_end_of_its_pause(
    client: Client, embedded: str, prefix: str
) -> None:
    """Redis has the resumption, whose order has not reached the engine."""
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with adapted(embedded, prefix, engine) as adapter, client.trace("tiny", "x", detach=True) as trace:
            async with _paused(trace, timeout=300, on_timeout="cancel"):
                run = _run(adapter, trace.id)
                assert run.pause.due is not None
                due, ends = run.pause.due, PauseEnds(adapter._bus, adapter._claims, adapter._control)
                await adapter._bus.command("HINCRBY", adapter._bus.keys.record(trace.id), "zn", 1)
                await adapter._bus.command("HDEL", adapter._bus.keys.record(trace.id), "z")
                await ends.check(due + 1)
                assert run.pause.paused
                assert not run.ended
                # The order comes.
                run.pause.request("guard", resume=True, number=2)
                adapter._control.apply_pause(run)
                await ends.check(due + 100)
            engine.finish(next(iter(engine.requests)))
            await trace.result()


@pytest.mark.parametrize("then", ["resume", "cancel"])
async def test_a_pause_ends_although_the_order_that_ended_it_was_refused(
    client: Client, embedded: str, prefix: str, then: str
) -> None:
    """Or although the adapter has lost Redis's reply to its own question. No order comes."""
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with adapted(embedded, prefix, engine) as adapter, client.trace("tiny", "x", detach=True) as trace:
            async with _paused(trace, timeout=300, on_timeout=then):
                run = _run(adapter, trace.id)
                assert run.pause.due is not None
                due, ends = run.pause.due, PauseEnds(adapter._bus, adapter._claims, adapter._control)
                await adapter._bus.command("HINCRBY", adapter._bus.keys.record(trace.id), "zn", 1)
                await adapter._bus.command("HDEL", adapter._bus.keys.record(trace.id), "z")
                await ends.check(due + 1)
                assert run.pause.paused
                await ends.check(due + 6)
            if then == "cancel":
                with pytest.raises(tracewire.TraceCancelled, match="its pause was not ended in time"):
                    await trace.result()
            else:
                assert isinstance(await anext(trace), Resumed)
                engine.finish(next(iter(engine.requests)))
                await trace.result()


async def test_a_pause_that_its_author_prolongs_is_one_pause(client: Client, embedded: str, prefix: str) -> None:
    """So nobody pauses a trace for longer than the engine's limit."""
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, PlayedEngine()) as adapter,
            client.trace("tiny", "x", detach=True) as trace,
            _paused(trace, timeout=300),
        ):
            run = _run(adapter, trace.id)
            since, number = run.pause.paused_since, run.pause.number
            assert since is not None
            assert await trace.pause(by="guard", timeout=600)
            await until(lambda: run.pause.number > number)
            assert run.pause.paused_since == since
            assert await trace.resume(by="guard")
            await until(lambda: not run.pause.paused)
            assert run.pause.paused_since is None
