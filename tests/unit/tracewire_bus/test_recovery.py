"""Traces whose engine has gone: put back, given up, or let be."""

from __future__ import annotations

import anyio
import pytest

from tests.support.scripted_engine import ScriptedEngine, acts, info, serving
from tests.support.stepping import Gate, free
from tests.support.suspects import suspects
from tracewire import Client
from tracewire_bus import recovery
from tracewire_bus.bus import Bus
from tracewire_bus.recovery import Recovery
from tracewire_bus.store import intake as queue_intake
from tracewire_bus.store.queue_entries import queue_names
from tracewire_bus.store.submission_queue import _PUT
from tracewire_bus.wire import messages
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.messages import Failure, Submission


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is missing is taken for gone soon."""
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.1)


@pytest.mark.usefixtures("_soon")
async def test_what_another_engine_has_begun_is_not_told_to_wait(bus: Bus) -> None:
    await bus.submit(Submission(trace="a", model="tiny", invokes=[]))
    await bus.records.open("a", "one", 1)
    # Of which nobody has heard yet.
    assert await bus.records.publish_waiting([("a", 1)], "lost") == 0
    async with bus.writer() as writer:
        await writer.append("a", 1, 0, encode(messages.Accepted(attempt=1, seq=0, engine="one", model="tiny")))
    assert await bus.records.publish_waiting([("a", 1), ("unknown", 1)], "lost") == 1
    assert await bus.records.publish_waiting([("a", 1)], "once more") == 0
    await bus.records.open("a", "two", 2)
    assert await bus.records.publish_waiting([("a", 1)], "lost") == 0
    await bus.records.end("a", "failed", Failure(type="x", message="y"))
    assert await bus.records.publish_waiting([("a", 2)], "lost") == 0


async def test_an_entry_whose_name_is_no_text_is_given_up_like_any_other(bus: Bus) -> None:
    """A client that is not ours put it into the queue, and each engine that took it was lost."""
    names = queue_names(bus.keys, "tiny")
    call = _PUT([*names, bus.keys.submitted("tiny", "?")], b"\xff\xfe", "1.0", b"c", 0, b"", 0, 60, 2, b"d")
    await bus.command(*call)
    for engine in ("one", "two"):
        assert len(await bus.queue.take("tiny", engine, 1, 0)) == 1
        await bus.queue.put_back("tiny", engine, "it was lost", lost=True)
    await bus.submit(Submission(trace="a", model="tiny", invokes=[]))
    await Recovery(bus, "tiny").finish_given_up()
    assert await bus.queue.given_up("tiny") == []
    assert [one.trace for one in await bus.queue.take("tiny", "three", 5, 0)] == ["a"]


@pytest.mark.usefixtures("_soon")
async def test_what_an_engine_that_lives_has_taken_stays_its(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside one that is gone, at a look that waits for nobody."""
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.0)
    lives = info(engine="lives")
    await bus.registry.register(lives, ttl_s=600)
    for engine in ("lives", "gone"):
        await bus.queue.put("tiny", f"of {engine}", b"x", tries=3)
        (taken,) = await bus.queue.take("tiny", engine, 1, 100)
        assert taken.trace == f"of {engine}"
    looking = bus.recovery("tiny")
    assert await looking.look() == ["gone"]
    assert await looking.look() == []
    assert await bus.queue.holders("tiny") == ["lives"]
    assert await bus.queue.waiting("tiny") == 1
    (again,) = await bus.queue.take("tiny", "another", 2, 100)
    assert again.trace == "of gone"


async def test_a_client_that_goes_while_its_trace_waits_for_a_second_attempt(bus: Bus) -> None:
    """Its record names the engine that was lost, which nobody asks any more."""
    submission = Submission(trace="a", model="tiny", invokes=[], lease="client.6", client="c")
    await bus.submit(submission)
    await bus.queue.take("tiny", "gone", 1, 100)
    await bus.records.open("a", "gone", 1)
    assert await bus.queue.put_back("tiny", "gone", "it was lost", lost=True) == 1
    await bus.cancel_orphans("tiny", "client.6", by="the bus")
    assert await bus.records.ended("a")
    assert await bus.command("HLEN", bus.keys.queue("tiny", "entries")) == 0


async def test_a_redis_that_kept_all_waiting_takes_nobodys_traces(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answered late, but it did answer: no connection broke."""
    monkeypatch.setattr(recovery, "CERTAIN_S", 0.001)
    monkeypatch.setattr(recovery, "STALL_S", 0.1)
    described = info()
    await bus.registry.register(described, 60)
    await bus.queue.put("tiny", "a", b"d")
    await bus.queue.take("tiny", described.engine, 1, 100)
    look = bus.recovery("tiny")
    assert await look.look() == []
    alive = bus.registry.alive

    async def stalled(*engines: str) -> set[str]:
        begun = anyio.current_time()
        while anyio.current_time() - begun < 0.2:
            await anyio.lowlevel.checkpoint()
        # Its entry ran out, and Redis came to this question before it came to the entry's renewal.
        return set()

    monkeypatch.setattr(bus.registry, "alive", stalled)
    assert await look.look() == []
    monkeypatch.setattr(bus.registry, "alive", alive)
    assert await look.look() == []
    assert await bus.queue.waiting("tiny") == 0
    # One that is gone is missed as ever.
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.0)
    await bus.registry.unregister(described.engine)
    assert await look.look() == [described.engine]


PATIENCE = 60


async def test_a_suspect_that_takes_its_time_does_not_keep_the_others_waiting_for_ever(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paused, hanging, or only long: its engine takes another one after a while, and not before."""
    await suspects(bus, "a", "b", "c")
    assert [one.trace for one in await bus.queue.take("tiny", "e", 10, 1)] == ["a"]
    assert await bus.queue.take("tiny", "e", 10, 1) == []
    monkeypatch.setattr(queue_intake, "SUSPECT_S", 0.0)
    assert [one.trace for one in await bus.queue.take("tiny", "e", 10, 1)] == ["b"]
    monkeypatch.setattr(queue_intake, "SUSPECT_S", 60.0)
    # It is `b` now that is waited for.
    await bus.queue.done("tiny", "a", "e")
    assert await bus.queue.take("tiny", "e", 10, 1) == []
    await bus.queue.done("tiny", "b", "e")
    assert [one.trace for one in await bus.queue.take("tiny", "e", 10, 1)] == ["c"]
    assert await bus.queue.put_back("tiny", "e", "it left", lost=False) == 1
    left = await bus.command("HKEYS", bus.keys.queue("tiny", "state"))
    assert not [name for name in left if name.startswith(b"suspect")]


async def test_the_adapters_of_one_engine_have_one_suspect_together(bus: Bus) -> None:
    await suspects(bus, "a", "b")
    assert [one.trace for one in await bus.queue.take("tiny", "e.1", 10, 1)] == ["a"]
    for adapter in ("e", "e.1", "e.2"):
        assert await bus.queue.take("tiny", adapter, 10, 1) == []
    # Another engine, whose name only begins alike.
    assert [one.trace for one in await bus.queue.take("tiny", "e.x", 10, 1)] == ["b"]
    await bus.queue.done("tiny", "a", "e.1")
    assert await bus.queue.put_back("tiny", "e.x", "it left", lost=False) == 1
    assert [one.trace for one in await bus.queue.take("tiny", "e.2", 10, 1)] == ["b"]


async def test_a_paused_suspect_and_its_engines_other_suspects(
    client: Client, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.1)
    monkeypatch.setattr(queue_intake, "SUSPECT_S", 0.3)
    async with serving(bus, dying := ScriptedEngine(Gate())) as first:
        await client.models.get("tiny", timeout=PATIENCE)
        async with (
            client.trace("tiny", "hang", acts, max_tokens=3, detach=True, max_attempts=2) as paused,
            client.trace("tiny", "two", acts, max_tokens=3, detach=True, max_attempts=2) as other,
        ):
            for trace in (paused, other):
                await trace.accepted()
            await paused.pause()
            dying.die()
            await first.ended.wait()
            async with serving(bus, free()):
                with anyio.fail_after(PATIENCE):
                    assert (await other.result()).status == "finished"
                    await paused.cancel()
