"""One attempt of a trace, from an engine's outputs and its workers' reports to its final event."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import anyio.lowlevel
import msgspec
import numpy as np
import pytest

from tests.support.played_engine import PlayedEngine, adapted
from tests.support.scripted_engine import ScriptedEngine, acts, serving
from tests.support.stepping import Gate
from tests.support.until import until
from tracewire import Client, Final, Output, Probe, TraceFailed, intervention
from tracewire_bus.bus import Bus
from tracewire_bus.transport.errors import BusUnavailable
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.messages import Append, Delta, Failure, Manifest, Set
from tracewire_bus.wire.packing import wire
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.adapter.bulk_writer import BulkSettings
from tracewire_engine.adapter.trace_run import TraceRun
from tracewire_engine.protocol.messages import (
    Batch,
    FinishRecord,
    Layout,
    LayoutEntry,
    Part,
    Read,
    Report,
    StepRecord,
)

PATIENCE = 60


@pytest.mark.usefixtures("registered")
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


#: What a played block saves in each step.
ROWS = [np.full(3, step, np.float32) for step in range(6)]


@intervention
def rows(model, tracer, live):
    """What the played engine reports, whatever the block says."""
    rows = [].save()


def raw(*deltas: Delta) -> msgspec.Raw:
    """Deltas as workers encode them."""
    return msgspec.Raw(encode(list(deltas)))


def step(request: str, index: int, ended: str = "") -> StepRecord:
    """A step in which the block appended one row."""
    row = wire(ROWS[index])
    delta = Append(path=("rows",), items=[row]) if index else Set(path=("rows",), value=[row])
    return StepRecord(request, 0, index, raw(delta), ended)


def end(request: str, steps: int, *deltas: Delta, length: int | None = None, **fields: Any) -> FinishRecord:
    """The end of a block that holds what was sent: the digest is the adapter's to know."""
    held = steps if length is None else length
    manifest = [Manifest(invoke=0, choice=0, name="rows", kind="list", length=held, digest=b"")]
    return FinishRecord(request, 0, raw(*deltas), manifest, steps=steps, **fields)


async def begun(engine: PlayedEngine) -> tuple[str, Any]:
    """The one request that was started."""
    await engine.started.wait()
    ((request, outputs),) = engine.requests.items()
    return request, outputs


@pytest.mark.usefixtures("registered")
async def test_each_token_has_what_was_saved_in_its_step(client: Client, embedded: str, prefix: str) -> None:
    """Of an output of several tokens, whose steps are reported in any order; and the digests are of what passed."""
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with adapted(embedded, prefix, engine), client.trace("tiny", "hello", rows) as trace:
            request, outputs = await begun(engine)
            outputs.put("xxx", count=3)
            engine.report(Report(steps=[step(request, 0), step(request, 1), step(request, 2)]))
            engine.report(Report(steps=[step(request, 3)], finishes=[end(request, 4)]))
            outputs.put("x", "length")
            items = [item async for item in trace]
            result = await trace.result()
    assert all(isinstance(item, Output) for item in items)
    deltas = [(item.index + place, one) for item in items for place, one in enumerate(item.deltas)]
    assert [place for place, _ in deltas] == list(range(4))
    for place, (delta,) in deltas:
        (row,) = delta.items if isinstance(delta, Append) else delta.value
        assert np.array_equal(row, ROWS[place])
    assert np.array_equal(result.saves["rows"], ROWS[:4])


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("most", [None, 1 << 20, 1 << 30], ids=["no store", "a small store", "a store"])
async def test_large_reads_go_to_a_bulk_store_with_room(
    client: Client, embedded: str, prefix: str, bus: Bus, tmp_path: Path, most: int | None
) -> None:
    """And to Redis otherwise, as blobs."""
    engine = PlayedEngine()
    row = np.arange(1000, dtype=np.float32)
    store = None if most is None else BulkSettings(tmp_path, 1, most)
    probe = Probe("hs", "model.layers.0.output")
    async with (
        adapted(embedded, prefix, engine, bulk=store, blob_threshold=64),
        client.trace("tiny", "x", interventions=[probe], detach=True) as trace,
    ):
        await trace.accepted()
        (request,) = engine.requests
        reads = [Read("hs", [Part("", "float32", row.shape, row.nbytes, 0, row.nbytes)])]
        engine.report(Report(layout=Layout(1, [reads], [LayoutEntry(request, 0, 0, [(0, 0, 1)])])))
        engine.report(Report(time=1.0, batch=Batch(1, 0, memoryview(row.tobytes()))))
        engine.report(Report(finishes=[FinishRecord(request, 0, raw())]))
        engine.requests[request].put("a", "length")
        result = await trace.result()
        blobs = await bus.command("EXISTS", bus.keys.blobs(trace.id))
        assert bool(blobs) == isinstance(result.saves["hs"][0], ArrayRef) == (most != 1 << 30)
        (found,) = await result.load("hs")
    np.testing.assert_array_equal(found, row)


@pytest.mark.usefixtures("registered")
async def test_a_trace_past_its_deadline_is_ended_by_its_engine(client: Client, embedded: str, prefix: str) -> None:
    """At once: the bus would only see to it some seconds later."""
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, engine),
            client.trace("tiny", "hello", deadline=2.0, detach=True) as trace,
        ):
            request, outputs = await begun(engine)
            outputs.put("x")
            events = [event async for event in client.subscribe(trace.id)]
    final = events[-1]
    assert final.status == "expired"
    assert final.error.field == "deadline"
    assert "2 s after it was queued" in final.error.message
    assert ("abort", request) in engine.asked


async def deadlines(bus: Bus, trace: str) -> int:
    """How many deadlines are kept beside a trace's."""
    return int(await bus.command("ZCARD", bus.keys.deadlines(bus.keys.tag(trace))))


@pytest.mark.usefixtures("roomy")
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


@pytest.mark.usefixtures("roomy")
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
                await until(lambda: not any(run() for run in runs))
            finally:
                gc.enable()
    assert len(runs) == 3


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


@pytest.mark.usefixtures("roomy")
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


class _Scoring(ScriptedEngine):
    """Its prompts have many log probabilities, as vLLM gives them."""

    async def start(self, request: str, prepared: Any, priority: int) -> Any:
        """Run it."""
        begun = await super().start(request, prepared, priority)
        begun.prompt_logprobs = [{number: (-1.0, number, "x" * 100)} for number in range(1000)]
        return begun


@pytest.mark.usefixtures("roomy")
async def test_a_trace_whose_final_fits_in_no_entry_fails_and_says_so(
    client: Client, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracewire_bus.events.writer.ENTRY_BYTES", 60_000)
    gate = Gate()
    gate.open()
    with anyio.fail_after(PATIENCE):
        async with serving(bus, _Scoring(gate)) as adapter:
            async with client.trace("tiny", "hello", acts, max_tokens=3) as trace:
                with pytest.raises(TraceFailed, match="fewer prompt_logprobs") as caught:
                    await trace.result()
            assert (caught.value.type, caught.value.status) == ("EntryTooLarge", "failed")
            assert caught.value.result is not None
            assert len(caught.value.result.token_ids) == 3
            await until(lambda: not adapter._claims.runs)
            assert await bus.command("HLEN", bus.keys.queue("tiny", "entries")) == 0
            assert [one.claimed for one in bus.queue._intakes.values()] == [set()]


@pytest.mark.usefixtures("roomy")
async def test_a_trace_ends_as_its_client_says_while_its_final_waits_for_a_right(
    client: Client, embedded: str, prefix: str, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's user may run no scripts for a while."""
    user, gate = f"engine-{prefix}", Gate()
    await bus.command("ACL", "SETUSER", user, "reset", "on", ">secret", "~*", "&*", "+@all")
    url = embedded.replace("unix://", f"unix://{user}@") + "?password=secret"
    with anyio.fail_after(PATIENCE):
        async with Bus.open(url, prefix=prefix) as other, serving(other, ScriptedEngine(gate)) as adapter:
            async with client.trace("tiny", "hello", acts, max_tokens=3, detach=True) as trace:
                await trace.accepted()
                (run,) = adapter._claims.running()
                await bus.command("ACL", "SETUSER", user, "-eval", "-evalsha")
                plain, said = run._stream.rewind, []

                def rewind() -> None:
                    plain()
                    said.append(run.end("cancelled", Failure(type="Cancelled", message="enough")))

                monkeypatch.setattr(run._stream, "rewind", rewind)
                gate.open()
                await until(lambda: said)
                assert said[0]
                await bus.command("ACL", "SETUSER", user, "+eval", "+evalsha")
                with pytest.raises(TraceFailed, match="enough"):
                    await trace.result()
                events = [event async for event in client.subscribe(trace.id)]
                assert [event.seq for event in events] == list(range(len(events)))
            await until(lambda: not adapter._claims.runs)
            assert await bus.command("HLEN", bus.keys.queue("tiny", "entries")) == 0
