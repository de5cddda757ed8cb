"""What clients and engines hold does not grow with the traces that they have seen."""

from __future__ import annotations

import gc
import types
import weakref
from collections import Counter

import anyio
import pytest

import tracewire
from tests.support.scripted_engine import acts, info, serving
from tests.support.stepping import free
from tests.support.until import until
from tracewire.traces import presence
from tracewire_bus.bus import Bus
from tracewire_bus.events import restore


def remembers_class(thing: object) -> bool:
    """Whether this is of the memory of `isinstance` for an abstract class, which grows with the classes asked about."""
    # By its very type: much of what is there answers for another class, or fails as it does.
    if type(thing) is weakref.ref:
        return issubclass(type(thing()), type)
    return type(thing) is types.BuiltinMethodType and thing.__qualname__ == "ReferenceType._destroy"


async def test_nothing_that_python_counts_is_left_of_traces_that_have_ended(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What Redis has acknowledged is kept for a while, should it come back with less.
    monkeypatch.setattr(restore, "KEEP_S", 0.0)
    monkeypatch.setattr(restore, "CHECK_S", 0.05)
    monkeypatch.setattr(presence, "GUARD_S", 0.0)

    async with tracewire.connect(bus.url, prefix=bus.keys.prefix) as client, serving(bus, free(), info()) as adapter:
        await client.models.get("tiny", timeout=10)
        room = anyio.Semaphore(20)

        async def one(number: int) -> None:
            async with client.trace("tiny", "hello", acts, max_tokens=5, trace_id=f"t{number}", detach=True) as trace:
                await trace.result()
            room.release()

        async def run(first: int, last: int) -> Counter[str]:
            async with anyio.create_task_group() as group:
                for number in range(first, last):
                    await room.acquire()
                    group.start_soon(one, number)
            await until(lambda: not (adapter.busy or adapter._claims.runs or adapter._leases._last_seq))
            # Both look at what they keep once more.
            await anyio.sleep(1)
            gc.collect()
            return Counter(type(thing).__qualname__ for thing in gc.get_objects() if not remembers_class(thing))

        before = await run(0, 100)
        after = await run(100, 400)
    grown = {kind: count - before[kind] for kind, count in after.items() if count - before[kind] >= 100}
    assert grown == {}
