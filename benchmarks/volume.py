"""How the cost of watching grows with volume: requests, layers, and the way in which values are read.

    python -m benchmarks.volume [--model FOLDER] [--requests 1 8 32 128 256 512] [--layers 1 4 all]
        [--ways block declared steered none] [--tokens 128] [--rounds 8] [--bulk FOLDER] [--quick] [--json]
        [--adapters N] [--subscribers N] [--blocks host] [--model-runner second]

For each number of requests and of layers, plain vLLM and each way take turns on engines that stay up:

- *block*: a block appends the last position of each layer to a list, in every step; with `--blocks host`, in a process
  of its own;
- *declared*: a `Probe` of each layer reads the same;
- *steered*: each layer has a probe with a vector, and a vector is added to it;
- *none*: requests without interventions, over the bus.

A subscriber in a process of its own submits the requests, and receives, folds and verifies everything; with
`--subscribers N`, each of N does so for its share. `to_plain` is the median over the rounds of tokens a second,
relative to the plain round before it, to the last verified result. `made_to_plain` is the same from the first step to
the last one. `mb_s` is how many megabytes of saved values the subscribers got a second. `p50_ms`, `p95_ms` and `p99_ms`
are from the end of the step that sampled a token to the subscriber's hands; `growth` is the median of the last quarter
of a round's outputs over that of its second quarter: a latency that grows with the length of the run is above 1.

`raw` is the limit of the same Redis in the same run, in megabytes a second: one process appends entries of so many
bytes to streams, another reads them, neither does anything else.

`--quick` is for two cores: fewer cells, two rounds, few tokens.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import psutil

from benchmarks.overhead import (
    ROOT,
    Role,
    left_by_workers,
    merged,
    on_cores,
    speed_of,
    start_engine,
    tracewire_round,
    turn,
)
from benchmarks.processes import at_least, show
from benchmarks.quantiles import quantiles
from tracewire_bus.bus import Bus
from tracewire_bus.transport.embedded import EmbeddedServer

#: What a workload saves, by way.
SAVES = {"block": "last", "declared": "declared:last", "steered": "steered", "none": "none"}
#: Bytes of the entries by which Redis's limit is measured.
ENTRIES = (512, 4096, 65536)
#: How many bytes of a stream are kept while that limit is measured.
KEPT_BYTES = 64 * 1024 * 1024


# --- the limit of Redis -----------------------------------------------------------------------------------------------


def write_entries(url: str, size: int, count: int) -> None:
    """Append `count` entries of `size` bytes to 32 streams, in pipelines of about a megabyte."""
    import redis

    client = redis.Redis.from_url(url)
    data, keep = os.urandom(size), KEPT_BYTES // size // 32 + 1
    together = max(1, min(512, (1 << 20) // size))
    for start in range(0, count, together):
        pipeline = client.pipeline(transaction=False)
        for number in range(start, min(count, start + together)):
            pipeline.xadd(f"raw:{number % 32}", {"d": data}, maxlen=keep, approximate=True)
        pipeline.execute()


def read_entries(url: str, size: int, count: int) -> None:
    """Read the entries as they come, and print how many megabytes a second came."""
    import redis

    client = redis.Redis.from_url(url)
    client.delete(*(f"raw:{number}" for number in range(32)))
    last: dict[bytes, bytes] = {f"raw:{number}".encode(): b"0" for number in range(32)}
    print("ready", flush=True)
    began, got = 0.0, 0
    while got < count:
        for key, entries in client.xread(last, count=64, block=5000) or ():  # type: ignore[arg-type]
            began = began or time.perf_counter()
            got += len(entries)
            last[key] = entries[-1][0]
    print(json.dumps({"mb_s": got * size / 1e6 / (time.perf_counter() - began)}), flush=True)


def raw_limit(url: str, size: int, seconds: float) -> float:
    """Megabytes a second from one writer through Redis to one reader."""
    # About as many as a second brings: 100,000 small ones, or half a gigabyte.
    count = int(seconds * min(60_000, 4e8 / size))

    def started(role: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.volume", "--role", role, url, str(size), str(count)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    reader = started("read")
    assert reader.stdout is not None
    reader.stdout.readline()
    writer = started("write")
    found: dict[str, float] = json.loads(reader.stdout.readline())
    if writer.wait(60) or reader.wait(60):
        raise RuntimeError("the limit of Redis could not be measured")
    return found["mb_s"]


# --- cells ------------------------------------------------------------------------------------------------------------


@contextmanager
def profiled(folder: Path | None, name: str, engine: int) -> Iterator[None]:
    """Have py-spy record the engine's processes and this one meanwhile, one file of stacks and samples for each."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    below = {process.pid: process.name() for process in psutil.Process(engine).children(recursive=True)}
    recorders = [
        subprocess.Popen(
            [
                "py-spy",
                "record",
                "-p",
                str(pid),
                "-r",
                "200",
                "-d",
                "600",
                "-f",
                "raw",
                "-o",
                folder / f"{name}-{pid}-{kind}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for pid, kind in {**below, os.getpid(): "subscriber"}.items()
    ]
    time.sleep(1.5)
    try:
        yield
    finally:
        for recorder in recorders:
            recorder.send_signal(signal.SIGINT)
        for recorder in recorders:
            recorder.wait(60)


def growth(latencies: list[float]) -> float:
    """The median latency of the last quarter of a round's outputs over that of its second quarter."""
    quarter = len(latencies) // 4
    if not quarter:
        return 1.0
    return median(latencies[-quarter:]) / max(1e-9, median(latencies[quarter : 2 * quarter]))


async def watched(url: str, subscribers: list[Role], workload: dict[str, Any], cores: set[int]) -> dict[str, Any]:
    """A round over the bus: by these subscribers, or if there are none, in this process."""
    with on_cores(cores):
        if not subscribers:
            return await tracewire_round(url, workload)
        answers: list[dict[str, Any]] = []

        async def one(place: int) -> None:
            share = {**workload, "share": (place, len(subscribers))}
            answers.append(await anyio.to_thread.run_sync(subscribers[place].run, share))

        async with anyio.create_task_group() as group:
            for place in range(min(len(subscribers), workload["concurrency"])):
                group.start_soon(one, place)
        return merged(answers)


async def cell(
    plain: Role,
    subscribers: list[Role],
    url: str,
    engine: int,
    cores: set[int],
    workload: dict[str, Any],
    ways: list[str],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """The figures of each way with so many requests and layers."""
    wanted = workload["concurrency"] * workload["tokens"]
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    base: list[dict[str, Any]] = []
    for number in range(options.rounds + 1):
        async with turn(options.turns):
            await anyio.sleep(options.settle)
            first = await anyio.to_thread.run_sync(plain.run, {**workload, "saves": "none"})
            for way in ways:
                await anyio.sleep(options.settle)
                answer = await watched(url, subscribers, {**workload, "saves": SAVES[way]}, cores)
                if answer["tokens"] != wanted:
                    raise RuntimeError(f"{way}: {answer['tokens']} of {wanted} tokens")
                if bool(answer["raw"]) == (way == "none"):
                    raise RuntimeError(f"{way}: {answer['raw']} bytes were saved")
                async with Bus.open(url) as bus:
                    # Redis would have gigabytes of them after a few rounds.
                    await bus.finished.drop_beyond(1, 0)
                # The first is a warm-up.
                if number:
                    found[way].append(answer)
            if number:
                base.append(first)
    for way in ways if options.profile else ():
        name = f"{way}-{workload['concurrency']}-{len(workload['layers'])}"
        async with turn(options.turns):
            with profiled(options.profile, name, engine):
                longer = {**workload, "saves": SAVES[way], "tokens": 3 * workload["tokens"]}
                await watched(url, subscribers, longer, cores)
            async with Bus.open(url) as bus:
                await bus.finished.drop_beyond(1, 0)
    return [figures(way, workload, rounds, base) for way, rounds in found.items()]


def figures(
    way: str, workload: dict[str, Any], rounds: list[dict[str, Any]], base: list[dict[str, Any]]
) -> dict[str, Any]:
    """What one way came to in these rounds, each beside the plain one in `base`."""
    ratios = [speed_of(one) / speed_of(first) for one, first in zip(rounds, base, strict=True)]
    made = [
        1000 * one["tokens"] / one["marks_ms"]["generating"] / speed_of(first)
        for one, first in zip(rounds, base, strict=True)
    ]
    latencies = quantiles([latency for one in rounds for latency in one["latencies"]])
    return {
        "way": way,
        "requests": workload["concurrency"],
        "layers": len(workload["layers"]),
        "plain": round(median(map(speed_of, base)), 1),
        "to_plain": round(median(ratios), 3),
        "made_to_plain": round(median(made), 3),
        "mb_s": round(median(one["raw"] / 1e6 / one["seconds"] for one in rounds), 2),
        "growth": round(median(growth(one["latencies"]) for one in rounds), 2),
        **{f"{name}_ms": value for name, value in latencies.items()},
    }


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All cells, and the limit of Redis before and after them."""
    config = json.loads((options.model / "config.json").read_text())
    depth: int = config["num_hidden_layers"]
    setup: dict[str, Any] = {"model": str(options.model), "engine": {"max_model_len": 2048}, "taps": options.tap}
    if options.dummy:
        setup["engine"] |= {"load_format": "dummy", "gpu_memory_utilization": 0.1}
    setup["arguments"] = [] if options.adapters is None else ["--adapters", str(options.adapters)]
    setup["arguments"] += ["--blocks", options.blocks, "--model-runner", options.model_runner]
    if options.bulk is not None:
        # The engine's budget of files holds a round of 256 requests at all layers.
        setup["arguments"] += ["--bulk", str(options.bulk), "--bulk-bytes", str(8 << 30), "--retention", "1"]
    setup["engine"]["kv_cache_memory_bytes"] = (8192 if options.dummy else 512) * 1024 * 1024
    # vLLM's default on a CPU is fewer.
    setup["engine"]["max_num_seqs"] = max(options.requests)
    for option in options.engine:
        name, _, value = option.partition("=")
        setup["engine"][name] = int(value) if value.isdigit() else value
    counts = dict.fromkeys(min(depth, depth if count == "all" else int(count)) for count in options.layers)
    cells: list[dict[str, Any]] = []
    raw: dict[int, list[float]] = {size: [] for size in ENTRIES}
    engines: list[subprocess.Popen[str]] = []
    roles: list[Role] = []
    subscribers: list[Role] = []
    async with EmbeddedServer.start() as server:

        async def start_ours() -> None:
            engines.append(await anyio.to_thread.run_sync(start_engine, server.url, setup, folder))

        async def start_plain() -> None:
            roles.append(await anyio.to_thread.run_sync(Role, "plain", {**setup, "eager": False}, folder, "plain"))

        try:
            async with turn(options.turns, fcntl.LOCK_SH), anyio.create_task_group() as group:
                if options.at_once:
                    group.start_soon(start_ours)
                    group.start_soon(start_plain)
                else:
                    await start_ours()
                    await start_plain()
            if options.subscribers > 1:
                given = {"url": server.url}
                subscribers += [
                    Role("subscriber", given, folder, f"subscriber-{number}") for number in range(options.subscribers)
                ]
            cores = left_by_workers(engines[0].pid)
            for thread in psutil.Process(server.pid).threads():
                os.sched_setaffinity(thread.id, cores)
            for last in (False, True):
                async with turn(options.turns):
                    for size in ENTRIES:
                        raw[size].append(await anyio.to_thread.run_sync(raw_limit, server.url, size, options.seconds))
                if last:
                    break
                for requests in options.requests:
                    for layers in counts:
                        chosen = [depth // 2] if layers == 1 else list(range(depth - layers, depth))
                        workload = {"layers": chosen, "prompt_tokens": 16}
                        workload |= {"concurrency": requests, "tokens": options.tokens}
                        # Requests without interventions have no layers.
                        ways = [way for way in options.ways if way != "none" or layers == min(counts)]
                        cells += await cell(
                            *(roles[0], subscribers, server.url, engines[0].pid, cores, workload, ways, options)
                        )
                        for one in cells[-len(ways) :]:
                            print(json.dumps(one), file=sys.stderr, flush=True)
        finally:
            for engine in engines:
                engine.terminate()
            for role in [*roles, *subscribers]:
                role.stop()
            for engine in engines:
                try:
                    engine.wait(60)
                except subprocess.TimeoutExpired:
                    engine.kill()
    return {
        "model": options.model.name,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "adapters": options.adapters,
        "blocks": options.blocks,
        "model_runner": options.model_runner,
        "subscribers": options.subscribers,
        "cells": cells,
        "raw": [{"bytes": size, "mb_s": round(median(found), 1)} for size, found in raw.items()],
    }


QUICK = {"requests": [1, 8, 32], "layers": ["1", "all"], "rounds": 2, "tokens": 48, "settle": 1.0, "seconds": 1.0}


def main() -> None:
    """Run from the command line."""
    if sys.argv[1:2] == ["--role"]:
        role, url, size, count = sys.argv[2:]
        {"read": read_entries, "write": write_entries}[role](url, int(size), int(count))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "demo_model" / "model")
    parser.add_argument("--requests", type=at_least(1), nargs="+", default=[1, 8, 32, 128, 256, 512])
    parser.add_argument("--layers", nargs="+", default=["1", "4", "all"], metavar="N|all")
    parser.add_argument("--ways", nargs="+", choices=list(SAVES), default=list(SAVES))
    parser.add_argument("--tokens", type=at_least(1), default=128, help="of each request")
    parser.add_argument("--rounds", type=at_least(1), default=8, help="of each cell, behind one to warm up")
    parser.add_argument("--settle", type=float, default=1.5, metavar="SECONDS", help="between two ways")
    parser.add_argument("--seconds", type=float, default=2.0, help="for which Redis's limit is measured, about")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=VALUE", help="vLLM's, for all ways")
    parser.add_argument("--tap", action="append", default=[], help="as of `tracewire engine`, for a GPU")
    parser.add_argument(
        "--bulk", type=Path, metavar="FOLDER", help="as of `tracewire engine`: large saves beside Redis"
    )
    parser.add_argument("--adapters", type=at_least(1), help="as of `tracewire engine`")
    parser.add_argument("--blocks", choices=("inline", "host"), default="inline", help="as of `tracewire engine`")
    parser.add_argument(
        "--model-runner",
        choices=("first", "second"),
        default="first",
        help="as of `tracewire engine`; plain vLLM chooses",
    )
    parser.add_argument("--subscribers", type=at_least(1), default=1, help="how many processes submit and follow")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--at-once", action="store_true", help="start both engines together, with cores enough")
    parser.add_argument("--turns", type=Path, metavar="FILE", help="take turns with others that name this file")
    parser.add_argument("--quick", action="store_true", help="fewer cells and rounds, for two cores")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="have py-spy record one more round of each cell")
    parser.add_argument("--logs", type=Path, default=None, help="a folder for the engines' logs")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    if "--quick" in sys.argv:
        parser.set_defaults(**QUICK)
    options = parser.parse_args()
    for count in options.layers:
        if count != "all" and not (count.isdecimal() and int(count)):
            parser.error(f"--layers: expected a number from 1 on, or all, got {count!r}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        figures = anyio.run(measure, options, folder)
    show(figures, as_json=options.json, width=12)


if __name__ == "__main__":
    main()
