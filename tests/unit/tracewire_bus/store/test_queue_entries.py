"""Entries of a queue may have any names, and bring their client, priority and lease."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.queue import HOSTILE, left_behind, submission, take
from tracewire_bus.bus import Bus
from tracewire_bus.store.queue_entries import queue_names
from tracewire_bus.store.submission_queue import _PUT


async def test_names_may_be_anything(bus: Bus) -> None:
    for client in HOSTILE:
        for trace in HOSTILE:
            await bus.queue.put("demo", f"{client}/{trace}", f"{client}/{trace}".encode(), client=client, lease=client)
    assert await bus.queue.clients("demo") == dict.fromkeys(HOSTILE, len(HOSTILE))
    assert set(await bus.queue.leases("demo")) == {lease for lease in HOSTILE if lease}
    assert await bus.queue.withdraw("demo", f"{HOSTILE[3]}/{HOSTILE[4]}")
    withdrawn = await bus.queue.withdraw_lease("demo", HOSTILE[5])
    assert len(withdrawn) == len(HOSTILE)
    for one in withdrawn:
        await bus.queue.done("demo", one.trace)
    found = await bus.queue.take("demo", "e", 1000, 0)
    assert len({one.trace for one in found}) == len(found) == len(HOSTILE) ** 2 - len(HOSTILE) - 1
    for one in found:
        assert one.fields[b"d"] == one.fields[b"t"] == one.trace.encode()
        await bus.queue.done("demo", one.trace)
    assert await left_behind(bus) == {"state", "engine:e", "holders"}


async def test_names_that_are_no_text_are_taken_and_settled(bus: Bus) -> None:
    # Of a client that is not ours.
    names = queue_names(bus.keys, "demo")
    await bus.command(
        *_PUT([*names, bus.keys.submitted("demo", "?")], b"\xff\xc3", "1.0", b"\xfe", 0, b"\xfd", 0, 60, 1, b"d")
    )
    assert await bus.queue.clients("demo") == {"\udcfe": 1}
    assert await bus.queue.leases("demo") == ["\udcfd"]
    (taken,) = await bus.queue.take("demo", "e", 1, 0)
    assert taken.fields[b"t"] == b"\xff\xc3"
    await bus.queue.dead_letter("demo", taken, "no text")
    assert await left_behind(bus) == {"state", "engine:e", "holders"}


@pytest.mark.parametrize("attempts", [-11, 2**63 - 1, "many"])
async def test_attempts_count_from_one_whatever_another_client_wrote(bus: Bus, attempts: Any) -> None:
    await bus.submit(submission("t"))
    key = bus.keys.queue("demo", "entries")
    fields = msgspec.msgpack.decode(await bus.command("HGET", key, "t"))
    assert fields[7] == 0
    fields[7] = attempts
    await bus.command("HSET", key, "t", msgspec.msgpack.encode(fields))
    (taken,) = await bus.queue.take("demo", "e", 1, 0)
    assert taken.attempt >= 1


async def test_a_submission_brings_its_client_priority_and_lease(bus: Bus) -> None:
    await bus.submit(submission("late", client="c", priority=1, lease="l"))
    await bus.submit(submission("early", client="c", priority=-1))
    assert await bus.queue.clients("demo") == {"c": 2}
    assert await bus.queue.leases("demo") == ["l"]
    assert await take(bus, 5) == ["early", "late"]
