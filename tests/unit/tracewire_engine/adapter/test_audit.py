"""An engine's decisions are in the trail, with the key, the reason and the code; and no trace waits for that."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

import tracewire
from tests.support.bus_engine import engine_info
from tests.support.identities import Identities, running
from tests.support.scripted_engine import acts
from tracewire_bus.bus import Bus
from tracewire_bus.domain.approvals import Approvals
from tracewire_bus.store.audit import CODE_S, REFUSED_CODE_S, AuditLog
from tracewire_bus.wire.messages import Block
from tracewire_engine.adapter import audit as audit_module
from tracewire_engine.adapter.audit import _WAITING, Audit
from tracewire_engine.adapter.code_policy import CodePolicy


async def test_what_an_engine_decides_is_in_the_trail(bus: Bus, tmp_path: Path) -> None:
    keys = Identities(tmp_path)
    policy = CodePolicy("listed", approvals=Approvals(tmp_path / "approved.json"))
    async with keys.client(bus, "alice") as alice, keys.client(bus, "bob") as bob, keys.client(bus) as nobody:
        async with keys.served(bus, audit=1000, code=policy):
            trace = await running(alice)
            await alice.steer(trace.id, alpha=2.0)
            await bob.steer(trace.id, alpha=666.0)
            await bob.cancel(trace.id, "because")
            await alice.pause(trace.id)
            with pytest.raises(tracewire.CodeRefused):
                await alice.trace("tiny", "valid", acts(), max_tokens=2, trace_id="code").result()
            with pytest.raises(tracewire.TraceRejected):
                await nobody.trace("tiny", "valid", max_tokens=2, trace_id="unsigned").result()
            await alice.cancel(trace.id)
            with pytest.raises(tracewire.TraceCancelled):
                await trace.result()
        log = AuditLog(bus)
        found = [(one.kind, one.decision, one.key, one.tenant, one.name) async for one in log.read()]
        for entry in (
            ("submit", "accepted", "alice", "red", trace.id),
            ("steer", "accepted", "alice", "red", trace.id),
            ("steer", "refused", "", "", trace.id),
            ("cancel", "refused", "", "", trace.id),
            ("pause", "accepted", "alice", "red", trace.id),
            ("cancel", "accepted", "alice", "red", trace.id),
            ("submit", "refused", "", "", "code"),
            ("submit", "refused", "", "", "unsigned"),
        ):
            assert entry in found
        assert len(found) == len(set(found))
        reasons = {one.name: one.reason async for one in log.read() if one.kind == "submit"}
        assert "--unsigned refuse" in reasons["unsigned"]
        (code,) = [word.rstrip(";") for word in reasons["code"].split() if len(word.rstrip(";")) == 64]
        # The code that was refused is there to be approved.
        text = await log.code(code)
        assert text is not None
        assert text.startswith("block acts(model, tracer, live)\n")


async def test_entries_wait_up_to_a_limit(bus: Bus) -> None:
    audit = Audit(bus, engine_info(), 10)
    for number in range(_WAITING + 5):
        audit.accepted("submit", f"t{number}", None)
    assert len(audit._entries) == _WAITING
    assert audit._entries[0].name == "t5"


async def test_an_engine_without_a_trail_keeps_nothing(bus: Bus) -> None:
    audit = Audit(bus, engine_info(), 0)
    audit.accepted("submit", "t", None)
    audit.refused("submit", "t", "so")
    audit.keep("ab", Block(name="b", source=""))
    await audit.flushed()


async def test_entries_go_with_the_next_events(bus: Bus) -> None:
    # Its own task does not run: only the writer writes.
    audit = Audit(bus, engine_info(), 10)
    audit.accepted("submit", "t", None, by="me", code=["ab"])
    audit.refused("submit", "u", "so", by="me")
    async with bus.writer() as writer:
        writer.riders = audit
        await writer.append("t", 1, 0, b"a")
        await audit.flushed()
        found = [(one.name, one.decision, one.reason, one.by, one.code) async for one in AuditLog(bus).read()]
        assert found == [("t", "accepted", "", "me", ["ab"]), ("u", "refused", "so", "me", [])]


async def written(audit: Audit) -> None:
    """Wait until the task has written all entries."""
    async with anyio.create_task_group() as group:
        group.start_soon(audit.run)
        with anyio.fail_after(20):
            await audit.flushed()
        group.cancel_scope.cancel()


async def test_entries_that_redis_refuses_with_the_events_are_left_to_the_task(bus: Bus) -> None:
    audit = Audit(bus, engine_info(), 10)
    audit.accepted("submit", "t", None)
    assert len(audit.board()) == 1
    # One round trip at a time carries them.
    assert not audit.board()
    audit.landed([ValueError("no")])
    assert not audit.board()
    await written(audit)
    assert [one.name async for one in AuditLog(bus).read()] == ["t"]
    audit.accepted("submit", "u", None)
    assert len(audit.board()) == 1
    # The connection failed.
    audit.landed([])
    assert len(audit._entries) == 1


async def test_entries_that_name_code_do_not_overtake_it(bus: Bus) -> None:
    audit = Audit(bus, engine_info(), 10)
    audit.keep("ab", Block(name="b", source="pass"))
    audit.accepted("submit", "t", None, code=["ab"])
    assert not audit.board()
    await written(audit)
    assert await AuditLog(bus).code("ab")
    assert [one.name async for one in AuditLog(bus).read()] == ["t"]


async def test_refused_sources_take_a_bounded_part_of_redis(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody who may submit can have blocks refused. One that is accepted later is kept as any other."""
    audit = Audit(bus, engine_info(), 10)
    for number in range(300):
        audit.keep(f"{number:x}", Block(name="b", source=f"pass  # {number}"), refused=True)
    assert len(audit._codes) == 256
    audit.keep("0", Block(name="b", source="pass  # 0"))
    # A day later.
    monkeypatch.setattr(audit_module, "_RENEW_S", 0.0)
    audit.keep("fff", Block(name="b", source="pass"), refused=True)
    assert [(hash, refused) for hash, _, refused in list(audit._codes)[256:]] == [("0", False), ("fff", True)]
    long = Audit(bus, engine_info(), 10)
    monkeypatch.undo()
    for number in range(100):
        long.keep(f"{number:x}", Block(name="b", source="#" * 200_000), refused=True)
    assert len(long._codes) == 4 * 1024 * 1024 // len(long._codes[0][1]) == 20


async def test_a_refusal_does_not_shorten_for_how_long_code_that_ran_is_kept(bus: Bus) -> None:
    """The engine that refuses it may be another one."""
    for hashes, refused, kept in ((["a"], False, CODE_S), (["a", "b"], True, REFUSED_CODE_S), (["b"], False, CODE_S)):
        audit = Audit(bus, engine_info(), 10)
        for hash in hashes:
            audit.keep(hash, Block(name="b", source="pass"), refused=refused)
        await written(audit)
        assert kept - 60 < await bus.command("TTL", bus.keys.audit_code(hashes[-1])) <= kept
        assert await bus.command("TTL", bus.keys.audit_code("a")) > CODE_S - 60


async def test_code_that_is_in_use_is_kept_on(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = Audit(bus, engine_info(), 10)
    block = Block(name="b", source="pass")
    for _ in range(3):
        audit.keep("ab", block)
    assert len(audit._codes) == 1
    # A day later.
    monkeypatch.setattr(audit_module, "_RENEW_S", 0.0)
    audit.keep("ab", block)
    assert len(audit._codes) == 2
