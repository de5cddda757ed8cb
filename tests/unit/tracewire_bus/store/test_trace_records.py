"""What Redis carried out although its reply was lost is sent again, done once, and told as what it came to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.lost_replies import losing
from tests.support.tasks import started
from tracewire_bus import recovery
from tracewire_bus.bus import Bus, Fenced
from tracewire_bus.store import trace_records as records
from tracewire_bus.store.trace_records import Overtaken, TraceEnded
from tracewire_bus.transport.loops import shielded
from tracewire_bus.wire.messages import Failure, Invoke, Submission

MODEL = "m"


@pytest.fixture(params=["waits", "runs"])
async def trace(request: pytest.FixtureRequest, bus: Bus) -> str:
    """A trace that waits, or that an engine runs."""
    await bus.submit(Submission(trace="t", model=MODEL, invokes=[Invoke(prompt="x")]))
    if request.param == "runs":
        await bus.command("SET", bus.keys.engine("e"), "lives")
        await bus.records.open("t", "e")
    return "t"


async def test_a_trace_is_paused_and_resumed_once(bus: Bus, tmp_path: Path, trace: str) -> None:
    for resume in (False, True):
        async with losing(bus, tmp_path, records._PAUSE) as (far, _):
            assert await far.records.pause(trace, by="me", resume=resume)
            assert not await far.records.pause(trace, by="me", resume=resume)
    assert await bus.command("HGET", bus.keys.record(trace), "zn") == b"2"
    orders = await bus.command("XLEN", bus.keys.control(bus.keys.tag(trace), "e"))
    assert orders in (0, 2)


async def test_a_pause_that_somebody_has_ended_since_is_not_made_again(bus: Bus, tmp_path: Path, trace: str) -> None:
    async with losing(bus, tmp_path, records._PAUSE) as (far, way):
        way.on_swallow = way.stop
        pausing = started(far.records.pause(trace, by="me"))
        await way.swallowed.wait()
        assert await bus.records.pause(trace, by="another", resume=True)
        way.go_on()
        assert await shielded(pausing)
    assert await bus.command("HGET", bus.keys.record(trace), "z") is None


async def test_a_pause_with_an_end_is_moved_by_its_author_and_replaced_by_one_without(bus: Bus, trace: str) -> None:
    at = bus.records
    assert await at.pause(trace, by="guard", within_s=30, then="cancel")
    assert await at.pause(trace, by="guard", within_s=60.5, then="resume")
    assert not await at.pause(trace, by="another", within_s=5, then="resume")
    opened = await at.open(trace, "e")
    assert opened.pause_left_s is not None
    assert 50 < opened.pause_left_s <= 60.5
    assert (opened.paused, opened.pauses, opened.pause_within_s, opened.pause_then) == ("guard", 2, 60.5, "resume")
    assert await at.pause(trace, by="person")
    assert not await at.pause(trace, by="guard", within_s=5, then="cancel")
    opened = await at.open(trace, "e")
    assert (opened.paused, opened.pause_left_s, opened.pause_within_s, opened.pause_then) == ("person", None, None, "")


async def test_a_pause_of_another_author_is_left_alone_where_the_caller_says_so(bus: Bus, trace: str) -> None:
    assert await bus.records.pause(trace, by="person")
    assert not await bus.records.pause(trace, by="guard", resume=True, of="guard")
    assert await bus.records.pause(trace, by="guard", resume=True, of="person")


async def test_an_engine_ends_the_pause_that_it_means(bus: Bus, trace: str) -> None:
    assert await bus.records.pause(trace, by="guard", within_s=30, then="resume")
    assert await bus.records.pause(trace, by="guard", within_s=60, then="resume")
    ended = [await bus.command(*records.unpause_command(bus.keys, trace, number)) for number in (1, 2, 3)]
    assert ended == [0, 3, 0]
    # The reply may be lost.
    assert await bus.command(*records.unpause_command(bus.keys, trace, 2)) == 3
    assert await bus.records.pause(trace, by="person")
    assert await bus.command(*records.unpause_command(bus.keys, trace, 2)) == 0


async def test_an_engine_that_is_to_cancel_a_paused_trace_closes_it_to_orders(bus: Bus, trace: str) -> None:
    """If the engine dies then, the next one finds the pause as it was."""
    await bus.records.open(trace, "e")
    assert await bus.records.pause(trace, by="guard", within_s=30, then="cancel")
    for _ in range(2):
        assert await bus.command(*records.unpause_command(bus.keys, trace, 1, cancels=True)) == 1
    with pytest.raises(TraceEnded):
        await bus.records.pause(trace, by="person", resume=True)
    opened = await bus.records.open(trace, "f", 2)
    assert (opened.paused, opened.pauses, opened.pause_then) == ("guard", 1, "cancel")
    assert await bus.records.pause(trace, by="person", resume=True)


async def test_who_has_cancelled_a_trace_is_told_so(bus: Bus, tmp_path: Path, trace: str) -> None:
    async with losing(bus, tmp_path, records._CANCEL) as (far, _):
        await far.cancel(trace, by="me")
    if not await bus.records.ended(trace):
        # Its engine ends it.
        assert await bus.command("XLEN", bus.keys.control(bus.keys.tag(trace), "e")) == 1
        assert await bus.records.end(trace, "cancelled", records.cancellation("me", ""))
    with pytest.raises(TraceEnded):
        await bus.cancel(trace, by="another")


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is missing is taken for gone soon."""
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.1)


@pytest.mark.usefixtures("_soon")
async def test_an_attempt_is_one_engines(bus: Bus) -> None:
    trace = "t"
    await bus.records.open(trace, "one", 1)
    # An answer was lost.
    assert (await bus.records.open(trace, "one", 1)).attempt == 1
    with pytest.raises(Overtaken):
        await bus.records.open(trace, "two", 1)
    assert (await bus.records.open(trace, "two", 3)).attempt == 3
    with pytest.raises(Overtaken):
        await bus.records.open(trace, "one", 1)
    assert await bus.records.close(trace, 1) == []
    assert await bus.records.end(trace, "failed", Failure(type="x", message="y"))
    assert not await bus.records.end(trace, "failed", Failure(type="x", message="y"))
    with pytest.raises(TraceEnded):
        await bus.records.open(trace, "two", 4)


@pytest.mark.usefixtures("_soon")
async def test_a_refused_end_leaves_everything_as_it_is(bus: Bus) -> None:
    """A later attempt has begun: the end of the one before changes neither its keys nor its entry."""
    keys = bus.keys
    await bus.queue.put("demo", "t", b"d", tries=3)
    (first,) = await bus.queue.take("demo", "one", 1, 0)
    assert await bus.queue.put_back("demo", "one", "gone", lost=True) == 1
    (second,) = await bus.queue.take("demo", "two", 1, 0)
    assert [(one.attempt, one.lost, one.why) for one in (first, second)] == [(1, 0, ""), (2, 1, "gone")]
    await bus.command("ZADD", keys.changes("t"), 1, "change")
    await bus.records.open("t", "two", 2)
    async with bus.writer() as writer:
        for data in (b"small", b"x" * 100_000):
            await bus.command("DEL", keys.events("t"))
            await writer.append("t", 2, 0, b"restarted")
            assert await bus.command("HSET", keys.record("t"), "a", 2) == 0
            with pytest.raises(Fenced):
                await writer.append("t", 1, 9, data, True)
            with pytest.raises(Fenced):
                await writer.append("t", 1, 9, data, live_version=1)
            before = await bus.command("TTL", keys.events("t"))
            assert before > 24 * 3600
            with pytest.raises(Fenced):
                await writer.append("t", 1, 5, data, live_version=1)
            assert await bus.command("ZCARD", keys.changes("t")) == 1
        assert await bus.command("HLEN", keys.queue("demo", "taken")) == 1
        await writer.append("t", 2, 7, b"x" * 100_000, True, settles=("demo", "t", "one"))
        assert await bus.command("HLEN", keys.queue("demo", "taken")) == 1
        assert 0 < await bus.command("TTL", keys.events("t")) < 24 * 3600
        assert await bus.command("EXISTS", keys.changes("t")) == 0
        await bus.queue.done("demo", "t", "two")
    assert await bus.command("HLEN", keys.queue("demo", "taken")) == 0


@pytest.mark.usefixtures("_soon")
async def test_what_follows_a_refused_event_is_refused_too(bus: Bus) -> None:
    """A later attempt has been begun, and has written nothing yet: a refused `Steered` leaves no hole behind it."""
    await bus.records.open("t", "one", 1)
    async with bus.writer() as writer:
        await writer.append("t", 1, 0, b"accepted")
        await bus.records.open("t", "two", 2)
        # What goes with no other key is not refused for the record alone.
        await writer.append("t", 1, 1, b"output")
        both = writer.submit("t", 1, 2, b"steered", live_version=1), writer.submit("t", 1, 3, b"output")
        for outcome in both:
            with pytest.raises(Fenced):
                await outcome
        await writer.append("t", 2, 0, b"restarted")
    entries = await bus.command("XRANGE", bus.keys.events("t"), "-", "+")
    assert [id_ for id_, _ in entries] == [b"1-0", b"1-1", b"2-0"]


@pytest.mark.usefixtures("_soon")
async def test_the_end_of_an_old_attempt_settles_nothing_of_its_engines_new_one(bus: Bus) -> None:
    """The engine has the trace again, after another had it: its first attempt's end is refused, its entry stays."""
    keys = bus.keys
    await bus.queue.put("demo", "t", b"d", tries=3)
    for engine, attempt in (("one", 1), ("two", 2)):
        (taken,) = await bus.queue.take("demo", engine, 1, 0)
        assert taken.attempt == attempt
        await bus.records.open("t", engine, attempt)
        assert await bus.queue.put_back("demo", engine, "", lost=False) == 1
    bus.queue.note_settled("demo", "t")
    (again,) = await bus.queue.take("demo", "one", 1, 0)
    assert again.attempt == 3
    async with bus.writer() as writer:
        with pytest.raises(Fenced):
            await writer.append("t", 1, 5, b"final", True, settles=("demo", "t", "one", 1))
        assert await bus.command("HKEYS", keys.queue("demo", "entries")) == [b"t"]
        assert await bus.command("HGET", keys.queue("demo", "taken"), "t") == b"one"
        # What its adapter does then.
        assert await bus.queue.put_back("demo", "one", "", lost=True, trace="t", attempt=1) == 0
        assert await bus.command("HGET", keys.queue("demo", "taken"), "t") == b"one"
        await bus.records.open("t", "one", 3)
        await writer.append("t", 3, 0, b"final", True, settles=("demo", "t", "one", 3))
    assert await bus.command("HLEN", keys.queue("demo", "entries")) == 0
