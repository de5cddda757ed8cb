"""The blocking client beside the async one, in turns.

    python -m benchmarks.blocking [--outputs 500] [--calls 200] [--rounds 7] [--json]

A finished trace of `--outputs` tokens, each with an item of a saved list, is in a private Redis. Both clients do the
same with it in each round, one after the other:

- *items*: iterate over a subscription from its start (events a second);
- *text*: read its `text_stream()` (pieces a second);
- *result*: `subscription.result()` (traces a second, of which each has all events);
- *calls*: `get_state()` of a trace that has one token, one call after the other (calls a second).

Each figure has the medians over the rounds, and the median of the rounds' ratios of blocking to async.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

import anyio
import anyio.to_thread

import tracewire
from benchmarks.processes import at_least, show
from tests.support.bus_engine import BusEngine, Stage, engine_info
from tracewire_bus.transport.embedded import EmbeddedServer

LONG, SHORT = "long", "short"
WAYS = ("items", "text", "result", "calls")


async def write(url: str, outputs: int) -> None:
    """Put the two finished traces into Redis."""

    async def script(stage: Stage) -> None:
        await stage.accept()
        for number in range(outputs if stage.trace == LONG else 1):
            await stage.save(f" {number}", {"scores": float(number)})
        await stage.final()

    async with BusEngine.running(url, "tw", script, engine_info("tiny")), tracewire.connect(url) as client:
        for trace in (LONG, SHORT):
            await client.trace("tiny", "a prompt", trace_id=trace).result()


async def asynchronous(client: tracewire.Client, way: str, calls: int) -> int:
    """Do one way with the async client. Returns how many of its units were done."""
    done = 0
    match way:
        case "items":
            async for _ in client.subscribe(LONG):
                done += 1
        case "text":
            async for _ in client.subscribe(LONG).text_stream():
                done += 1
        case "result":
            await client.subscribe(LONG).result()
            done = 1
        case _:
            for done in range(1, calls + 1):
                await client.get_state(SHORT)
    return done


def blocking(client: tracewire.blocking.Client, way: str, calls: int) -> int:
    """Do one way with the blocking client. Returns how many of its units were done."""
    done = 0
    match way:
        case "items":
            for _ in client.subscribe(LONG):
                done += 1
        case "text":
            for _ in client.subscribe(LONG).text_stream():
                done += 1
        case "result":
            client.subscribe(LONG).result()
            done = 1
        case _:
            for done in range(1, calls + 1):
                client.get_state(SHORT)
    return done


async def timed(work: Callable[[], Awaitable[int]]) -> float:
    """Units a second."""
    began = time.perf_counter()
    done = await work()
    return done / (time.perf_counter() - began)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds; the figures."""
    rates: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    async with EmbeddedServer.start() as server:
        await write(server.url, options.outputs)
        async with tracewire.connect(server.url) as client:
            with tracewire.blocking.Client(server.url) as other:
                # The first round is left out.
                for number in range(options.rounds + 1):
                    for way in WAYS:
                        one = await timed(lambda way=way: asynchronous(client, way, options.calls))  # type: ignore[misc]
                        two = await timed(
                            lambda way=way: anyio.to_thread.run_sync(blocking, other, way, options.calls)  # type: ignore[misc]
                        )
                        if number:
                            rates[way].append((one, two))
    return {
        way: {
            "async": round(median(one for one, _ in found), 1),
            "blocking": round(median(two for _, two in found), 1),
            "ratio": round(median(two / one for one, two in found), 3),
        }
        for way, found in rates.items()
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outputs", type=at_least(1), default=500, help="tokens of the trace (default: %(default)s)")
    parser.add_argument("--calls", type=at_least(1), default=200, help="calls in a round (default: %(default)s)")
    parser.add_argument("--rounds", type=at_least(1), default=7, help="rounds of both (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    show(anyio.run(measure, options), as_json=options.json)


if __name__ == "__main__":
    main()
