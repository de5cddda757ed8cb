"""Two monitors and a controller on one generation, each of which could be a process on another host.

One monitor keeps the mean of a probe, the other counts lines. The controller reads both and steers the generation: to
code while there are too few lines, then back to prose. `python monitors.py [PROMPT]`
"""

from __future__ import annotations

import asyncio
import sys

from common import DIRECTION, LOCATION, code_probe

import tracewire
from tracewire import Live, Steer


class Board:
    """What the monitors have found so far."""

    def __init__(self) -> None:
        self.mean, self.lines, self.changed = 0.0, 0, asyncio.Event()


async def watch_probe(client: tracewire.Client, trace_id: str, board: Board) -> None:
    seen: list[float] = []
    async for event in client.subscribe(trace_id, names={"code"}):
        if event.type == "output":
            seen += event.delta.get("code", [])
            board.mean = sum(seen[-8:]) / len(seen[-8:])
            board.changed.set()


async def watch_lines(client: tracewire.Client, trace_id: str, board: Board) -> None:
    async for event in client.subscribe(trace_id, names=()):
        if event.type == "output":
            board.lines += event.text.count("\n")
            board.changed.set()


async def control(client: tracewire.Client, trace_id: str, board: Board, lines: int) -> None:
    alpha = 0.0
    while True:
        await board.changed.wait()
        board.changed.clear()
        wanted = 20.0 if board.lines < lines else -20.0
        if wanted != alpha:
            alpha = wanted
            await client.steer(trace_id, alpha=alpha, by="controller")
            print(f"controller: {board.lines} lines, mean {board.mean:.1f}: alpha {alpha:g}", flush=True)


async def main(prompt: str = "This module provides", tokens: int = 96) -> None:
    async with tracewire.Client() as client:
        watched = [Steer(LOCATION, DIRECTION, scale=Live("alpha")), code_probe()]
        async with client.trace(
            "demo", prompt, interventions=watched, live={"alpha": 0.0}, max_tokens=tokens, ignore_eos=True
        ) as trace:
            board = Board()
            async with asyncio.TaskGroup() as group:
                monitors = [group.create_task(watch(client, trace.id, board)) for watch in (watch_probe, watch_lines)]
                controller = group.create_task(control(client, trace.id, board, lines=4))
                result = await trace.result()
                await asyncio.gather(*monitors)
                controller.cancel()
        print(f"{board.lines} lines, mean {board.mean:.1f}\n{result.text}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
