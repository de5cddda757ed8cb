"""How soon a change of a live parameter holds, in steps and milliseconds, beside what a step itself takes.

    python -m benchmarks.steering [--model FOLDER] [--concurrency 1 16 64] [--steers 12] [--form block|declared]
    [--redis-first] [--json] [any option of `tracewire engine`]

One engine serves N traces at once, each of which is steered again and again at random tokens by the service that reads
it, all in one process. For each steer:

- *steps* is the index of the first token that it holds for, less that of the newest token that the caller had seen: 1
  is the very next one;
- *ms* is from the call of `steer()` until that token is in the caller's hands;
- *engine steps* counts the steps that the worker has begun since the adapter read the change, until it holds: 1 is
  the very next step to begin.

`step_ms` is the median time between two outputs of a trace in the same run: what a decode step takes there. On fewer
cores than busy processes Redis may be left waiting for one; `--redis-first` is as good as a core of its own
(`benchmarks/blobs.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import anyio.to_thread
import numpy as np

import tracewire
from benchmarks.blobs import put_redis_first
from benchmarks.processes import at_least
from benchmarks.quantiles import quantile
from tracewire_bus.transport.embedded import EmbeddedServer

ROOT = Path(__file__).resolve().parents[1]


@tracewire.intervention
def steered(model, tracer, live, vector):
    """Adds the live `alpha` times a vector."""
    for step in tracer.iter[:]:
        alpha = live.alpha
        model.model.layers[2].output[0].add_(alpha * vector)


async def one(
    client: tracewire.Client, model: tracewire.Model, form: str, number: int, steers: int, found: dict[str, list[float]]
) -> None:
    """A trace that is steered at random tokens."""
    generator = random.Random(number)
    vector = np.linspace(-1, 1, model.info.hidden_size, dtype=np.float32) / 100
    what: dict[str, Any] = {"block": steered(vector=vector)}
    if form == "declared":
        what = {"interventions": [tracewire.Steer("residual(2)", vector, scale=tracewire.Live("alpha"))]}
    marks = sorted(generator.sample(range(8, 12 * steers), steers))
    index, last = -1, 0.0
    async with (
        client.trace(
            model, [1 + number % 200] * 16, live={"alpha": 0.0}, max_tokens=16 * steers, ignore_eos=True, **what
        ) as trace,
        anyio.create_task_group() as group,
    ):

        async def steer(seen: int, began: float) -> None:
            try:
                version = await trace.steer(alpha=began)
            except tracewire.TraceEnded:
                found["late"].append(1)
            else:
                sent[version] = seen, began

        sent: dict[int, tuple[int, float]] = {}
        told: dict[int, int] = {}
        async for item in trace:
            now = time.perf_counter()
            if isinstance(item, tracewire.Steered):
                if item.first:
                    told.update(dict.fromkeys([change.version for change in item.changes], item.first[0].index))
                continue
            assert isinstance(item, tracewire.Output)
            if last and len(item.token_ids) == 1:
                found["step"].append(now - last)
            last, index = now, item.index + len(item.token_ids) - 1
            for version in [version for version in told if version in sent and told[version] <= index]:
                seen, began = sent.pop(version)
                found["steps"].append(told.pop(version) - seen)
                found["ms"].append((now - began) * 1e3)
            while marks and index >= marks[0]:
                marks.pop(0)
                group.start_soon(steer, index, time.perf_counter())


async def measure(url: str, options: argparse.Namespace, notes: Path) -> list[dict[str, Any]]:
    """All concurrencies in turn."""
    results = []
    async with tracewire.connect(url, lease_ttl=60) as client:
        model = await client.models.get("model", timeout=300)
        for number in options.concurrency:
            found: dict[str, list[float]] = {"steps": [], "ms": [], "step": [], "late": []}
            for warm in (True, False):
                for values in found.values():
                    values.clear()
                await anyio.Path(notes).write_text("")
                async with anyio.create_task_group() as group:
                    for each in range(number):
                        group.start_soon(one, client, model, options.form, each, 2 if warm else options.steers, found)
            asked = number * options.steers
            if not found["steps"] or len(found["steps"]) + len(found["late"]) > asked:
                raise RuntimeError(f"of {asked} changes, {len(found['steps'])} were seen to hold")
            engine = [float(line) for line in (await anyio.Path(notes).read_text()).split()]
            results.append(
                {
                    "n": number,
                    "asked": asked,
                    "steers": len(found["steps"]),
                    "too_late": len(found["late"]),
                    "steps_p50": quantile(found["steps"], 0.5),
                    "steps_p99": quantile(found["steps"], 0.99),
                    "ms_p50": round(quantile(found["ms"], 0.5), 2),
                    "ms_p99": round(quantile(found["ms"], 0.99), 2),
                    "step_ms": round(median(found["step"]) * 1e3, 2),
                    "engine_steps_p50": quantile(engine, 0.5),
                    "engine_steps_p99": quantile(engine, 0.99),
                    "engine_steps_max": max(engine),
                }
            )
    return results


async def run(options: argparse.Namespace, log: Path, notes: Path) -> list[dict[str, Any]]:
    """A Redis, an engine, and all concurrencies in turn."""
    async with EmbeddedServer.start() as server:
        if options.redis_first:
            put_redis_first()
        process = await anyio.to_thread.run_sync(start_engine, server.url, options, log, notes)
        try:
            return await measure(server.url, options, notes)
        finally:
            process.send_signal(signal.SIGTERM)
            await anyio.to_thread.run_sync(process.wait)


def start_engine(url: str, options: argparse.Namespace, log: Path, notes: Path) -> subprocess.Popen[bytes]:
    """`engine`, in a process of its own."""
    arguments = ["--url", url, "--name", "model", options.model]
    arguments += options.engine
    command = [sys.executable, "-m", "benchmarks.steering", "--engine", str(notes), *arguments]
    with log.open("wb") as out:
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=out)


def engine(arguments: list[str], notes: str) -> int:
    """An engine whose traces note how many steps after it was read each change came to hold."""
    from tracewire_engine.adapter import intake
    from tracewire_engine.adapter.trace_run import TraceRun
    from tracewire_engine.launch import cli
    from tracewire_engine.launch.supervisor import SUPERVISOR_PID
    from tracewire_engine.protocol.messages import Applied

    class Watched(TraceRun):
        """Notes what the workers say of each change."""

        def _applied(self, applied: Applied) -> None:
            super()._applied(applied)
            if applied.first:
                with Path(notes).open("a") as out:
                    out.write(f"{applied.steps}\n")

    intake.TraceRun = Watched
    # This process is the adapter itself: a supervisor would start one that knows nothing of `Watched`.
    os.environ[SUPERVISOR_PID] = str(os.getppid())
    return cli.main(arguments)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--concurrency", type=at_least(1), nargs="+", default=[1, 16, 64])
    parser.add_argument("--steers", type=at_least(1), default=12, help="of each trace")
    parser.add_argument("--form", choices=["block", "declared"], default="block")
    parser.add_argument("--redis-first", action="store_true")
    parser.add_argument("--json", action="store_true")
    options, options.engine = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        notes.write_text("")

        results = anyio.run(run, options, Path(folder) / "log", notes)
    if options.json:
        print(json.dumps({"form": options.form, "concurrency": results}))
        return
    for result in results:
        print("  ".join(f"{name}={value:g}" for name, value in result.items()))


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if sys.argv[1:2] == ["--engine"]:
        sys.exit(engine(sys.argv[3:], sys.argv[2]))
    main()
