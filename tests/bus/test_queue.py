"""The models' queues on a real Redis: fair, bounded, and each entry goes to one engine once."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import anyio
import pytest

from tests.bus.test_streams import clients
from tests.support.redis.proxy import proxy
from tests.support.until import until
from tracewire_bus.bus import Bus, BusFull, QueueFull
from tracewire_bus.store import intake as intake_module
from tracewire_bus.store import submission_queue as queue
from tracewire_bus.store.queue_entries import Taken, queue_names
from tracewire_bus.store.submission_queue import _PUT
from tracewire_bus.transport.embedded import EmbeddedServer
from tracewire_bus.wire.codec import decode_submission, schema_text
from tracewire_bus.wire.messages import Invoke, Submission

HOSTILE = [
    "",
    " ",
    "ünï",
    "🦜",
    "a:b",
    "{m}",
    "}{",
    "*",
    "a\nb",
    "a\0b",
    "0000000000000001x",
    "client:x",
    "$(rm)",
    "x" * 300,
]


def submission(trace: str = "t", model: str = "demo", **fields: object) -> Submission:
    return Submission(trace=trace, model=model, invokes=[Invoke(prompt="hello")], **fields)  # type: ignore[arg-type]


async def put(bus: Bus, client: str, traces: Iterable[int | str], **fields: object) -> None:
    """Entries `client-<trace>` of a client's."""
    for trace in traces:
        await bus.queue.put("demo", f"{client}-{trace}", b"d", client=client, **fields)  # type: ignore[arg-type]


async def take(bus: Bus, count: int = 1, engine: str = "e") -> list[str]:
    """The traces of what can be taken now."""
    return traces(await bus.queue.take("demo", engine, count, 0))


def traces(found: Iterable[Taken]) -> list[str]:
    return [one.trace for one in found]


async def left_behind(bus: Bus) -> set[str]:
    """The parts of the queue that exist."""
    prefix = bus.keys.queue("demo", "")
    return {
        key.decode().removeprefix(prefix)
        for key in await bus.command("KEYS", "*:queue:*")
        if key.decode().startswith(prefix)
    }


# --- one entry --------------------------------------------------------------------------------------------------------


async def test_a_submission_is_taken_by_one_engine_and_settled(bus: Bus) -> None:
    before = time.time()
    await bus.submit(submission())
    assert await bus.exists("t")
    assert not await bus.exists("other")
    assert await bus.queue.waiting("demo") == 1
    (taken,) = await bus.queue.take("demo", "e1", 5, 1000)
    assert taken.trace == "t"
    assert (taken.fields[b"v"], taken.fields[b"t"]) == (schema_text().encode(), b"t")
    assert decode_submission(taken.fields[b"d"]) == submission()
    assert abs(taken.queued_at - before) < 60
    assert await bus.queue.waiting("demo") == 0
    assert await bus.queue.take("demo", "e2", 5, 1) == []
    assert await bus.queue.take("demo", "e1", 5, 0) == []
    for _ in range(2):
        await bus.queue.done("demo", "t")
    # Whose takes count expires.
    assert await left_behind(bus) == {"state", "engine:e1", "engine:e2", "holders"}
    assert await bus.command("TTL", bus.keys.queue("demo", "engine:e1")) > 0


async def test_a_trace_is_queued_once_however_often_it_is_submitted(bus: Bus) -> None:
    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(bus.submit, submission())
    assert await take(bus, 50) == ["t"]
    await bus.submit(submission())
    assert await take(bus, 50) == []
    await bus.queue.done("demo", "t")
    await bus.submit(submission())
    assert await take(bus, 50) == []


async def test_a_submission_whose_answer_was_lost_is_queued_once(bus: Bus, prefix: str, tmp_path: Path) -> None:
    async with proxy(bus.url, tmp_path) as way, Bus.open(way.url, prefix=prefix) as far:
        way.swallow = b"EVAL"
        await far.submit(submission())
        assert way.swallowed.is_set()
    assert await take(bus, 50) == ["t"]


async def test_an_entry_may_be_settled_with_its_final(bus: Bus) -> None:
    await bus.submit(submission())
    await take(bus)
    async with bus.writer() as writer:
        await writer.append("t", 1, 0, b"", final=True, settles=("demo", "t"))
    assert await left_behind(bus) == {"state", "engine:e", "holders"}
    # Nor does this process remember it.
    assert not bus.queue._intakes["demo", "e"].claimed


async def test_what_cannot_be_answered_is_kept_as_it_was(bus: Bus) -> None:
    await bus.queue.put("demo", "\x00", b"\x00garbage", schema="?")
    (taken,) = await bus.queue.take("demo", "e", 1, 0)
    assert len(await bus.dead_letters.list()) == 0
    await bus.queue.dead_letter("demo", taken, "it names no trace")
    assert len(await bus.dead_letters.list()) == 1
    assert await left_behind(bus) == {"state", "engine:e", "holders"}
    ((_, flat),) = await bus.command("XRANGE", bus.keys.dead(), "-", "+")
    assert dict(zip(flat[::2], flat[1::2], strict=True)) == {
        b"model": b"demo",
        b"entry": b"\x00",
        b"reason": b"it names no trace",
        b"v": b"?",
        b"t": b"\x00",
        b"d": b"\x00garbage",
    }


async def test_names_may_be_anything(bus: Bus) -> None:
    for client in HOSTILE:
        for trace in HOSTILE:
            await bus.queue.put("demo", f"{client}/{trace}", f"{client}/{trace}".encode(), client=client, lease=client)
    assert await bus.queue.clients("demo") == dict.fromkeys(HOSTILE, len(HOSTILE))
    assert set(await bus.queue.leases("demo")) == {lease for lease in HOSTILE if lease}
    assert await bus.queue.withdraw("demo", f"{HOSTILE[3]}/{HOSTILE[4]}")
    withdrawn = await bus.queue.withdraw_lease("demo", HOSTILE[5])
    assert len(withdrawn) == len(HOSTILE)
    for one in withdrawn:
        await bus.queue.done("demo", one.trace)
    found = await bus.queue.take("demo", "e", 1000, 0)
    assert len({one.trace for one in found}) == len(found) == len(HOSTILE) ** 2 - len(HOSTILE) - 1
    for one in found:
        assert one.fields[b"d"] == one.fields[b"t"] == one.trace.encode()
        await bus.queue.done("demo", one.trace)
    assert await left_behind(bus) == {"state", "engine:e", "holders"}


async def test_names_that_are_no_text_are_taken_and_settled(bus: Bus) -> None:
    # Of a client that is not ours.
    names = queue_names(bus.keys, "demo")
    await bus.command(
        *_PUT([*names, bus.keys.submitted("demo", "?")], b"\xff\xc3", "1.0", b"\xfe", 0, b"\xfd", 0, 60, 1, b"d")
    )
    assert await bus.queue.clients("demo") == {"\udcfe": 1}
    assert await bus.queue.leases("demo") == ["\udcfd"]
    (taken,) = await bus.queue.take("demo", "e", 1, 0)
    assert taken.fields[b"t"] == b"\xff\xc3"
    await bus.queue.dead_letter("demo", taken, "no text")
    assert await left_behind(bus) == {"state", "engine:e", "holders"}


async def test_models_do_not_share_a_queue(bus: Bus) -> None:
    await bus.queue.put("one", "t", b"1")
    await bus.queue.put("two", "t", b"2")
    assert [found.fields[b"d"] for found in await bus.queue.take("two", "e", 5, 0)] == [b"2"]
    assert [found.fields[b"d"] for found in await bus.queue.take("one", "e", 5, 0)] == [b"1"]


# --- order ------------------------------------------------------------------------------------------------------------


async def test_a_clients_backlog_holds_up_nobody_else(bus: Bus) -> None:
    await put(bus, "A", range(1000))
    await put(bus, "B", range(1))
    assert await take(bus, 3) == ["A-0", "B-0", "A-1"]
    await put(bus, "C", range(2))
    assert await take(bus, 5) == ["A-2", "C-0", "A-3", "C-1", "A-4"]


async def test_clients_take_turns(bus: Bus) -> None:
    for client in "ABC":
        await put(bus, client, range(20))
    found = [await take(bus, count) for count in (1, 4, 7, 3, 15)]
    assert [trace for some in found for trace in some] == [
        f"{client}-{number}" for number in range(10) for client in "ABC"
    ]


@pytest.mark.parametrize("how", ["served", "withdrawn"])
async def test_nobody_gains_by_leaving_and_returning(bus: Bus, how: str) -> None:
    for client in ("other", "patient", "zealous"):
        await put(bus, client, range(100))
    served: Counter[str] = Counter()
    # "A" never has more than one entry waiting, and queues the next at once; its name sorts first.
    await put(bus, "A", ["0"])
    for turn in range(200):
        (trace,) = await take(bus)
        served[trace.partition("-")[0]] += 1
        if how == "withdrawn" and not trace.startswith("A-"):
            assert await bus.queue.withdraw("demo", f"A-{turn}")
        if how == "withdrawn" or trace.startswith("A-"):
            await put(bus, "A", [turn + 1])
    if how == "withdrawn":
        assert served["A"] < 50
        del served["A"]
    assert max(served.values()) - min(served.values()) <= 1


async def test_many_clients_of_one_entry_hold_up_nobody(bus: Bus) -> None:
    await put(bus, "zzz", range(3))
    found: list[str] = []
    for number in range(0, 40, 2):
        # More come than are served.
        await put(bus, f"once{number}", "x")
        await put(bus, f"once{number + 1}", "x")
        found += await take(bus)
    assert found[0] == "zzz-0"
    assert "zzz-1" in found
    # And in the order they came.
    once = [trace for trace in found if trace.startswith("once")]
    assert once == [f"once{number}-x" for number in range(len(once))]


async def test_priorities_order_a_clients_own(bus: Bus) -> None:
    for number, priority in enumerate([0, 5, -3, 0, 2**70, -(2**70), 5, -3]):
        await put(bus, "A", [number], priority=priority)
    await put(bus, "B", range(8), priority=9)
    found = await take(bus, 16)
    assert [trace for trace in found if trace.startswith("A")] == [f"A-{number}" for number in (5, 2, 7, 0, 3, 1, 6, 4)]
    # Nobody comes before another client by it.
    assert [trace[0] for trace in found] == ["A", "B"] * 8


# --- limits -----------------------------------------------------------------------------------------------------------


async def test_a_full_queue_refuses_but_not_who_has_less_than_its_share(bus: Bus) -> None:
    await put(bus, "A", range(10), limit=10)
    with pytest.raises(QueueFull, match="10 submissions wait for 'demo', the limit is 10") as refused:
        await put(bus, "A", ["more"], limit=10)
    assert (refused.value.waiting, refused.value.limit, refused.value.retry_after_s) == (10, 10, 1.0)
    # The share of two is 5 each.
    await put(bus, "B", range(5), limit=10)
    with pytest.raises(QueueFull):
        await put(bus, "B", ["more"], limit=10)
    # Of three, a third of 10.
    await put(bus, "C", range(4), limit=10)
    with pytest.raises(QueueFull):
        await put(bus, "C", ["more"], limit=10)
    await put(bus, "D", range(1), limit=10)
    assert await bus.queue.waiting("demo") == 20
    with pytest.raises(QueueFull, match="20 submissions"):
        await put(bus, "E", range(1), limit=10)
    # Others may be more generous, and who was queued before is told so.
    await put(bus, "E", range(1), limit=11)
    await put(bus, "A", range(10), limit=10)
    await put(bus, "A", ["more"])
    assert await bus.queue.clients("demo") == {"A": 11, "B": 5, "C": 4, "D": 1, "E": 1}
    assert await bus.queue.waiting("demo") == 22


async def test_what_was_taken_does_not_wait(bus: Bus) -> None:
    await put(bus, "A", range(2), limit=2)
    await take(bus)
    await put(bus, "A", [2], limit=2)
    with pytest.raises(QueueFull):
        await put(bus, "A", [3], limit=2)
    assert await bus.queue.withdraw("demo", "A-2")
    await put(bus, "A", [3], limit=2)


async def test_what_was_refused_was_never_there(bus: Bus) -> None:
    await bus.submit(submission("first"), 1)
    with pytest.raises(QueueFull):
        await bus.submit(submission("second"), 1)
    assert not await bus.exists("second")
    await bus.submit(submission("first"), 1)
    assert await bus.exists("first")
    await take(bus)
    await bus.submit(submission("second"), 1)
    assert await bus.exists("second")
    assert await take(bus, 5) == ["second"]


async def test_when_there_is_room_is_told_by_how_fast_entries_were_taken(bus: Bus) -> None:
    state = bus.keys.queue("demo", "state")

    async def retry_after(limit: int) -> float:
        with pytest.raises(QueueFull) as refused:
            await put(bus, "A", ["more"], limit=limit)
        return refused.value.retry_after_s

    await put(bus, "A", range(40))
    assert await take(bus, 1) == ["A-0"]
    assert await retry_after(39) == 1.0
    # Half a second ago, by what the queue remembers.
    for taken in range(1, 30):
        since = float(await bus.command("HGET", state, "since"))
        await bus.command("HSET", state, "since", repr(since - 500_000))
        assert await take(bus, 1) == [f"A-{taken}"]
    assert 0.5 <= await retry_after(10) < 5
    assert await retry_after(9) > await retry_after(10)
    assert await retry_after(9) >= 1
    await bus.command("HSET", state, "span", repr(1e12))
    assert await retry_after(10) == 60
    await bus.command("HSET", state, "span", "1")
    assert await retry_after(10) == 0.1
    # While nothing waits nothing is measured.
    await take(bus, 10)
    assert await bus.command("HGET", state, "since") is None


# --- taking -----------------------------------------------------------------------------------------------------------


async def test_an_engine_that_waits_gets_what_comes(bus: Bus) -> None:
    async with anyio.create_task_group() as group:
        found: list[str] = []

        async def wait() -> None:
            found.extend(traces(await bus.queue.take("demo", "e", 5, 20_000)))

        group.start_soon(wait)
        await until(lambda: idle(bus, 1))
        await bus.submit(submission())
    assert found == ["t"]


async def idle(bus: Bus, count: int) -> bool:
    """Whether as many engines wait for the bell."""
    waiting = [client for client in await clients(bus) if client["cmd"] == "blpop" and "b" in client["flags"]]
    return len(waiting) == count


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


async def put_silently(bus: Bus, *some: str) -> None:
    """Entries whose tokens get lost."""
    names = [name + ":elsewhere" if name.endswith(":bell") else name for name in queue_names(bus.keys, "demo")]
    for trace in some:
        await bus.command(*_PUT([*names, bus.keys.submitted("demo", trace)], trace, "1.0", "A", 0, "", 0, 60, 1, b"d"))


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


# --- what gets lost on the way ----------------------------------------------------------------------------------------


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
    intake._lost = True
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


async def test_redis_may_forget_the_scripts(bus: Bus) -> None:
    await put(bus, "A", range(2))
    assert await take(bus) == ["A-0"]
    await bus.command("SCRIPT", "FLUSH")
    await put(bus, "A", [2])
    await bus.command("SCRIPT", "FLUSH")
    assert await take(bus, 5) == ["A-1", "A-2"]


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
                    far.queue.settled("demo", trace)
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


# --- withdrawing ------------------------------------------------------------------------------------------------------


async def test_what_waits_can_be_withdrawn(bus: Bus) -> None:
    await put(bus, "A", range(3))
    await put(bus, "B", range(1), lease="l")
    assert await take(bus) == ["A-0"]
    assert await bus.queue.withdraw("demo", "A-1")
    assert await bus.queue.withdraw("demo", "A-1")
    assert not await bus.queue.withdraw("demo", "A-0")
    assert not await bus.queue.withdraw("demo", "never")
    assert await bus.queue.withdraw("demo", "B-0")
    assert await bus.queue.clients("demo") == {"A": 1}
    assert await bus.queue.leases("demo") == []
    # It is not queued again.
    await put(bus, "A", [1])
    assert await take(bus, 5) == ["A-2"]
    for trace in ("A-0", "A-2"):
        await bus.queue.done("demo", trace)
    assert await left_behind(bus) == {"state", "engine:e", "holders"}


async def test_a_lease_takes_what_waits_under_it_along(bus: Bus) -> None:
    await put(bus, "A", range(3), lease="one")
    await put(bus, "B", range(3), lease="one")
    await put(bus, "A", range(3, 5), lease="two")
    await put(bus, "A", range(5, 6))
    assert await take(bus, 2) == ["A-0", "B-0"]
    assert set(await bus.queue.leases("demo")) == {"one", "two"}
    found = await bus.queue.withdraw_lease("demo", "one")
    assert traces(found) == ["A-1", "A-2", "B-1", "B-2"]
    assert found[0].fields == {b"v": schema_text().encode(), b"t": b"A-1", b"d": b"d"}
    assert found[0].queued_at > 0
    assert await bus.queue.withdraw_lease("demo", "") == []
    assert await bus.queue.clients("demo") == {"A": 3}
    assert await bus.queue.waiting("demo") == 3
    # Until they are settled they are not forgotten.
    await bus.queue.done("demo", "A-1")
    assert not await bus.queue.withdraw("demo", "A-2")
    assert set(await bus.queue.leases("demo")) == {"one", "two"}
    assert traces(await bus.queue.withdraw_lease("demo", "one")) == ["A-2", "B-1", "B-2"]
    assert await take(bus, 10) == ["A-3", "A-4", "A-5"]
    for trace in ("A-2", "B-1", "B-2"):
        await bus.queue.done("demo", trace)
    assert await bus.queue.withdraw_lease("demo", "one") == []
    assert await bus.queue.leases("demo") == []


@pytest.mark.parametrize("how", ["withdraw", "withdraw_lease"])
async def test_a_withdrawal_whose_answer_was_lost_is_told(bus: Bus, prefix: str, tmp_path: Path, how: str) -> None:
    await put(bus, "A", range(1), lease="l")
    async with proxy(bus.url, tmp_path) as way, Bus.open(way.url, prefix=prefix) as far:
        way.swallow = b"EVALSHA"
        if how == "withdraw":
            assert await far.queue.withdraw("demo", "A-0")
        else:
            assert traces(await far.queue.withdraw_lease("demo", "l")) == ["A-0"]
        assert way.swallowed.is_set()
    assert await take(bus) == []


async def test_large_entries_of_a_lease_are_not_returned(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "TAKE_BYTES", 100)
    for number, size in enumerate((60, 30, 20, 100_000, 10)):
        await bus.queue.put("demo", f"t{number}", b"x" * size, lease="l")
    found = await bus.queue.withdraw_lease("demo", "l")
    assert traces(found) == [f"t{number}" for number in range(5)]
    assert [one.trace for one in found if b"d" in one.fields] == ["t0", "t1", "t4"]
    for one in found:
        await bus.queue.done("demo", one.trace)
    assert await left_behind(bus) == {"state"}


async def test_a_submission_brings_its_client_priority_and_lease(bus: Bus) -> None:
    await bus.submit(submission("late", client="c", priority=1, lease="l"))
    await bus.submit(submission("early", client="c", priority=-1))
    assert await bus.queue.clients("demo") == {"c": 2}
    assert await bus.queue.leases("demo") == ["l"]
    assert await take(bus, 5) == ["early", "late"]
