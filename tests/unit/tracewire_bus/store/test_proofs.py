"""A process with a key signs what it writes; one without leaves it as it is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from tests.support.identities import Identities
from tracewire_bus.domain.identity import SignatureRefused
from tracewire_bus.store.proofs import Proofs
from tracewire_bus.wire.codec import decode_event, encode
from tracewire_bus.wire.messages import Final
from tracewire_bus.wire.signing import MOST_AT_ONCE, decode_envelope, unwrap


def test_content_and_orders_are_signed_for_one_bus(tmp_path: Path) -> None:
    keys = Identities(tmp_path)
    proofs = Proofs(keys.signer("alice")).on("tw")
    envelope, content = unwrap(proofs.content("submit", "m", "t", b"x"))
    assert envelope is not None
    assert keys.ring.verify(envelope, "submit", "tw", "m", "t", content).id == "alice"
    order = decode_envelope(proofs.order("cancel", "t", b"x"))
    assert keys.ring.verify(order, "cancel", "tw", "", "t", b"x").id == "alice"
    assert order.nonce != decode_envelope(proofs.order("cancel", "t", b"x")).nonce


def test_without_a_key_nothing_is_signed() -> None:
    assert Proofs().content("submit", "m", "t", b"x") == b"x"
    assert Proofs().order("cancel", "t", b"x") == b""


def test_finals_are_genuine_if_a_trusted_engine_has_signed_them(tmp_path: Path) -> None:
    engine = Identities(tmp_path).signer("engine")
    (data,) = Proofs(engine, prefix="tw").finals([("t", encode(Final(attempt=1, seq=0, status="finished")))])
    final = decode_event(data)
    assert isinstance(final, Final)
    assert Proofs(None, [engine.public], "tw").is_genuine("t", memoryview(data), final)
    assert not Proofs(None, [engine.public], "tx").is_genuine("t", data, final)
    assert not Proofs(None, ["ab" * 32], "tw").is_genuine("t", data, final)
    assert Proofs().is_genuine("t", data, final)


@pytest.mark.parametrize("count", [1, 2, MOST_AT_ONCE, MOST_AT_ONCE + 1, 2 * MOST_AT_ONCE + 8])
async def test_submissions_of_one_turn_have_one_signature(tmp_path: Path, count: int) -> None:
    keys = Identities(tmp_path)
    proofs = Proofs(keys.signer("alice"), prefix="tw")
    made: dict[str, bytes] = {}

    async def submit(trace: str) -> None:
        made[trace] = await proofs.submission("m", trace, trace.encode())

    async with anyio.create_task_group() as group:
        for number in range(count):
            group.start_soon(submit, f"t{number}")
    signatures = set()
    for trace, data in made.items():
        envelope, content = unwrap(data)
        assert envelope is not None
        assert content == trace.encode()
        assert keys.ring.verify(envelope, "submit", "tw", "m", trace, content).id == "alice"
        signatures.add(envelope.signature)
        # It does not cover anything else.
        for other in (("submit", "tw", "m", "else"), ("edit", "tw", "m", trace), ("submit", "tx", "m", trace)):
            with pytest.raises(SignatureRefused, match="is not of key 'alice'"):
                keys.ring.verify(envelope, *other, content)  # type: ignore[arg-type]
        with pytest.raises(SignatureRefused, match="is not of key 'alice'"):
            keys.ring.verify(envelope, "submit", "tw", "m", trace, content + b"x")
    assert len(signatures) == -(-count // MOST_AT_ONCE)


async def test_submissions_of_successive_turns_have_one_signature_and_none_waits_for_a_time(tmp_path: Path) -> None:
    keys = Identities(tmp_path)
    proofs = Proofs(keys.signer("alice"), prefix="tw")
    made: list[str] = []
    signatures: dict[str, bytes] = {}

    async def submit(trace: str, turns: int = 0) -> None:
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        envelope, _ = unwrap(await proofs.submission("m", trace, b"x"))
        assert envelope is not None
        made.append(trace)
        signatures[trace] = envelope.signature

    async with anyio.create_task_group() as group:
        for number in range(MOST_AT_ONCE + 4):
            group.start_soon(submit, f"t{number}", number)
        # Everything is signed while the loop only turns: no task sleeps.
        for _ in range(2 * MOST_AT_ONCE):
            await anyio.lowlevel.checkpoint()
        assert len(made) == MOST_AT_ONCE + 4
    assert sorted(Counter(signatures.values()).values()) == [4, MOST_AT_ONCE]
    # A round that is over takes no more.
    await submit("later")
    assert list(signatures.values()).count(signatures["later"]) == 1


async def test_a_process_that_has_signed_several_at_once_lets_some_turns_bring_none(tmp_path: Path) -> None:
    proofs = Proofs(Identities(tmp_path).signer("alice"), prefix="tw")

    async def together(turns: int) -> bool:
        """Whether two submissions, the second of them so many turns later, have one signature."""
        signatures: list[bytes] = []

        async def submit(turns: int) -> None:
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            envelope, _ = unwrap(await proofs.submission("m", "t", b"x"))
            assert envelope is not None
            signatures.append(envelope.signature)

        async with anyio.create_task_group() as group:
            for number in (0, turns):
                group.start_soon(submit, number)
        return signatures[0] == signatures[1]

    # The first two of a process, and two after a round of one, are apart by a few turns.
    assert not await together(5)
    assert not await together(5)
    assert await together(0)
    assert await together(5)
    assert await together(5)
    # A round of one ends that.
    assert not await together(100)
    assert not await together(5)


@pytest.mark.parametrize("cancelled", ["first", "second"])
async def test_who_is_cancelled_keeps_nobody_from_a_signature(tmp_path: Path, cancelled: str) -> None:
    keys = Identities(tmp_path)
    proofs = Proofs(keys.signer("alice"), prefix="tw")
    made: dict[str, bytes] = {}

    async def submit(trace: str) -> None:
        with anyio.CancelScope() as scopes[trace]:
            made[trace] = await proofs.submission("m", trace, b"x")

    scopes: dict[str, anyio.CancelScope] = {}
    traces = {"first", "second", "third"}
    async with anyio.create_task_group() as group:
        for trace in sorted(traces):
            group.start_soon(submit, trace)
        while len(scopes) < 3:
            await anyio.lowlevel.checkpoint()
        assert not made
        scopes[cancelled].cancel()
    assert set(made) == traces - {cancelled}
    for trace, data in made.items():
        envelope, content = unwrap(data)
        assert envelope is not None
        assert keys.ring.verify(envelope, "submit", "tw", "m", trace, content).id == "alice"


async def test_a_round_whose_callers_were_all_cancelled_takes_no_more(tmp_path: Path) -> None:
    keys = Identities(tmp_path)
    proofs = Proofs(keys.signer("alice"), prefix="tw")
    async with anyio.create_task_group() as group:
        for trace in ("t", "u"):
            group.start_soon(proofs.submission, "m", trace, b"x")
        while proofs._round is None or len(proofs._round.waiting) < 2:
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert proofs._round is None
    envelope, content = unwrap(await proofs.submission("m", "v", b"x"))
    assert envelope is not None
    assert not envelope.digests
    assert keys.ring.verify(envelope, "submit", "tw", "m", "v", content).id == "alice"


async def test_without_a_key_a_submission_stays_as_it_is() -> None:
    assert await Proofs().submission("m", "t", b"x") == b"x"
    assert Proofs().finals([("t", b"x")]) == [b"x"]
