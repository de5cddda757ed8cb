"""A harvest of all layers beside plain requests of as many prompts, and beside the disk, in turns on one engine.

    python -m benchmarks.harvest [--model FOLDER] [--prompts 200] [--tokens 64] [--concurrency 32] [--rounds 5]
        [--ways http traces last harvest parquet] [--to FOLDER] [--stock] [--dummy] [--tap LOCATION ...]
        [--engine NAME=VALUE ...] [--settle 0] [--turns FILE] [--json] [any option of `tracewire engine`]

Each round has every way once, in another order. All ways have as many prompts of so many tokens, and so many at once.
No way has a prompt that another way or an earlier round had, so none is in a prefix cache:

- *stock*, with `--stock`: a stock `AsyncLLM` in a process of its own, at vLLM's defaults but for `--engine`;
- *http*: plain requests of vLLM's own HTTP API on Tracewire's engine, from one client;
- *traces*: traces without interventions;
- *last*: a harvest of each layer's residual stream at the last position;
- *harvest*: a harvest of each layer's residual stream at all positions, as safetensors in a folder;
- *parquet*: the same as Parquet;
- *disk*, if *harvest* is among the ways: files of the sizes of the harvest's are written to the same disk one after
  the other, each by the harvest's own code, up to the end of its `fsync`. Nothing else is done meanwhile.

A way's figure is the prompts' tokens a second; its ratio is to *http* in the same round, or to *stock* if there is no
*http*, and the median of the rounds. *disk* has the tokens a second whose values the disk takes.

`goal` has what a harvest is compared with: the tokens a second of the fastest plain way (`plain`) and of the disk
(`disk`), whichever of the two is `less`, and how many times that the harvest comes to in the same round (`ratio`).

On a GPU, `--tap 'model.layers.*.output'` lets a harvest read all layers. `--dummy` takes random weights, and a size of
the KV cache that two engines on one GPU have room for. Where values are more than Redis should carry, `--bulk FOLDER`
has them go beside it. `--to` names a folder on the disk of interest.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import anyio.to_thread
import httpx

import tracewire
from benchmarks.overhead import Role, turn
from benchmarks.processes import at_least
from tests.faults.harness.processes import free_port
from tracewire import Probe
from tracewire.harvest.stores import Store
from tracewire_bus.transport.embedded import EmbeddedServer

ROOT = Path(__file__).resolve().parents[1]

Way = Callable[[list[list[int]], Path], Awaitable[int]]

WAYS = ("http", "traces", "last", "harvest", "parquet")
#: The ways without interventions, of which one is what the others are compared with.
PLAIN = ("http", "stock", "traces")


async def each(prompts: list[list[int]], concurrency: int, one: Callable[[list[int]], Awaitable[None]]) -> None:
    """Await `one` for each prompt, so many at once."""
    waiting = iter(prompts)

    async def work() -> None:
        for prompt in waiting:
            await one(prompt)

    async with anyio.create_task_group() as group:
        for _ in range(concurrency):
            group.start_soon(work)


def ways(client: tracewire.Client, http: httpx.AsyncClient, concurrency: int) -> dict[str, Way]:
    """The ways by name. Each returns how many bytes of values it kept."""

    async def plain(prompts: list[list[int]], folder: Path) -> int:
        async def one(prompt: list[int]) -> None:
            body = {"model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0}
            (await http.post("/v1/completions", json=body)).raise_for_status()

        await each(prompts, concurrency, one)
        return 0

    async def traces(prompts: list[list[int]], folder: Path) -> int:
        async def one(prompt: list[int]) -> None:
            await client.trace("model", prompt, max_tokens=1, temperature=0).result()

        await each(prompts, concurrency, one)
        return 0

    async def harvest(prompts: list[list[int]], folder: Path, positions: Any = "all", form: Any = "safetensors") -> int:
        probe = Probe("hs", "residual(*)", positions=positions)
        # So many shards that writing one and filling the next overlap, as in a harvest of many.
        options = {"concurrency": concurrency, "format": form, "temperature": 0, "shard_prompts": -(-len(prompts) // 8)}
        done = await client.harvest("model", prompts, [probe], to=folder, **options)
        if done.prompts != len(prompts):
            raise RuntimeError(f"of {len(prompts)} prompts, {done.prompts} were harvested")
        return done.bytes

    return {
        "http": plain,
        "traces": traces,
        "last": partial(harvest, positions="last"),
        "harvest": harvest,
        "parquet": partial(harvest, form="parquet"),
    }


def stock_way(role: Role, concurrency: int) -> Way:
    """The prompts on a stock engine."""

    async def stock(prompts: list[list[int]], folder: Path) -> int:
        workload = {"prompts": prompts, "tokens": 1, "at_once": concurrency}
        await anyio.to_thread.run_sync(role.run, workload)
        return 0

    return stock


def prompts_of(number: int, way: str, options: argparse.Namespace) -> list[list[int]]:
    """The prompts of a way in a round, which no other way or round has."""
    draw = random.Random(f"{number} {way}")
    return [[draw.randint(1, 200) for _ in range(options.tokens)] for _ in range(options.prompts)]


def write_files(sizes: list[int], folder: Path) -> float:
    """Write files of these sizes as a harvest does. Returns how many seconds that took."""
    data = os.urandom(max(sizes))
    folder.mkdir()
    store = Store(folder)
    seconds = 0.0
    for number, size in enumerate(sizes):
        part = data[:size]
        began = time.perf_counter()
        store.put(f"shards/{number}", part)
        seconds += time.perf_counter() - began
    return seconds


async def one_round(
    number: int, found: dict[str, Way], options: argparse.Namespace, seconds: dict[str, list[float]]
) -> dict[str, int]:
    """Each way once; adds how long each took to `seconds`. Returns how many bytes each kept."""
    kept: dict[str, int] = {}
    names = list(found)
    for name in names[number % len(names) :] + names[: number % len(names)]:
        prompts = prompts_of(number, name, options)
        await anyio.sleep(options.settle)
        with tempfile.TemporaryDirectory(dir=options.to) as folder:
            began = time.perf_counter()
            kept[name] = await found[name](prompts, Path(folder) / "acts")
            seconds.setdefault(name, []).append(time.perf_counter() - began)
            if name == "harvest":
                sizes = [file.stat().st_size for file in (Path(folder) / "acts").rglob("*") if file.is_file()]
                written = await anyio.to_thread.run_sync(write_files, sizes, Path(folder) / "raw")
                seconds.setdefault("disk", []).append(written)
                kept["disk"] = sum(sizes)
    return kept


async def measure(url: str, openai: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rounds."""
    seconds: dict[str, list[float]] = {}
    kept: dict[str, int] = {}
    limits = httpx.Limits(max_connections=options.concurrency)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(tracewire.connect(url, lease_ttl=60))
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{openai}", limits=limits, timeout=300)
        )
        every = ways(client, http, options.concurrency)
        found = {name: every[name] for name in options.ways}
        async with turn(options.turns, fcntl.LOCK_SH):
            await client.models.get("model", timeout=600)
            if options.stock:
                setup = {"model": model_folder(options.model), "engine": engine_options(options), "eager": False}
                role = await anyio.to_thread.run_sync(Role, "plain", setup, folder, "stock")
                stack.callback(role.stop)
                found = {"stock": stock_way(role, options.concurrency), **found}
        for number in range(-1, options.rounds):
            # One round to warm up, which does not count.
            async with turn(options.turns):
                kept = await one_round(number, found, options, seconds)
            if number < 0:
                seconds.clear()
            else:
                said = {name: round(options.prompts * options.tokens / took[-1]) for name, took in seconds.items()}
                print(f"round {number}: {said}", file=sys.stderr, flush=True)
    return figures(seconds, kept, options)


def figures(seconds: dict[str, list[float]], kept: dict[str, int], options: argparse.Namespace) -> dict[str, Any]:
    """What each way came to, and what the harvest is compared with."""
    tokens = options.prompts * options.tokens
    rates = {name: [tokens / one for one in took] for name, took in seconds.items()}
    base = next((name for name in ("http", "stock") if name in rates), None)
    found: dict[str, Any] = {}
    # In the order of the ways, whatever came first in the first round.
    for name in sorted(rates, key=["stock", *WAYS, "disk"].index):
        each = rates[name]
        found[name] = {
            "tokens_per_second": round(median(each)),
            "megabytes_per_second": round(median(each) * kept[name] / tokens / 1e6, 2),
        }
        if base is not None:
            compared = [mine / plain for mine, plain in zip(each, rates[base], strict=True)]
            found[name] |= {"ratio": round(median(compared), 3), "ratios": [round(one, 3) for one in compared]}
    plain = [rates[name] for name in PLAIN if name in rates]
    if plain and "harvest" in rates:
        found["goal"] = goal([max(each) for each in zip(*plain, strict=True)], rates["disk"], rates["harvest"])
    return found


def goal(plain: list[float], disk: list[float], harvest: list[float]) -> dict[str, Any]:
    """What a harvest comes to, relative to the lesser of plain requests and the disk in the same round."""
    ratios = [mine / min(one, other) for mine, one, other in zip(harvest, plain, disk, strict=True)]
    return {
        "plain": round(median(plain)),
        "disk": round(median(disk)),
        "harvest": round(median(harvest)),
        "less": "plain" if median(plain) < median(disk) else "disk",
        "ratio": round(median(ratios), 3),
        "ratios": [round(one, 3) for one in ratios],
    }


def model_folder(model: str) -> str:
    """The folder of a model, which may be the demo's."""
    return str(ROOT / "examples" / "demo_model" / "model") if model == "demo" else model


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """vLLM's options of all engines."""
    found: dict[str, Any] = {}
    if options.dummy:
        # The cache's size is given: two engines on one GPU disturb each other's profiling of memory.
        found |= {"load_format": "dummy", "gpu_memory_utilization": 0.1, "max_model_len": 2048}
        found["kv_cache_memory_bytes"] = 8 << 30
    elif options.stock:
        found["kv_cache_memory_bytes"] = 512 << 20
    for option in options.engine:
        name, _, value = option.partition("=")
        found[name] = int(value) if value.isdigit() else value
    return found


async def run(options: argparse.Namespace, log: Path) -> dict[str, Any]:
    """A Redis, an engine, and all rounds."""
    openai = f"127.0.0.1:{free_port()}"
    async with EmbeddedServer.start() as server:
        command = [sys.executable, "-m", "tracewire.cli", "engine", options.model, "--name", "model"]
        command += ["--url", server.url, "--openai", openai, "--retain-total-bytes", "500000000"]
        for name, value in engine_options(options).items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        command += options.rest
        with log.open("wb") as out:
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=out)  # noqa: ASYNC220
        try:
            return await measure(server.url, openai, options, log.parent)
        finally:
            process.send_signal(signal.SIGTERM)
            await anyio.to_thread.run_sync(process.wait)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", type=at_least(1), default=200)
    parser.add_argument("--tokens", type=at_least(1), default=64, help="of each prompt")
    parser.add_argument("--concurrency", type=at_least(1), default=32)
    parser.add_argument("--rounds", type=at_least(1), default=5, help="behind one to warm up")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="on the disk to which harvests are written")
    parser.add_argument("--stock", action="store_true", help="a stock engine beside Tracewire's as well")
    parser.add_argument("--dummy", action="store_true", help="random weights, and a given size of the KV cache")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=VALUE", help="vLLM's, for all engines")
    parser.add_argument("--settle", type=float, default=0.0, metavar="SECONDS", help="before each way")
    parser.add_argument("--turns", type=Path, metavar="FILE", help="take turns with others that name this file")
    parser.add_argument("--logs", type=Path, help="a folder for the engines' logs")
    parser.add_argument("--json", action="store_true")
    options, options.rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = anyio.run(run, options, folder / "engine.log")
    if options.json:
        print(json.dumps(found))
        return
    for name, figures in found.items():
        print(f"{name}: " + "  ".join(f"{key}={value}" for key, value in figures.items()))


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
