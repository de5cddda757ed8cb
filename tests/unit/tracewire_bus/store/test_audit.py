"""The audit trail is bounded, is read in order, and keeps the code that it names."""

from __future__ import annotations

import anyio

from tracewire_bus.bus import Bus
from tracewire_bus.store.audit import AuditEntry, AuditLog


async def test_entries_are_read_in_order_and_followed(bus: Bus) -> None:
    log = AuditLog(bus)
    for number in range(3):
        await log.append([AuditEntry("submit", f"t{number}", "accepted", key="alice")], 100)
    await bus.command("XADD", bus.keys.audit, "*", "e", "{")
    found = [entry async for entry in log.read()]
    assert [(entry.name, entry.key) for entry in found] == [("t0", "alice"), ("t1", "alice"), ("t2", "alice")]
    assert all(entry.id for entry in found)
    seen = []
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(log.append, [AuditEntry("cancel", "t3", "refused", reason="so")], 100)
            async for entry in log.read(follow=True):
                seen.append(entry.name)
                if entry.name == "t3":
                    break
    assert seen == ["t0", "t1", "t2", "t3"]


async def test_the_stream_is_bounded(bus: Bus) -> None:
    log = AuditLog(bus)
    for number in range(20):
        await log.append([AuditEntry("submit", f"t{number}-{index}", "accepted") for index in range(50)], 200)
    left = [entry async for entry in log.read()]
    # Redis removes whole nodes of 100 entries.
    assert 200 <= len(left) <= 400
    assert left[-1].name.startswith("t19-")


async def test_code_is_kept_by_hash(bus: Bus) -> None:
    log = AuditLog(bus)
    assert await log.code("ab" * 32) is None
    await log.keep_code("ab" * 32, "block watch\n")
    assert await log.code("ab" * 32) == "block watch\n"
    assert await bus.command("TTL", bus.keys.audit_code("ab" * 32)) > 0
