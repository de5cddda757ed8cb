"""An adapter whose Redis or whose engine does not answer."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest

from tests.support.bus_engine import engine_info
from tests.support.lost_reports import Hanging
from tests.support.played_engine import PlayedEngine, adapted
from tests.support.redis.proxy import proxy
from tests.support.scripted_engine import acts
from tracewire import Client
from tracewire_bus.bus import Bus
from tracewire_engine.adapter.service import Adapter, Settings
from tracewire_engine.protocol.messages import FinishRecord, Report, StepRecord

PATIENCE = 60


@pytest.mark.usefixtures("registered")
async def test_an_engine_that_refuses_to_be_held_is_asked_again(
    client: Client, embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was told to stop does, with an error of its own type: nobody else's traces end by that."""
    monkeypatch.setattr("tracewire_engine.adapter.service._BACKPRESSURE_RETRY_S", 0.0)
    held = anyio.Event()

    class Refusing(PlayedEngine):
        refusals = 1

        async def pause_all(self) -> None:
            if self.refusals:
                self.refusals -= 1
                raise RuntimeError("the engine is shutting down")
            held.set()

    engine = Refusing()
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, engine, buffer_bytes=10) as adapter,
            client.trace("tiny", "hello", acts, detach=True) as trace,
        ):
            await trace.accepted()
            ((request, outputs),) = engine.requests.items()
            nothing = msgspec.Raw(msgspec.msgpack.encode([]))
            engine.report(Report(steps=[StepRecord(request, 0, 0, nothing)]))
            await held.wait()
            assert adapter.engine_paused
            outputs.put("x")
            engine.report(Report(finishes=[FinishRecord(request, 0, nothing, steps=1)]))
            outputs.put("", "stop", 0)
            assert (await trace.result()).text == "x"


@pytest.mark.usefixtures("registered")
async def test_an_engine_that_hangs_loses_its_lease_and_its_traces(
    client: Client, bus: Bus, embedded: str, prefix: str
) -> None:
    """Its adapter lives, and would renew it for ever."""
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, Hanging(), engine_patience_s=0.2) as adapter,
            client.trace("tiny", "hello", acts, detach=True) as trace,
        ):
            await trace.accepted()
            await adapter.ended.wait()
            assert adapter.lost
            assert await bus.queue.waiting("tiny") == 1
            assert not await bus.registry.alive(adapter._info.engine)


async def test_an_engine_that_reports_is_not_given_up_whether_or_not_it_answers(embedded: str, prefix: str) -> None:
    """One that was told to stop answers nothing any more, and finishes what it runs."""
    engine = Hanging()
    with anyio.fail_after(PATIENCE):
        async with adapted(embedded, prefix, engine, engine_patience_s=0.2) as adapter:
            while engine.asked_to_answer < 5:
                engine.report(Report())
                adapter._reports.pull()
                await anyio.lowlevel.checkpoint()
            assert not adapter.lost


async def test_a_redis_that_goes_before_the_engine_is_registered_ends_no_adapter(
    embedded: str, prefix: str, tmp_path: Path
) -> None:
    """Its model would be loaded anew, and after some such starts the supervisor gives up."""
    async with (
        proxy(embedded, tmp_path) as way,
        Bus.open(way.url, prefix=prefix, patience_s=0.1) as bus,
        anyio.create_task_group() as group,
    ):
        adapter = Adapter(PlayedEngine(), engine_info(), bus, Settings(heartbeat_s=0.05, drain_s=0))
        asked, look = 0, adapter._standing.refresh

        async def looked() -> None:
            nonlocal asked
            asked += 1
            if asked == 3:
                way.away = False
            await look()

        adapter._standing.refresh = looked  # type: ignore[method-assign]
        way.away = True
        await way.cut()
        group.start_soon(adapter.run)
        with anyio.fail_after(PATIENCE):
            await adapter.serving.wait()
        assert asked >= 3
        assert await bus.registry.alive(adapter._info.engine)
        adapter.stop()
