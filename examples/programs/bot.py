"""A bot that follows a trace to its end, over outages and restarts of its own. `python bot.py TRACE BOOKMARK`"""

import asyncio
import sys

from anyio import Path

import tracewire


async def follow(trace_id: str, bookmark: Path) -> None:
    since = await bookmark.read_text() if await bookmark.exists() else "start"
    async with tracewire.Client(retry_timeout=5) as client:
        async for event in client.subscribe(trace_id, since=since):
            if event.type == "output":
                print(event.text, end="", flush=True)
            await bookmark.write_text(event.id)


async def main(trace_id: str, bookmark: Path) -> None:
    while True:
        try:
            return await follow(trace_id, bookmark)
        except tracewire.BusUnavailable as error:
            print(f"\ntrying again: {error}", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
