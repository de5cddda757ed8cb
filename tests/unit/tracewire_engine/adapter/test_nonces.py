"""A signed submission comes again as long as its trace has not ended, and never after."""

from __future__ import annotations

from tracewire_bus.bus import Bus
from tracewire_bus.wire.signing import Envelope
from tracewire_engine.adapter.nonces import Nonces


async def test_a_submission_runs_until_its_trace_has_ended(bus: Bus) -> None:
    nonces, one, other = Nonces(bus), Envelope("alice", 1000, b"n" * 16), Envelope("alice", 1000, b"m" * 16)
    assert await nonces.take("t", one)
    # Its engine was lost, and another one takes it.
    assert await Nonces(bus).take("t", one)
    await nonces.end("t", one)
    assert not await nonces.take("t", one)
    assert await nonces.take("t", other)
    assert await nonces.take("u", one)
