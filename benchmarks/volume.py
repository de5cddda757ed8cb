"""How the cost of watching grows with volume: requests, layers, and the way in which values are read.

    python -m benchmarks.volume [--model FOLDER] [--requests 1 8 32 128 256 512] [--layers 1 4 all]
        [--ways block writing directed deciding declared steered none] [--tokens 128] [--rounds 8] [--bulk FOLDER]
        [--quick] [--json] [--adapters N] [--subscribers N] [--blocks host] [--model-runner second] [--wake]
        [--limit SECONDS]

In each round, plain vLLM and each way take turns on engines that stay up, for each number of requests and of layers:

- *block*: a block appends the last position of each layer to a list, in every step; with `--blocks host`, in a process
  of its own;
- *writing*, if it is asked for: a block scales the output of each layer, and appends its last position;
- *directed*, if it is asked for: a block removes a direction from the residual stream of each layer, and appends the
  last position;
- *deciding*, if it is asked for: as *writing*, but only the values say whether an output is scaled, so that the model
  waits for the block in any case;
- *declared*: a `Probe` of each layer reads the same;
- *steered*: each layer has a probe with a vector, and a vector is added to it;
- *none*: requests without interventions, over the bus.

A subscriber in a process of its own submits the requests, and receives, folds and verifies everything; with
`--subscribers N`, each of N does so for its share, by a client that stays up, and all begin together. `to_plain` is the
median over the rounds of tokens a second, relative to the plain round before it, to the last verified result.
`made_to_plain` is the same from the first step to the last one. `mb_s` is how many megabytes of saved values the
subscribers got a second. `p50_ms`, `p95_ms` and `p99_ms` are from the end of the step that sampled a token to the
subscriber's hands; `growth` is the median of the last quarter of a round's outputs over that of its second quarter: a
latency that grows with the length of the run is above 1. `least` and `most` are those of single rounds. `step_ms` and
`plain_step_ms` are from a token of a request to its next one, over eight or more: p50, and p10, which little disturbs.
`marks_ms` and `plain_marks_ms` say where a round's time goes. `core_ms` and `plain_core_ms` are the time of the
engine's threads on cores, in milliseconds for one token of each request (`CoreTime.ms` in `core_time.py` names them).

An engine that waits long for its turn is slower at first. With `--wake`, each turn has a short round of both engines
before those that count. `--limit SECONDS` begins no more rounds when the program has run for so long.

Without `--turnover`, all requests of a round begin at once, and end at once. With `--turnover N`, N requests of varied
lengths follow each other at each of the `requests` places, so the batch changes every few steps, as a service's does.

`raw` is the limit of the same Redis in the same run, in megabytes a second: one process appends entries of so many
bytes to streams, another reads them, neither does anything else.

`--quick` is for two cores: fewer cells, two rounds, few tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import psutil

from benchmarks.overhead import ROOT, turn
from benchmarks.processes import at_least, show
from benchmarks.quantiles import step_ms
from benchmarks.side_by_side import (
    SideBySide,
    add_options,
    described,
    engine_setup,
    figures,
    layer_count,
    measured,
    side_by_side,
)

#: What a workload saves, by way.
SAVES = {"block": "last", "declared": "declared:last", "steered": "steered", "none": "none"} | {
    way: way for way in ("writing", "directed", "deciding")
}
#: Bytes of the entries by which Redis's limit is measured.
ENTRIES = (512, 4096, 65536)
#: How many bytes of a stream are kept while that limit is measured.
KEPT_BYTES = 64 * 1024 * 1024
#: Tokens of each request of a round that only wakes the engines.
WAKE_TOKENS = 8


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


@dataclass
class Cell:
    """One number of requests and of layers.

    Attributes:
        workload: the requests.
        ways: those that take turns at it.
        rounds: by way, what each round came to.
        base: the plain round beside each.
    """

    workload: dict[str, Any]
    ways: list[str]
    rounds: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    base: list[dict[str, Any]] = field(default_factory=list)

    async def run(self, engines: SideBySide, *, wake: bool) -> None:
        """One round of plain vLLM and of each way; with `wake`, behind a short one of each engine."""
        if wake:
            short = {**self.workload, "turnover": 1, "tokens": min(WAKE_TOKENS, self.workload["tokens"])}
            await engines.our_round({**short, "saves": "none"}, saves=False)
            await engines.plain_round(short)
        self.base.append(await engines.plain_round(self.workload))
        for way in self.ways:
            answer = await engines.our_round({**self.workload, "saves": SAVES[way]}, saves=way != "none")
            self.rounds.setdefault(way, []).append(answer)

    def figures(self) -> list[dict[str, Any]]:
        """Of each way, without the first round, which is a warm-up."""
        return [
            {
                "way": way,
                "requests": self.workload["concurrency"],
                "layers": len(self.workload["layers"]),
                **figures(rounds[1:], self.base[1:]),
                "rounds": len(rounds) - 1,
                "growth": round(median(growth(one["latencies"]) for one in rounds[1:]), 2),
                "step_ms": step_ms([gap for one in rounds[1:] for gap in one["gaps"]]),
                "plain_step_ms": step_ms([gap for one in self.base[1:] for gap in one["gaps"]]),
                "marks_ms": medians(one["marks_ms"] for one in rounds[1:]),
                "plain_marks_ms": medians(one["marks_ms"] for one in self.base[1:]),
                "core_ms": medians(one["core_ms"] for one in rounds[1:]),
                "plain_core_ms": medians(one["core_ms"] for one in self.base[1:]),
            }
            for way, rounds in self.rounds.items()
        ]


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """One for each number of requests and of layers."""
    depth = layer_count(options.model)
    counts = dict.fromkeys(min(depth, depth if count == "all" else int(count)) for count in options.layers)
    found = []
    for requests in options.requests:
        for layers in counts:
            chosen = [depth // 2] if layers == 1 else list(range(depth - layers, depth))
            workload = {"layers": chosen, "prompt_tokens": 16, "concurrency": requests, "tokens": options.tokens}
            workload |= {"count_wire": False, "turnover": options.turnover}
            # Requests without interventions have no layers.
            found.append(Cell(workload, [way for way in options.ways if way != "none" or layers == min(counts)]))
    return found


async def record_profiles(
    engines: SideBySide, workload: dict[str, Any], ways: list[str], options: argparse.Namespace
) -> None:
    """Have py-spy record one more round of each way, of three times as many tokens."""
    for way in ways:
        name = f"{way}-{workload['concurrency']}-{len(workload['layers'])}"
        async with turn(options.turns):
            with profiled(options.profile, name, engines.engine):
                longer = {**workload, "saves": SAVES[way], "tokens": 3 * workload["tokens"]}
                await engines.watched(longer)
            await engines.drop_streams()


def medians(marks: Iterable[dict[str, float]]) -> dict[str, float]:
    """Of each mark over the rounds."""
    rounds = list(marks)
    return {name: round(median(one[name] for one in rounds), 2) for name in rounds[0]}


def growth(latencies: list[float]) -> float:
    """The median latency of the last quarter of a round's outputs over that of its second quarter."""
    quarter = len(latencies) // 4
    if not quarter:
        return 1.0
    return median(latencies[-quarter:]) / max(1e-9, median(latencies[quarter : 2 * quarter]))


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All cells, and the limit of Redis before and after them."""
    began = psutil.Process().create_time()
    setup = engine_setup(options)
    setup["arguments"] += ["--blocks", options.blocks]
    if options.bulk is not None:
        # The engine's budget of files holds a round of 256 requests at all layers.
        setup["arguments"] += ["--bulk", str(options.bulk), "--bulk-bytes", str(8 << 30), "--retention", "1"]
    cells = cells_of(options)
    raw: dict[int, list[float]] = {size: [] for size in ENTRIES}

    async def measure_raw(engines: SideBySide) -> None:
        async with turn(options.turns):
            for size in ENTRIES:
                raw[size].append(await anyio.to_thread.run_sync(raw_limit, engines.url, size, options.seconds))

    async with side_by_side(options, setup, folder) as engines:
        await measure_raw(engines)
        for number in range(options.rounds + 1):
            # Two rounds are the least: the first one is left out.
            if number > 1 and options.limit is not None and time.time() - began > options.limit:
                break
            for one in cells:
                async with turn(options.turns):
                    await one.run(engines, wake=options.wake)
        found = [of_way for one in cells for of_way in one.figures()]
        for of_way in found:
            print(json.dumps(of_way), file=sys.stderr, flush=True)
        for one in cells if options.profile else ():
            await record_profiles(engines, one.workload, one.ways, options)
        await measure_raw(engines)
    return {
        **described(options),
        "blocks": options.blocks,
        "turnover": options.turnover,
        "cells": found,
        "raw": [{"bytes": size, "mb_s": round(median(speeds), 1)} for size, speeds in raw.items()],
    }


QUICK = {"requests": [1, 8, 32], "layers": ["1", "all"], "rounds": 2, "tokens": 48, "settle": 1.0, "seconds": 1.0}


def main() -> None:
    """Run from the command line."""
    if sys.argv[1:2] == ["--role"]:
        role, url, size, count = sys.argv[2:]
        {"read": read_entries, "write": write_entries}[role](url, int(size), int(count))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser, requests=[1, 8, 32, 128, 256, 512], rounds=8, settle=1.5)
    parser.add_argument(
        "--turnover", type=at_least(1), default=1, metavar="N", help="each request's place has N, one after the other"
    )
    parser.add_argument("--layers", nargs="+", default=["1", "4", "all"], metavar="N|all")
    parser.add_argument("--ways", nargs="+", choices=list(SAVES), default=["block", "declared", "steered", "none"])
    parser.add_argument("--seconds", type=float, default=2.0, help="for which Redis's limit is measured, about")
    parser.add_argument(
        "--bulk", type=Path, metavar="FOLDER", help="as of `tracewire engine`: large saves beside Redis"
    )
    parser.add_argument("--blocks", choices=("inline", "host"), default="inline", help="as of `tracewire engine`")
    parser.add_argument("--wake", action="store_true", help="a short round of both engines before each turn")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="begin no more rounds after so long")
    parser.add_argument("--quick", action="store_true", help="fewer cells and rounds, for two cores")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="have py-spy record one more round of each cell")
    if "--quick" in sys.argv:
        parser.set_defaults(**QUICK)
    options = parser.parse_args()
    for count in options.layers:
        if count != "all" and not (count.isdecimal() and int(count)):
            parser.error(f"--layers: expected a number from 1 on, or all, got {count!r}")
    show(measured(measure, options), as_json=options.json, width=12)


if __name__ == "__main__":
    main()
