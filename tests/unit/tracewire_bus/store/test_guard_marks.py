"""What the guards of a group have decided is known to all of them, and to no other group."""

from __future__ import annotations

from tracewire_bus.bus import Bus
from tracewire_bus.store.guard_marks import GuardMarks


async def test_marks_are_a_groups(bus: Bus) -> None:
    marks = GuardMarks(bus)
    assert await marks.read("t", "g") == set()
    await marks.add("t", "g", "r/1/0.0/5", "done steer")
    await marks.add("t", "g", "r/1/0.0/9", "x" * 1000)
    await marks.add("t", "other", "r/1/0.0/7", "late")
    assert await marks.read("t", "g") == {"r/1/0.0/5", "r/1/0.0/9"}
    assert await marks.read("t2", "g") == set()
    assert await bus.command("HGET", bus.keys.guarded("t"), "g/r/1/0.0/5") == b"done steer"
    assert await bus.command("HSTRLEN", bus.keys.guarded("t"), "g/r/1/0.0/9") == 200
    assert await bus.command("TTL", bus.keys.guarded("t")) > 3600
