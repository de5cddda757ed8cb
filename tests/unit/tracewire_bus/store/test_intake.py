"""Engines take entries of a queue: each entry goes to one engine once, over broken connections too."""

from __future__ import annotations

import math
import random
from pathlib import Path

import anyio
import pytest

from tests.support.queue import idle, left_behind, put, put_silently, submission, take, traces
from tests.support.redis.proxy import proxy
from tests.support.until import until
from tracewire_bus.bus import Bus, BusFull
from tracewire_bus.store import intake as intake_module
from tracewire_bus.store import submission_queue as queue
from tracewire_bus.transport.embedded import EmbeddedServer


async def test_an_engine_that_waits_gets_what_comes(bus: Bus) -> None:
    async with anyio.create_task_group() as group:
        found: list[str] = []

        async def wait() -> None:
            found.extend(traces(await bus.queue.take("demo", "e", 5, 20_000)))

        group.start_soon(wait)
        await until(lambda: idle(bus, 1))
        await bus.submit(submission())
    assert found == ["t"]


async def test_one_submission_wakes_one_engine(bus: Bus) -> None:
    found: list[str] = []

    async def serve(engine: str) -> None:
        found.extend(traces(await bus.queue.take("demo", engine, 5, 60_000)))

    async with anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(serve, f"e{number}")
        for number in range(3):
            await until(lambda left=3 - number: idle(bus, left))
            await put(bus, "A", [number])
    assert found == ["A-0", "A-1", "A-2"]


async def test_one_token_wakes_as_many_engines_as_there_are_entries(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "_POLL_S", 60)
    found: list[str] = []

    async def serve(engine: str) -> None:
        found.extend(traces(await bus.queue.take("demo", engine, 1, 60_000)))

    async with anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(serve, f"e{number}")
        await until(lambda: idle(bus, 3))
        await put_silently(bus, "A-0", "A-1")
        await put(bus, "A", [2])
    assert sorted(found) == ["A-0", "A-1", "A-2"]


async def test_a_lost_token_leaves_no_engine_asleep(bus: Bus) -> None:
    async with anyio.create_task_group() as group:
        found: list[str] = []

        async def wait() -> None:
            with anyio.fail_after(20):
                found.extend(traces(await bus.queue.take("demo", "e", 5, 600_000)))

        group.start_soon(wait)
        await until(lambda: idle(bus, 1))
        await put_silently(bus, "A-0")
    assert found == ["A-0"]


async def test_the_bell_is_bounded_and_silent_when_nothing_waits(bus: Bus) -> None:
    await put(bus, "A", range(100))
    bell = bus.keys.queue("demo", "bell")
    assert await bus.command("LLEN", bell) == 64
    assert len(await take(bus, 99)) == 99
    assert await bus.queue.withdraw("demo", "A-99")
    assert await bus.command("EXISTS", bell) == 0


async def test_no_more_is_taken_than_fits(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "TAKE_BYTES", 1_000_000)
    bodies = {f"t{number}": bytes([number]) * 300_000 for number in range(7)}
    bodies["t2"] = b"x" * 3_000_000
    for trace, body in bodies.items():
        await bus.queue.put("demo", trace, body)
    found = [await bus.queue.take("demo", "e", 10, 0) for _ in range(5)]
    assert [traces(some) for some in found] == [["t0", "t1"], ["t2"], ["t3", "t4", "t5"], ["t6"], []]
    for one in (one for some in found for one in some):
        assert one.fields[b"d"] == bodies[one.trace]


async def test_entries_can_be_taken_while_redis_is_full(tmp_path: Path) -> None:
    async with EmbeddedServer.start() as server, Bus.open(server.url, patience_s=0.2) as bus:
        await put(bus, "A", range(3))
        await bus.command("CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(BusFull, match="no memory"):
            await put(bus, "A", [3])
        assert await take(bus, 2) == ["A-0", "A-1"]
        assert await bus.queue.withdraw("demo", "A-2")
        for trace in ("A-0", "A-1"):
            await bus.queue.done("demo", trace)
        await bus.command("CONFIG", "SET", "maxmemory", 0)
        await put(bus, "A", [3])
        assert await take(bus, 2) == ["A-3"]


async def test_what_a_lost_take_had_taken_comes_with_the_next(bus: Bus, prefix: str, tmp_path: Path) -> None:
    async with proxy(bus.url, tmp_path) as way, Bus.open(way.url, prefix=prefix) as far:
        await put(far, "A", range(1))
        assert await take(far) == ["A-0"]
        await put(far, "A", range(1, 4))
        # Redis gives it to us, and we never hear of it.
        way.swallow = b"EVALSHA"
        found = traces(await far.queue.take("demo", "e", 2, 5000))
        found += await take(far, 2)
        assert way.swallowed.is_set()
        assert found == ["A-1", "A-2", "A-3"]
        assert await take(far, 2) == []
        for trace in ("A-0", *found):
            await far.queue.done("demo", trace)
    assert await left_behind(bus) == {"state", "engine:e", "holders"}


async def test_large_entries_that_were_lost_come_too(bus: Bus, prefix: str, tmp_path: Path) -> None:
    async with proxy(bus.url, tmp_path) as way, Bus.open(way.url, prefix=prefix) as far:
        for trace in ("one", "two"):
            await far.queue.put("demo", trace, trace.encode() * 100_000)
        # The data is asked for by itself.
        way.swallow = b"HMGET"
        found = await far.queue.take("demo", "e", 5, 5000)
        assert way.swallowed.is_set()
        assert {one.trace: one.fields[b"d"] for one in found} == {
            trace: trace.encode() * 100_000 for trace in ("one", "two")
        }


async def test_an_engine_that_comes_back_gets_what_it_held(bus: Bus, prefix: str) -> None:
    await put(bus, "A", range(5))
    async with Bus.open(bus.url, prefix=prefix) as first:
        assert await take(first, 3, "came-back") == ["A-0", "A-1", "A-2"]
        await first.queue.done("demo", "A-1")
        assert await take(bus, 1, "other") == ["A-3"]
    assert await take(bus, 1, "came-back") == ["A-0"]
    assert await take(bus, 5, "came-back") == ["A-2"]
    assert await take(bus, 5, "came-back") == ["A-4"]
    assert await take(bus, 5, "came-back") == []


async def test_what_is_half_settled_does_not_come_back(bus: Bus, prefix: str) -> None:
    await put(bus, "A", range(2))
    async with Bus.open(bus.url, prefix=prefix) as first:
        await take(first, 2)
    await bus.command("HDEL", bus.keys.queue("demo", "entries"), "A-0")
    assert await take(bus, 2) == ["A-1"]
    assert await bus.command("HKEYS", bus.keys.queue("demo", "taken")) == [b"A-1"]


async def test_what_was_settled_before_it_was_taken_is_passed_over(bus: Bus) -> None:
    await put(bus, "A", range(2), lease="l")
    await put(bus, "B", range(1))
    await bus.queue.done("demo", "A-0")
    assert await take(bus, 5) == ["A-1", "B-0"]
    assert await bus.queue.waiting("demo") == 0
    assert await bus.queue.withdraw_lease("demo", "l") == []
    assert await bus.queue.leases("demo") == []


async def test_a_take_that_comes_too_late_takes_nothing(bus: Bus) -> None:
    assert await take(bus) == []
    intake = bus.queue._intakes["demo", "e"]
    late = intake._call(intake_module._TAKE, 5)
    # Its connection broke, and the next one looked for what it had taken.
    intake._recovery_due = True
    assert await take(bus) == []
    await put(bus, "A", range(1))
    await bus.command("DEL", bus.keys.queue("demo", "bell"))
    assert await bus.command(*late) is None
    # Nor is the token that it came by lost.
    assert await bus.command("LLEN", bus.keys.queue("demo", "bell")) == 1
    assert await take(bus) == ["A-0"]


async def test_a_token_that_has_expired_is_renewed(bus: Bus) -> None:
    await put(bus, "A", range(2))
    assert await take(bus) == ["A-0"]
    await bus.command("DEL", bus.keys.queue("demo", "engine:e"))
    assert await take(bus, 5) == ["A-1"]


async def test_a_take_is_an_engines_share_of_what_waits(bus: Bus) -> None:
    """Of two engines that take, each gets half, whoever asks first; one that is alone gets all."""
    for trace in ("a", "b"):
        await bus.submit(submission(trace))
        assert len(await bus.queue.take("demo", trace, 10, 0)) == 1
    for number in range(10):
        await bus.submit(submission(f"t{number}"))
    sizes = [len(await bus.queue.take("demo", engine, 10, 0)) for engine in ("a", "b", "a", "b", "a")]
    assert sizes == [5, 5, 0, 0, 0]
    # One that has gone has no share, and what it had waits again.
    assert await bus.queue.put_back("demo", "b", "", lost=False) == 6
    assert len(await bus.queue.take("demo", "a", 10, 0)) == 6


async def test_a_burst_is_shared_evenly_and_leaves_nothing_to_engines_that_do_not_come(bus: Bus) -> None:
    for engine in "abc":
        assert await bus.queue.take("demo", engine, 64, 0, 256) == []
    for number in range(10):
        await bus.submit(submission(f"t{number}"))
    assert [len(await bus.queue.take("demo", engine, 64, 0, 256)) for engine in "abc"] == [4, 3, 3]
    # Who has fewer is to have it, and gets a moment for that.
    for trace in ("u", "v", "w"):
        await bus.submit(submission(trace))
    assert len(await bus.queue.take("demo", "b", 64, 0, 256)) == 2
    assert len(await bus.queue.take("demo", "a", 64, 0, 256)) == 1


async def test_two_engines_that_are_disturbed_get_each_entry_once(bus: Bus, prefix: str, tmp_path: Path) -> None:
    count, chance = 2000, random.Random(8)
    wanted = {f"{client}-{number}" for client in "AB" for number in range(count)}
    taken: list[str] = []
    cancelled = 0

    async with proxy(bus.url, tmp_path) as way, Bus.open(way.url, prefix=prefix) as far:

        async def serve(engine: str) -> None:
            nonlocal cancelled
            while len(taken) < len(wanted):
                # However slow the machine is, every second one gets through.
                for limit in (chance.uniform(0, 0.004), math.inf):
                    with anyio.move_on_after(limit) as scope:
                        taken.extend(traces(await far.queue.take("demo", engine, chance.randint(1, 5), 50)))
                    cancelled += scope.cancelled_caught

        async def settle() -> None:
            settled = 0
            while settled < len(wanted):
                await until(lambda past=settled: more_than(past))
                for trace in taken[settled:]:
                    await bus.queue.done("demo", trace)
                    far.queue.note_settled("demo", trace)
                    settled += 1

        async def more_than(number: int) -> bool:
            return len(taken) > number

        async def disturb() -> None:
            for number in range(500, len(wanted), 500):
                await until(lambda wanted=number: more_than(wanted))
                await way.cut()

        async with anyio.create_task_group() as group:
            for engine in ("e1", "e2"):
                group.start_soon(serve, engine)
            for client in "AB":
                group.start_soon(put, bus, client, range(count))
            group.start_soon(settle)
            group.start_soon(disturb)
    assert cancelled > 0
    assert len(taken) == len(wanted)
    assert set(taken) == wanted
    assert await left_behind(bus) == {"state", "engine:e1", "engine:e2", "holders"}


async def test_one_engine_of_many_looks_at_all_that_is_taken(
    bus: Bus, embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the longer, the more engines there are. Another does when that one has gone, and clients do besides."""
    monkeypatch.setattr(queue, "ROLE_S", 60.0)
    async with Bus.open(embedded, prefix=prefix) as other:
        first, second, client = bus.recovery("tiny"), other.recovery("tiny"), other.recovery("tiny")
        for one, name in ((first, "a"), (second, "b"), (first, "a")):
            await one.look(but=name)
        await client.look()
        assert (first.has_role, second.has_role, client.has_role) == (True, False, True)
        # It has gone, and its time with it.
        care = bus.keys.queue("tiny", "caretaker:engines")
        assert 0 < int(await bus.command("PTTL", care)) <= 60_000
        await bus.command("DEL", care)
        await second.look(but="b")
        await first.look(but="a")
        assert (first.has_role, second.has_role) == (False, True)
