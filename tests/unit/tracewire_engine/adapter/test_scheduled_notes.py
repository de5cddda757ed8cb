"""Consumers read a scheduled change before the first token under it, as they read a client's change."""

from __future__ import annotations

from functools import partial

import anyio

from tests.support.scripted_engine import ScriptedEngine, info, serving
from tracewire import Client, Output, Steered
from tracewire_bus.bus import Bus
from tracewire_bus.wire.messages import ScheduledChange
from tracewire_bus.wire.packing import pack
from tracewire_engine.adapter.scheduled_notes import ScheduledNotes

PATIENCE = 60


def test_each_choice_is_told_its_own_once() -> None:
    changes = [
        ScheduledChange(index=5, values=pack({"a": 1.0})),
        ScheduledChange(index=2, values=pack({"a": 2.0}), invoke=1),
        ScheduledChange(index=2, values=pack({"a": 3.0}), choice=1),
    ]
    notes = ScheduledNotes(changes)

    def told(invoke: int, choice: int, tokens: int) -> list[int]:
        return [event.first[0].index for event in notes.due(invoke, choice, tokens, None)]

    assert told(0, 0, 5) == []
    assert told(0, 0, 6) == [5]
    assert told(0, 0, 9) == []
    assert told(1, 1, 3) == [2, 2]
    assert told(1, 1, 99) == [5]
    assert ScheduledNotes([]).due(0, 0, 99, None) == []


async def test_they_are_on_the_stream_beside_the_changes_of_clients(client: Client, bus: Bus) -> None:
    with anyio.fail_after(PATIENCE):
        async with serving(bus, ScriptedEngine(partial(anyio.sleep, 0.005)), info()):
            await client.models.get("tiny", timeout=PATIENCE)
            schedule = {3: {"alpha": 1.0}, 20: {"alpha": 2.0}}
            told: list[tuple[int, str, float]] = []
            seen = 0
            async with client.trace("tiny", "x", live={"alpha": 0.0}, schedule=schedule, max_tokens=30) as trace:
                async for item in trace:
                    match item:
                        case Output():
                            seen = item.index + len(item.token_ids)
                            if item.index <= 8 < seen:
                                await trace.steer(alpha=9.0, by="me")
                        case Steered():
                            first = item.first_token()
                            assert first is not None
                            assert first >= seen
                            told += [(first, change.by, change.values["alpha"]) for change in item.changes]
            assert [one for one in told if one[1] == "schedule"] == [(3, "schedule", 1.0), (20, "schedule", 2.0)]
            assert [one[1:] for one in told if one[1] != "schedule"] == [("me", 9.0)]
            # The change of a client was reported, and waits no longer.
            assert await bus.command("ZCARD", bus.keys.changes(trace.id)) == 0
