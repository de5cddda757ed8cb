"""What a trace's blocks share, as the adapter sends and publishes it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import msgspec
import pytest

import tracewire
from tests.support.bus_engine import engine_info
from tests.support.played_engine import PlayedEngine, adapted
from tests.support.until import until
from tracewire import Client, Prompt, Shared, intervention
from tracewire_bus.bus import Bus
from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.messages import Append, Manifest, Set
from tracewire_bus.wire.packing import pack
from tracewire_engine.adapter import pending
from tracewire_engine.protocol.messages import (
    FinishRecord,
    Report,
    SharedValues,
    StepRecord,
)

PATIENCE = 60


def share(**members: int) -> bytes:
    """One list, for requests with so many choices each."""
    return msgspec.msgpack.encode(SharedValues("s", members, pack({"rows": [1]})))


class SharingEngine(PlayedEngine):
    """One whose workers' share a test reports."""

    share: SharedValues | None = None

    def __init__(self) -> None:
        super().__init__()
        self.forgotten: list[str] = []
        self.forgot = anyio.Event()

    async def prepare(self, *args: Any, **named: Any) -> Any:
        """Notes what is shared."""
        shared = named["shared"]
        self.share = None if shared is None else msgspec.msgpack.decode(shared, type=SharedValues)
        return await super().prepare(*args, **named)

    async def steer(self, changes: Any, over: list[str], since: float) -> None:
        """Notes what may be forgotten."""
        self.forgotten += over
        self.forgot.set()

    def gain(self, step: int, *deltas: Any) -> None:
        """A step in which the share changed."""
        record = StepRecord(self.share.name, 0, step, msgspec.Raw(msgspec.msgpack.encode(list(deltas))))
        self.report(Report(steps=[record]))

    def over(self, value: Any, steps: int) -> None:
        """Its end."""
        manifest = [Manifest(invoke=0, choice=0, name="rows", kind="list", length=len(value), digest=digest(value))]
        none = msgspec.Raw(msgspec.msgpack.encode([]))
        self.report(Report(finishes=[FinishRecord(self.share.name, 0, none, manifest, steps=steps)]))

    def step(self, request: str, index: int) -> None:
        """A step of a request's block, which saved nothing."""
        none = msgspec.Raw(msgspec.msgpack.encode([]))
        self.report(Report(steps=[StepRecord(request, 0, index, none)]))


@pytest.fixture
async def client(embedded: str, prefix: str, bus: Bus) -> AsyncIterator[Client]:
    """A client, of a bus on which a model is known."""
    await bus.registry.register(engine_info(), ttl_s=600)
    async with tracewire.connect(embedded, prefix=prefix, name="one") as client:
        yield client


@intervention
def collects(model, tracer, live, rows):
    rows.append(model.samples.item())


async def test_gains_are_told_in_order_before_what_comes_next_and_the_end_is_verified(
    client: Client, embedded: str, prefix: str
) -> None:
    engine = SharingEngine()
    trace = client.trace("tiny", prompts=["a", "b"], block=collects, shared={"rows": []}, detach=True)
    with anyio.fail_after(PATIENCE):
        async with trace, adapted(embedded, prefix, engine):
            await trace.accepted()
            one, two = engine.requests
            assert engine.share.members == {one: 1, two: 1}
            engine.gain(0, Set(path=("rows",), value=[]))
            # The third comes before the second, as by another way.
            engine.gain(2, Append(path=("rows",), items=[3]))
            engine.step(one, 0)
            engine.requests[one].put("x")
            first = [await anext(trace), await anext(trace)]
            engine.gain(1, Append(path=("rows",), items=[1, 2]))
            engine.step(one, 1)
            engine.step(two, 0)
            engine.finish(one)
            engine.finish(two)
            engine.over([1, 2, 3], 3)
            rest = [item async for item in trace]
            result = await trace.result()
    assert [type(item).__name__ for item in first] == ["Shared", "Output"]
    gains = [item for item in rest if isinstance(item, Shared)]
    assert [item for gain in gains for item in gain.delta["rows"]] == [1, 2, 3]
    assert result.shared == {"rows": [1, 2, 3]}
    assert [(entry.invoke, entry.name) for entry in result.manifest] == [(-1, "rows")]
    assert engine.forgotten == []


async def test_what_was_shared_and_never_used_is_forgotten(client: Client, embedded: str, prefix: str) -> None:
    """A trace that is cancelled before any block ran does not wait for an end that never comes."""
    engine = SharingEngine()
    trace = client.trace("tiny", prompts=["a", "b"], block=collects, shared={"rows": []}, detach=True)
    with anyio.fail_after(PATIENCE):
        async with trace, adapted(embedded, prefix, engine):
            await trace.accepted()
            await trace.cancel("enough")
            with pytest.raises(tracewire.TraceFailed, match="enough"):
                await trace.result()
            await engine.forgot.wait()
    assert engine.forgotten == [engine.share.name]
    assert trace.state().shared == {}


async def test_a_share_that_the_trace_does_not_have_is_refused(client: Client, embedded: str, prefix: str) -> None:
    block = collects.block({"rows"})
    with anyio.fail_after(PATIENCE):
        async with client.trace("tiny", "a", block, detach=True) as trace, adapted(embedded, prefix, SharingEngine()):
            with pytest.raises(tracewire.TraceRejected, match="rows") as caught:
                await trace.result()
    assert caught.value.field == "shared"


@pytest.mark.parametrize("lost", ["a step", "the end"])
@pytest.mark.parametrize("tries", [2, 1])
async def test_a_trace_whose_shared_values_were_lost_on_their_way_runs_again(
    client: Client, embedded: str, prefix: str, tries: int, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it may; else it ends with an error, and no client takes a part of them for all."""
    monkeypatch.setattr(pending, "LATE_S" if lost == "a step" else "ENDING_S", 0.01)
    engine = SharingEngine()
    trace = client.trace("tiny", "a", collects, shared={"rows": []}, detach=True, max_attempts=tries)
    with anyio.fail_after(PATIENCE):
        async with trace, adapted(embedded, prefix, engine):
            for attempt in range(1, tries + 1):
                await engine.started.wait()
                engine.started = anyio.Event()
                name = [*engine.requests][-1]
                engine.gain(0, Set(path=("rows",), value=[attempt]))
                if attempt > 1:
                    engine.gain(1, Append(path=("rows",), items=[5]))
                engine.step(name, 0)
                engine.finish(name)
                if lost == "a step" or attempt > 1:
                    engine.over([attempt, 5], 2)
            if tries == 1:
                with pytest.raises(tracewire.TraceFailed, match="did not report the request's end"):
                    await trace.result()
            else:
                assert (await trace.result()).shared == {"rows": [2, 5]}
    assert len(engine.requests) == tries


async def test_the_lost_end_of_shared_values_counts_beside_requests_that_share_nothing(
    client: Client, embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "ENDING_S", 0.01)
    engine = SharingEngine()
    prompts = [Prompt("a", block=collects), Prompt("b")]
    trace = client.trace("tiny", prompts=prompts, shared={"rows": []}, detach=True, max_attempts=1)
    with anyio.fail_after(PATIENCE):
        async with trace, adapted(embedded, prefix, engine):
            await until(lambda: len(engine.requests) == 2)
            sharing, other = engine.requests
            engine.gain(0, Set(path=("rows",), value=[1]))
            engine.step(sharing, 0)
            engine.finish(sharing)
            engine.finish(other)
            with pytest.raises(tracewire.TraceFailed, match="did not report the request's end"):
                await trace.result()
