"""Appends that wait together share a round trip, and one that is fenced touches no other."""

from __future__ import annotations

import anyio

from tracewire_bus.bus import Bus, Fenced


async def test_one_fenced_append_does_not_touch_the_others(bus: Bus) -> None:
    outcomes: dict[str, object] = {}

    async def append(trace: str, seq: int) -> None:
        try:
            outcomes[f"{trace}{seq}"] = await writer.append(trace, 1, seq, b"")
        except Fenced:
            outcomes[f"{trace}{seq}"] = Fenced

    async with bus.writer() as writer:
        await writer.append("a", 1, 5, b"")
        async with anyio.create_task_group() as group:
            for trace in ("a", "b"):
                for seq in range(5, 8):
                    group.start_soon(append, trace, seq)
    assert outcomes == {"a5": Fenced, "a6": "1-6", "a7": "1-7", "b5": "1-5", "b6": "1-6", "b7": "1-7"}


async def test_appends_that_wait_together_share_a_round_trip(bus: Bus) -> None:
    async def calls() -> int:
        text = (await bus.command("INFO", "stats")).decode()
        return int(text.partition("total_reads_processed:")[2].split()[0]) if "total_reads_processed" in text else -1

    async with bus.writer() as writer:
        await writer.append("warm", 1, 0, b"")
        before = await calls()
        async with anyio.create_task_group() as group:
            for trace in range(200):
                group.start_soon(writer.append, f"t{trace}", 1, 0, b"x")
        if before >= 0:
            assert await calls() - before < 40
