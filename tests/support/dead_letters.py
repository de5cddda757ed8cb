"""Submissions that are given up."""

from __future__ import annotations

import tracewire
from tests.support.bus_engine import engine_info
from tracewire import Client
from tracewire_bus.bus import Bus
from tracewire_bus.wire.messages import Failure


@tracewire.intervention
def with_direction(model, tracer, live, direction=None):
    """Uses a large variable."""
    kept = direction.save()


async def given_up(bus: Bus, trace: str) -> str:
    """Take a trace and give it up, as happens when its engines are lost. Returns the dead letter's id."""
    (taken,) = await bus.queue.take("tiny", "doomed", 1, 1000)
    assert taken.trace == trace
    await bus.records.open(trace, "doomed", 1)
    await bus.records.end(trace, "failed", Failure(type="EngineLost", message="each engine was lost"))
    await bus.queue.dead_letter("tiny", taken, "each engine was lost")
    return (await bus.dead_letters.list())[-1].id


async def dead(client: Client, bus: Bus, redis_url: str, prefix: str, block: object = None) -> tuple[str, str]:
    """A dead letter of a trace that was submitted while no engine took it: its id, and its trace's."""
    info = engine_info()
    await bus.registry.register(info, 600)
    trace = client.trace("tiny", "hello", block, deadline=1000)  # type: ignore[arg-type]
    await trace.start()
    id_ = await given_up(bus, trace.id)
    await bus.registry.unregister(info.engine)
    await trace.aclose()
    return id_, trace.id
