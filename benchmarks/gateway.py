"""The gateway beside the SDK: how many tokens a second it passes on, and how much later each arrives.

    python -m benchmarks.gateway [--engine scripted|demo] [--streams N] [--tokens N] [--rounds N] [--rate R]
                                 [--probe] [--whole] [--against CHECKOUT] [--read-interval SECONDS] [--json]
    python -m benchmarks.gateway --idle N [--json]

The same streams run in turns through the SDK and through `tracewire gateway`, on one engine, Redis and machine; the
client, the gateway, the engine and Redis are processes of their own. With `--engine scripted` the engine is a scripted
one (`tests/support/scripted_engine.py`), which puts out a token of each stream `--rate` times a second; `demo` is the
demo model on the CPU, as fast as it goes. With `--probe` each token brings the norms of all layers, inline. With
`--whole` the answers are no streams. `--against` runs the gateway of another checkout in turns with this one's, and
`--read-interval` a second gateway with that option.

`to_sdk` is the median of the gateway's tokens a second over the median of the SDK's. `cpu_us_per_token` is what the
gateway's process takes of a core. `added_p50_ms` and `added_p99_ms` are differences: of the quantiles of the time from
the engine's step to the client's hands, of every token. `against` has these figures of the other checkout's gateway,
`with_interval` those of the gateway with a `--read-interval`.

With `--idle N` the program opens N streams that an engine has accepted and for which it makes no token.
`kib_a_stream` is the memory that the gateway takes for each, and `cores` what all take of the processor together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

import anyio
import anyio.to_thread
import httpx
import msgspec
import numpy as np
import psutil

import tracewire
from benchmarks.processes import ROOT, at_least, show, start
from benchmarks.quantiles import quantile
from tracewire_bus.transport.embedded import EmbeddedServer

PROMPT = "def parse(text):"
_END = b"\n\n"
#: For how long idle streams are watched, in seconds.
IDLE_S = 5.0


# --- the client's process ---------------------------------------------------------------------------------------------


class Round(msgspec.Struct):
    """What the client's process runs: so many streams at once, through `gateway` or, if there is none, the SDK.

    The process writes the tokens' ages to `file`. `probe` is whether each token brings saves.
    """

    gateway: str
    model: str
    streams: int
    tokens: int
    file: str
    probe: bool = False
    whole: bool = False

    def run(self, client: tracewire.Client, ages: list[float]) -> Coroutine[Any, Any, None]:
        """One stream."""
        if not self.gateway:
            return by_sdk(client, self, ages)
        return (whole_by_gateway if self.whole else by_gateway)(httpx.URL(self.gateway), self, ages)


async def by_sdk(client: tracewire.Client, asked: Round, ages: list[float]) -> None:
    """One stream, or one result."""
    options: dict[str, Any] = {"max_tokens": asked.tokens, "ignore_eos": True, "temperature": 0.0}
    if asked.probe:
        options["interventions"] = [tracewire.Probe("norm", "residual(*)", reduce="norm")]
    if asked.whole:
        result = await client.trace(asked.model, PROMPT, **options).result()
        ages.extend([0.0] * len(result.token_ids))
        return
    async with client.trace(asked.model, PROMPT, **options) as trace:
        async for item in trace:
            if isinstance(item, tracewire.Output):
                ages.extend([time.time() - item.time] * len(item.token_ids))
                assert not asked.probe or item.delta


def request(gateway: httpx.URL, asked: Round) -> bytes:
    """The request for one completion."""
    about: dict[str, Any] = {}
    if asked.probe:
        about["interventions"] = [{"do": "probe", "name": "norm", "at": "residual(*)", "reduce": "norm"}]
    body = {"model": asked.model, "prompt": PROMPT, "max_tokens": asked.tokens, "ignore_eos": True}
    data = json.dumps({**body, "stream": not asked.whole, "temperature": 0.0, "tracewire": about}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {gateway.host}\r\nConnection: close\r\n"
    return (head + f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n").encode() + data


async def by_gateway(gateway: httpx.URL, asked: Round, ages: list[float]) -> None:
    """One stream, over a bare connection: what a client's library takes is not the gateway's."""
    reader, writer = await asyncio.open_connection(gateway.host, gateway.port)
    writer.write(request(gateway, asked))
    left = b""
    while data := await reader.read(65536):
        # The server sends each event as one chunk of the body, or several events as one.
        *whole, left = (left + data).split(_END)
        for event in whole:
            _, found, line = event.rpartition(b"data: ")
            if found and line.startswith(b"{"):
                about = msgspec.json.decode(line).get("tracewire", {})
                if "time" in about:
                    ages.extend([time.time() - about["time"]] * len(about["token_ids"]))
                    assert not asked.probe or about["delta"]
    writer.close()


async def whole_by_gateway(gateway: httpx.URL, asked: Round, ages: list[float]) -> None:
    """One answer that is no stream."""
    reader, writer = await asyncio.open_connection(gateway.host, gateway.port)
    writer.write(request(gateway, asked))
    body = (await reader.read(-1)).partition(b"\r\n\r\n")[2]
    ages.extend([0.0] * msgspec.json.decode(body)["usage"]["completion_tokens"])
    writer.close()


async def wait_accepted(gateway: httpx.URL, asked: Round) -> asyncio.StreamWriter:
    """Open a stream, and wait for its status."""
    reader, writer = await asyncio.open_connection(gateway.host, gateway.port)
    writer.write(request(gateway, asked))
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head, head
    return writer


async def hold_idle(url: str, asked: Round, gateway: psutil.Process) -> dict[str, Any]:
    """What streams cost a gateway while nothing comes: an engine has accepted each, and makes no token."""
    before = gateway.memory_info().rss
    address = httpx.URL(url)
    held: list[asyncio.StreamWriter] = []
    for first in range(0, asked.streams, 50):
        count = min(50, asked.streams - first)
        held += await asyncio.gather(*(wait_accepted(address, asked) for _ in range(count)))
    # What the last ones have left to do is no cost of idle streams.
    await asyncio.sleep(1)
    grown, since, used = gateway.memory_info().rss - before, time.monotonic(), sum(gateway.cpu_times()[:2])
    await asyncio.sleep(IDLE_S)
    cores = (sum(gateway.cpu_times()[:2]) - used) / (time.monotonic() - since)
    for writer in held:
        writer.close()
    return {"streams": asked.streams, "kib_a_stream": round(grown / 1024 / asked.streams, 1), "cores": round(cores, 3)}


async def load(url: str) -> None:
    """Run the rounds that the lines of standard input ask for."""
    async with tracewire.connect(url) as client:
        print("ready", flush=True)
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            asked = msgspec.json.decode(line, type=Round)
            ages: list[float] = []
            begun = time.monotonic()
            async with anyio.create_task_group() as group:
                for _ in range(asked.streams):
                    group.start_soon(asked.run, client, ages)
            seconds = time.monotonic() - begun
            np.save(asked.file, np.array(ages))
            print(json.dumps({"seconds": seconds, "tokens": len(ages)}), flush=True)


# --- the benchmark ----------------------------------------------------------------------------------------------------


@contextmanager
def process(*command: str, checkout: Path = ROOT) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process of a checkout's that has printed its first line, and what it printed. Terminated at the end."""
    sources = os.pathsep.join(str(checkout / part) for part in ("bus", "sdk", "engine_adapter", ""))
    running = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": sources},
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


class Way:
    """The rounds of one way: the SDK, or a gateway with its process."""

    def __init__(self, url: str = "", pid: int | None = None) -> None:
        self.url = url
        self.rates: list[float] = []
        self.ages: list[Any] = []
        self.cpu_us: list[float] = []
        self._process = psutil.Process(pid) if pid else None

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return median(self.rates)

    def late_ms(self, share: float) -> float:
        """A quantile of the tokens' ages."""
        return 1000 * quantile(np.concatenate(self.ages), share)

    def run(self, client: subprocess.Popen[str], asked: Round, *, counts: bool) -> None:
        """Run one round."""
        assert client.stdin is not None
        assert client.stdout is not None
        before = self._cpu_s()
        client.stdin.write(msgspec.json.encode(asked).decode() + "\n")
        client.stdin.flush()
        found = json.loads(client.stdout.readline())
        assert found["tokens"] == asked.streams * asked.tokens, found
        if counts:
            self.rates.append(found["tokens"] / found["seconds"])
            self.ages.append(np.load(asked.file))
            self.cpu_us.append(1e6 * (self._cpu_s() - before) / found["tokens"])

    def _cpu_s(self) -> float:
        if self._process is None:
            return 0.0
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def figures(self, sdk: Way) -> dict[str, float]:
        """A gateway's figures beside the SDK's."""
        return {
            "to_sdk": round(self.rate / sdk.rate, 3),
            "cpu_us_per_token": round(mean(self.cpu_us), 1),
            "added_p50_ms": round(self.late_ms(0.5) - sdk.late_ms(0.5), 2),
            "added_p99_ms": round(self.late_ms(0.99) - sdk.late_ms(0.99), 2),
        }


def run(options: argparse.Namespace, url: str, folder: Path) -> dict[str, Any]:
    """The figures."""
    model = "demo" if options.engine == "demo" else "tiny"
    scripted = ("tests.support.scripted_engine", "--rate", str(options.rate), "--capacity", str(options.streams))
    command = ("tracewire.cli", "engine", "demo") if options.engine == "demo" else scripted
    served = ("tracewire.cli", "gateway", "--url", url, "--port", "0")
    ways = {"sdk": Way()}
    with ExitStack() as stack:
        stack.enter_context(process(*command, "--url", url))
        gateways: dict[str, tuple[Path, tuple[str, ...]]] = {"gateway": (ROOT, ())}
        if options.against is not None:
            gateways["against"] = (options.against, ())
        if options.read_interval:
            gateways["with_interval"] = (ROOT, ("--read-interval", str(options.read_interval)))
        for name, (checkout, more) in gateways.items():
            running, gateway = stack.enter_context(process(*served, *more, checkout=checkout))
            ways[name] = Way(gateway, running.pid)
        client = stack.enter_context(start("benchmarks.gateway", "--load", url))
        stack.callback(client.terminate)
        # The first round of each warms everything up.
        for number in range(options.rounds + 1):
            for name, way in ways.items():
                file = str(folder / f"{name}.npy")
                asked = Round(way.url, model, options.streams, options.tokens, file, options.probe, options.whole)
                way.run(client, asked, counts=number > 0)
    sdk, through = ways["sdk"], ways["gateway"]
    return {
        "engine": options.engine,
        "streams": options.streams,
        "tokens": options.tokens,
        **through.figures(sdk),
        "sdk_tokens_s": round(sdk.rate, 1),
        "gateway_tokens_s": round(through.rate, 1),
        "sdk_p50_ms": round(sdk.late_ms(0.5), 2),
        "sdk_p99_ms": round(sdk.late_ms(0.99), 2),
        **{name: ways[name].figures(sdk) for name in ("against", "with_interval") if name in ways},
    }


def run_idle(options: argparse.Namespace, url: str) -> dict[str, Any]:
    """The figures of idle streams."""
    engine = ("tests.support.scripted_engine", "--rate", "0.0001", "--capacity", str(options.idle), "--url", url)
    with process(*engine), process("tracewire.cli", "gateway", "--url", url, "--port", "0") as (running, gateway):
        asked = Round(gateway, "tiny", options.idle, 2, "")
        return asyncio.run(hold_idle(gateway, asked, psutil.Process(running.pid)))


async def measured(options: argparse.Namespace) -> dict[str, Any]:
    """The figures, on a Redis of their own."""
    async with EmbeddedServer.start() as server:
        if options.idle:
            return await anyio.to_thread.run_sync(run_idle, options, server.url)
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
    parser.add_argument("--probe", action="store_true", help="save the norms of all layers with each token")
    parser.add_argument("--whole", action="store_true", help="answers that are no streams")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="run the gateway of another checkout, too")
    parser.add_argument("--read-interval", type=float, metavar="SECONDS", help="also run a gateway with this option")
    parser.add_argument(
        "--idle", type=at_least(1), metavar="N", help="what N streams cost while nothing comes, instead"
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        anyio.run(load, options.load)
        return
    show(anyio.run(measured, options), as_json=options.json, width=18)


if __name__ == "__main__":
    main()
