"""Many short traces on a real engine, one after another: does anything grow?

    tracewire redis &                                # prints its URL
    tracewire engine demo --url URL --kv-cache-memory-bytes 67108864 &
    python -m benchmarks.soak --url URL --engine-pid PID [--traces 20000]

Blocks of several kinds take turns (lists, dicts, a stop, an error, none at all), 64 at once, five tokens each. Prints
the resident memory of every process in MiB as it goes, and the rate.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import anyio
import psutil

import tracewire
from benchmarks.processes import at_least

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.blocks import tracing as blocks

RAISES = blocks.raises_at(at=2)
KINDS = [
    blocks.list_each_step,
    blocks.dict_each_step,
    blocks.two_names,
    blocks.scalar_each_step,
    blocks.stops_at(at=2),
    RAISES,
    None,
]


async def soak(url: str, pid: int, traces: int, plain: bool) -> None:
    """Run the traces."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    names = {process.pid: process.name() for process in processes}
    limiter = anyio.CapacityLimiter(64)
    done = 0
    began = time.monotonic()

    def resident() -> dict[str, float]:
        found = {names[process.pid]: round(process.memory_info().rss / 2**20, 1) for process in processes}
        return found | {"client": round(psutil.Process().memory_info().rss / 2**20, 1)}

    async with tracewire.connect(url) as client:
        model = await client.models.get("demo", timeout=60)

        async def one(number: int) -> None:
            nonlocal done
            block = None if plain else KINDS[number % len(KINDS)]
            sampling = {"max_tokens": 5, "ignore_eos": True, "temperature": 0.0}
            async with limiter, client.trace(model, [1 + number % 50, 2, 3, 4], block, **sampling) as trace:
                raised = False
                try:
                    await trace.result()
                except tracewire.InterventionError:
                    raised = True
                    if block is not RAISES:
                        raise
                if block is RAISES and not raised:
                    raise RuntimeError(f"trace {trace.id} ended as {trace.status}, though its block raises")
            done += 1
            if done % max(1, traces // 10) == 0:
                print(f"{done:6} traces, {done / (time.monotonic() - began):4.0f} a second, {resident()}", flush=True)

        for start in range(0, traces, 500):
            async with anyio.create_task_group() as group:
                for number in range(start, min(start + 500, traces)):
                    group.start_soon(one, number)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--engine-pid", type=int, required=True)
    parser.add_argument("--traces", type=at_least(1), default=20_000)
    parser.add_argument("--plain", action="store_true", help="no blocks at all, for comparison")
    options = parser.parse_args()
    anyio.run(soak, options.url, options.engine_pid, options.traces, options.plain)


if __name__ == "__main__":
    main()
