"""What the adapter makes of an engine's outputs and of what its workers report: each token once, with what was saved in
its step, up to where it ends. The engine is played, and nothing of nnsight's own collect stands in for a digest."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

import tracewire
from tests.support.bus_engine import engine_info
from tests.support.played_engine import PlayedEngine, adapted
from tests.support.redis.servers import until
from tracewire import Client, Output, Steered, intervention
from tracewire_bus.bus import Bus
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.messages import Append, Block, Delta, Failure, Invoke, Manifest, Set, Submission
from tracewire_bus.wire.packing import pack, wire
from tracewire_engine.protocol.messages import FinishRecord, Report, StepRecord

PATIENCE = 15
#: What a played block saves in each step.
ROWS = [np.full(3, step, np.float32) for step in range(6)]


@intervention
def rows(model, tracer, live):
    """What the played engine reports, whatever the block says."""
    rows = [].save()


@pytest.fixture
async def client(embedded: str, prefix: str, bus: Bus) -> AsyncIterator[Client]:
    """A client, of a bus on which a model is known."""
    await bus.registry.register(engine_info(), ttl_s=600)
    async with tracewire.connect(embedded, prefix=prefix, name="one") as client:
        yield client


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


async def test_a_change_that_reached_no_step_is_told_once(client: Client, embedded: str, prefix: str) -> None:
    """Its engine has it by the control stream, and finds it once more as it ends the trace."""

    class Told(PlayedEngine):
        def __init__(self) -> None:
            super().__init__()
            self.steered = anyio.Event()

        async def steer(self, *args: Any) -> None:
            self.steered.set()

    engine = Told()
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, engine),
            client.trace("tiny", "hello", live={"alpha": 0.0}, detach=True) as trace,
        ):
            await trace.accepted()
            request, _ = await begun(engine)
            assert await trace.steer(alpha=1.0) == 1
            await engine.steered.wait()
            engine.finish(request)
            events = [event async for event in client.subscribe(trace.id)]
    told = [change.version for event in events if isinstance(event, Steered) for change in event.changes]
    assert told == [1]


@pytest.mark.parametrize("path", ["model.layer", "model.layers[99]"])
async def test_a_block_with_a_path_that_there_is_not_is_refused_whoever_sent_it(
    client: Client, bus: Bus, embedded: str, prefix: str, path: str
) -> None:
    """Past all checks of a client's."""
    block = Block(
        name="reads",
        source=f"x = model.{path}.output",
        filename="of_somebody.py",
        first_line=7,
        variables=pack({}),
    )
    submission = Submission(trace="t", model="tiny", invokes=[Invoke(prompt="p", sampling={})], block=block)

    class Ending(PlayedEngine):
        async def start(self, request: str, *rest: Any) -> Any:
            outputs = await super().start(request, *rest)
            self.finish(request)
            return outputs

    engine = Ending()
    with anyio.fail_after(PATIENCE):
        async with adapted(embedded, prefix, engine):
            await bus.submit(submission)
            (final,) = [event async for event in client.subscribe("t")]
    assert final.status == "rejected"
    assert final.error.type == "UnknownModulePath"
    assert final.error.line == 7
    assert engine.requests == {}


async def test_a_trace_past_its_deadline_is_ended_by_its_engine(client: Client, embedded: str, prefix: str) -> None:
    """At once: the bus would only see to it some seconds later."""
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, engine),
            client.trace("tiny", "hello", deadline=0.5, detach=True) as trace,
        ):
            request, outputs = await begun(engine)
            outputs.put("x")
            events = [event async for event in client.subscribe(trace.id)]
    final = events[-1]
    assert final.status == "expired"
    assert final.error.field == "deadline"
    assert "0.5 s from when it was queued" in final.error.message
    assert ("abort", request) in engine.asked


async def test_what_names_no_trace_becomes_a_dead_letter(client: Client, bus: Bus, embedded: str, prefix: str) -> None:
    """And what does is answered on its stream. The engine goes on."""
    engine = PlayedEngine()
    for name, data in (("", b"\x00garbage"), ("x" * 1000, b"else"), ("named", b"\xc1")):
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
