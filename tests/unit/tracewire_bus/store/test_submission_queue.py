"""Two submissions of one id at the same time."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from tests.support.queue import left_behind, put, submission, take, traces
from tests.support.redis.proxy import proxy
from tracewire_bus import recovery
from tracewire_bus.bus import Bus, QueueFull
from tracewire_bus.wire.codec import decode_submission, request_schema_text
from tracewire_bus.wire.messages import Invoke, Submission


async def test_a_trace_that_two_submit_at_once_keeps_its_record(embedded: str, prefix: str, bus: Bus) -> None:
    """One is refused, since too many wait; before it takes its record back, there is room for the other."""
    one = Submission(trace="one", model="tiny", invokes=[Invoke(prompt="x")], deadline_s=1e6)
    async with Bus.open(embedded, prefix=prefix) as other:
        full = [msgspec.structs.replace(one, trace=f"full{number}") for number in range(2)]
        for submission in full:
            await bus.submit(submission)
        forget = bus.records.forget

        async def forgetting(trace: str, model: str) -> bool:
            for submission in full:
                assert await other.queue.withdraw("tiny", submission.trace)
            await other.submit(one, 1)
            return await forget(trace, model)

        bus.records.forget = forgetting  # type: ignore[method-assign]
        with pytest.raises(QueueFull):
            await bus.submit(one, 1)
        assert await other.queue.waiting("tiny") == 1
        assert await other.records.left("one") != (False, None)
        await other.cancel("one", by="somebody")
        assert await other.queue.waiting("tiny") == 0


@pytest.mark.parametrize("meanwhile", ["nothing", "taken", "run", "cancelled"])
async def test_a_trace_that_two_submit_at_once_is_queued_by_one(
    embedded: str, prefix: str, bus: Bus, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """Redis carries out the other's commands between the two commands of the first, whose record the other finds."""
    one = Submission(trace="one", model="tiny", invokes=[Invoke(prompt="x")], detach=True)
    commands = bus.queue._connections.commands
    async with Bus.open(embedded, prefix=prefix) as other:

        async def interleaved(*calls: Any, **options: Any) -> list[Any]:
            if len(calls) == 1:
                return await commands(*calls, **options)
            create, put = calls
            created = await commands(create)
            await other.submit(one)
            if meanwhile == "cancelled":
                await other.cancel("one", by="somebody")
            elif meanwhile != "nothing":
                assert [taken.trace for taken in await other.queue.take("tiny", "e", 5, 0)] == ["one"]
            if meanwhile == "run":
                await other.records.open("one", "e", 1)
                await other.queue.done("tiny", "one")
            return [*created, *await commands(put, **options)]

        with monkeypatch.context() as patch:
            patch.setattr(bus.queue._connections, "commands", interleaved)
            await bus.submit(one)
        assert await bus.exists("one")
        assert await bus.queue.waiting("tiny") == (1 if meanwhile == "nothing" else 0)
        assert await bus.records.ended("one") == (meanwhile == "cancelled")


async def test_a_submission_is_taken_by_one_engine_and_settled(bus: Bus) -> None:
    before = time.time()
    await bus.submit(submission())
    assert await bus.exists("t")
    assert not await bus.exists("other")
    assert await bus.queue.waiting("demo") == 1
    (taken,) = await bus.queue.take("demo", "e1", 5, 1000)
    assert taken.trace == "t"
    assert (taken.fields[b"v"], taken.fields[b"t"]) == (request_schema_text().encode(), b"t")
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


async def test_models_do_not_share_a_queue(bus: Bus) -> None:
    await bus.queue.put("one", "t", b"1")
    await bus.queue.put("two", "t", b"2")
    assert [found.fields[b"d"] for found in await bus.queue.take("two", "e", 5, 0)] == [b"2"]
    assert [found.fields[b"d"] for found in await bus.queue.take("one", "e", 5, 0)] == [b"1"]


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


async def test_redis_may_forget_the_scripts(bus: Bus) -> None:
    await put(bus, "A", range(2))
    assert await take(bus) == ["A-0"]
    await bus.command("SCRIPT", "FLUSH")
    await put(bus, "A", [2])
    await bus.command("SCRIPT", "FLUSH")
    assert await take(bus, 5) == ["A-1", "A-2"]


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


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is missing is taken for gone soon."""
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.1)


@pytest.mark.usefixtures("_soon")
async def test_what_waits_again_waits_where_it_did(bus: Bus, tmp_path: Path) -> None:
    """Ahead of what its client queued later, under its lease, and steerable; hundreds at once."""
    for number in range(250):
        await bus.queue.put(
            "demo", f"a{number}", b"d" * (100_000 if number == 3 else 1), client="a", lease="l", tries=2
        )
    taken = await bus.queue.take("demo", "one", 250, 0)
    assert len(taken) == 250
    await bus.queue.put("demo", "later", b"d", client="a")
    await bus.queue.put("demo", "other", b"d", client="b")
    assert await bus.queue.leases("demo") == []
    assert await bus.queue.put_back("demo", "one", "", lost=False) == 250
    assert await bus.queue.put_back("demo", "one", "", lost=False) == 0
    assert await bus.queue.waiting("demo") == 252
    assert await bus.queue.leases("demo") == ["l"]
    again = await bus.queue.take("demo", "two", 300, 0)
    assert [one.trace for one in again][:4] == ["a0", "other", "a1", "a2"]
    assert again[-1].trace == "later"
    assert await bus.queue.put_back("demo", "two", "dead", lost=True) == 250
    given_up = await bus.queue.given_up("demo")
    assert [one.trace for one in given_up] == ["later", "other"]
    assert [one.lost for one in given_up] == [1, 1]
    again = await bus.queue.take("demo", "three", 300, 0)
    assert {one.attempt for one in again} == {3}
    # Suspects, one at a time.
    assert [one.trace for one in again] == ["a0"]
    assert await bus.queue.take("demo", "three", 300, 0) == []
    assert [one.trace for one in await bus.queue.take("demo", "four", 300, 0)] == ["a1"]
    await bus.queue.done("demo", "a0", "three")
    assert await bus.queue.withdraw("demo", "a2")
    assert [one.trace for one in await bus.queue.take("demo", "three", 300, 0)] == ["a3"]
    await bus.queue.put_back("demo", "three", "dead", lost=True, trace="a3")
    large = next(one for one in await bus.queue.given_up("demo") if one.trace == "a3")
    assert b"d" not in large.fields
    await bus.queue.dead_letter("demo", large, "why")
    ((_, flat),) = await bus.command("XRANGE", bus.keys.dead(), "-", "+")
    assert dict(zip(flat[::2], flat[1::2], strict=True))[b"d"] == b"d" * 100_000


@pytest.mark.parametrize("attempt", [10**14, 2**50])
async def test_an_entry_with_an_absurd_attempt_leaves_the_queue(bus: Bus, attempt: int) -> None:
    """Everybody who can write to the queue can write the number."""
    await bus.queue.put("tiny", "t", b"data")
    entries = bus.keys.queue("tiny", "entries")
    fields = msgspec.msgpack.decode(await bus.command("HGET", entries, "t"))
    fields[7] = attempt
    await bus.command("HSET", entries, "t", msgspec.msgpack.encode(fields))
    (taken,) = await bus.queue.take("tiny", "one", 1, 100)
    assert taken.attempt > attempt
    assert await bus.queue.put_back("tiny", "one", "fenced", lost=False, trace="t", attempt=taken.attempt) == 1
    (taken,) = await bus.queue.take("tiny", "one", 1, 100)
    await bus.queue.dead_letter("tiny", taken, "no", "one")
    assert await bus.dead_letters.count() == 1
    assert await bus.command("HLEN", entries) == 0


async def test_what_is_put_back_by_an_attempt_is_no_later_one(bus: Bus) -> None:
    """A fenced attempt costs no try of the one that its engine took since."""
    await bus.queue.put("tiny", "a", b"d", tries=3)
    await bus.queue.take("tiny", "one", 1, 100)
    await bus.queue.put_back("tiny", "one", "slow", lost=True)
    (again,) = await bus.queue.take("tiny", "one", 1, 100)
    assert await bus.queue.put_back("tiny", "one", "fenced", lost=True, trace="a", attempt=again.attempt - 1) == 0
    assert await bus.queue.waiting("tiny") == 0
    assert await bus.queue.put_back("tiny", "one", "fenced", lost=True, trace="a", attempt=again.attempt) == 1
