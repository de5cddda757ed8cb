"""Entries of the queue, while Redis is away and where a part of one is malformed."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

import tests.fuzz as fuzz
import tracewire
from tests.support.played_engine import PlayedEngine, adapted
from tests.support.redis.proxy import proxy
from tests.support.scripted_engine import ScriptedEngine, acts, serving
from tests.support.served import counted, failure, runs, served, submission
from tests.support.stepping import Gate, free, whole
from tests.support.until import until
from tracewire import Client
from tracewire_bus.bus import Bus, BusError, BusUnavailable, NotAllowed
from tracewire_bus.domain.limits import Limits
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.messages import Failure, Submission
from tracewire_bus.wire.packing import pack
from tracewire_engine.adapter import intake
from tracewire_engine.adapter.engine_api import Rejection
from tracewire_engine.adapter.trace_run import TraceRun

PATIENCE = 60


@pytest.mark.usefixtures("registered")
async def test_an_entry_waits_for_a_redis_that_is_away_while_it_is_opened(
    client: Client, embedded: str, prefix: str, tmp_path: Path
) -> None:
    """For longer than the bus is patient."""
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with proxy(embedded, tmp_path) as way, adapted(way.url, prefix, engine) as adapter:
            records, opening = adapter._bus.records, anyio.Event()
            plain = records.open

            async def opened(*given: Any, **named: Any) -> Any:
                way.away = True
                await way.cut()
                try:
                    return await plain(*given, **named)
                finally:
                    way.away = False
                    opening.set()
                    records.open = plain  # type: ignore[method-assign]

            records.open = opened  # type: ignore[method-assign]
            async with client.trace("tiny", "hello", detach=True) as trace:
                await opening.wait()
                await trace.accepted()
                (request,) = engine.requests
                engine.finish(request)
                assert (await trace.result()).text == "x"


@pytest.mark.usefixtures("registered")
async def test_an_entry_that_is_still_being_opened_keeps_no_adapter_from_leaving(
    client: Client, bus: Bus, embedded: str, prefix: str
) -> None:
    """Redis does not take its rejection, say. It waits for the next engine."""
    opening = anyio.Event()
    async with client.trace("tiny", "hello", detach=True):
        with anyio.fail_after(PATIENCE):
            async with adapted(embedded, prefix, PlayedEngine(), last_words_s=0.2) as adapter:

                async def never(*arguments: Any) -> None:
                    opening.set()
                    await anyio.sleep_forever()

                adapter._intake._checked = never  # type: ignore[method-assign,assignment]
                await opening.wait()
                adapter.stop()
                await adapter.ended.wait()
            assert await bus.queue.waiting("tiny") == 1


async def begun(engine: PlayedEngine) -> tuple[str, Any]:
    """The one request that was started."""
    await engine.started.wait()
    ((request, outputs),) = engine.requests.items()
    return request, outputs


@pytest.mark.usefixtures("registered")
async def test_what_names_no_trace_becomes_a_dead_letter(client: Client, bus: Bus, embedded: str, prefix: str) -> None:
    """And what does is answered on its stream. The engine goes on."""
    engine = PlayedEngine()
    for name, data in (("", b"\x00garbage"), ("x" * 1000, b"else"), ("named", b"\x80")):
        await bus.queue.put("tiny", name, data)
    with anyio.fail_after(PATIENCE):
        async with adapted(embedded, prefix, engine), client.trace("tiny", "hello") as trace:
            request, _ = await begun(engine)

            async def answered() -> bool:
                return await bus.command("EXISTS", bus.keys.events("named")) == 1

            await until(answered)
            (final,) = [event async for event in client.subscribe("named")]
            engine.finish(request)
            assert (await trace.result()).text == "x"

            async def cleared() -> bool:
                return await bus.command("HLEN", bus.keys.queue("tiny", "entries")) == 0

            await until(cleared)
    assert (final.status, final.error.field) == ("rejected", "submission")
    assert [letter.data for letter in await bus.dead_letters.list()] == [b"\x00garbage", b"else"]
    assert await bus.queue.waiting("tiny") == 0


async def test_queue_entries_with_a_malformed_part_are_answered(bus: Bus, embedded: str, prefix: str) -> None:
    keys = [bus.keys.queue("tiny", part) for part in ("entries", "data", "client:raw", "turns", "bell", "state")]
    async with served(bus, embedded, prefix) as (_, client), anyio.create_task_group() as group:

        async def answered(trace: str, place: int) -> None:
            error = await failure(client, trace)
            # Only its schema says what its data is.
            assert error is None if place else error.field == "schema", trace

        for place, value in itertools.product(range(11), [None, "text", -1, 1e300, [1], {}]):
            trace = f"t{place}-{value!r}"
            entry: list[Any] = ["1.1", "1700000000000000", "raw", 0, "", 1, 300, 0, 2, 0, ""]
            entry[place] = value
            await bus.command("HSET", bus.keys.record(trace), "m", "tiny")
            packed, data = msgspec.msgpack.encode(entry), encode(submission(trace))
            await bus.command("EVAL", fuzz._RAW_ENTRY, len(keys), *keys, trace, packed, data)
            group.start_soon(answered, trace, place)
        await runs(client)


@pytest.mark.parametrize("name", ["v", "zn", "t", "l:alpha"])
async def test_a_malformed_record_fails_its_own_trace(name: str, bus: Bus, embedded: str, prefix: str) -> None:
    await bus.command("HSET", bus.keys.record("t"), "m", "tiny", name, b"\xc1 garbage")
    await bus.queue.put("tiny", "t", encode(submission(live=pack({"alpha": 0.5}))))
    async with served(bus, embedded, prefix) as (_, client):
        error = await failure(client, "t")
        assert "in Redis is malformed" in error.message
        assert bus.keys.record("t") in error.message
        await runs(client)
        await counted(client)


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
    ended = []
    async with serving(bus, free()) as adapter:
        monkeypatch.setattr(adapter._intake, "_run_trace", defect)
        monkeypatch.setattr(adapter._intake._admissions, "end", lambda _: ended.append(asked))
        await client.models.get("tiny", timeout=PATIENCE)
        async with client.trace("tiny", "hello", acts, max_tokens=3) as trace:
            with anyio.fail_after(PATIENCE), pytest.raises(tracewire.TraceFailed, match="a defect"):
                await trace.result()
        await until(lambda: _empty(bus))
    assert asked == 2
    # Not before: the entry would come again as a replay of itself.
    assert ended == [2]


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

    async def refused(trace: str, *more: Any, **named: Any) -> Any:
        nonlocal asked
        if trace == "refused":
            asked += 1
            raise NotAllowed("Redis does not allow this user that")
        return await open_(trace, *more, **named)

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

        async def checks(entry: Any, *more: Any) -> Any:
            await bus.records.end(entry.trace, "failed", Failure(type="Test", message="ended by others"))
            return await opening(entry, *more)

        def check(*_: Any) -> None:
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


@pytest.mark.usefixtures("registered")
async def test_an_engine_that_was_only_slow_counts_its_trace_once(client: Client, embedded: str, prefix: str) -> None:
    """Another process has put the trace's entry back, and the engine takes it again while it runs the trace."""
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, engine, limits=Limits(client_traces=1)) as adapter,
            client.trace("tiny", "hello", detach=True) as trace,
        ):
            await trace.accepted()
            name = adapter._info.engine
            assert await adapter._bus.queue.put_back("tiny", name, "it was slow", lost=False) == 1
            await until(lambda: len(adapter._intake.scopes) == 2)
            await anyio.wait_all_tasks_blocked()
            engine.finish(next(iter(engine.requests)))
            assert (await trace.result()).text == "x"


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("how", ["refused", "cancelled", "expired"])
async def test_inputs_that_cannot_be_fetched_hold_no_trace_that_is_to_end(
    client: Client, embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    tries, fetching = [], anyio.Event()
    monkeypatch.setattr(intake, "_REFUSED_S", 0.01)
    limits = Limits(deadline_s=2) if how == "expired" else Limits()
    with anyio.fail_after(PATIENCE):
        async with adapted(embedded, prefix, PlayedEngine(), limits=limits) as adapter:

            @asynccontextmanager
            async def of(submission: Submission) -> AsyncIterator[None]:
                tries.append(submission.trace)
                if how == "refused":
                    raise BusError("NOPERM")
                fetching.set()
                run = adapter._claims.runs[submission.trace]
                assert isinstance(run, TraceRun)
                await until(run.is_over)
                raise BusUnavailable("Redis is away")
                yield

            monkeypatch.setattr(adapter._intake._services.inputs, "of", of)
            async with client.trace("tiny", "hello", detach=True) as trace:
                if how == "cancelled":
                    await fetching.wait()
                    assert await trace.cancel()
                errors = {"refused": "NOPERM", "cancelled": "cancelled", "expired": "deadline-s"}
                with pytest.raises(tracewire.TraceFailed, match=errors[how]):
                    await trace.result()
    assert len(tries) == 1


@pytest.mark.usefixtures("registered")
async def test_a_redis_that_was_away_while_inputs_were_fetched_fails_no_trace(
    client: Client, embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than the bus is patient: the entry comes again."""
    engine, tries = PlayedEngine(), []
    monkeypatch.setattr(intake, "_REFUSED_S", 0.01)
    with anyio.fail_after(PATIENCE):
        async with adapted(embedded, prefix, engine) as adapter:
            inputs = adapter._intake._services.inputs
            plain = inputs.of

            def of(submission: Submission) -> Any:
                tries.append(submission.trace)
                if len(tries) == 1:
                    raise BusUnavailable("Redis is away")
                return plain(submission)

            monkeypatch.setattr(inputs, "of", of)
            async with client.trace("tiny", "hello", detach=True) as trace:
                accepted = await trace.accepted()
                assert accepted.attempt == 1
                engine.finish(next(iter(engine.requests)))
                assert (await trace.result()).text == "x"
    assert len(tries) == 2


@pytest.mark.usefixtures("registered")
async def test_an_entry_that_was_served_to_no_end_comes_again(
    client: Client, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a defect of the adapter, the run of its trace returned without a final."""
    monkeypatch.setattr(intake, "_REFUSED_S", 0.01)
    run, begun = TraceRun.run, []

    async def ends_early(self: TraceRun) -> None:
        begun.append(self.attempt)
        if len(begun) > 1:
            await run(self)

    monkeypatch.setattr(TraceRun, "run", ends_early)
    async with serving(bus, free()):
        async with client.trace("tiny", "hello", acts, max_tokens=3, trace_id="t", detach=True) as trace:
            with anyio.fail_after(PATIENCE):
                await trace.result()
        await until(lambda: _empty(bus))
    assert begun == [1, 1]


@pytest.mark.usefixtures("registered")
async def test_a_trace_that_ran_before_waits_for_a_place_of_its_client(
    client: Client, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine has left it. One that has not run yet is refused."""
    monkeypatch.setattr(intake, "_FULL_S", 0.01)
    handles = [client.trace("tiny", "hello", acts, max_tokens=3, detach=True, trace_id=id) for id in ("t", "u", "v")]
    await handles[0].start()
    (taken,) = await bus.queue.take("tiny", "gone", 1, 0)
    await bus.records.open("t", "gone", taken.attempt)
    gate, seen = Gate(), []
    async with serving(bus, ScriptedEngine(gate), limits=Limits(client_traces=1)) as adapter:
        checks = adapter._intake._checked

        async def checked(entry: Any, *more: Any) -> Any:
            seen.append((entry.trace, entry.attempt, entry.lost))
            return await checks(entry, *more)

        monkeypatch.setattr(adapter._intake, "_checked", checked)
        await handles[1].start()
        await handles[1].accepted()
        await bus.queue.put_back("tiny", "gone", "it left", lost=False)
        await until(lambda: ("t", 4, 0) in seen)
        with anyio.fail_after(PATIENCE):
            with pytest.raises(tracewire.TraceRejected, match="may have 1"):
                await handles[2].result()
            gate.open()
            await whole(client, "u", "hello", 3)
            await whole(client, "t", "hello", 3)
        await until(lambda: _empty(bus))
        assert not adapter._intake._admissions._of_clients
    for handle in handles:
        await handle.aclose()
