"""Bursts of short traces: when each reaches the engine, and what a trace costs whom.

    python -m benchmarks.bursts [--traces 32] [--bursts 40] [--steered | --layers 16] [--keep-client] [--rest 0.3]

A scripted engine (no model) in the adapter's process puts out one token of each trace as soon as it is started. The
real adapter is a process of its own, as Redis is; the client is this one. All traces of a burst are started at the same
time. With `--steered` each brings two `Steer`s with a vector of 2,048 numbers; with `--layers N` a `Steer` and a
`Probe` for each of N layers, of as many different vectors, 8 KiB each. Each burst has a client of its own unless
`--keep-client`. Medians over the bursts, the first two left out:

- *first*, *last*: from the first call until the engine has the first trace, and the last;
- *submitted*: until the last submission was acknowledged; *ended*: until the last result is there (milliseconds);
- *client*, *adapter*, *redis*: microseconds of CPU for each trace.

With `--rest 0` bursts follow one another at once, and *rate* is what one of each carries, in traces a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import numpy as np

import tracewire
from benchmarks.bus import cpu_s
from benchmarks.processes import at_least, show, start
from benchmarks.scripted import ScriptedEngine, Token, _Outputs, scripted_info
from tests.support.fake_engine import FakeEngine
from tracewire_bus.bus import Bus
from tracewire_bus.process_memory import settle_memory
from tracewire_bus.transport.embedded import EmbeddedServer
from tracewire_bus.wire.codec import schema_text
from tracewire_bus.wire.messages import ModuleInfo
from tracewire_engine.adapter.engine_api import Prepared
from tracewire_engine.adapter.service import Adapter
from tracewire_engine.adapter.trace_run import _NO_DELTAS
from tracewire_engine.launch.adapter_process import LOOP
from tracewire_engine.protocol.messages import FinishRecord, Report

MODEL, HIDDEN, LAYERS = "bursts", 2048, 32


class InstantEngine(FakeEngine):
    """Puts out one token of each request, at once and in this process; notes when each was started."""

    prepare, decode = ScriptedEngine.prepare, ScriptedEngine.decode

    def __init__(self) -> None:
        super().__init__()
        self.started: list[float] = []

    async def start(self, request: str, prepared: Prepared, priority: int) -> _Outputs:
        """Put out its token when whoever started it has gone on."""
        self.started.append(time.perf_counter())
        outputs = _Outputs()
        asyncio.get_running_loop().call_soon(self._put, request, outputs)
        return outputs

    def _put(self, request: str, outputs: _Outputs) -> None:
        outputs.put(Token(request, 5, " word", "length"))
        self.report(Report(time.time(), finishes=[FinishRecord(request, 0, _NO_DELTAS)]))


def adapter(url: str) -> None:
    """The real adapter, in a process as `tracewire engine` has it; a line on standard input asks when traces began."""

    async def main(folder: Path) -> None:
        engine = InstantEngine()
        engine.inputs = folder
        info = scripted_info(MODEL, 1024)
        info.hidden_size, info.layers, info.layer_count, info.schema = HIDDEN, "model.layers", LAYERS, schema_text()
        names = ["", "model", "model.layers", *(f"model.layers.{layer}" for layer in range(LAYERS))]
        info.modules = [ModuleInfo(name, "Module") for name in names]
        settle_memory()
        async with Bus.open(url) as bus, anyio.create_task_group() as group:
            group.start_soon(Adapter(engine, info, bus).run)
            print(json.dumps([]), flush=True)
            while await anyio.to_thread.run_sync(sys.stdin.readline):
                print(json.dumps(engine.started), flush=True)
                engine.started.clear()
            group.cancel_scope.cancel()

    with TemporaryDirectory(dir="/dev/shm") as folder:
        anyio.run(main, Path(folder), backend_options=LOOP)


async def burst(client: tracewire.Client, traces: int, interventions: list[Any]) -> dict[str, float]:
    """One burst; what this side saw of it, and when it began."""
    model = await client.models.get(MODEL, timeout=20)
    marks = {"began": time.perf_counter()}

    async def one(number: int) -> None:
        token_ids = [1 + (7 * number + 3 * index) % 200 for index in range(16)]
        async with client.trace(model, token_ids, interventions=interventions, max_tokens=8) as trace:
            marks["submitted"] = time.perf_counter()
            async for _ in trace:
                pass
            await trace.result()

    async with anyio.create_task_group() as group:
        for number in range(traces):
            group.start_soon(one, number)
    marks["ended"] = time.perf_counter()
    return marks


def declared(options: argparse.Namespace) -> list[Any]:
    """What each trace declares."""
    if options.layers:
        rows = np.random.default_rng(0).standard_normal((2 * options.layers, HIDDEN)).astype(np.float32)
        return [
            one
            for layer in range(options.layers)
            for one in (
                tracewire.Steer(f"model.layers.{layer}", rows[2 * layer], scale=0.1),
                tracewire.Probe(f"p{layer}", f"model.layers.{layer}", weight=rows[2 * layer + 1]),
            )
        ]
    vector = np.linspace(-1, 1, HIDDEN, dtype=np.float32)
    return [tracewire.Steer(f"model.layers.{layer}", vector, scale=0.1) for layer in (1, 2)] if options.steered else []


async def measure(options: argparse.Namespace) -> dict[str, float]:
    """All bursts; the figures."""
    interventions = declared(options)
    found: list[dict[str, float]] = []
    async with EmbeddedServer.start() as server:
        process = start("benchmarks.bursts", "--adapter", server.url)

        def started() -> list[float]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            times: list[float] = json.loads(process.stdout.readline())
            return times

        try:
            async with tracewire.connect(server.url) as kept:
                began = time.perf_counter()
                for _ in range(options.bursts):
                    await anyio.sleep(options.rest)
                    used = cpu_s(process.pid), cpu_s(server.pid)
                    async with nullcontext(kept) if options.keep_client else tracewire.connect(server.url) as client:
                        own = time.process_time()
                        marks = await burst(client, options.traces, interventions)
                    own = time.process_time() - own
                    cpu = cpu_s(process.pid) - used[0], cpu_s(server.pid) - used[1]
                    times = started()
                    if len(times) != options.traces:
                        raise RuntimeError(f"the engine started {len(times)} of {options.traces} traces")
                    found.append(
                        {
                            "first": 1e3 * (min(times) - marks["began"]),
                            "last": 1e3 * (max(times) - marks["began"]),
                            "submitted": 1e3 * (marks["submitted"] - marks["began"]),
                            "ended": 1e3 * (marks["ended"] - marks["began"]),
                            "client": 1e6 * own / options.traces,
                            "adapter": 1e6 * cpu[0] / options.traces,
                            "redis": 1e6 * cpu[1] / options.traces,
                        }
                    )
                rate = options.bursts * options.traces / (time.perf_counter() - began)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(20)
    figures = {name: round(median(one[name] for one in found[2:]), 1) for name in found[0]}
    return figures if options.rest else {**figures, "rate": round(rate, 1)}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=at_least(1), default=32, help="of each burst")
    parser.add_argument("--bursts", type=at_least(3), default=40, help="the first two are left out of the figures")
    parser.add_argument("--steered", action="store_true", help="each trace brings two vectors")
    parser.add_argument("--layers", type=at_least(1), metavar="N", help="each trace steers and probes N layers")
    parser.add_argument("--keep-client", action="store_true", help="one client for all bursts")
    parser.add_argument("--rest", type=float, default=0.3, metavar="SECONDS", help="before each burst")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--adapter", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.adapter:
        adapter(options.adapter)
        return
    figures = anyio.run(measure, options)
    show(figures, as_json=options.json)


if __name__ == "__main__":
    main()
