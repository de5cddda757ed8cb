"""A safety monitor: reads a probe of every generation of a model, and cancels those that go where they must not.

The monitor installs the probe on the model, so that no service has to know of it. `python safety_monitor.py [LIMIT]`
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque

from common import code_probe

import tracewire


async def read(client: tracewire.Client, trace_id: str, limit: float) -> None:
    """Read the probe of one trace, and cancel the trace when the mean of its last eight values is above `limit`."""
    last: deque[float] = deque(maxlen=8)
    async for event in client.subscribe(trace_id, names={"safety/code"}):
        if event.type == "output":
            last.extend(event.delta.get("safety/code", ()))
            if len(last) == 8 and (mean := sum(last) / 8) > limit:
                if await client.cancel(trace_id, f"the safety monitor read {mean:.1f}, above {limit:g}", by="safety"):
                    print(f"cancelled {trace_id} at token {event.index}: {mean:.1f}", flush=True)
                return


async def main(limit: float = 10.0) -> None:
    async with tracewire.Client(name="safety") as client, client.watch(model="demo", since="now") as watch:
        await client.edits("demo").install("safety", interventions=[code_probe()])
        print("watching", flush=True)
        async with asyncio.TaskGroup() as readers:
            async for event in watch:
                if event.type == "accepted":
                    readers.create_task(read(client, event.trace_id, limit))


if __name__ == "__main__":
    asyncio.run(main(*map(float, sys.argv[1:])))
