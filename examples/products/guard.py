"""A guard: pauses a generation when a probe rises, asks, then steers it or lets it go on. `python guard.py [TRACE]`

The guard is an ordinary consumer in a process of its own. With `--yes` or `--no` it answers for the person. Without a
trace's id it starts one, which steers to code from the middle on.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import deque

from common import DIRECTION, LOCATION, code_probe

import tracewire
from tracewire import Live, Steer


async def guard(client: tracewire.Client, trace_id: str, limit: float, reply: str | None) -> None:
    """Guard one trace that saves `code` and has the live parameter `alpha`."""
    last: deque[float] = deque(maxlen=6)
    async for event in client.subscribe(trace_id, names={"code"}):
        if event.type != "output":
            continue
        last.extend(event.delta.get("code", ()))
        if len(last) == 6 and (mean := sum(last) / 6) > limit:
            if not await client.pause(trace_id, by="guard"):
                return
            text = (await client.get_state(trace_id)).text
            print(f"paused at token {event.index}: {mean:.1f} is above {limit:g}\n  ...{text[-60:]!r}", flush=True)
            said = reply or await asyncio.to_thread(input, "let it go on? [yes/no] ")
            if said == "no":
                await client.steer(trace_id, alpha=-20.0, by="guard")
                print("steered to prose", flush=True)
            await client.resume(trace_id, by="guard")
            return


async def main(trace_id: str | None, limit: float, reply: str | None) -> None:
    async with tracewire.Client(name="guard") as client:
        if trace_id is not None:
            return await guard(client, trace_id, limit, reply)
        watched = [Steer(LOCATION, DIRECTION, scale=Live("alpha")), code_probe()]
        async with (
            client.trace(
                "demo",
                "This module provides",
                interventions=watched,
                live={"alpha": 0.0},
                max_tokens=96,
                ignore_eos=True,
            ) as trace,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(guard(client, trace.id, limit, reply))
            async for item in trace:
                if item.type == "output" and item.index <= 24 < item.index + len(item.token_ids):
                    await trace.steer(alpha=20.0)
                elif item.type in ("paused", "resumed", "steered"):
                    print(f"  the trace was {item.type}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", nargs="?")
    parser.add_argument("--limit", type=float, default=4.0)
    answers = parser.add_mutually_exclusive_group()
    answers.add_argument("--yes", dest="reply", action="store_const", const="yes")
    answers.add_argument("--no", dest="reply", action="store_const", const="no")
    options = parser.parse_args()
    asyncio.run(main(options.trace, options.limit, options.reply))
