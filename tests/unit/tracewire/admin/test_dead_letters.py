"""Dead letters: submissions that were given up can be looked at, submitted again, and dropped."""

from __future__ import annotations

import anyio
import anyio.to_thread
import numpy as np
import pytest

import tracewire
from tests.support.bus_engine import BusEngine, Stage, engine_info, tiny
from tests.support.dead_letters import dead, given_up, with_direction
from tests.support.scripted_engine import acts
from tracewire import Client, Steer, TraceRejected, UnknownDeadLetter, UnknownModel, ValueMissing
from tracewire_bus.bus import Bus
from tracewire_bus.store.blobs import THRESHOLD_BYTES
from tracewire_bus.store.queue_entries import Taken
from tracewire_bus.wire.codec import schema_text
from tracewire_bus.wire.packing import unpack
from tracewire_bus.wire.refs import ArrayRef

PATIENCE = 60


async def test_a_dead_letter_is_submitted_again_as_a_new_trace(
    client: Client, bus: Bus, redis_url: str, prefix: str
) -> None:
    id_, trace = await dead(client, bus, redis_url, prefix, acts)
    (letter,) = await client.dead_letters.list()
    assert (letter.id, letter.trace_id, letter.model, letter.reason) == (id_, trace, "tiny", "each engine was lost")
    assert letter.submission is not None
    assert letter.submission.invokes[0].prompt == "hello"
    assert letter.time > 1.7e9
    async with tracewire.connect(redis_url, prefix=prefix) as other:
        with pytest.raises(UnknownModel):
            await other.dead_letters.resubmit(id_)
    assert len(await client.dead_letters.list()) == 1
    async with BusEngine.running(redis_url, prefix, tiny) as engine:
        new = await client.dead_letters.resubmit(id_)
        assert new != trace
        with anyio.fail_after(PATIENCE):
            events = [event async for event in client.subscribe(new)]
        assert events[-1].status == "finished"  # type: ignore[union-attr]
        assert (await client.get_state(trace)).status == "failed"
        (taken,) = engine.taken
        assert (taken.detach, taken.lease, taken.deadline_s, taken.client) == (True, "", 1000, client._session.name)
        assert taken.block is not None
    assert await client.dead_letters.list() == []
    for call in (client.dead_letters.resubmit(id_), client.dead_letters.resubmit("1-1")):
        with pytest.raises(UnknownDeadLetter):
            await call


async def test_resubmitting_twice_runs_it_once(
    client: Client, bus: Bus, redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_, _ = await dead(client, bus, redis_url, prefix)
    async with BusEngine.running(redis_url, prefix, tiny) as engine:
        with monkeypatch.context() as patch:

            async def fail(self: object, id_: str) -> bool:
                raise tracewire.ConnectError("away")

            patch.setattr("tracewire_bus.store.dead_letters.DeadLetters.drop", fail)
            with pytest.raises(tracewire.ConnectError):
                await client.dead_letters.resubmit(id_)
        new = await client.dead_letters.resubmit(id_)
        with anyio.fail_after(PATIENCE):
            assert [event async for event in client.subscribe(new)]
        assert [one.trace for one in engine.taken] == [new]


async def test_large_variables_come_along(client: Client, bus: Bus, redis_url: str, prefix: str) -> None:
    direction = np.arange(THRESHOLD_BYTES, dtype="float32")
    id_, trace = await dead(client, bus, redis_url, prefix, with_direction(direction=direction))
    found = []

    async def script(stage: Stage) -> None:
        assert stage.submission.block is not None
        ref = unpack(stage.submission.block.variables)["direction"]
        assert isinstance(ref, ArrayRef)
        found.append(await stage.bus.blobs.load(stage.trace, ref))
        await tiny(stage)

    async with BusEngine.running(redis_url, prefix, script):
        blobs = await bus.command("DUMP", bus.keys.blobs(trace))
        await bus.command("DEL", bus.keys.blobs(trace))
        with pytest.raises(ValueMissing, match="direction"):
            await client.dead_letters.resubmit(id_)
        await bus.command("RESTORE", bus.keys.blobs(trace), 0, blobs)
        new = await client.dead_letters.resubmit(id_)
        with anyio.fail_after(PATIENCE):
            assert [event async for event in client.subscribe(new)]
    assert np.array_equal(found[0], direction)


async def test_arrays_of_interventions_come_along(client: Client, bus: Bus, redis_url: str, prefix: str) -> None:
    vector, described = np.arange(2048, dtype=np.float32), {"hidden_size": 2048, "schema": schema_text()}
    await bus.registry.register(engine_info(**described), 600)  # type: ignore[arg-type]
    trace = client.trace("tiny", "hello", interventions=[tracewire.Ablate("residual(0)"), Steer("residual(1)", vector)])
    await trace.start()
    id_ = await given_up(bus, trace.id)
    await trace.aclose()
    found = []

    async def script(stage: Stage) -> None:
        found.extend(stage.submission.interventions)
        await tiny(stage)

    (letter,) = await client.dead_letters.list()
    assert letter.submission is not None
    ref = letter.submission.interventions[1].vector  # type: ignore[union-attr]
    assert isinstance(ref, ArrayRef)
    async with BusEngine.running(redis_url, prefix, script, engine_info(engine="next", **described)):  # type: ignore[arg-type]
        key = bus.keys.vector(ref.blob)
        stored = await bus.command("DUMP", key)
        await bus.command("DEL", key)
        with pytest.raises(ValueMissing, match=r"interventions\[1\]\.vector"):
            await client.dead_letters.resubmit(id_)
        await bus.command("RESTORE", key, 0, stored)
        new = await client.dead_letters.resubmit(id_)
        with anyio.fail_after(PATIENCE):
            assert [event async for event in client.subscribe(new)]
    assert np.array_equal(found[1].vector, vector)


async def test_what_cannot_be_read_is_shown_and_not_submitted(client: Client, bus: Bus) -> None:
    await bus.queue.dead_letter("tiny", Taken("t\udcff", {b"v": b"1.0", b"t": b"t\xff", b"d": b"garbage"}, 0.0), "bad")
    await bus.queue.dead_letter("tiny", Taken("u", {b"v": b"99.0", b"t": b"u", b"d": b""}, 0.0), "new")
    one, two = await client.dead_letters.list()
    assert (one.trace_id, one.submission, two.submission) == ("t\udcff", None, None)
    assert "99.0" in (two.problem or "")
    for letter in (one, two):
        with pytest.raises(TraceRejected, match="cannot be read"):
            await client.dead_letters.resubmit(letter.id)
    assert [letter.id for letter in await client.dead_letters.list(after=one.id)] == [two.id]
    assert [letter.id for letter in await client.dead_letters.list(limit=1)] == [one.id]
    assert await client.dead_letters.drop(one.id)
    assert not await client.dead_letters.drop(one.id)
    assert not await client.dead_letters.drop("nonsense")
