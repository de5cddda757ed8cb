"""A harvest of all layers beside plain requests of the same prompts, in turns on one engine.

    python -m benchmarks.harvest [--model FOLDER] [--prompts 200] [--tokens 64] [--concurrency 32] [--rounds 5] [--json]
    [any option of `tracewire engine`]

Each round has every way once, in another order, over the same prompts, which have so many tokens each:

- *http*: plain requests of vLLM's own HTTP API, from one client;
- *traces*: traces without interventions;
- *last*: a harvest of each layer's residual stream at the last position;
- *harvest*: a harvest of each layer's residual stream at all positions, as safetensors in a folder;
- *parquet*: the same as Parquet.

A way's figure is the prompts' tokens a second; its ratio is to *http* in the same round, and the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import anyio.to_thread
import httpx

import tracewire
from benchmarks.processes import at_least
from tests.faults.harness.processes import free_port
from tracewire import Probe
from tracewire_bus.transport.embedded import EmbeddedServer

ROOT = Path(__file__).resolve().parents[1]

Way = Callable[[list[list[int]], Path], Awaitable[int]]


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


async def measure(url: str, openai: str, options: argparse.Namespace) -> dict[str, Any]:
    """All rounds."""
    rates: dict[str, list[float]] = {}
    kept: dict[str, int] = {}
    limits = httpx.Limits(max_connections=options.concurrency)
    async with (
        tracewire.connect(url, lease_ttl=60) as client,
        httpx.AsyncClient(base_url=f"http://{openai}", limits=limits, timeout=300) as http,
    ):
        await client.models.get("model", timeout=300)
        found = ways(client, http, options.concurrency)
        for turn in range(-1, options.rounds):
            # One round to warm up, which does not count. Prompts differ from round to round.
            names = list(found)
            names = names[turn % len(names) :] + names[: turn % len(names)]
            prompts = [
                [1 + (7 * number + 3 * index + 11 * turn) % 200 for index in range(options.tokens)]
                for number in range(options.prompts)
            ]
            for name in names:
                with tempfile.TemporaryDirectory() as folder:
                    began = time.perf_counter()
                    kept[name] = await found[name](prompts, Path(folder) / "acts")
                    seconds = time.perf_counter() - began
                if turn >= 0:
                    rates.setdefault(name, []).append(options.prompts * options.tokens / seconds)
    return {
        name: {
            "tokens_per_second": round(median(each)),
            "megabytes_per_second": round(median(each) * kept[name] / options.prompts / options.tokens / 1e6, 2),
            "ratio": round(median(mine / plain for mine, plain in zip(each, rates["http"], strict=True)), 3),
            "ratios": [round(mine / plain, 3) for mine, plain in zip(each, rates["http"], strict=True)],
        }
        for name, each in rates.items()
    }


async def run(options: argparse.Namespace, log: Path) -> dict[str, Any]:
    """A Redis, an engine, and all rounds."""
    openai = f"127.0.0.1:{free_port()}"
    async with EmbeddedServer.start() as server:
        command = [sys.executable, "-m", "tracewire.cli", "engine", options.model, "--name", "model"]
        command += ["--url", server.url, "--openai", openai, "--retain-total-bytes", "500000000", *options.engine]
        with log.open("wb") as out:
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=out)  # noqa: ASYNC220
        try:
            return await measure(server.url, openai, options)
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
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--json", action="store_true")
    options, options.engine = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        found = anyio.run(run, options, Path(folder) / "log")
    if options.json:
        print(json.dumps(found))
        return
    for name, figures in found.items():
        print(f"{name}: " + "  ".join(f"{key}={value}" for key, value in figures.items()))


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
