"""Many short traces on a real engine, one after another: does anything grow?

    tracewire redis &                                # prints its URL
    tracewire engine demo --url URL --kv-cache-memory-bytes 67108864 &
    python -m benchmarks.soak --url URL --engine-pid PID [--traces 20000]

Blocks of several kinds take turns (lists, dicts, a stop, an error, none at all), 64 at once, five tokens each. Prints
the resident memory of every process in MiB as it goes, and the rate.

    python -m benchmarks.soak --url URL --engine-pid PID --seconds 600

For so many seconds, 16 traces at once of 400 tokens instead, each of which reads all layers at each token. One client
folds and verifies every trace; another subscribes to every trace, reads one output and then no more. Prints the same
ten times.
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


class Memory:
    """The resident memory of an engine's processes and of this one."""

    def __init__(self, pid: int) -> None:
        self._processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        self._names = {process.pid: process.name() for process in self._processes}

    def resident(self) -> dict[str, float]:
        """MiB by process."""
        found = {"client": psutil.Process().memory_info().rss}
        for process in self._processes:
            # The adapter and a helper of Python's share a name.
            name = self._names[process.pid]
            found[name] = found.get(name, 0) + process.memory_info().rss
        return {name: round(size / 2**20, 1) for name, size in found.items()}


async def volume(url: str, pid: int, seconds: float) -> None:
    """Read all layers of 16 traces at once, for so many seconds, beside a client that stops reading."""
    memory, began, done, bytes_read = Memory(pid), time.monotonic(), 0, 0
    probe = tracewire.Probe("hs", "residual(*)")

    async with tracewire.connect(url) as client, tracewire.connect(url) as stalled:
        model = await client.models.get("demo", timeout=60)

        async def stops_reading(trace_id: str) -> None:
            async for event in stalled.subscribe(trace_id):
                if isinstance(event, tracewire.Output):
                    await anyio.sleep_forever()

        async def keep_on(number: int) -> None:
            nonlocal done, bytes_read
            while time.monotonic() < began + seconds:
                sampling = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.0}
                async with (
                    anyio.create_task_group() as group,
                    client.trace(model, [1 + number, 2, 3, 4], interventions=[probe], **sampling) as trace,
                ):
                    group.start_soon(stops_reading, trace.id)
                    async for output in trace.outputs():
                        bytes_read += sum(array.nbytes for array in output.delta.get("hs", ()))
                    # Verifies the fold.
                    await trace.result()
                    group.cancel_scope.cancel()
                done += 1

        async with anyio.create_task_group() as group:
            for number in range(16):
                group.start_soon(keep_on, number)
            for part in range(1, 11):
                await anyio.sleep(max(0.0, began + seconds * part / 10 - time.monotonic()))
                rate = bytes_read / 1e6 / (time.monotonic() - began)
                print(f"{done:6} traces, {rate:5.1f} MB a second, {memory.resident()}", flush=True)


async def soak(url: str, pid: int, traces: int, plain: bool) -> None:
    """Run the traces."""
    memory = Memory(pid)
    limiter = anyio.CapacityLimiter(64)
    done = 0
    began = time.monotonic()

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
                print(
                    f"{done:6} traces, {done / (time.monotonic() - began):4.0f} a second, {memory.resident()}",
                    flush=True,
                )

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
    parser.add_argument("--seconds", type=float, help="traces that read all layers, for so long, instead of short ones")
    options = parser.parse_args()
    if options.seconds is not None:
        anyio.run(volume, options.url, options.engine_pid, options.seconds)
        return
    anyio.run(soak, options.url, options.engine_pid, options.traces, options.plain)


if __name__ == "__main__":
    main()
