"""A signed submission comes again as a later attempt, or to the engine that still has it, and not otherwise."""

from __future__ import annotations

import pytest

from tracewire_bus.bus import Bus
from tracewire_bus.store.trace_records import NonceMark, Overtaken, Replayed
from tracewire_bus.wire.signing import Envelope
from tracewire_engine.adapter.nonces import Nonces


async def test_a_submission_is_taken_once_for_each_attempt(bus: Bus) -> None:
    nonces, one, other = Nonces(), Envelope("alice", 1000, b"n" * 16), Envelope("alice", 1000, b"m" * 16)

    async def take(mark: NonceMark, attempt: int, trace: str = "t") -> bool:
        # Somebody has removed the record, which knows the last attempt.
        await bus.command("DEL", bus.keys.record(trace))
        try:
            await bus.records.open(trace, "e", attempt, mark=mark)
        except Replayed:
            return False
        return True

    assert await take(nonces.mark(one), 1)
    # Redis did not answer while it was begun.
    assert await take(nonces.mark(one), 1)
    nonces.end(one)
    assert not await take(nonces.mark(one), 1)
    # Its engine was lost, and another one takes it.
    assert await take(Nonces().mark(one), 2)
    assert not await take(Nonces().mark(one), 2)
    assert not await take(Nonces().mark(one), 1)
    assert await take(nonces.mark(other), 1)
    assert await take(nonces.mark(one), 1, "u")


@pytest.mark.parametrize("mark", [b"", b"1", b"1:", b"x:ab", b"1:ab:"])
async def test_a_malformed_mark_lets_no_submission_run(bus: Bus, mark: bytes) -> None:
    made = Nonces().mark(Envelope("alice", 1000, b"n" * 16))
    await bus.command("SET", bus.keys.nonce("t", made.key, made.nonce), mark)
    with pytest.raises(Replayed):
        await bus.records.open("t", "e", 5, mark=made)


async def test_an_attempt_that_has_not_ended_is_no_copy(bus: Bus) -> None:
    """The queue's server has forgotten who has the entry, and hands it out as the same attempt again."""
    one = Envelope("alice", 1000, b"n" * 16)
    nonces, others = Nonces(), Nonces()
    await bus.records.open("t", "e", 1, mark=nonces.mark(one))
    with pytest.raises(Overtaken):
        await bus.records.open("t", "other", 1, mark=others.mark(one))
    # The engine has put the entry back, and so forgotten its word.
    nonces.end(one)
    with pytest.raises(Overtaken):
        await bus.records.open("t", "e", 1, mark=nonces.mark(one))
    assert (await bus.records.open("t", "other", 2, mark=others.mark(one))).attempt == 2
    with pytest.raises(Overtaken):
        await bus.records.open("t", "e", 1, mark=nonces.mark(one))
