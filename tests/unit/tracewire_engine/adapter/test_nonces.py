"""A signed submission comes again as a later attempt, or to the engine that still has it, and not otherwise."""

from __future__ import annotations

from tracewire_bus.bus import Bus
from tracewire_bus.wire.signing import Envelope
from tracewire_engine.adapter.nonces import Nonces


async def test_a_submission_is_taken_once_for_each_attempt(bus: Bus) -> None:
    nonces, one, other = Nonces(bus), Envelope("alice", 1000, b"n" * 16), Envelope("alice", 1000, b"m" * 16)
    assert await nonces.take("t", one, 1)
    # Redis did not answer while it was begun.
    assert await nonces.take("t", one, 1)
    nonces.end(one)
    assert not await nonces.take("t", one, 1)
    # Its engine was lost, and another one takes it.
    assert await Nonces(bus).take("t", one, 2)
    assert not await Nonces(bus).take("t", one, 2)
    assert not await Nonces(bus).take("t", one, 1)
    assert await nonces.take("t", other, 1)
    assert await nonces.take("u", one, 1)
