"""What a bus reads of the records of traces."""

from __future__ import annotations

import pytest

from tracewire_bus.bus import Bus
from tracewire_bus.store.record_reads import TraceMissing
from tracewire_bus.wire.messages import Failure, Invoke, Submission


async def submit(bus: Bus, trace: str, deadline_s: float | None = None) -> None:
    await bus.submit(Submission(trace=trace, model="m", invokes=[Invoke(prompt="x")], deadline_s=deadline_s))


async def test_a_trace_that_waits_runs_and_ends(bus: Bus) -> None:
    at = bus.records
    assert await at.existing(["t", "other"]) == set()
    assert await at.holder("t") is None
    await submit(bus, "t", deadline_s=60)
    assert await at.existing(["t", "other"]) == {"t"}
    assert await at.holder("t") == ("m", "", 0)
    assert await at.submitter("t") == ""
    has_record, left_s = await at.left("t")
    assert has_record
    assert left_s is not None
    assert 30 < left_s <= 60
    await at.open("t", "e", 2)
    assert await at.holder("t") == ("m", "e", 2)
    assert not await at.ended("t")
    assert await at.end("t", "failed", Failure(type="Broken", message="it broke"))
    assert await at.ended("t")
    assert await at.failed_as("t") == "Broken"


async def test_attempts_that_are_overtaken(bus: Bus) -> None:
    at = bus.records
    assert await at.overtaken("e", []) == []
    for trace in ("mine", "later", "elsewhere", "over"):
        await submit(bus, trace)
        await at.open(trace, "e", 1)
    await at.open("later", "e", 2)
    await bus.command("HSET", bus.keys.record("elsewhere"), "e", "another")
    await at.end("over", "cancelled", Failure(type="Cancelled", message=""))
    asked = [("mine", 1), ("later", 1), ("elsewhere", 1), ("over", 1), ("unknown", 1)]
    assert await at.overtaken("e", asked) == [False, True, True, True, False]


async def test_an_id_that_no_key_can_have(bus: Bus) -> None:
    with pytest.raises(TraceMissing):
        await bus.records.holder("\ud800")
