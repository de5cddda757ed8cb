"""The bus on a real Redis: nothing is lost, repeated or reordered, and nobody waits for anybody else."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from tests.support.redis.proxy import proxy
from tests.support.streams import anext_is_waited_for, assert_whole, rest, submission, write
from tracewire_bus.bus import FINAL_ID, Bus, BusError, BusUnavailable, Entry, Fenced


async def test_a_stale_attempt_is_fenced_and_so_is_everything_after_the_final(bus: Bus) -> None:
    async with bus.writer() as writer:
        assert await writer.append("t", 1, 0, b"a") == "1-0"
        assert await writer.append("t", 2, 0, b"b") == "2-0"
        for attempt, seq, what in [(1, 1, "a stale attempt"), (2, 0, "a repeat"), (1, 0, "both")]:
            with pytest.raises(Fenced):
                await writer.append("t", attempt, seq, what.encode())
        assert await writer.append("t", 2, 1, b"end", final=True) == FINAL_ID
        for final in (False, True):
            with pytest.raises(Fenced):
                await writer.append("t", 3, 0, b"too late", final=final)
    assert [entry.data for entry in await rest(bus.read("t"))] == [b"a", b"b", b"end"]


async def test_events_of_one_trace_keep_their_order_though_nobody_waits(bus: Bus) -> None:
    async with bus.writer() as writer, anyio.create_task_group() as group:
        for seq in range(1000):
            group.start_soon(writer.append, "t", 1, seq, str(seq).encode())
    async with bus.writer() as writer:
        await writer.append("t", 1, 1000, b"1000", final=True)
    assert [int(entry.data) for entry in await rest(bus.read("t"))] == list(range(1001))


async def test_a_cancelled_append_is_carried_out_all_the_same(bus: Bus) -> None:
    async with bus.writer() as writer:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await writer.append("t", 1, 0, b"")
        assert scope.cancelled_caught
        await writer.append("t", 1, 1, b"", final=True)
    assert len(await rest(bus.read("t"))) == 2


async def test_the_final_lets_the_trace_expire(embedded: str, prefix: str) -> None:
    async with Bus.open(embedded, prefix=prefix, retention_s=100) as bus, bus.writer() as writer:
        await bus.submit(submission())
        await writer.append("t", 1, 0, b"")
        assert await bus.command("TTL", bus.keys.events("t")) > 6 * 24 * 3600
        await writer.append("t", 1, 1, b"", final=True)
        for key in (bus.keys.events("t"), bus.keys.record("t")):
            assert 0 < await bus.command("TTL", key) <= 100


async def test_traces_that_end_together_leave_the_queue_in_one_round_trip(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = [f"t{number}" for number in range(20)]
    for trace in traces:
        await bus.queue.put("m", trace, b"d", client="c")
    assert await bus.command("HLEN", bus.keys.queue("m", "data")) == len(traces)
    taken = {one.trace: one.attempt for one in await bus.queue.take("m", "one", len(traces), 0)}
    async with bus.writer() as writer:
        rounds = list[int]()
        execute = writer.restorer.execute_until_answered

        async def counted(*commands: tuple[object, ...], moving: bool = False) -> list[object]:
            rounds.append(len(commands))
            return await execute(*commands, moving=moving)

        monkeypatch.setattr(writer.restorer, "execute_until_answered", counted)
        outcomes = []
        for trace in traces:
            # Redis might refuse the output before the final, so the entry is settled behind the flush.
            outcomes.append(writer.submit(trace, taken[trace], 0, b"a"))
            settles = "m", trace, "one", taken[trace]
            outcomes.append(writer.submit(trace, taken[trace], 1, b"end", final=True, settles=settles))
        for outcome in outcomes:
            await outcome
        assert rounds == [len(traces)]
    for trace in traces:
        assert [entry.data for entry in await rest(bus.read(trace))] == [b"a", b"end"]
    assert not await bus.command("HLEN", bus.keys.queue("m", "data"))


async def test_what_redis_refuses_is_an_error_of_that_append(bus: Bus) -> None:
    await bus.command("SET", bus.keys.events("t"), "no stream")
    async with bus.writer() as writer:
        with pytest.raises(BusError, match="WRONGTYPE"):
            await writer.append("t", 1, 0, b"")
        await writer.append("other", 1, 0, b"")
    with pytest.raises(BusError, match="WRONGTYPE"):
        await anext(bus.read("t"))


async def test_an_append_whose_answer_was_lost_succeeds_once(bus: Bus, prefix: str, tmp_path: Path) -> None:
    async with proxy(bus.url, tmp_path) as way, Bus.open(way.url, prefix=prefix) as far, far.writer() as writer:
        way.swallow = b"precious"
        assert await writer.append("t", 1, 0, b"precious") == "1-0"
        assert way.swallowed.is_set()
        way.swallow = b"the end"
        assert await writer.append("t", 1, 1, b"the end", final=True) == FINAL_ID
        with pytest.raises(Fenced):
            await writer.append("t", 1, 2, b"more")
        # Someone else's event under the same id is not taken for ours.
        await bus.command("XADD", bus.keys.events("u"), "1-0", "v", "1.0", "d", "other")
        way.swallow = b"mine"
        with pytest.raises(Fenced):
            await writer.append("u", 1, 0, b"mine")
    assert [entry.data for entry in await rest(bus.read("t"))] == [b"precious", b"the end"]


async def test_while_redis_is_away_reading_and_appending_wait(bus: Bus, prefix: str, tmp_path: Path) -> None:
    async with proxy(bus.url, tmp_path) as way, Bus.open(way.url, prefix=prefix, patience_s=0.2) as far:
        subscription = far.read("t")
        async with far.writer() as writer, anyio.create_task_group() as group:
            await anext_is_waited_for(bus, subscription)
            way.away = True
            await way.cut()
            with pytest.raises(BusUnavailable, match="is away"):
                await far.exists("t")
            with pytest.raises(BusUnavailable):
                await far.submit(submission())
            assert await far.queue.take("demo", "e", 1, 10) == []
            group.start_soon(write, writer, "t", 5)
            late: list[list[Entry]] = []

            async def follow() -> None:
                late.append(await rest(far.read("t")))

            group.start_soon(follow)
            # Long enough for the patience of a short command to end.
            with anyio.move_on_after(0.5):
                await anext(subscription)
                pytest.fail("nothing can come")
            way.away = False
            assert_whole(await rest(subscription), "t", 5)
        assert_whole(late[0], "t", 5)


def test_on_uvloop_a_check_that_is_due_at_once_stops_no_writer(
    embedded: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with Bus.open(embedded, prefix=prefix) as bus, bus.writer() as writer:
            for seq in range(20):
                await writer.append("t", 1, seq, f"t {seq}".encode())
                # uvloop's timers that are due within half a millisecond do not know when they ring.
                writer.restorer.check_at = anyio.current_time() + 0.0003
                writer._wanted.notify()
                await anyio.lowlevel.checkpoint()
            await writer.append("t", 1, 20, b"t 20", final=True)
            assert_whole(await rest(bus.read("t")), "t", 20)
            # Nor does a timer that rings somewhat early leave the writer without one.
            for early_s in (0.0003, 0.0006, 0.0013):
                due = writer.restorer.check_at = anyio.current_time() + early_s
                writer._wanted.notify()
                with anyio.fail_after(20):
                    while writer.restorer.check_at == due:
                        await anyio.lowlevel.checkpoint()

    anyio.run(main, backend_options={"use_uvloop": True})
    assert not caplog.records
