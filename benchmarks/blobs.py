"""What a 100 MB save that passes does to everybody else, in one run.

    python -m benchmarks.blobs [--megabytes 100] [--traces 8] [--tokens 300] [--rounds 5] [--redis-first] [--inline]
    [--json]

Some traces run with a small save a step, and their subscriber measures. Meanwhile, in another process, a further trace
is submitted once a round, in four ways that take turns:

- *alone*: none is;
- *made*: its block makes an array of that size and saves one number of it: what the block itself costs;
- *saved*: it saves the array, which nobody loads;
- *loaded*: and its subscriber, that other process, loads it.

`latency_ms` is from the end of a step to the measuring subscriber's hands; `gap_ms` the time from one step of a trace
to the next, by the worker's clock: a model that stalls shows there (of outputs of one token: where the bus lags, vLLM
merges). `ping_ms` is Redis's answer to a PING every few milliseconds, from the measuring process. `to_alone` has the
ratios. Each quantile is taken of every round by itself, and its median over the rounds is what counts: a machine shared
with others stands still now and then. The first round is a warm-up.

On fewer cores than busy processes the kernel may leave Redis waiting for a core for a second, ready to run, beside
vLLM's processes, which spin. `--redis-first` gives it real-time priority (as root), as good as a core of its own: what
then remains is what blobs do. `--inline` sends large arrays in the events, as if there were no blobs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import psutil

import tracewire
from benchmarks.overhead import ROOT, start_engine
from benchmarks.processes import at_least, start
from benchmarks.quantiles import quantiles
from tracewire_bus.bus import Bus
from tracewire_bus.transport.embedded import EmbeddedServer

WAYS = ("alone", "made", "saved", "loaded")


@tracewire.intervention
def small(model, tracer, live):
    """The last position of a layer, each step."""
    kept = [].save()
    for _ in tracer.iter[:]:
        kept.append(model.model.layers[2].output[0][-1].clone())


@tracewire.intervention
def large(model, tracer, live, nbytes, keep):
    """A whole prompt's activation, repeated up to a size."""
    hidden = model.model.layers[2].output[0]
    array = hidden.repeat(nbytes // hidden.nbytes, 1)
    number = array[0, 0].item().save()
    if keep:
        array = array.save()


async def one_large(client: tracewire.Client, way: str, nbytes: int) -> float:
    """Submit it, and load what it saved if the way says so; returns the seconds it took."""
    began = time.perf_counter()
    block = large(nbytes=nbytes, keep=way != "made")
    async with client.trace("bench", list(range(10, 138)), block, max_tokens=1) as trace:
        result = await trace.result()
    assert ("array" in result.saves) == (way != "made"), f"{way}: saved {sorted(result.saves)}"
    if way == "loaded":
        saved = result.saves["array"]
        array = await saved.load() if isinstance(saved, tracewire.ArrayRef) else saved
        assert 0.9 * nbytes < array.nbytes <= nbytes, array.nbytes
    return time.perf_counter() - began


async def serve(url: str, nbytes: int) -> None:
    """The other process: one large trace for every line with a way; answers with its seconds."""
    async with tracewire.connect(url) as client:
        await client.models.get("bench", timeout=60)
        print("ready", flush=True)
        while way := (await anyio.to_thread.run_sync(sys.stdin.readline)).strip():
            seconds = await one_large(client, way, nbytes)
            print(json.dumps(seconds), flush=True)


def put_redis_first() -> None:
    """Give the Redis that this process started real-time priority."""
    for child in psutil.Process().children(recursive=True):
        if "redis-server" in child.name():
            for thread in child.threads():
                os.sched_setscheduler(thread.id, os.SCHED_RR, os.sched_param(1))


def start_other(url: str, megabytes: int) -> subprocess.Popen[str]:
    """The other process, when it is ready."""
    return start("benchmarks.blobs", "--serve", url, "--megabytes", str(megabytes))


async def observed(
    client: tracewire.Client, bus: Bus, other: subprocess.Popen[str], way: str, options: argparse.Namespace
) -> dict[str, Any]:
    """One round of the small traces, in whose middle the large one is submitted."""
    latencies: list[float] = []
    gaps: list[float] = []
    pings: list[float] = []
    seconds: list[float] = []
    ends: list[float] = []
    done = anyio.Event()
    running = anyio.Event()
    began = time.perf_counter()

    async def follow(number: int) -> None:
        before = 0.0
        token_ids = list(range(10 + number, 26 + number))
        async with client.trace(
            "bench", token_ids, small(), max_tokens=options.tokens, temperature=0.0, ignore_eos=True
        ) as trace:
            count = 0
            async for output in trace:
                assert isinstance(output, tracewire.Output)
                latencies.append(time.time() - output.time)
                if before and len(output.token_ids) == 1:
                    gaps.append(output.time - before)
                before = output.time
                count += len(output.token_ids)
                if count >= options.tokens // 10:
                    running.set()
        assert count == options.tokens, f"a trace put out {count} of {options.tokens} tokens"
        ends.append(time.perf_counter())

    async def ping() -> None:
        while not done.is_set():
            asked = time.perf_counter()
            await bus.command("PING")
            pings.append(time.perf_counter() - asked)
            await anyio.sleep(0.003)

    async def ask() -> None:
        await running.wait()
        if way != "alone":
            assert other.stdin is not None
            assert other.stdout is not None
            other.stdin.write(way + "\n")
            other.stdin.flush()
            seconds.append(json.loads(await anyio.to_thread.run_sync(other.stdout.readline)))

    async with anyio.create_task_group() as group:
        group.start_soon(ping)
        async with anyio.create_task_group() as traces:
            traces.start_soon(ask)
            for number in range(options.traces):
                traces.start_soon(follow, number)
        done.set()
    return {
        "latencies": latencies,
        "gaps": gaps,
        "pings": pings,
        "speed": options.traces * options.tokens / (max(ends) - began),
        "seconds": seconds,
    }


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All ways, in alternating rounds; returns the figures."""
    rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    engine_options: dict[str, Any] = {"max_model_len": 2048, "kv_cache_memory_bytes": 512 * 1024 * 1024}
    if options.inline:
        engine_options["blob_threshold"] = 0
    setup = {"model": str(options.model), "engine": engine_options, "taps": []}
    async with EmbeddedServer.start() as server:
        if options.redis_first:
            put_redis_first()
        engine = await anyio.to_thread.run_sync(start_engine, server.url, setup, folder)
        nbytes = options.megabytes * 1024 * 1024
        other = await anyio.to_thread.run_sync(start_other, server.url, options.megabytes)
        assert other.stdin is not None
        try:
            async with tracewire.connect(server.url) as client, Bus.open(server.url) as bus:
                await client.models.get("bench", timeout=60)
                for number in range(options.rounds + 1):
                    # Each way comes first in turn.
                    for way in WAYS[number % 4 :] + WAYS[: number % 4]:
                        await anyio.sleep(1)
                        rounds[way].append(await observed(client, bus, other, way, options))
                    said = {way: round(found[-1]["speed"]) for way, found in rounds.items()}
                    print(f"round {number}{' (warm-up)' if not number else ''}: {said}", file=sys.stderr)
        finally:
            other.stdin.close()
            other.wait(60)
            engine.terminate()
            engine.wait(60)
    return summary(rounds, options, nbytes)


def summary(rounds: dict[str, list[dict[str, Any]]], options: argparse.Namespace, nbytes: int) -> dict[str, Any]:
    """Medians of all rounds but the first, and their ratios to the way without a large trace."""
    figures: dict[str, Any] = {"bytes": nbytes, "traces": options.traces, "tokens": options.tokens}
    figures["rounds"] = options.rounds
    for way, found in rounds.items():
        kept = found[1:]
        figures[way] = {
            "tokens_per_s": round(median(one["speed"] for one in kept), 1),
            "latency_ms": medians([one["latencies"] for one in kept]),
            "gap_ms": medians([one["gaps"] for one in kept]),
            "ping_ms": medians([one["pings"] for one in kept]),
        }
        if way != "alone":
            figures[way]["large_trace_s"] = round(median(one["seconds"][0] for one in kept), 3)
    alone = figures["alone"]
    figures["to_alone"] = {
        way: {
            "tokens_per_s": round(figures[way]["tokens_per_s"] / alone["tokens_per_s"], 3),
            **{
                f"{name}_{share}": round(figures[way][name][share] / max(alone[name][share], 1e-9), 2)
                for name in ("latency_ms", "gap_ms", "ping_ms")
                for share in ("p50", "p99", "max")
            },
        }
        for way in WAYS[1:]
    }
    return figures


def medians(rounds: list[list[float]]) -> dict[str, float]:
    """The median over the rounds of each quantile, and of the greatest value, in milliseconds."""
    found = [{**quantiles(one), "max": round(1000 * max(one), 2)} for one in rounds]
    return {share: round(median(one[share] for one in found), 2) for share in found[0]}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "demo_model" / "model")
    parser.add_argument("--megabytes", type=at_least(1), default=100)
    parser.add_argument("--traces", type=at_least(1), default=8)
    parser.add_argument("--tokens", type=at_least(10), default=300)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--redis-first", action="store_true", help="give Redis real-time priority (as root)")
    parser.add_argument("--inline", action="store_true", help="the same without blobs: large arrays in the events")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--serve", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        anyio.run(serve, options.serve, options.megabytes * 1024 * 1024)
        return
    with tempfile.TemporaryDirectory() as temporary:
        figures = anyio.run(measure, options, Path(temporary))
    for name, value in figures.items():
        print(f"{name:12} {value}", file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
