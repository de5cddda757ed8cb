"""A monitor: an alarm when too many of the last traces of all clients have failed. `python monitor.py`"""

import asyncio
from collections import deque

import tracewire


async def main(window: int = 20, allowed: float = 0.2) -> None:
    last: deque[bool] = deque(maxlen=window)
    async with tracewire.Client(name="monitor") as client, client.watch(since="start") as watch:
        async for event in watch:
            if event.type == "final":
                last.append(event.status == "failed")
                if sum(last) > allowed * window:
                    print(f"alarm: {sum(last)} of {len(last)} failed, the last is {event.trace_id}", flush=True)
                    last.clear()


if __name__ == "__main__":
    asyncio.run(main())
