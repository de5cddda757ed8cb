"""The places of a list of traces."""

from __future__ import annotations

from typing import Any

import pytest

from tracewire_bus.bus import Bus
from tracewire_bus.store.lifecycle import lifecycle_fields
from tracewire_bus.store.trace_list import parse_place, place_text


@pytest.mark.parametrize("text", ["", "1-2", "1-2-3-4", "-1-2-3", "1-2-64", "a-b-c", "1-2-" + "3" * 21])
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(ValueError, match="expected the place"):
        parse_place(text)


async def test_entries_without_their_submission_are_left_out(bus: Bus) -> None:
    """Redis trims a stream from its beginning."""
    tag = bus.keys.tags[0]
    for kind, trace in (("accepted", "old"), ("final", "old"), ("queued", "new"), ("other", "new"), ("refused", "no")):
        await bus.command("XADD", bus.keys.firehose(tag), "*", *lifecycle_fields(kind, trace, model="tiny"))
    await bus.command("XADD", bus.keys.firehose(tag), "*", *lifecycle_fields("queued", "late", model="tiny"))
    await bus.command("XADD", bus.keys.firehose(tag), "*", *lifecycle_fields("refused", "late", model="tiny"))
    found = [trace async for trace in bus.list_traces()]
    assert [(trace.trace_id, trace.state) for trace in found] == [("new", "queued")]
    assert [trace async for trace in bus.list_traces(parse_place(found[0].place))] == []


async def test_the_last_change_says_how_far_a_trace_is(bus: Bus) -> None:
    key = bus.keys.firehose(bus.keys.tags[3])
    changes = {"queued": "queued", "accepted": "running", "paused": "paused", "resumed": "running", "odd": "running"}
    for kind, state in changes.items():
        await bus.command("XADD", key, "*", *lifecycle_fields(kind, "t", model="tiny", engine="e", attempt=1))
        assert [trace.state async for trace in bus.list_traces()] == [state]


def added(bus: Bus, number: int, place: str, kind: str, trace: str) -> tuple[Any, ...]:
    """The command that adds an entry to one of the streams."""
    fields = lifecycle_fields(kind, trace, model="tiny", status="finished" if kind == "final" else None)
    return ("XADD", bus.keys.firehose(bus.keys.tags[number]), place, *fields)


async def listed(bus: Bus, most: int, id_prefix: str = "") -> tuple[list[tuple[str, str]], int]:
    """All traces and their states, by scans of `most` entries each, and the number of scans."""
    found: list[tuple[str, str]] = []
    before, count = None, 0
    while True:
        scan = bus.list_traces(before, id_prefix=id_prefix, most=most)
        found += [(trace.trace_id, trace.state) async for trace in scan]
        count += 1
        if scan.stopped_at is None:
            return found, count
        assert before is None or scan.stopped_at < before
        before = parse_place(place_text(scan.stopped_at))


@pytest.mark.parametrize("most", [1, 2, 7, 50])
async def test_scans_that_stop_early_find_the_same_traces(bus: Bus, most: int) -> None:
    commands = []
    for one in range(12):
        # Entries of two streams with one id, and ends long after the submissions.
        for number in (3, 5):
            for place, kind in ((f"{100 + one}-1", "queued"), (f"{100 + one}-2", "accepted")):
                commands.append(added(bus, number, place, kind, f"red:{number}.{one}"))
    ends = {one: "final" if one % 4 else "refused" for one in range(0, 12, 2)}
    commands += [added(bus, 3, f"{200 + one}-1", kind, f"red:3.{one}") for one, kind in ends.items()]
    commands.append(added(bus, 9, "300-1", "queued", "blue:1"))
    await bus._connections.commands(*commands)
    wanted = [("blue:1", "queued")]
    for one in reversed(range(12)):
        wanted.append((f"red:5.{one}", "running"))
        if one % 4:
            wanted.append((f"red:3.{one}", "running" if one % 2 else "finished"))
    found, count = await listed(bus, most)
    assert found == wanted
    assert count == len(commands) // most + 1
    assert await listed(bus, most, "blue:") == ([("blue:1", "queued")], count)


async def test_the_streams_are_read_together(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    tags = range(len(bus.keys.tags))
    commands = [
        added(bus, number, f"{100 + one}-1", "final", f"{number}.{one}") for one in range(100) for number in tags
    ]
    await bus._connections.commands(*commands)
    trips = []
    send = bus._connections.commands

    async def counted(*sent: Any) -> Any:
        trips.append(len(sent))
        return await send(*sent)

    monkeypatch.setattr(bus._connections, "commands", counted)
    assert [trace async for trace in bus.list_traces()] == []
    assert len(trips) <= 6
