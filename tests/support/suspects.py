"""Traces whose engine is suspected to be gone."""

from __future__ import annotations

from tracewire_bus.bus import Bus
from tracewire_bus.wire.messages import Invoke, Submission


async def suspects(bus: Bus, *traces: str) -> None:
    """Entries with one try left."""
    for trace in traces:
        await bus.queue.put("tiny", trace, b"d", tries=2)
    assert len(await bus.queue.take("tiny", "gone", 10, 1)) == len(traces)
    assert await bus.queue.put_back("tiny", "gone", "it was lost", lost=True) == len(traces)


def _submission(trace: str) -> Submission:
    return Submission(trace=trace, model="tiny", invokes=[Invoke(prompt="hello")], detach=True)
