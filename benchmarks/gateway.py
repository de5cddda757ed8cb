"""The gateway beside the SDK: how many tokens a second it passes on, and how much later each arrives.

    python -m benchmarks.gateway [--engine scripted|demo] [--streams N] [--tokens N] [--rounds N] [--rate R] [--json]

The same streams run in turns through the SDK and through `tracewire gateway`, on one engine, Redis and machine; the
client, the gateway, the engine and Redis are processes of their own. With `--engine scripted` the engine is a scripted
one (`tests/support/scripted_engine.py`), which puts out a token of each stream `--rate` times a second; `demo` is the
demo model on the CPU, as fast as it goes.

`to_sdk` is the median of the gateway's tokens a second over the median of the SDK's. `added_p50_ms` and `added_p99_ms`
are differences: of the quantiles of the time from the engine's step to the client's hands, of every token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import anyio.to_thread
import httpx
import msgspec
import numpy as np

import tracewire
from benchmarks.processes import ROOT, at_least, show, start
from benchmarks.quantiles import quantile
from tracewire_bus.transport.embedded import EmbeddedServer

PROMPT = "def parse(text):"
_END = b"\n\n"


# --- the client's process ---------------------------------------------------------------------------------------------


class Round(msgspec.Struct):
    """What the client's process runs: so many streams at once, by `way`, and where it writes the tokens' ages."""

    way: str
    model: str
    streams: int
    tokens: int
    file: str


async def by_sdk(client: tracewire.Client, asked: Round, ages: list[float]) -> None:
    """One stream."""
    options: dict[str, Any] = {"max_tokens": asked.tokens, "ignore_eos": True, "temperature": 0.0}
    async with client.trace(asked.model, PROMPT, **options) as trace:
        async for item in trace:
            if isinstance(item, tracewire.Output):
                ages.extend([time.time() - item.time] * len(item.token_ids))


async def by_gateway(gateway: httpx.URL, asked: Round, ages: list[float]) -> None:
    """One stream, over a bare connection: what a client's library takes is not the gateway's."""
    body = {"model": asked.model, "prompt": PROMPT, "max_tokens": asked.tokens, "ignore_eos": True, "stream": True}
    data = json.dumps({**body, "temperature": 0.0, "tracewire": {}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {gateway.host}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(gateway.host, gateway.port)
    writer.write(head.encode() + data)
    left = b""
    while data := await reader.read(65536):
        # The server sends each event as one chunk of the body.
        *whole, left = (left + data).split(_END)
        for event in whole:
            _, found, line = event.rpartition(b"data: ")
            if found and line.startswith(b"{"):
                about = msgspec.json.decode(line).get("tracewire", {})
                if "time" in about:
                    ages.extend([time.time() - about["time"]] * len(about["token_ids"]))
    writer.close()


async def load(url: str, gateway: str) -> None:
    """Run the rounds that the lines of standard input ask for."""
    limits = httpx.Limits(max_connections=None)
    async with (
        tracewire.connect(url) as client,
        httpx.AsyncClient(base_url=gateway, timeout=600, limits=limits) as http,
    ):
        print("ready", flush=True)
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            asked = msgspec.json.decode(line, type=Round)
            ages: list[float] = []
            begun = time.monotonic()
            async with anyio.create_task_group() as group:
                for _ in range(asked.streams):
                    if asked.way == "sdk":
                        group.start_soon(by_sdk, client, asked, ages)
                    else:
                        group.start_soon(by_gateway, httpx.URL(gateway), asked, ages)
            seconds = time.monotonic() - begun
            np.save(asked.file, np.array(ages))
            print(json.dumps({"seconds": seconds, "tokens": len(ages)}), flush=True)


# --- the benchmark ----------------------------------------------------------------------------------------------------


@contextmanager
def process(*command: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that has printed its first line, and what it printed. Terminated at the end."""
    running = subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    )
    try:
        assert running.stdout is not None
        said = ""
        while not said.startswith("ready"):
            said = running.stdout.readline()
            assert said, f"{command} ended with {running.wait()}"
        yield running, said.split(maxsplit=1)[1].strip()
    finally:
        running.terminate()
        running.wait(120)


def run(options: argparse.Namespace, url: str, folder: Path) -> dict[str, Any]:
    """The figures."""
    model = "demo" if options.engine == "demo" else "tiny"
    scripted = ("tests.support.scripted_engine", "--rate", str(options.rate), "--capacity", str(options.streams))
    command = ("tracewire.cli", "engine", "demo") if options.engine == "demo" else scripted
    rates: dict[str, list[float]] = {"sdk": [], "gateway": []}
    ages: dict[str, list[Any]] = {"sdk": [], "gateway": []}
    with ExitStack() as stack:
        stack.enter_context(process(*command, "--url", url))
        _, gateway = stack.enter_context(process("tracewire.cli", "gateway", "--url", url, "--port", "0"))
        client = stack.enter_context(start("benchmarks.gateway", "--load", url, gateway))
        stack.callback(client.terminate)
        assert client.stdin is not None
        assert client.stdout is not None
        # The first round of each warms everything up.
        for number in range(options.rounds + 1):
            for way in ("sdk", "gateway"):
                file = str(folder / f"{way}.npy")
                asked = Round(way, model, options.streams, options.tokens, file)
                client.stdin.write(msgspec.json.encode(asked).decode() + "\n")
                client.stdin.flush()
                found = json.loads(client.stdout.readline())
                assert found["tokens"] == options.streams * options.tokens, found
                if number:
                    rates[way].append(found["tokens"] / found["seconds"])
                    ages[way].append(np.load(file))
    late = {way: np.concatenate(ages[way]) for way in ages}
    added = {share: 1000 * (quantile(late["gateway"], share) - quantile(late["sdk"], share)) for share in (0.5, 0.99)}
    return {
        "engine": options.engine,
        "streams": options.streams,
        "to_sdk": round(median(rates["gateway"]) / median(rates["sdk"]), 3),
        "added_p50_ms": round(added[0.5], 2),
        "added_p99_ms": round(added[0.99], 2),
        "sdk_tokens_s": round(median(rates["sdk"]), 1),
        "gateway_tokens_s": round(median(rates["gateway"]), 1),
        "sdk_p50_ms": round(1000 * quantile(late["sdk"], 0.5), 2),
        "sdk_p99_ms": round(1000 * quantile(late["sdk"], 0.99), 2),
    }


async def measured(options: argparse.Namespace) -> dict[str, Any]:
    """The figures, on a Redis of their own."""
    async with EmbeddedServer.start() as server:
        with tempfile.TemporaryDirectory() as folder:
            return await anyio.to_thread.run_sync(run, options, server.url, Path(folder))


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", choices=("scripted", "demo"), default="scripted")
    parser.add_argument("--streams", type=at_least(1), default=64)
    parser.add_argument("--tokens", type=at_least(1), default=100)
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--rate", type=float, default=20.0, help="steps a second of the scripted engine")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--load", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        anyio.run(load, *options.load)
        return
    show(anyio.run(measured, options), as_json=options.json, width=18)


if __name__ == "__main__":
    main()
