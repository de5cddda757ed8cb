"""What hostile clients try beside `test_attacks.py`: old signatures, keyrings that change, plans, others' libraries."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

import tracewire
from tests.e2e.security.test_attacks import put, refusal, submission
from tests.support.gateways import serving as gateway_serving
from tests.support.identities import Identities
from tests.support.scripted_engine import ScriptedEngine, info, serving
from tests.support.until import until
from tracewire.gateway.keys import RIGHTS, entry_of, new_key
from tracewire_bus.bus import Bus
from tracewire_bus.domain import identity
from tracewire_bus.domain.identity import Keyring, SignatureRefused
from tracewire_bus.store.proofs import Proofs
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.messages import Invoke, ScheduledChange, Submission
from tracewire_bus.wire.signing import unwrap


@pytest.fixture
def keys(tmp_path: Path) -> Identities:
    return Identities(tmp_path)


def signed(keys: Identities, bus: Bus, one: Submission) -> bytes:
    """A submission as alice signs it, without the checks of a client."""
    return Proofs(keys.signer("alice"), prefix=bus.keys.prefix).content("submit", "tiny", one.trace, encode(one))


async def test_two_engines_do_not_take_one_signature(keys: Identities, bus: Bus) -> None:
    """Somebody makes Redis forget the trace and queues the copy again, until each engine has seen it."""
    short = [Invoke(prompt="valid", sampling={"max_tokens": 2})]
    data = signed(keys, bus, submission("t", invokes=short))
    other = ScriptedEngine(partial(anyio.sleep, 0.005))
    async with (
        keys.served(bus) as first,
        serving(bus, other, info("tiny", engine="the-other"), identity=keys.strict) as second,
        keys.client(bus, "alice") as client,
    ):
        await until(lambda: bus.registry.alive("the-other"))
        await put(bus, "t", data)
        await client.subscribe("t").result()
        # An engine that is draining takes nothing: the other one gets the copy.
        for engine in (first, second):
            await bus.command("DEL", bus.keys.record("t"), bus.keys.events("t"), bus.keys.submitted("tiny", "t"))
            await put(bus, "t", data)
            error = await refusal(client, "t")
            assert "was replayed: an engine has taken it before" in error.message
            engine.stop()
            if engine is first:
                await until(lambda: _gone(bus, first._info.engine))


async def _gone(bus: Bus, engine: str) -> bool:
    return not await bus.registry.alive(engine)


async def test_a_clock_that_is_set_back_revives_no_submission(
    keys: Identities, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A submission that was kept back comes to an engine by whose own clock it is still valid."""
    monkeypatch.setattr(identity, "_LIFETIMES", {"submit": -3600})
    data = signed(keys, bus, submission("t"))
    clock = SimpleNamespace(time=lambda: time.time() - 2 * 3600)
    monkeypatch.setattr(identity, "time", clock)
    async with keys.served(bus), keys.client(bus, "alice") as client:
        await put(bus, "t", data)
        # Redis's clock says when it was queued.
        assert "had expired" in (await refusal(client, "t")).message


def test_a_keyring_that_changes_while_it_is_read_keeps_no_revoked_key(
    keys: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = Keyring(keys.ring.path)
    envelope, content = unwrap(Proofs(keys.signer("alice"), prefix="tw").content("submit", "m", "t", b"x"))
    assert envelope is not None
    verify: Any = partial(ring.verify, envelope, "submit", "tw", "m", "t", content)
    assert verify().id == "alice"
    # In place, with the time and the length of the file before: a replacement has another inode.
    known = keys.ring.listed()
    before = ring.path.stat()
    changed = [msgspec.structs.replace(one, revoked=1.0) if one.id == "alice" else one for one in known]
    look = os.stat

    def late(path: Any, *more: Any, **named: Any) -> os.stat_result:
        found = look(path, *more, **named)
        if os.fspath(path) == os.fspath(ring.path):
            # The operator's command replaces the file between the look at it and the reading of it.
            monkeypatch.setattr(identity.os, "stat", look)
            keys.ring.write(changed)
            os.utime(ring.path, ns=(before.st_atime_ns, before.st_mtime_ns))
        return found

    keys.ring.write(known)
    monkeypatch.setattr(identity.os, "stat", late)
    with pytest.raises(SignatureRefused, match="was revoked"):
        verify()
    with pytest.raises(SignatureRefused, match="was revoked"):
        verify()
    # And the other way round: what was read early does not stay.
    monkeypatch.setattr(identity.os, "stat", look)
    keys.ring.write(known)
    assert verify().id == "alice"


BOMB = b"\xdd" + (200_000).to_bytes(4, "big") + b"\x90" * 200_000
#: What a client plans by tokens, the field that the refusal names, and what it says.
PLANS: dict[str, tuple[dict[str, Any], str, str]] = {
    "a bomb": ({"schedule": [ScheduledChange(0, BOMB)]}, "schedule", "lists, dicts and arrays"),
    "an undeclared name": (
        {"schedule": [ScheduledChange(0, msgspec.msgpack.encode({"x": 1.0}))]},
        "schedule",
        "no such live parameter",
    ),
    "an index from the end": ({"schedule": [ScheduledChange(-1, b"\x80")]}, "schedule", "a token from 0 on"),
    "too many": ({"schedule": [ScheduledChange(0, b"\x80")] * 10_001}, "schedule", "at most 10000 changes"),
    "a token that is none": (
        {"invokes": [Invoke(prompt="valid", forced_tokens=[-1])]},
        "forced_tokens",
        "expected a token id",
    ),
}


async def test_a_hostile_plan_is_refused_by_its_field(keys: Identities, bus: Bus) -> None:
    async with keys.served(bus), keys.client(bus, "alice") as client:
        for number, (name, (fields, field, says)) in enumerate(PLANS.items()):
            await put(bus, f"t{number}", signed(keys, bus, submission(f"t{number}", **fields)))
            error = await refusal(client, f"t{number}")
            assert field in error.field, name
            assert says in error.message, name
        assert (await client.trace("tiny", "valid", max_tokens=2).result()).token_ids


async def test_a_tenant_of_a_gateway_names_no_other_tenant_s_library(bus: Bus, tmp_path: Path) -> None:
    """The gateway's own user of Redis reads the entries of all tenants."""
    red, blue = new_key(), new_key()
    file = tmp_path / "keys.toml"
    file.write_text(entry_of(red, "rita", RIGHTS, "red") + entry_of(blue, "bruno", RIGHTS, "blue"))
    engine = ScriptedEngine(partial(anyio.sleep, 0.005))
    async with (
        serving(bus, engine, info("tiny", engine="e")),
        tracewire.connect(bus.url, prefix=bus.keys.prefix) as client,
        gateway_serving(bus.url, bus.keys.prefix, keys=file) as gateway,
        gateway.http(red) as rita,
    ):
        await until(lambda: bus.registry.alive("e"))
        await client.library.put("blue:secret", np.ones(8, np.float32), model="tiny", kind="vector")
        for name in ("blue:secret", "blue:secret@1", "blue:other"):
            steer = {"do": "steer", "at": "residual(0)", "vector": name, "scale": 1.0}
            answer = await rita.post("/traces", json={"model": "tiny", "prompt": "x", "interventions": [steer]})
            assert answer.status_code == 422, (name, answer.text)
            assert "expected an entry of the trace's tenant 'red' or a shared one" in answer.json()["detail"]
