"""No value of a live parameter holds that nobody who may steer the trace has signed, whatever the record says."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.support.identities import Identities, signing_bus
from tracewire_bus.bus import Bus
from tracewire_bus.domain.identity import Keyring, SignatureRefused
from tracewire_bus.store.trace_records import Opened
from tracewire_bus.wire.live_values import live_values, pack_live
from tracewire_bus.wire.messages import Invoke, Submission
from tracewire_bus.wire.packing import pack, unpack
from tracewire_engine.adapter.gate import Gate, Identity
from tracewire_engine.adapter.live_proofs import LiveProofs

DECLARED = {"alpha": 1.0, "beta": 2.0}


@pytest.fixture
def keys(tmp_path: Path) -> Identities:
    return Identities(tmp_path)


def packed(**values: float) -> bytes:
    return pack_live({name: one.packed for name, one in live_values(values).items()})


class World:
    """A record on Redis, and what a strict engine makes of it."""

    def __init__(self, bus: Bus, keys: Identities) -> None:
        self.bus, self.keys = bus, keys
        self.gate = Gate(Identity(Keyring(keys.ring.path), False, "so"), bus.keys.prefix, "m", "e")
        self.owner = keys.ring.get("alice")

    async def create(self) -> None:
        submission = Submission(trace="t", model="m", invokes=[Invoke(prompt="x")], detach=True)
        await self.bus.command(*self.bus.records.create_command(submission, live_values(DECLARED)))

    def proofs(self) -> LiveProofs:
        return LiveProofs(self.gate, "t", self.owner, packed(**DECLARED))

    async def steer(self, id: str, **values: float) -> None:
        signer = self.keys.signer(id) if id else None
        async with signing_bus(self.bus, signer) as bus:
            await bus.records.steer("t", live_values(values), by="c")

    async def opened(self, attempt: int = 1) -> Opened:
        return await self.bus.records.open("t", "e", attempt)


@pytest.fixture
async def world(bus: Bus, keys: Identities) -> World:
    world = World(bus, keys)
    await world.create()
    return world


async def test_an_engine_begins_with_what_was_signed(world: World) -> None:
    await world.steer("alice", alpha=3.0)
    await world.steer("", alpha=666.0)
    await world.steer("bob", beta=666.0)
    await world.steer("ann", beta=4.0)
    opened = await world.opened()
    assert unpack(opened.live) == {"alpha": 666.0, "beta": 4.0}
    assert len(opened.changes) == 4
    found = world.proofs().begin(opened)
    # The record has lost the first value to the second, which nobody has signed. The change of the first still waits.
    assert unpack(found.live) == {"alpha": 3.0, "beta": 4.0}
    unreported = msgspec.structs.replace(opened, changes=[])
    # What was declared holds where the record proves nothing else.
    assert unpack(world.proofs().begin(unreported).live) == {"alpha": 1.0, "beta": 4.0}
    assert [msgspec.msgpack.decode(change)[0] for change in found.changes] == [1, 4]


async def test_a_refused_change_is_undone_and_a_later_one_stays(world: World) -> None:
    proofs = world.proofs()
    await world.steer("alice", alpha=3.0)
    await world.steer("", alpha=666.0, beta=666.0)
    first, forged = (await world.opened()).changes
    key = proofs.admit(first)
    assert key is not None
    with pytest.raises(SignatureRefused, match="only what a key"):
        proofs.admit(forged)
    await world.steer("ann", beta=5.0)
    undoing = proofs.undo(forged)
    assert undoing is not None
    await world.bus.records.restore("t", *undoing)
    opened = await world.opened(2)
    assert unpack(opened.live) == {"alpha": 3.0, "beta": 5.0}
    assert unpack(world.proofs().begin(opened).live) == {"alpha": 3.0, "beta": 5.0}
    assert len(opened.changes) == 2
    assert proofs.undo(b"\xff") is None


async def test_a_change_is_admitted_once_and_of_one_trace(world: World) -> None:
    await world.steer("alice", alpha=3.0)
    (change,) = (await world.opened()).changes
    proofs = world.proofs()
    proofs.admit(change)
    # As it comes from the record at the end, too.
    assert proofs.admitted([change]) == [change]
    version, *rest = msgspec.msgpack.decode(change)
    again = msgspec.msgpack.encode([version + 1, *rest])
    with pytest.raises(SignatureRefused, match="the change of key 'alice' was replayed"):
        proofs.admit(again)
    assert proofs.admitted([change, again, b"\xff"]) == [change]
    other = LiveProofs(world.gate, "u", world.owner, packed(**DECLARED))
    with pytest.raises(SignatureRefused, match="is of another trace"):
        other.admit(change)
    altered = msgspec.msgpack.encode([version, *rest[:2], {"alpha": 4.0}, rest[3]])
    with pytest.raises(SignatureRefused, match="has been altered"):
        world.proofs().admit(altered)


async def test_a_lenient_engine_takes_the_record_as_it_is(world: World) -> None:
    await world.steer("", alpha=3.0)
    opened = await world.opened()
    lenient = LiveProofs(Gate(Identity(), "tw", "m", "e"), "t", None, pack(DECLARED))
    assert lenient.begin(opened) is opened
    assert lenient.admitted(opened.changes) == opened.changes


async def test_a_change_that_nests_too_deep_is_refused(world: World) -> None:
    fields = msgspec.msgpack.encode([1, "c", 0, {}, b""])
    change = bytes([fields[0] + 1]) + fields[1:] + b"\x91" * 5000 + b"\xc0"
    proofs = world.proofs()
    with pytest.raises(SignatureRefused, match="nests too deep"):
        proofs.admit(change)
    assert proofs.undo(change) is None
