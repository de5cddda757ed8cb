"""A trace whose events wait for Redis is slowed down by itself; the others run on."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

import tracewire
from tests.support.played_engine import PlayedEngine, adapted
from tests.support.scripted_engine import acts
from tests.support.until import until
from tracewire import Client, Final, Lagging, Output, Probe, StopWhen
from tracewire_bus.wire.messages import Set
from tracewire_engine.adapter.bulk_writer import BulkSettings
from tracewire_engine.adapter.trace_lag import RequestPause
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

NOTHING = msgspec.Raw(msgspec.msgpack.encode([]))
#: Each of two traces may have half of half of this waiting.
BUFFER = 400_000
SHARE = BUFFER // 4


def saved(nbytes: int) -> msgspec.Raw:
    """The deltas of a step in which a block saved so many bytes."""
    return msgspec.Raw(msgspec.msgpack.encode([Set(path=("x",), value=b"x" * nbytes)]))


def segment_sizes(folder: Path) -> int:
    """The bytes in all segments of the bulk stores in a folder."""
    return sum(path.stat().st_size for path in folder.glob("*/" + "[0-9a-f]" * 16))


def asked(engine: PlayedEngine, request: str) -> list[str]:
    """What the engine was asked to do with a request."""
    return [what for what, which in engine.asked if which == request]


@pytest.fixture(autouse=True)
def _small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracewire_engine.adapter.backpressure._LEAST_SHARE", 1)


@pytest.mark.usefixtures("registered")
async def test_a_heavy_trace_is_held_and_a_light_one_runs_on(client: Client, embedded: str, prefix: str) -> None:
    engine = PlayedEngine()
    async with (
        adapted(embedded, prefix, engine, buffer_bytes=BUFFER) as adapter,
        client.trace("tiny", "heavy", acts, detach=True) as heavy,
    ):
        await heavy.accepted()
        async with client.trace("tiny", "light", acts, detach=True) as light:
            await light.accepted()
            one, two = engine.requests
            # Reports come, and the tokens that they belong to do not: nothing can be published.
            for index in range(3):
                engine.report(Report(steps=[StepRecord(one, 0, index, saved(SHARE // 2))]))
            await until(lambda: asked(engine, one) == ["pause"])
            assert not adapter.engine_paused
            for index in range(5):
                engine.report(Report(steps=[StepRecord(two, 0, index, NOTHING)]))
                engine.requests[two].put("y")
            engine.report(Report(finishes=[FinishRecord(two, 0, NOTHING, steps=5)]))
            engine.requests[two].put("", "stop", 0)
            assert (await light.result()).text == "y" * 5
            assert asked(engine, two) == []
        for _ in range(3):
            engine.requests[one].put("x")
        await until(lambda: asked(engine, one) == ["pause", "resume"])
        engine.report(Report(finishes=[FinishRecord(one, 0, NOTHING, steps=3)]))
        engine.requests[one].put("", "stop", 0)
        lagging = [event async for event in client.subscribe(heavy.id) if isinstance(event, Lagging)]
    assert [event.action for event in lagging] == ["held", "caught_up"]
    assert lagging[0].type == "lagging"
    assert lagging[0].nbytes > SHARE > 2 * lagging[1].nbytes
    assert lagging[0].left_out == 0


@pytest.mark.usefixtures("registered")
async def test_a_client_s_pause_outlasts_the_lag_and_the_lag_a_client_s_pause(
    client: Client, embedded: str, prefix: str
) -> None:
    engine = PlayedEngine()
    async with (
        adapted(embedded, prefix, engine, buffer_bytes=2 * SHARE),
        client.trace("tiny", "x", acts, detach=True) as trace,
    ):
        await trace.accepted()
        (request,) = engine.requests
        await trace.pause()
        await until(lambda: asked(engine, request) == ["pause"])
        engine.report(Report(steps=[StepRecord(request, 0, index, saved(SHARE)) for index in range(2)]))
        seen = client.subscribe(trace.id)
        async for event in seen:
            if isinstance(event, Lagging):
                break
        # The client resumes, and Redis is still behind.
        await trace.resume()
        async for event in seen:
            if isinstance(event, tracewire.Resumed):
                break
        assert asked(engine, request) == ["pause"]
        engine.requests[request].put("a", None, 2)
        await until(lambda: asked(engine, request) == ["pause", "resume"])
        engine.finish(request, count=0)


@pytest.mark.usefixtures("registered")
async def test_a_thinned_trace_leaves_reads_out_and_says_so(client: Client, embedded: str, prefix: str) -> None:
    """Tokens, and the stop conditions on what is left out, are as without; what did come is verified."""
    engine = PlayedEngine()
    row = np.arange(SHARE // 4 + 1, dtype=np.float32)
    at = "model.layers.0.output"
    interventions = [Probe("hs", at), Probe("norm", at, reduce="norm"), StopWhen("norm", above=9.0)]
    async with (
        adapted(embedded, prefix, engine, buffer_bytes=2 * SHARE, blob_threshold=0),
        client.trace("tiny", "x", interventions=interventions, on_lag="thin", detach=True) as trace,
    ):
        await trace.accepted()
        (request,) = engine.requests
        stride = row.nbytes + 4
        reads = [
            Read("hs", [Part("", "float32", row.shape, row.nbytes, 0, stride)]),
            Read("norm", [Part("", "float32", (), 4, row.nbytes, stride)]),
        ]
        engine.report(Report(layout=Layout(1, [reads], [LayoutEntry(request, 0, 0, [(0, 0, 1)])])))

        def step(index: int, norm: float = 0.0) -> None:
            data = row.tobytes() + np.float32(norm).tobytes()
            engine.report(Report(time=1.0, batch=Batch(1, index, memoryview(data))))

        seen = client.subscribe(trace.id)
        step(0)
        async for event in seen:
            if isinstance(event, Lagging):
                break
        step(1)
        step(2)
        engine.requests[request].put("abc", None, 3)
        async for event in seen:
            if isinstance(event, Lagging):
                break
        step(3)
        step(4, norm=10.0)
        engine.report(Report(finishes=[FinishRecord(request, 0, NOTHING, steps=5)]))
        engine.requests[request].put("de", None, 2)
        result = await trace.result()
        events = [event async for event in client.subscribe(trace.id)]
    assert asked(engine, request) == ["abort"]
    lagging = [event for event in events if isinstance(event, Lagging)]
    assert [(event.action, event.left_out) for event in lagging] == [("thinned", 0), ("caught_up", 2)]
    outputs = [event for event in events if isinstance(event, Output)]
    assert [len(step) for output in outputs for step in output.deltas] == [1, 0, 0, 1, 1]
    assert len(result.saves["hs"]) == len(result.saves["norm"]) == 3
    assert result.warnings == ["the engine left out the reads of interventions in 2 steps: Redis was late"]
    assert outputs[-1].stop_reason == "StopWhen(norm)"


@pytest.mark.usefixtures("registered")
async def test_a_spilled_trace_puts_all_saves_beside_redis(
    client: Client, embedded: str, prefix: str, tmp_path: Path
) -> None:
    engine = PlayedEngine()
    settings = BulkSettings(tmp_path, threshold=1 << 40, most=1 << 30)
    async with (
        adapted(embedded, prefix, engine, buffer_bytes=2 * SHARE, bulk=settings),
        client.trace("tiny", "x", acts, on_lag="spill", detach=True) as trace,
    ):
        await trace.accepted()
        (request,) = engine.requests
        engine.report(Report(steps=[StepRecord(request, 0, 0, NOTHING)]))
        engine.requests[request].put("a")
        seen = client.subscribe(trace.id)
        for index in range(1, 3):
            engine.report(Report(steps=[StepRecord(request, 0, index, saved(SHARE))]))
            async for event in seen:
                if isinstance(event, Lagging):
                    break
        for _ in range(2):
            engine.requests[request].put("b")
        async for event in seen:
            if isinstance(event, Lagging):
                break
        engine.report(Report(finishes=[FinishRecord(request, 0, NOTHING, steps=3)]))
        engine.requests[request].put("", "stop", 0)
        events = [event async for event in client.subscribe(trace.id)]
        lagging = [event for event in events if isinstance(event, Lagging)]
        # Spilled at one share, and held at two.
        assert [event.action for event in lagging] == ["spilled", "held", "caught_up"]
        assert asked(engine, request) == ["pause", "resume"]
        assert segment_sizes(tmp_path) > 2 * SHARE
        outputs = [event for event in events if isinstance(event, Output)]
        changes = [change for event in outputs for step in event.deltas for change in step]
        assert changes == [Set(path=("x",), value=b"x" * SHARE)] * 2


@pytest.mark.usefixtures("registered")
async def test_a_trace_that_cannot_be_spilled_is_held_and_says_so(client: Client, embedded: str, prefix: str) -> None:
    engine = PlayedEngine()
    async with (
        adapted(embedded, prefix, engine, buffer_bytes=2 * SHARE),
        client.trace("tiny", "x", acts, on_lag="spill", detach=True) as trace,
    ):
        await trace.accepted()
        (request,) = engine.requests
        engine.report(Report(steps=[StepRecord(request, 0, 0, saved(2 * SHARE))]))
        await until(lambda: asked(engine, request) == ["pause"])
        engine.finish(request, count=1)
        *_, final = [event async for event in client.subscribe(trace.id)]
    assert isinstance(final, Final)
    assert final.warnings == [
        "the engine held the trace while Redis was late: on_lag='spill' needs an engine with --bulk"
    ]


@pytest.mark.usefixtures("registered")
async def test_an_unknown_way_to_lag_is_refused(client: Client) -> None:
    with pytest.raises(tracewire.TraceRejected, match=r"on_lag: expected 'hold' or 'thin' or 'spill', got 'drop'"):
        client.trace("tiny", "x", on_lag="drop")  # type: ignore[call-overload]


async def test_reasons_add_up() -> None:
    class Request:
        name = "r"

    engine = PlayedEngine()
    pause = RequestPause(engine, [Request()])  # type: ignore[arg-type,list-item]
    for reason, on in (("client", True), ("lag", True), ("client", False), ("client", False), ("lag", False)):
        await pause.change(reason, on)
    assert [what for what, _ in engine.asked] == ["pause", "resume"]
