"""What a trace holds at its end: all that was saved up to the token at which it ended."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from tests.support.played_engine import PlayedEngine, adapted
from tracewire import Client, Output, TraceFailed, intervention
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.messages import Append, Delta, Failure, Manifest, Set
from tracewire_bus.wire.packing import wire
from tracewire_engine.adapter import pending
from tracewire_engine.protocol.messages import FinishRecord, Report, StepRecord

PATIENCE = 60


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
async def test_what_was_saved_behind_the_last_token_comes_with_the_final(
    client: Client, embedded: str, prefix: str
) -> None:
    """Of a step whose token was trimmed, and since the last step."""
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with adapted(embedded, prefix, engine), client.trace("tiny", "hello", rows) as trace:
            request, outputs = await begun(engine)
            engine.report(Report(steps=[step(request, 0), step(request, 1)]))
            last = Append(path=("rows",), items=[wire(ROWS[2])])
            engine.report(Report(finishes=[end(request, 2, last, length=3)]))
            outputs.put("x", "stop")
            result = await trace.result()
    assert len(result.token_ids) == 1
    assert np.array_equal(result.saves["rows"], ROWS[:3])


@pytest.mark.usefixtures("registered")
async def test_a_block_that_raised_says_so_although_what_it_saved_was_lost_on_its_way(
    client: Client, embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "LATE_S", 0.01)
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with adapted(embedded, prefix, engine), client.trace("tiny", "hello", rows, detach=True) as trace:
            request, outputs = await begun(engine)
            failure = Failure(type="ValueError", message="mine", field="block")
            engine.report(Report(steps=[step(request, 0)], finishes=[end(request, 2, error=failure)]))
            outputs.put("xx", count=2)
            with pytest.raises(TraceFailed, match="mine") as caught:
                await trace.result()
    assert caught.value.type == "ValueError"
    assert len(engine.requests) == 1


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("first", ["lost", "raised"])
async def test_a_trace_one_of_whose_blocks_raised_does_not_run_again_for_what_another_saved(
    client: Client, embedded: str, prefix: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error would come again."""
    monkeypatch.setattr(pending, "LATE_S", 0.01)
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        trace = client.trace("tiny", prompts=["one", "two"], block=rows, detach=True)
        async with adapted(embedded, prefix, engine), trace:
            await trace.accepted()
            lost, raised = [*engine.requests] if first == "lost" else [*engine.requests][::-1]
            failure = Failure(type="ValueError", message="mine", field="block")
            ends = [end(raised, 1, error=failure, length=1), end(lost, 2)]
            engine.report(Report(steps=[step(raised, 0, "error"), step(lost, 0)], finishes=ends))
            engine.requests[raised].put("x", "stop")
            engine.requests[lost].put("xx", "stop", 2)
            with pytest.raises(TraceFailed, match="mine"):
                await trace.result()
    assert len(engine.requests) == 2


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("ended", ["stop", "error"])
async def test_a_trace_ends_at_the_token_at_which_its_block_ended(
    client: Client, embedded: str, prefix: str, ended: str
) -> None:
    """What vLLM sampled since is no part of it."""
    engine = PlayedEngine()
    failure = Failure(type="ValueError", message="mine", field="block") if ended == "error" else None
    with anyio.fail_after(PATIENCE):
        async with adapted(embedded, prefix, engine), client.trace("tiny", "hello", rows, detach=True) as trace:
            request, outputs = await begun(engine)
            engine.report(Report(steps=[step(request, 0), step(request, 1, ended), step(request, 2)]))
            outputs.put("xxx", count=3)
            engine.report(Report(finishes=[end(request, 3, error=failure, stopped=ended == "stop", length=2)]))
            events = [event async for event in client.subscribe(trace.id)]
    final = events[-1]
    (output,) = [event for event in events if isinstance(event, Output)]
    assert (output.token_ids, output.text, len(output.deltas)) == ([0, 1], "xx", 2)
    assert output.finish_reason == ended
    assert final.status == ("stopped" if ended == "stop" else "failed")
    assert ("abort", request) in engine.asked
