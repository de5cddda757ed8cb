"""The stream of one attempt: events are numbered as they are queued, and its final settles the trace."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest

from tests.support.bus_engine import engine_info
from tracewire_bus.bus import Bus, EntryTooLarge, Fenced, NotAllowed
from tracewire_bus.wire.codec import decode_event
from tracewire_bus.wire.messages import Paused, Resumed
from tracewire_engine.adapter import trace_stream
from tracewire_engine.adapter.trace_stream import UNNUMBERED, Acknowledgements, RawFinal, TraceStream

PATIENCE = 60


async def _events(bus: Bus, trace: str) -> list[Any]:
    return [decode_event(entry.data) async for entry in bus.read(trace)]


async def test_events_are_numbered_in_order_and_the_final_settles_the_trace(bus: Bus) -> None:
    info = engine_info("m", "one")
    await bus.queue.put("m", "t", b"d", client="c")
    (taken,) = await bus.queue.take("m", "one", 1, 0)
    await bus.records.open("t", "one", taken.attempt)
    async with bus.writer() as writer:
        stream = TraceStream(writer, info, "t", taken.attempt, None)
        await stream.append(Paused(**UNNUMBERED, by="a"), Resumed(**UNNUMBERED, by="b"))
        assert (stream.seq, stream.ended) == (1, False)
        await stream.append(RawFinal(**UNNUMBERED, status="finished"), final=True)
        assert (stream.seq, stream.ended) == (2, True)
        with pytest.raises(Fenced):
            await stream.append(Paused(**UNNUMBERED, by="late"))
    events = await _events(bus, "t")
    assert [(type(one).__name__, one.attempt, one.seq) for one in events] == [
        ("Paused", taken.attempt, 0),
        ("Resumed", taken.attempt, 1),
        ("Final", taken.attempt, 2),
    ]
    assert await bus.records.ended("t")


async def test_queued_events_are_waited_for_together_and_the_first_failure_is_raised(bus: Bus) -> None:
    async with bus.writer() as writer:
        stream = TraceStream(writer, engine_info("m", "one"), "t", 1, None)
        acknowledgements = Acknowledgements()
        for by in "ab":
            await stream.queue(Paused(**UNNUMBERED, by=by), acknowledgements=acknowledgements)
        together = Acknowledgements([acknowledgements])
        await stream.queue(RawFinal(**UNNUMBERED, status="finished"), final=True, acknowledgements=together)
        assert stream.ended
        await acknowledgements.wait()  # has none any more
        await together.wait()
        assert [type(one).__name__ for one in await _events(bus, "t")] == ["Paused", "Paused", "Final"]
        # The stream has ended, so each of these is refused.
        await stream.queue(Paused(**UNNUMBERED, by="c"), Paused(**UNNUMBERED, by="d"), acknowledgements=together)
        with pytest.raises(Fenced, match="event 1-3 "):
            await together.wait()
        await together.wait()


async def test_events_that_no_task_waits_for_are_dropped(bus: Bus, recwarn: pytest.WarningsRecorder) -> None:
    async with bus.writer() as writer:
        stream = TraceStream(writer, engine_info("m", "one"), "t", 1, None)
        acknowledgements = Acknowledgements()
        await stream.queue(
            Paused(**UNNUMBERED, by="a"), Paused(**UNNUMBERED, by="b"), acknowledgements=acknowledgements
        )
        with anyio.CancelScope() as scope:
            scope.cancel()
            await acknowledgements.wait()
        await stream.queue(Paused(**UNNUMBERED, by="c"), acknowledgements=acknowledgements)
        acknowledgements.close()
        await stream.append(RawFinal(**UNNUMBERED, status="finished"), final=True)
    assert [one.seq for one in await _events(bus, "t")] == [0, 1, 2, 3]
    assert not [one for one in recwarn if "never awaited" in str(one.message)]


async def test_a_final_that_is_too_large_leaves_its_number_to_another(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracewire_bus.events.writer.ENTRY_BYTES", 10_000)
    async with bus.writer() as writer:
        stream = TraceStream(writer, engine_info("m", "one"), "t", 1, None)
        large = RawFinal(**UNNUMBERED, status="finished", warnings=["x" * 10_000])
        with pytest.raises(EntryTooLarge):
            await stream.end(Paused(**UNNUMBERED, by="a"), large)
        assert (stream.seq, stream.ended) == (0, False)
        await stream.end(RawFinal(**UNNUMBERED, status="failed"))
        assert stream.ended
    assert [(type(one).__name__, one.seq) for one in await _events(bus, "t")] == [("Paused", 0), ("Final", 1)]


async def test_a_final_that_redis_does_not_allow_is_sent_again(
    bus: Bus, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it lacks before the final, and under the numbers that are free."""
    monkeypatch.setattr(trace_stream, "_REFUSED_S", 0.01)
    user, waits = f"writes-{prefix}", anyio.Event()
    await bus.command("ACL", "SETUSER", user, "reset", "on", ">secret", "~*", "&*", "+@all")
    url = bus.url.replace("unix://", f"unix://{user}@") + "?password=secret"
    final = RawFinal(**UNNUMBERED, status="finished")

    def again() -> None:
        final.status = "cancelled"
        waits.set()

    async with Bus.open(url, prefix=prefix) as other, other.writer() as writer:
        stream = TraceStream(writer, engine_info("m", "one"), "t", 1, None)
        before = Acknowledgements()
        await stream.queue(Paused(**UNNUMBERED, by="a"), acknowledgements=before)
        await before.wait()
        await bus.command("ACL", "SETUSER", user, "-eval")
        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as group:
                group.start_soon(partial(stream.end, Resumed(**UNNUMBERED, by="b"), final, again=again))
                await waits.wait()
                await bus.command("ACL", "SETUSER", user, "+eval")
        assert (stream.seq, stream.ended) == (2, True)
    events = await _events(bus, "t")
    assert [(type(one).__name__, one.seq) for one in events] == [("Paused", 0), ("Resumed", 1), ("Final", 2)]
    assert events[-1].status == "cancelled"


async def test_no_final_stands_behind_an_output_that_redis_does_not_allow(bus: Bus, prefix: str) -> None:
    user = f"writes-{prefix}"
    await bus.command("ACL", "SETUSER", user, "reset", "on", ">secret", "~*", "&*", "+@all")
    url = bus.url.replace("unix://", f"unix://{user}@") + "?password=secret"
    async with Bus.open(url, prefix=prefix) as other, other.writer() as writer:
        stream = TraceStream(writer, engine_info("m", "one"), "t", 1, None)
        await stream.append(Paused(**UNNUMBERED, by="a"))
        await bus.command("ACL", "SETUSER", user, "-eval")
        before = Acknowledgements()
        await stream.queue(Paused(**UNNUMBERED, by="b"), acknowledgements=before)
        with anyio.fail_after(PATIENCE), pytest.raises(NotAllowed):
            await stream.end(RawFinal(**UNNUMBERED, status="finished"), behind=[before])
        assert (stream.seq, stream.ended) == (0, False)
