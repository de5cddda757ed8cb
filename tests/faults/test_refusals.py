"""What Redis refuses, and what a crash leaves half done: adapters wait, ask again, and leave in time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

import tracewire
from tests.faults.test_engine_loss import Gate, free, whole
from tests.support.redis.durable import server
from tests.support.scripted_engine import ScriptedEngine, acts, info, serving
from tests.support.until import until
from tracewire import Client, Restarted
from tracewire_bus import recovery
from tracewire_bus.bus import Bus, BusError, BusUnavailable, NotAllowed
from tracewire_bus.store import intake as queue_intake
from tracewire_bus.wire.messages import Failure, Invoke, Submission
from tracewire_engine.adapter import intake
from tracewire_engine.adapter.engine_api import Choice, Rejection
from tracewire_engine.adapter.service import Adapter, Settings

PATIENCE = 10


@pytest.fixture
async def client(embedded: str, prefix: str) -> AsyncIterator[Client]:
    """A client on the session's Redis."""
    async with tracewire.connect(embedded, prefix=prefix) as client:
        yield client


async def test_what_could_not_be_answered_while_redis_was_away_is_later(
    client: Client, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect of the adapter's own, in the moment in which Redis is away."""
    monkeypatch.setattr(intake, "_REFUSED_S", 0.01)
    end = bus.records.end
    asked = 0

    async def away(*arguments: Any) -> bool:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise BusUnavailable("Redis is away")
        return await end(*arguments)

    async def defect(*_: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(bus.records, "end", away)
    async with serving(bus, free()) as adapter:
        monkeypatch.setattr(adapter._intake, "_checked", defect)
        await client.models.get("tiny", timeout=PATIENCE)
        async with client.trace("tiny", "hello", acts, max_tokens=3) as trace:
            with anyio.fail_after(PATIENCE), pytest.raises(tracewire.TraceFailed, match="a defect"):
                await trace.result()
        await until(lambda: _empty(bus))
    assert asked == 2


async def _empty(bus: Bus) -> bool:
    return not await bus.command("HLEN", bus.keys.queue("tiny", "entries"))


async def test_what_redis_refuses_to_begin_is_not_asked_for_all_the_time(
    client: Client, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits before it asks again; others run meanwhile, and a stop is not held up by it."""
    monkeypatch.setattr(intake, "_REFUSED_S", 10_000.0)
    monkeypatch.setattr(intake, "_REFUSED_MOST_S", 10_000.0)
    open_ = bus.records.open
    asked = 0

    async def refused(trace: str, *more: Any) -> Any:
        nonlocal asked
        if trace == "refused":
            asked += 1
            raise NotAllowed("Redis does not allow this user that")
        return await open_(trace, *more)

    monkeypatch.setattr(bus.records, "open", refused)
    async with serving(bus, free()) as adapter:
        await client.models.get("tiny", timeout=PATIENCE)
        waiting = client.trace("tiny", "hello", acts, max_tokens=3, trace_id="refused", detach=True)
        await waiting.start()
        await until(lambda: asked > 0)
        for _ in range(20):
            async with client.trace("tiny", "hello", acts, max_tokens=3) as trace:
                await trace.result()
        assert asked == 1
        with anyio.fail_after(PATIENCE):
            adapter.stop()
            await adapter.ended.wait()
    monkeypatch.setattr(bus.records, "open", open_)
    async with serving(bus, free()):
        await whole(client, "refused", "hello", 3)
    await waiting.aclose()


async def test_a_queue_that_cannot_be_taken_from_ends_no_adapter(
    client: Client, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs goes on, and once it can be taken from again it is."""
    monkeypatch.setattr(intake, "_REFUSED_S", 0.01)
    gate = Gate()
    async with serving(bus, ScriptedEngine(gate)) as adapter:
        await client.models.get("tiny", timeout=PATIENCE)
        async with client.trace("tiny", "hello", acts, max_tokens=10) as running:
            await running.accepted()
            bell = bus.keys.queue("tiny", "bell")
            await bus.command("DEL", bell)
            await bus.command("SET", bell, "no list")
            await until(lambda: adapter._intake.refused.failures > 2)
            gate.step(10)
            with anyio.fail_after(PATIENCE):
                await running.result()
        assert not adapter.ended.is_set()
        await bus.command("DEL", bell)
        gate.open()
        async with client.trace("tiny", "hello", acts, max_tokens=3) as trace:
            with anyio.fail_after(PATIENCE):
                await trace.result()


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


@pytest.mark.parametrize("where", ["in its check", "in its engine"])
async def test_a_rejected_trace_that_others_had_ended_leaves_nothing_behind(
    client: Client, bus: Bus, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Its final is refused, and its entry is not claimed any more."""
    engine = free()
    ended = anyio.Event()

    async def ends(submission: Submission) -> None:
        await bus.records.end(submission.trace, "failed", Failure(type="Test", message="ended by others"))
        ended.set()
        raise Rejection("prompt", "it is not to the engine's liking")

    async def prepare(submission: Submission, *_: Any, **__: Any) -> Any:
        await ends(submission)

    async with serving(bus, engine) as adapter:
        opening = adapter._intake._checked

        async def checks(entry: Any) -> Any:
            await bus.records.end(entry.trace, "failed", Failure(type="Test", message="ended by others"))
            return await opening(entry)

        def check(_: Any) -> None:
            ended.set()
            raise Rejection("prompt", "it is not to the adapter's liking")

        if where == "in its check":
            monkeypatch.setattr(adapter._intake, "_checked", checks)
            monkeypatch.setattr(adapter._validator, "_check", check)
        else:
            monkeypatch.setattr(engine, "prepare", prepare)
        await client.models.get("tiny", timeout=PATIENCE)
        async with client.trace("tiny", "hello", acts, max_tokens=3) as trace:
            with anyio.fail_after(PATIENCE), pytest.raises(tracewire.TraceFailed, match="ended by others"):
                await trace.result()
        await ended.wait()
        await until(lambda: not adapter._claims.runs and not adapter._intake.scopes)
        await until(lambda: _empty(bus))
        assert [one.claimed for one in bus.queue._intakes.values()] == [set()]


# --- suspects and dead letters ----------------------------------------------------------------------------------------


async def suspects(bus: Bus, *traces: str) -> None:
    """Entries with one try left."""
    for trace in traces:
        await bus.queue.put("tiny", trace, b"d", tries=2)
    assert len(await bus.queue.take("tiny", "gone", 10, 1)) == len(traces)
    assert await bus.queue.put_back("tiny", "gone", "it was lost", lost=True) == len(traces)


async def test_a_suspect_that_takes_its_time_does_not_keep_the_others_waiting_for_ever(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paused, hanging, or only long: its engine takes another one after a while, and not before."""
    await suspects(bus, "a", "b", "c")
    assert [one.trace for one in await bus.queue.take("tiny", "e", 10, 1)] == ["a"]
    assert await bus.queue.take("tiny", "e", 10, 1) == []
    monkeypatch.setattr(queue_intake, "SUSPECT_S", 0.0)
    assert [one.trace for one in await bus.queue.take("tiny", "e", 10, 1)] == ["b"]
    monkeypatch.setattr(queue_intake, "SUSPECT_S", 60.0)
    # It is `b` now that is waited for.
    await bus.queue.done("tiny", "a", "e")
    assert await bus.queue.take("tiny", "e", 10, 1) == []
    await bus.queue.done("tiny", "b", "e")
    assert [one.trace for one in await bus.queue.take("tiny", "e", 10, 1)] == ["c"]
    assert await bus.queue.put_back("tiny", "e", "it left", lost=False) == 1
    left = await bus.command("HKEYS", bus.keys.queue("tiny", "state"))
    assert not [name for name in left if name.startswith(b"suspect")]


async def test_a_paused_suspect_and_its_engines_other_suspects(
    client: Client, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.1)
    monkeypatch.setattr(queue_intake, "SUSPECT_S", 0.3)
    async with serving(bus, dying := ScriptedEngine(Gate())) as first:
        await client.models.get("tiny", timeout=PATIENCE)
        async with (
            client.trace("tiny", "hang", acts, max_tokens=3, detach=True, max_attempts=2) as paused,
            client.trace("tiny", "two", acts, max_tokens=3, detach=True, max_attempts=2) as other,
        ):
            for trace in (paused, other):
                await trace.accepted()
            await paused.pause()
            dying.die()
            await first.ended.wait()
            async with serving(bus, free()):
                with anyio.fail_after(PATIENCE):
                    assert (await other.result()).status == "finished"
                    await paused.cancel()


@pytest.mark.parametrize("crash", ["before the letter", "before its entry is settled"])
async def test_a_crash_on_the_way_to_a_dead_letter_leaves_one(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    class Crash(Exception):
        pass

    async def crashes(*_: Any, **__: Any) -> None:
        raise Crash

    await suspects(bus, "a")
    await bus.queue.take("tiny", "e", 1, 1)
    await bus.queue.put_back("tiny", "e", "it was lost again", lost=True)
    with monkeypatch.context() as patched:
        patched.setattr(bus.queue, "dead_letter" if crash == "before the letter" else "done", crashes)
        for _ in range(2):
            with pytest.raises(Crash):
                await bus.recovery("tiny").finish_given_up()
    assert await bus.records.ended("a")
    await bus.recovery("tiny").finish_given_up()
    (letter,) = await bus.dead_letters.list()
    assert (letter.trace, letter.data) == ("a", b"d")
    assert "it was lost again" in letter.reason
    assert await bus.queue.given_up("tiny") == []
    # An operator who has seen to it does not find it again.
    await bus.dead_letters.drop(letter.id)
    await bus.recovery("tiny").finish_given_up()
    assert len(await bus.dead_letters.list()) == 0


async def test_what_had_ended_otherwise_is_no_dead_letter(bus: Bus) -> None:
    """Its engine was lost between its end and its entry."""
    await suspects(bus, "a")
    await bus.queue.take("tiny", "e", 1, 1)
    await bus.records.end("a", "failed", Failure(type="BlockError", message="its block failed"))
    await bus.queue.put_back("tiny", "e", "it was lost again", lost=True)
    await bus.recovery("tiny").finish_given_up()
    assert len(await bus.dead_letters.list()) == 0
    assert await bus.queue.given_up("tiny") == []


async def test_a_dead_letter_fits_into_a_redis_that_is_full(tmp_path: Path) -> None:
    async with server(tmp_path / "redis") as redis, Bus.open(redis.url, patience_s=0.5) as bus:
        await suspects(bus, "a")
        await bus.queue.take("tiny", "e", 1, 1)
        await bus.queue.put_back("tiny", "e", "it was lost again", lost=True)
        await bus.command("CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(BusError):
            await bus.queue.put("tiny", "b", b"d")
        await bus.recovery("tiny").finish_given_up()
        assert len(await bus.dead_letters.list()) == 1


async def test_readers_of_a_group_are_forgotten_when_they_leave_or_fall_silent(bus: Bus) -> None:
    """One that leaves, one that was killed, and not one that holds something."""

    async def readers() -> set[bytes]:
        found = set()
        for tag in bus.keys.tags:
            for flat in await bus.command("XINFO", "CONSUMERS", bus.keys.firehose(tag), "g"):
                found.add(dict(zip(flat[::2], flat[1::2], strict=True))[b"name"])
        return found

    watching = partial(bus.watch_group, "g", since="start")
    async with watching("stays", idle_s=0.05) as stays, anyio.create_task_group() as group:

        async def read(watch: Any) -> None:
            async for _ in watch:
                pass

        leaves, killed, holds = watching("leaves"), watching("killed"), watching("holds")
        await holds.start()
        await bus.submit(_submission("t"))
        assert (await anext(holds)).type == "queued"
        for watch, name in ((leaves, b"leaves"), (killed, b"killed")):
            async with anyio.create_task_group() as reading:
                reading.start_soon(read, watch)
                await until(partial(_is_among, name, readers))
                reading.cancel_scope.cancel()
        assert {b"leaves", b"killed", b"holds"} <= await readers()
        await leaves.aclose()
        assert b"leaves" not in await readers()
        await killed._link.drop()
        await holds.aclose()
        # It hands over what it holds, and is known until somebody has that.
        assert b"holds" in await readers()
        group.start_soon(read, stays)
        await until(lambda: _are(readers, {b"stays"}))
        group.cancel_scope.cancel()


async def _is_among(name: bytes, readers: Any) -> bool:
    return name in await readers()


async def _are(readers: Any, names: set[bytes]) -> bool:
    return bool(await readers() == names)


def _submission(trace: str) -> Submission:
    return Submission(trace=trace, model="tiny", invokes=[Invoke(prompt="hello")], detach=True)
