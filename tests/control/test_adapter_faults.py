"""What the adapter and the client do where an engine's call fails, Redis is away, or a caller passes odd values."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import numpy as np
import pytest

import tracewire
from tests.support.bus_engine import engine_info
from tests.support.played_engine import PlayedEngine, adapted
from tests.support.redis.proxy import proxy
from tests.support.scripted_engine import acts
from tracewire import Accepted, Client, Final, FirstToken, Output, Paused, Resumed, Steered
from tracewire_bus.bus import Bus
from tracewire_bus.domain.intervention_checks import normalized
from tracewire_bus.store.control import Order
from tracewire_bus.wire.codec import decode_submission, encode
from tracewire_bus.wire.live_values import live_values
from tracewire_bus.wire.messages import Invoke, Submission
from tracewire_bus.wire.packing import pack, unpack
from tracewire_engine.adapter.engine_api import Rejection
from tracewire_engine.adapter.service import Adapter
from tracewire_engine.adapter.trace_run import TraceRun
from tracewire_engine.protocol.messages import Applied, Changes, FinishRecord, Report, StepRecord

PATIENCE = 15


@pytest.fixture
async def client(embedded: str, prefix: str, bus: Bus) -> AsyncIterator[Client]:
    """A client, of a bus on which a model is known."""
    await bus.registry.register(engine_info(), ttl_s=600)
    async with tracewire.connect(embedded, prefix=prefix, name="one") as client:
        yield client


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


async def test_interventions_are_placed_once_for_each_form_in_which_they_come(bus: Bus) -> None:
    adapter = Adapter(PlayedEngine(), engine_info(), bus)

    def placed(by: Any, vector: float = 1.0, at: str = "residual(1)", **live: Any) -> bytes | None:
        steer = tracewire.Steer(at, np.full(8, vector, np.float32), scale=by)
        submission = Submission(
            trace="t",
            model="tiny",
            invokes=[Invoke(prompt="p")],
            interventions=normalized([steer]),
            live=pack(live),
        )
        data = encode(submission)
        return adapter._validator._place(decode_submission(data), data)

    first = placed(1.0)
    # The very same, and not merely equal.
    assert placed(1.0) is first
    scale = tracewire.Live("scale")
    others = [placed(2.0), placed(1.0, 2.0), placed(1.0, at="residual(2)"), placed(scale, scale=1.0)]
    assert len({first, *others}) == 5
    assert placed(scale, scale=1.0) is others[-1]
    # What its live parameters are decides whether it fits.
    with pytest.raises(Rejection, match="must be a number"):
        placed(scale, scale="much")
    with pytest.raises(Rejection, match="was not declared"):
        placed(scale)
    for vector in range(3, 203):
        placed(1.0, float(vector))
    assert len(adapter._validator._placed) <= 64


@pytest.mark.parametrize("deadline", [1e14, 1e20, 1e300])
async def test_a_deadline_may_be_as_far_as_one_likes(
    client: Client, embedded: str, prefix: str, deadline: float
) -> None:
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with (
            client.trace("tiny", "hello", deadline=deadline, detach=True) as trace,
            adapted(embedded, prefix, engine),
        ):
            await trace.accepted()
            (request,) = engine.requests
            engine.finish(request)
            events = [event async for event in client.subscribe(trace.id)]
            assert isinstance(events[-1], Final)
            assert events[-1].status == "finished"


async def test_an_entry_waits_for_a_redis_that_is_away_while_it_is_opened(
    client: Client, embedded: str, prefix: str, tmp_path: Path
) -> None:
    """For longer than the bus is patient."""
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with proxy(embedded, tmp_path) as way, adapted(way.url, prefix, engine) as adapter:
            records, opening = adapter._bus.records, anyio.Event()
            plain = records.open

            async def opened(trace: str, name: str, attempt: int) -> Any:
                way.away = True
                await way.cut()
                try:
                    return await plain(trace, name, attempt)
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


async def test_an_abort_does_not_wait_for_the_word_of_a_pause(
    client: Client, embedded: str, prefix: str, tmp_path: Path
) -> None:
    """While Redis is away nothing can be told; what is past its deadline is aborted all the same."""
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with (
            proxy(embedded, tmp_path) as way,
            adapted(way.url, prefix, engine) as adapter,
            client.trace("tiny", "hello", detach=True) as trace,
            client.trace("tiny", "hello", detach=True) as other,
        ):
            await trace.accepted()
            await other.accepted()
            one, two = (adapter._claims.runs[id_] for id_ in (trace.id, other.id))
            assert isinstance(one, TraceRun)
            assert isinstance(two, TraceRun)
            way.away = True
            await way.cut()
            adapter._control.obey(Order("pause", trace.id, by="me"))
            while ("pause", one.requests[0].name) not in engine.asked:
                await anyio.lowlevel.checkpoint()
            adapter._control.obey(Order("cancel", other.id, by="me"))
            while ("abort", two.requests[0].name) not in engine.asked:
                await anyio.lowlevel.checkpoint()
            way.away = False
            with pytest.raises(tracewire.TraceFailed, match="cancelled by me"):
                await other.result()
            engine.finish(one.requests[0].name)
            await trace.result()


async def test_a_pause_that_is_under_way_is_told_before_what_follows(
    client: Client, embedded: str, prefix: str
) -> None:
    """It was asked for while the trace began; the engine takes its time; then it is resumed."""
    pausing, go = anyio.Event(), anyio.Event()

    class Slow(PlayedEngine):
        async def pause(self, request: str) -> bool:
            pausing.set()
            await go.wait()
            return await super().pause(request)

    engine = Slow()
    with anyio.fail_after(PATIENCE):
        async with client.trace("tiny", "hello", detach=True) as trace:
            # Still queued.
            assert await trace.pause(by="me")
            assert not await trace.pause()
            async with adapted(embedded, prefix, engine) as adapter:
                await trace.accepted()
                await pausing.wait()
                assert await trace.resume(by="you")
                run = adapter._claims.runs[trace.id]
                assert isinstance(run, TraceRun)
                while run.pause.wanted_by is not None:
                    await anyio.lowlevel.checkpoint()
                go.set()
                assert isinstance(await anext(trace), Paused)
                assert isinstance(await anext(trace), Resumed)
                assert [kind for kind, _ in engine.asked] == ["pause", "resume"]
                (request,) = engine.requests
                engine.finish(request)
                await trace.result()
            events = [event async for event in client.subscribe(trace.id)]
    assert [type(event) for event in events] == [Accepted, Paused, Resumed, Output, Final]
    assert (events[1].by, events[2].by) == ("me", "you")


async def test_an_engine_that_has_not_heard_of_a_resumption_does_not_undo_it(
    client: Client, bus: Bus, embedded: str, prefix: str, tmp_path: Path
) -> None:
    """It says again what it runs, on a new connection, before it reads what was asked of it meanwhile."""
    engine = PlayedEngine()

    async def told(adapter: Adapter) -> tuple[bool, int]:
        """Whether the record has the trace paused, and how often it knows that to have changed."""
        for command in adapter._claims.commands():
            await bus.command(*command)
        paused, number = await bus.command("HMGET", bus.keys.record(trace.id), "z", "zn")
        return paused is not None, int(number)

    with anyio.fail_after(PATIENCE):
        async with (
            proxy(embedded, tmp_path) as way,
            adapted(way.url, prefix, engine) as adapter,
            client.trace("tiny", "hello", detach=True) as trace,
        ):
            await trace.accepted()
            assert await trace.pause()
            assert isinstance(await anext(trace), Paused)
            assert await told(adapter) == (True, 1)
            way.away = True
            await way.cut()
            assert await trace.resume()
            assert await told(adapter) == (False, 2)
            way.away = False
            assert isinstance(await anext(trace), Resumed)
            # A server that has forgotten it hears of it, either way.
            await bus.command("HSET", bus.keys.record(trace.id), "z", "me", "zn", 1)
            assert await told(adapter) == (False, 2)
            assert await trace.pause()
            assert isinstance(await anext(trace), Paused)
            await bus.command("HDEL", bus.keys.record(trace.id), "z", "zn")
            assert await told(adapter) == (True, 3)
            assert await trace.resume()
            engine.finish(next(iter(engine.requests)))
            await trace.result()


async def test_what_is_claimed_too_late_is_given_back(client: Client, bus: Bus, embedded: str, prefix: str) -> None:
    """Redis comes back, and hears that a trace runs here when it has ended, or is another engine's, already."""
    engine = PlayedEngine()

    async def entries() -> tuple[int, int]:
        """How many entries the queue has, and how many of them are taken."""
        keys = [bus.keys.queue("tiny", part) for part in ("entries", "taken")]
        counts = [int(await bus.command("HLEN", key)) for key in keys]
        return counts[0], counts[1]

    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, engine) as adapter,
            client.trace("tiny", "hello", detach=True) as trace,
        ):
            await trace.accepted()
            late = adapter._claims.commands()
            engine.finish(next(iter(engine.requests)))
            await trace.result()
            while await entries() != (0, 0):
                await anyio.lowlevel.checkpoint()
            for command in late:
                await bus.command(*command)
            assert await entries() == (1, 1)
            adapter._claims.acknowledged()
            # Within two heartbeats it is put back, taken, and found to have ended.
            while await entries() != (0, 0):
                await anyio.lowlevel.checkpoint()
            assert len(engine.requests) == 1
            events = [event async for event in client.subscribe(trace.id)]
            assert [isinstance(event, Final) for event in events] == [False] * (len(events) - 1) + [True]


async def test_a_paused_trace_is_cancelled(client: Client, embedded: str, prefix: str) -> None:
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with client.trace("tiny", "hello", detach=True) as trace:
            await trace.pause()
            async with adapted(embedded, prefix, engine):
                assert isinstance(await anext(trace), Paused)
                await trace.cancel("enough")
                with pytest.raises(tracewire.TraceFailed, match="enough"):
                    await trace.result()
            assert [kind for kind, _ in engine.asked] == ["pause", "abort"]
            events = [event async for event in client.subscribe(trace.id)]
    assert [type(event) for event in events][:2] == [Accepted, Paused]
    assert [event.status for event in events if isinstance(event, Final)] == ["cancelled"]


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


async def test_what_engine_core_alone_finds_out_fails_the_trace_and_no_other(
    client: Client, embedded: str, prefix: str
) -> None:
    engine = PlayedEngine()

    async def refused() -> Any:
        raise Rejection("sampling.structured_outputs", "no grammar")

    async with adapted(embedded, prefix, engine), client.trace("tiny", "good", detach=True) as good:
        await good.accepted()
        (first,) = engine.requests
        async with client.trace("tiny", "bad", detach=True) as bad:
            await bad.accepted()
            (second,) = engine.requests.keys() - {first}
            engine.requests[second].get = refused  # type: ignore[method-assign]
            engine.requests[second].put("x")
            with pytest.raises(tracewire.TraceFailed, match="no grammar"):
                await bad.result()
            assert ("abort", second) in engine.asked
            engine.finish(first)
            assert (await good.result()).text == "x"
