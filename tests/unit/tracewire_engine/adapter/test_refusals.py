"""A queue entry that cannot run ends its own trace, and no trace beside it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio
import msgspec
import pytest

import tracewire
from tests.support.identities import ENGINE, PATIENCE, Identities, running
from tests.support.scripted_engine import ScriptedEngine, info, serving
from tests.support.until import until
from tracewire_bus.bus import Bus, Taken
from tracewire_bus.domain.limits import Limits
from tracewire_bus.store.proofs import Proofs
from tracewire_bus.store.submission_queue import claim_command
from tracewire_bus.wire.codec import encode, request_schema_text
from tracewire_bus.wire.messages import Failure, Invoke, Submission
from tracewire_engine.adapter import refusals
from tracewire_engine.adapter.service import Adapter


@pytest.fixture
def keys(tmp_path: Path) -> Identities:
    return Identities(tmp_path)


def forged(keys: Identities, bus: Bus, trace: str, by: str, content: bytes) -> Taken:
    """An entry that an engine takes for a late attempt, of which its author has written the number."""
    signer = keys.signer(by) if by else None
    data = Proofs(signer, prefix=bus.keys.prefix).content("submit", "tiny", trace, content)
    fields = {b"v": request_schema_text().encode(), b"t": trace.encode(), b"d": data}
    return Taken(trace, fields, keys.ring.path.stat().st_mtime, attempt=51)


async def serve(adapter: Adapter, bus: Bus, entry: Taken) -> None:
    """Have an engine serve an entry that it has taken."""
    await bus.command("HSET", bus.keys.queue("tiny", "taken"), entry.trace, adapter._info.engine)
    await adapter._intake._serve(entry, anyio.CancelScope())


async def goes_on(keys: Identities, bus: Bus, trace: str) -> None:
    """The trace runs as it did, and its owner steers it. What stood in the queue is a dead letter."""
    assert [one.trace for one in await bus.dead_letters.list()] == [trace]
    async with keys.client(bus, "alice") as alice:
        await alice.steer(trace, alpha=2.0)
        async for event in alice.subscribe(trace, since="start"):
            assert event.type not in ("final", "restarted")
            if event.type == "steered":
                break
        await alice.cancel(trace)


@pytest.mark.parametrize(
    ("by", "content"),
    [("", b"garbage"), ("bob", b"garbage"), ("", b"x" * (33 << 20))],
    ids=["nobody's garbage", "garbage of another tenant", "too much"],
)
async def test_what_cannot_run_ends_no_trace_that_runs(by: str, content: bytes, keys: Identities, bus: Bus) -> None:
    """Also if it comes as a later attempt."""
    async with keys.served(bus) as adapter, keys.client(bus, "alice") as alice:
        trace = await running(alice)
        await serve(adapter, bus, forged(keys, bus, trace.id, by, content))
        await goes_on(keys, bus, trace.id)


async def test_another_key_s_submission_does_not_take_a_trace(
    keys: Identities, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could run, on another engine, as a later attempt."""
    monkeypatch.setattr(refusals, "_HANDOVER_S", 0.1)
    other = ScriptedEngine(partial(anyio.sleep, 0.005))
    async with (
        keys.served(bus),
        serving(bus, other, info("tiny", engine="other-engine"), identity=keys.strict) as second,
        keys.client(bus, "alice") as alice,
    ):
        await until(lambda: bus.registry.alive("other-engine"))
        trace = await running(alice)
        holder = await bus.records.holder(trace.id)
        assert holder is not None
        adapter = second if holder[1] == ENGINE else keys.adapter
        mine = Submission(trace=trace.id, model="tiny", invokes=[Invoke(prompt="valid")], detach=True)
        await serve(adapter, bus, forged(keys, bus, trace.id, "bob", encode(mine)))
        await until(lambda: not adapter._intake.refusals._undecided)
        await goes_on(keys, bus, trace.id)


async def test_an_engine_that_was_slow_leaves_the_entry_to_the_engine_that_has_it(keys: Identities, bus: Bus) -> None:
    """A refusal that comes late is no answer to an attempt of another engine, which must not lose the entry."""
    held = bus.keys.queue("tiny", "taken")
    async with keys.served(bus) as adapter:
        await bus.command("HSET", bus.keys.record("t"), "m", "tiny", "a", 2, "e", "another-engine")
        await bus.command("HSET", held, "t", "another-engine")
        entry = Taken("t", {b"t": b"t", b"v": b"2.0", b"d": b"x"}, 0.0, attempt=1)
        await adapter._intake.refusals.refuse(entry, "t", Failure(type="SignatureRefused", message="replayed"), None)
        assert await bus.dead_letters.count() == 0
        assert await bus.command("HGET", held, "t") == b"another-engine"


async def test_a_trace_that_an_engine_has_put_back_is_answered_although_that_engine_lives(
    keys: Identities, bus: Bus
) -> None:
    """Its key was revoked since."""
    async with keys.served(bus) as adapter:
        await bus.command("HSET", bus.keys.record("t"), "m", "tiny", "a", 1, "e", "another-engine", "k", "alice")
        await bus.command("SET", bus.keys.engine("another-engine"), "lives")
        await bus.records.leave("t", "a-third-engine", 1)
        await bus.records.leave("t", "another-engine", 2)
        assert not await bus.records.is_left("t")
        await bus.records.leave("t", "another-engine", 1)
        await serve(adapter, bus, forged(keys, bus, "t", "", b"its signature counts no more"))
        async with keys.client(bus, "alice") as alice:
            (final,) = [event async for event in alice.subscribe("t")]
        assert isinstance(final, tracewire.Final)
        assert final.status == "rejected"
        assert await bus.dead_letters.count() == 0


async def test_a_trace_whose_engine_is_about_to_leave_is_answered_when_it_has_left(keys: Identities, bus: Bus) -> None:
    """An engine puts its traces back before it leaves the registry."""
    async with keys.served(bus) as adapter, anyio.create_task_group() as group:
        await bus.command("HSET", bus.keys.record("t"), "m", "tiny", "a", 1, "e", "another-engine", "k", "alice")
        await bus.command("SET", bus.keys.engine("another-engine"), "lives")
        group.start_soon(serve, adapter, bus, forged(keys, bus, "t", "", b"its signature counts no more"))
        await anyio.wait_all_tasks_blocked()
        assert not await bus.records.ended("t")
        await bus.command("DEL", bus.keys.engine("another-engine"))
        async with keys.client(bus, "alice") as alice:
            (final,) = [event async for event in alice.subscribe("t")]
        assert isinstance(final, tracewire.Final)
        assert final.status == "rejected"
        assert await bus.dead_letters.count() == 0


async def test_an_entry_with_more_tries_than_an_engine_allows_is_refused(keys: Identities, bus: Bus) -> None:
    """Its author has written them there, whatever the submission says."""
    async with keys.served(bus, limits=Limits(attempts=2)) as adapter:
        mine = encode(Submission(trace="t", model="tiny", invokes=[Invoke(prompt="valid")], detach=True))
        entry = msgspec.structs.replace(forged(keys, bus, "t", "alice", mine), attempt=1, tries=3)
        await serve(adapter, bus, entry)
        async with keys.client(bus, "alice") as alice:
            (final,) = [event async for event in alice.subscribe("t")]
    assert isinstance(final, tracewire.Final)
    assert (final.status, final.error and final.error.field) == ("rejected", "max_attempts")


async def forgotten(bus: Bus, trace: str, engine: str) -> None:
    """Have the queue's server take over from another one, and know no engine that has the trace's entry."""
    await bus.queue.put_back("tiny", engine, "", lost=False, trace=trace)
    entries = bus.keys.queue("tiny", "entries")
    entry = msgspec.msgpack.decode(await bus.command("HGET", entries, trace))
    await bus.command("HSET", entries, trace, msgspec.msgpack.encode([*entry[:7], 0, *entry[8:10], ""]))


async def test_a_signed_trace_whose_engine_the_queue_has_forgotten_is_no_dead_letter(
    keys: Identities, bus: Bus
) -> None:
    """On a cluster, the queue's node fails over and not that of the trace, which another engine then runs."""
    first, second = (ScriptedEngine(partial(anyio.sleep, 0.005)) for _ in range(2))
    async with (
        serving(bus, first, info("tiny", engine="first", capacity=1), identity=keys.strict),
        keys.client(bus, "alice") as alice,
    ):
        await until(lambda: bus.registry.alive("first"))
        trace = await running(alice)
        await forgotten(bus, trace.id, "first")
        async with serving(bus, second, info("tiny", engine="second"), identity=keys.strict):
            with anyio.fail_after(PATIENCE):
                async for event in alice.subscribe(trace.id):
                    if event.type == "restarted":
                        break
            assert await bus.dead_letters.count() == 0
            await alice.cancel(trace.id)
            async for event in alice.subscribe(trace.id, since="now"):
                assert event.type in ("output", "final")


@pytest.mark.parametrize("meanwhile", ["runs", "left", "ended"])
async def test_a_trace_that_cannot_run_here_and_runs_elsewhere_runs_again_if_that_engine_is_lost(
    keys: Identities, bus: Bus, meanwhile: str
) -> None:
    """The queue has forgotten that the other engine has the entry."""
    entries, taken = bus.keys.queue("tiny", "entries"), bus.keys.queue("tiny", "taken")
    mine = Submission(trace="t", model="tiny", invokes=[Invoke(prompt="valid")], detach=True)
    one, limits = ScriptedEngine(partial(anyio.sleep, 0.005)), Limits(attempts=2)
    # It takes no entry by itself.
    described = info("tiny", engine=ENGINE, capacity=0)
    async with serving(bus, one, described, identity=keys.strict, limits=limits) as adapter:
        await bus.command("HSET", bus.keys.record("t"), "m", "tiny", "a", 2, "e", "other", "s", "running", "k", "alice")
        entry = msgspec.structs.replace(forged(keys, bus, "t", "alice", encode(mine)), attempt=1, tries=3)
        await bus.command(*claim_command(bus.keys, "tiny", ENGINE, entry, client="", priority=0, lease=""))
        if meanwhile == "left":
            await bus.records.leave("t", "other", 2)
        if meanwhile == "ended":
            await bus.records.end("t", "failed", Failure(type="E", message="it failed"))
        await adapter._intake._serve(entry, anyio.CancelScope())
        assert await bus.dead_letters.count() == 0
        if meanwhile == "ended":
            assert await bus.command("HLEN", entries) == 0
            return
        if meanwhile == "runs":
            assert await bus.command("HGET", taken, "t") == b"other"
            assert "other" in await bus.queue.holders("tiny")
            await bus.queue.put_back("tiny", "other", "it was lost", lost=True)
        (again,) = await bus.queue.take("tiny", "somebody", 1, 1000)
        assert (again.attempt, again.lost) == (3, meanwhile == "runs")
        await bus.queue.done("tiny", "t")


async def unverified(bus: Bus, *traces: str) -> None:
    """Entries that nobody has signed come as second attempts. An engine that lives runs their traces."""
    await bus.command("SET", bus.keys.engine("other"), "lives")
    for trace in traces:
        await bus.command("HSET", bus.keys.record(trace), "m", "tiny", "a", 1, "e", "other", "s", "running")
        await bus.queue.put("tiny", trace, b"garbage", tries=3)
    await bus.queue.take("tiny", "somebody", len(traces), 1000)
    assert await bus.queue.put_back("tiny", "somebody", "", lost=False) == len(traces)


async def test_an_entry_that_waits_takes_no_place_of_a_trace(
    keys: Identities, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has one place, and the other engine, which may be leaving, takes its time."""
    monkeypatch.setattr(refusals, "_HANDOVER_S", 1e6)
    await unverified(bus, "t")
    one, described = ScriptedEngine(partial(anyio.sleep, 0.005)), info("tiny", engine=ENGINE, capacity=1)

    async def taken() -> bool:
        return bool(await bus.command("HGET", bus.keys.queue("tiny", "taken"), "t") == ENGINE.encode())

    with anyio.fail_after(PATIENCE):
        async with (
            serving(bus, one, described, identity=keys.strict) as adapter,
            keys.client(bus, "alice") as alice,
        ):
            await until(taken)
            await alice.cancel((await running(alice)).id)
            await until(lambda: not adapter._intake.scopes)
            assert not await bus.records.ended("t")
            assert await taken()
            await bus.command("DEL", bus.keys.engine("other"))
            (final,) = [event async for event in alice.subscribe("t")]
            assert isinstance(final, tracewire.Final)
            assert final.status == "rejected"
            await until(lambda: not adapter._intake.refusals._undecided)
            assert await bus.dead_letters.count() == 0


async def test_of_many_entries_that_would_wait_the_last_are_dead_letters(
    keys: Identities, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "_HANDOVER_S", 1e6)
    monkeypatch.setattr(refusals, "_MOST_UNDECIDED", 2)
    await unverified(bus, *"abc")
    async with keys.served(bus) as adapter:
        await until(bus.dead_letters.count)
        waiting = set(adapter._intake.refusals._undecided)
        (letter,) = await bus.dead_letters.list()
        assert {*waiting, letter.trace} == {"a", "b", "c"}
        assert len(waiting) == 2
        await until(lambda: not adapter._intake.scopes)
        # Its time is over.
        undecided = adapter._intake.refusals._undecided
        undecided.update({name: one._replace(until=0.0) for name, one in undecided.items()})
        await until(lambda: not undecided)
    assert await bus.dead_letters.count() == 3
