"""The firehose: what becomes of every trace, once each, in order; alone or shared by a group."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import anyio
import pytest

import tracewire
from tests.support.redis.proxy import proxy
from tests.support.scripted_engine import ScriptedEngine, acts, serving
from tests.support.stepping import PATIENCE, Gate, free
from tracewire_bus.bus import Bus
from tracewire_bus.store import lifecycle as firehose
from tracewire_bus.store.lifecycle import Lifecycle, Watch, lifecycle_fields
from tracewire_bus.store.queue_entries import QueueFull
from tracewire_bus.store.watch_groups import GroupWatch
from tracewire_bus.wire.messages import Failure, Invoke, Submission, Usage


def submission(trace: str, model: str = "m", **more: object) -> Submission:
    return Submission(trace=trace, model=model, invokes=[Invoke(prompt="x")], client="me", **more)  # type: ignore[arg-type]


async def some(watch: Watch | GroupWatch, count: int) -> list[Lifecycle]:
    """The next so many events."""
    with anyio.fail_after(30):
        return [await anext(watch) for _ in range(count)]


async def test_a_trace_from_its_submission_to_its_end(bus: Bus) -> None:
    async with bus.watch() as watch, bus.writer() as out:
        await bus.submit(submission("t"))
        await bus.submit(submission("t"))
        await bus.records.open("t", "e", 1)
        for seq, kind in enumerate(("accepted", "paused", "resumed")):
            life = lifecycle_fields(kind, "t", model="m", engine="e", attempt=1)
            await out.append("t", 1, seq, kind.encode(), lifecycle=life)
        await out.append("t", 1, 3, b"output")
        life = lifecycle_fields("final", "t", model="m", engine="e", attempt=1, status="finished", usage=Usage(3, 5))
        await out.append("t", 1, 4, b"end", final=True, lifecycle=life)
        events = await some(watch, 5)
        assert [event.type for event in events] == ["queued", "accepted", "paused", "resumed", "final"]
        assert {(event.trace_id, event.model, event.client) for event in events} == {("t", "m", "me")}
        assert [event.engine for event in events] == ["", "e", "e", "e", "e"]
        assert [event.attempt for event in events] == [0, 1, 1, 1, 1]
        assert [event.time for event in events] == sorted(event.time for event in events)
        assert events[0].time > 1.7e9
        end = events[-1]
        assert (end.status, end.error, end.prompt_tokens, end.tokens) == ("finished", None, 3, 5)
        assert [event.status for event in events[:4]] == [None] * 4


async def test_ends_by_third_parties_and_refusals_are_told(bus: Bus) -> None:
    async with bus.watch() as watch:
        await bus.submit(submission("a"), 1)
        with pytest.raises(QueueFull):
            await bus.submit(submission("b"), 1)
        await bus.cancel("a", by="me")
        await bus.submit(submission("c"))
        await bus.records.open("c", "e", 3)
        await bus.records.end("c", "failed", Failure(type="EngineLost", message="gone"))
        assert not await bus.records.end("c", "failed", Failure(type="EngineLost", message="gone"))
        await bus.submit(submission("d", deadline_s=0.001))
        with anyio.fail_after(20):
            while not await bus.records.ended("d"):
                await bus.sweep([bus.keys.tag("d")])
        seen: dict[str, list[Lifecycle]] = {}
        for event in await some(watch, 8):
            seen.setdefault(event.trace_id, []).append(event)
    assert [event.type for event in seen["a"]] == ["queued", "final"]
    assert (seen["a"][1].status, seen["a"][1].error, seen["a"][1].model) == ("cancelled", "Cancelled", "m")
    assert [event.type for event in seen["b"]] == ["queued", "refused"]
    assert (seen["b"][1].model, seen["b"][1].client) == ("m", "me")
    assert (seen["c"][1].error, seen["c"][1].engine, seen["c"][1].attempt) == ("EngineLost", "e", 4)
    assert seen["c"][1].tokens is None
    assert (seen["d"][1].status, seen["d"][1].error) == ("expired", "DeadlineExceeded")


async def test_a_watch_goes_on_from_a_position_without_a_repeat(bus: Bus) -> None:
    traces = [f"t{number}" for number in range(150)]
    for trace in traces:
        await bus.submit(submission(trace))
        await bus.records.end(trace, "failed", Failure(type="X", message="x"))
    seen: list[Lifecycle] = []
    position = "start"
    while len(seen) < 300:
        async with bus.watch(position) as watch:
            seen += await some(watch, min(37, 300 - len(seen)))
            position = watch.position
    assert Counter((event.trace_id, event.type) for event in seen) == Counter(
        (trace, kind) for trace in traces for kind in ("queued", "final")
    )
    for trace in traces:
        assert [event.type for event in seen if event.trace_id == trace] == ["queued", "final"]
    async with bus.watch(position) as watch:
        await bus.submit(submission("last"))
        assert [event.trace_id for event in await some(watch, 1)] == ["last"]
    for nothing in ("", "w1.", "w1.abc", "1-1", "w2." + position[3:], "w1." + "A" * 20_000):
        with pytest.raises(ValueError, match="a watch begins at"):
            bus.watch(nothing)


async def test_all_streams_share_one_connection_and_are_bounded(
    bus: Bus, embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connections() -> int:
        return len((await bus.command("CLIENT", "LIST")).splitlines())

    await bus.submit(submission("first"))
    before = await connections()
    async with bus.watch("start") as watch:
        assert [event.trace_id for event in await some(watch, 1)] == ["first"]
        assert await connections() == before + 1
    for tag in bus.keys.tags:
        left = await bus.command("TTL", bus.keys.firehose(tag))
        assert left == -2 or 0 < left <= firehose.KEEP_S


async def test_a_connection_that_breaks_loses_and_repeats_nothing(
    bus: Bus, prefix: str, tmp_path: Path, embedded: str
) -> None:
    async with (
        proxy(embedded, tmp_path) as through,
        Bus.open(through.url, prefix=prefix) as far,
        far.watch() as watch,
        far.watch_group("g", "a", idle_s=1000) as member,
    ):
        for number in range(30):
            await bus.submit(submission(f"t{number}"))
            if number % 3 == 0:
                await through.cut()
            assert [event.trace_id for event in await some(watch, 1)] == [f"t{number}"]
            assert [event.trace_id for event in await some(member, 1)] == [f"t{number}"]


async def test_a_large_final_is_told_once(bus: Bus, prefix: str, tmp_path: Path, embedded: str) -> None:
    """Also where the answer was lost, and it was sent again."""
    large = b"x" * 1_000_000
    async with bus.watch() as watch, proxy(embedded, tmp_path) as through:
        await bus.submit(submission("t"))
        async with Bus.open(through.url, prefix=prefix) as far, far.writer() as out:
            through.swallow = b"EVAL"
            life = lifecycle_fields("final", "t", model="m", status="finished")
            await out.append("t", 1, 0, large, final=True, lifecycle=life)
            assert through.swallowed.is_set()
        await bus.submit(submission("t2"))
        seen = []
        while not seen or seen[-1].trace_id != "t2":
            seen += await some(watch, 1)
        assert [(event.trace_id, event.type) for event in seen] == [("t", "queued"), ("t", "final"), ("t2", "queued")]


async def test_closing_wakes_who_waits(bus: Bus) -> None:
    for watch in (bus.watch(), bus.watch_group("g", "a")):
        with pytest.raises(anyio.ClosedResourceError), anyio.fail_after(10):
            async with anyio.create_task_group() as group:

                async def close(watch: Watch | GroupWatch = watch) -> None:
                    while watch._wait is None:
                        await anyio.lowlevel.checkpoint()
                    await watch.aclose()

                group.start_soon(close)
                try:
                    await anext(watch)
                except anyio.ClosedResourceError:
                    closed = True
            assert closed
            await anext(watch)


async def test_a_watch_tells_of_a_trace_whose_engine_died(bus: Bus, embedded: str, prefix: str) -> None:
    gate = Gate()
    async with (
        tracewire.connect(embedded, prefix=prefix) as client,
        client.watch() as watch,
        serving(bus, dying := ScriptedEngine(gate)) as first,
    ):
        await client.models.get("tiny", timeout=PATIENCE)
        async with client.trace("tiny", "hello", acts, max_tokens=20, detach=True) as trace:
            await trace.accepted()
            await trace.pause()
            with anyio.fail_after(PATIENCE):
                kinds = [(await anext(watch)).type for _ in range(3)]
            await trace.resume()
            gate.step(3)
            with anyio.fail_after(PATIENCE):
                kinds.append((await anext(watch)).type)
            dying.die()
            await first.ended.wait()
            async with serving(bus, free()):
                with anyio.fail_after(PATIENCE):
                    await trace.result()
                    events = [await anext(watch) for _ in range(3)]
    assert kinds == ["queued", "accepted", "paused", "resumed"]
    assert [(event.type, event.attempt) for event in events] == [("restarted", 2), ("accepted", 2), ("final", 2)]
    assert (events[-1].status, events[-1].tokens, events[-1].prompt_tokens) == ("finished", 20, 1)
