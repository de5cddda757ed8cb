"""An adapter whose Redis or whose engine does not answer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from tests.support.bus_engine import engine_info
from tests.support.lost_reports import Hanging
from tests.support.played_engine import PlayedEngine, adapted
from tests.support.redis.durable import server
from tests.support.redis.proxy import proxy
from tests.support.scripted_engine import ScriptedEngine, acts, info, serving
from tests.support.stepping import Gate, free, whole
from tests.support.until import until
from tracewire import Client, Restarted
from tracewire_bus.bus import Bus
from tracewire_bus.transport.link import Link
from tracewire_engine.adapter.engine_api import Choice
from tracewire_engine.adapter.service import Adapter, Settings
from tracewire_engine.protocol.messages import Report

PATIENCE = 60


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


async def test_the_registry_shows_that_an_engine_is_stalled_until_it_reports_again(
    embedded: str, bus: Bus, prefix: str
) -> None:
    engine = Hanging()

    async def stalled() -> bool:
        return [entry.state for entry in await bus.registry.list()] == ["stalled"]

    async def serves() -> bool:
        engine.report(Report())
        adapter._reports.pull()
        return [entry.state for entry in await bus.registry.list()] == ["serving"]

    with anyio.fail_after(PATIENCE):
        async with adapted(embedded, prefix, engine, engine_patience_s=30.0) as adapter:
            await until(stalled)
            await until(serves)
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


async def test_an_adapter_that_ends_by_a_defect_leaves_all_the_same(
    client: Client, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine(Gate())
    described = info()
    broken = Adapter(engine, described, bus, Settings(heartbeat_s=0.05))

    async def defect() -> None:
        raise RuntimeError("a defect")

    async def run() -> None:
        with pytest.raises(ExceptionGroup) as error:
            await broken.run()
        assert error.group_contains(RuntimeError, match="a defect")

    monkeypatch.setattr(broken._intake, "drain", defect)
    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await client.models.get("tiny", timeout=PATIENCE)
        trace = client.trace("tiny", "hello", acts, max_tokens=3, detach=True)
        await trace.start()
        await trace.accepted()
        broken.stop()
        await broken.ended.wait()
        assert await bus.registry.alive(described.engine) == set()
        assert await bus.queue.waiting("tiny") == 1
    async with serving(bus, free()):
        await whole(client, trace.id, "hello", 3)
    await trace.aclose()


async def test_leaving_takes_no_longer_than_last_words_while_redis_is_away(tmp_path: Path) -> None:
    """A bus waits for twenty seconds for each thing that it asks."""
    async with (
        server(tmp_path / "redis") as redis,
        Bus.open(redis.url) as bus,
        serving(bus, free(), last_words_s=0.2) as adapter,
    ):
        await until(lambda: bus.registry.alive(adapter._info.engine))
        redis.kill()
        with anyio.fail_after(PATIENCE):
            adapter.stop()
            await adapter.ended.wait()


async def test_an_engine_that_was_told_to_stop_by_itself_costs_an_attempt(client: Client, bus: Bus) -> None:
    """vLLM ends what comes then with `abort`, though nobody has asked for that."""
    gate = Gate()
    async with serving(bus, stopping := ScriptedEngine(gate)) as first:
        await client.models.get("tiny", timeout=PATIENCE)
        trace = client.trace("tiny", "hello", acts, max_tokens=20, detach=True)
        await trace.start()
        await trace.accepted()
        (request,) = stopping._requests.values()
        stopping.told_to_stop = True
        request.put(Choice(0, [], "", finish_reason="abort"))
        gate.step()
        with anyio.fail_after(PATIENCE):
            await first.ended.wait()
        assert first.lost
        async with serving(bus, free()):
            events = await whole(client, trace.id, "hello", 20)
    assert [event.attempt for event in events if isinstance(event, Restarted)] == [2]
    await trace.aclose()


async def test_an_engine_that_was_told_to_stop_with_its_adapter_costs_no_try(client: Client, bus: Bus) -> None:
    """All processes were: what the adapter still runs goes on, and what vLLM gave back is handed over."""
    gate = Gate()
    async with serving(bus, stopping := ScriptedEngine(gate), drain_s=PATIENCE) as first:
        await client.models.get("tiny", timeout=PATIENCE)
        async with (
            client.trace("tiny", "aborted", acts, max_tokens=20, detach=True, max_attempts=2) as aborted,
            client.trace("tiny", "drains", acts, max_tokens=20, detach=True) as drains,
        ):
            for trace in (aborted, drains):
                await trace.accepted()
            first.stop()
            request = next(one for one in stopping._requests.values() if one.prompt == "aborted")
            stopping.told_to_stop = True
            request.put(Choice(0, [], "", finish_reason="abort"))
            gate.open()
            with anyio.fail_after(PATIENCE):
                await first.ended.wait()
            assert not first.lost
            async with serving(bus, free()):
                await whole(client, aborted.id, "aborted", 20)
            events = await whole(client, drains.id, "drains", 20)
    assert not [event for event in events if isinstance(event, Restarted)]


async def test_an_engine_keeps_its_lease_though_its_connections_have_gone_silent(
    bus: Bus, embedded: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has closed them, and replies over them would be awaited for ever."""
    monkeypatch.setattr(
        Link.execute, "__kwdefaults__", {**(Link.execute.__kwdefaults__ or {}), "timeout_s": float("inf")}
    )
    with anyio.fail_after(PATIENCE):
        async with (
            proxy(embedded, tmp_path) as way,
            Bus.open(way.url, prefix=prefix, patience_s=1000) as other,
            serving(other, free(), lease_s=0.6) as adapter,
        ):
            name = adapter._info.engine
            await until(lambda: bus.registry.alive(name))
            registered = adapter._lifecycle.valid_until
            await until(lambda: adapter._lifecycle.valid_until > registered)
            way.freeze()
            await bus.command("DEL", bus.keys.engine(name), bus.keys.heartbeat(name))
            await until(lambda: bus.registry.alive(name))
            assert other.broken_at > 0
            await way.cut()
