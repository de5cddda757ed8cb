"""The places of a list of traces."""

from __future__ import annotations

import pytest

from tracewire_bus.bus import Bus
from tracewire_bus.store.lifecycle import lifecycle_fields
from tracewire_bus.store.trace_list import parse_place


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
