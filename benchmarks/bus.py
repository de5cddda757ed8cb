"""The bus alone: what a delta on every output costs when no model stands behind it.

    python -m benchmarks.bus [--traces 32] [--rate 100] [--subscribers 8] [--seconds 10] [--spread] [--text-only]
        [--tracing] [--sweep] [--json]

A *scripted engine* (`benchmarks/scripted.py`) puts out a token of each trace `--rate` times a second, with a delta of
one array of 512 bytes, at times that its own clock sets: it waits for nobody. The real adapter takes it from there;
`--subscribers` subscribers of each trace, spread over `--processes` processes with one client each, fold what comes and
check it against the manifest. Pacer, adapter, Redis and subscribers are processes of their own on one machine.

With `--layers N`, what each token brings are the reads of N declared probes instead, of 4 KiB each. With `--tracing`
the adapter makes OpenTelemetry spans of the traces and exports them to a collector in the parent's process.

`latency_ms` is from the pacer handing a token over to each subscriber's hands, of every token. Beside it, a bare XADD
to XREAD BLOCK of the same size between two processes through the same Redis: `bare_ms`, in turns with the rounds, when
nothing else runs, and `bare_loaded_ms` during the rounds. All of it by the same clock.

`wire_ratio` is bytes of all entries of a trace, text and times included, over bytes of the new values themselves.
`keeps_up` says whether nothing queued: at least 0.95 entries an output (the adapter merges what it cannot send at
once), and the p95 of the latency under the time between two outputs. `--sweep` looks for the highest rate that does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import zmq
from opentelemetry.sdk.trace import TracerProvider

import tracewire
from benchmarks.processes import at_least, show
from benchmarks.quantiles import quantiles
from benchmarks.scripted import ELEMENTS, WIDTH, Command, Pacer, ScriptedEngine, scripted_info
from tests.support.spans import collector
from tracewire_bus.bus import Bus
from tracewire_bus.domain.fold import Fold
from tracewire_bus.process_memory import settle_memory
from tracewire_bus.span_export import exporting, otlp_exporter
from tracewire_bus.transport.embedded import EmbeddedServer
from tracewire_bus.wire.messages import Block
from tracewire_engine.adapter.bulk_writer import BulkSettings
from tracewire_engine.adapter.service import Adapter, Settings
from tracewire_engine.adapter.trace_spans import TraceSpans
from tracewire_engine.launch.adapter_process import LOOP
from tracewire_engine.link.step_link import LinkReceiver

ROOT = Path(__file__).resolve().parents[1]
MODEL = "scripted"
#: The environment variable that names the folder of bulk to the adapter.
BULK = "TRACEWIRE_BENCHMARK_BULK"
#: The environment variable that tells the adapter to make spans.
TRACING = "TRACEWIRE_BENCHMARK_TRACING"
#: Rates that `--sweep` tries, in outputs a second a trace.
RATES = (300, 250, 200, 170, 140, 120, 100, 80, 60, 50, 40, 30, 25, 20, 15, 10, 5)
#: Bytes of an output's entry, about; what the bare round trip carries.
BARE_BYTES = 640


def say(**answer: Any) -> None:
    """Answer the parent."""
    print(json.dumps(answer), flush=True)


# --- the processes ----------------------------------------------------------------------------------------------------


def pacer(folder: Path, url: str) -> None:
    """The scripted engine's own process."""
    engine = Pacer(folder)
    say(ready=True)
    engine.run()


def adapter(folder: Path, url: str) -> None:
    """The real adapter, until its standard input ends."""
    bulk = os.environ.get(BULK)
    settings = Settings(bulk=BulkSettings(Path(bulk), 32 * 1024, 4 << 30) if bulk else None)

    async def main() -> None:
        settle_memory()
        with LinkReceiver() as link, contextlib.ExitStack() as held:
            spans = None
            if os.environ.get(TRACING):
                provider = held.enter_context(exporting(otlp_exporter(), "benchmark", "adapter", ""))
                spans = TraceSpans(provider.get_tracer("benchmark"))
            engine = ScriptedEngine(folder, link)
            async with Bus.open(url) as bus, anyio.create_task_group() as group:
                server = Adapter(engine, scripted_info(MODEL, 1024), bus, replace(settings, spans=spans))
                group.start_soon(engine.receive)
                group.start_soon(server.run)
                say(ready=True)
                await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
                group.cancel_scope.cancel()

    anyio.run(main, backend_options=LOOP)


def subscriber(folder: Path, url: str) -> None:
    """One client with many subscriptions. A line on standard input is a round: its traces, and how often each."""

    async def read_text(trace: str, client: tracewire.Client, ready: Callable[[], None], found: dict[str, Any]) -> None:
        text = ""
        ages: list[float] = found["ages"]
        async with client.subscribe(trace) as events:
            ready()
            async for event in events:
                now = time.time()
                if isinstance(event, tracewire.Output):
                    found["entries"] += 1
                    text += event.text
                    ages.extend([now - event.time] * len(event.token_ids))
        found["verified"] += isinstance(event, tracewire.Final)

    async def fold_all(trace: str, client: tracewire.Client, ready: Callable[[], None], found: dict[str, Any]) -> None:
        layers = found["layers"]
        fold = Fold()
        ages: list[float] = found["ages"]
        async with client.subscribe(trace) as events:
            ready()
            async for event in events:
                now = time.time()
                fold.apply(event)
                if isinstance(event, tracewire.Output):
                    found["entries"] += 1
                    count = len(event.token_ids)
                    if layers:
                        ages.extend([now - event.time] * count)
                    else:
                        ages.extend(now - float(array[0]) for array in fold.choices[0, 0].saves["acts"][-count:])
        fold.verify()
        found["verified"] += fold.status == "finished"

    async def main() -> None:
        async with tracewire.connect(url) as client:
            say(ready=True)
            while line := await anyio.to_thread.run_sync(sys.stdin.readline):
                asked = json.loads(line)
                wanted = [trace for trace in asked["traces"] for _ in range(asked["copies"])]
                left = len(wanted)
                found: dict[str, Any] = {"entries": 0, "verified": 0, "ages": [], "layers": asked["layers"]}

                def ready() -> None:
                    nonlocal left
                    left -= 1
                    if not left:
                        say(subscribed=True)

                one = read_text if asked["text_only"] else fold_all
                async with anyio.create_task_group() as group:
                    for trace in wanted:
                        group.start_soon(one, trace, client, ready, found)
                ages = np.array(found.pop("ages"))
                np.save(asked["file"], ages)
                say(**found, received=len(ages))

    anyio.run(main)


def bare(folder: Path, url: str) -> None:
    """The far end of the bare round trip: blocks on one stream and notes each entry's age."""
    import redis

    # It waits for as long as nothing comes.
    connection = redis.Redis.from_url(url, socket_timeout=None)
    say(ready=True)
    last = b"0"
    ages: list[float] = []
    while True:
        for _, entries in connection.xread({"bare": last}, block=0) or ():
            now = time.time()
            for last, fields in entries:
                sent = fields[b"t"]
                if sent == b"end":
                    say(ages=ages)
                    ages = []
                else:
                    ages.append(now - float(sent))


ROLES = {"pacer": pacer, "adapter": adapter, "subscriber": subscriber, "bare": bare}


class Role:
    """One of them, as the parent has it."""

    def __init__(self, role: str, folder: Path, url: str, number: int = 0) -> None:
        self.name = role
        self._log = folder / f"{role}-{number}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.bus", "--role", role, "--folder", str(folder), "--url", url],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
            )

    def next(self, key: str) -> dict[str, Any]:
        """Its next answer that has `key`."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer: dict[str, Any] = json.loads(line)
            if key in answer:
                return answer
        raise RuntimeError(f"{self.name} ended with {self._process.wait()}:\n{self._log.read_text()[-2000:]}")

    def send(self, **asked: Any) -> None:
        """One line to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()

    @property
    def cpu_s(self) -> float:
        """CPU seconds so far."""
        return cpu_s(self._process.pid)

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, as the scheduler counts: by ticks, short bursts would go unseen."""
    used = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            used += int((thread / "schedstat").read_text().split()[0])
    return used / 1e9


# --- rounds -----------------------------------------------------------------------------------------------------------


class Bench:
    """All processes, and the rounds they play."""

    def __init__(self, server: EmbeddedServer, client: tracewire.Client, folder: Path, processes: int) -> None:
        import redis

        self._server = server
        self._client = client
        self._folder = folder
        url = server.url
        self._roles: list[Role] = []
        for role in ("pacer", "adapter", "bare", *["subscriber"] * processes):
            self._roles.append(Role(role, folder, url, len(self._roles)))
        for started in self._roles:
            started.next("ready")
        self._bare = self._roles[2]
        self._subscribers = self._roles[3:]
        self._pacer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._pacer.connect(f"ipc://{folder}/commands")
        self._redis = redis.Redis.from_url(url)

    def stop(self) -> None:
        """End them all."""
        for role in self._roles:
            role.stop()
        self._pacer.close(0)

    def bare_trip(self, seconds: float, rate: float) -> list[float]:
        """Ages of entries at the far end of a bare XADD to XREAD BLOCK, sent at `rate` a second."""
        filler = b"x" * BARE_BYTES
        began = time.monotonic()
        for number in range(max(1, round(seconds * rate))):
            left = began + number / rate - time.monotonic()
            if left > 0:
                time.sleep(left)
            self._redis.xadd("bare", {"t": repr(time.time()), "d": filler})
        self._redis.xadd("bare", {"t": "end"})
        ages: list[float] = self._bare.next("ages")["ages"]
        self._redis.xtrim("bare", maxlen=1)
        return ages

    async def round(self, options: argparse.Namespace, rate: float, seconds: float) -> dict[str, Any]:
        """One round: `seconds` of outputs at `rate`, to the last fold verified."""
        tokens = max(1, round(rate * seconds))
        traces = [uuid.uuid4().hex for _ in range(options.traces)]
        for trace in traces:
            block = None if options.layers else Block(name="scripted", source="pass")
            probes = [tracewire.Probe(f"h{layer}", f"layers.{layer}") for layer in range(options.layers)]
            await self._client.trace(MODEL, [1], block, interventions=probes, trace_id=trace, max_tokens=tokens).start()
        copies = options.subscribers // options.processes
        files = [self._folder / f"ages-{number}.npy" for number in range(len(self._subscribers))]
        for role, file in zip(self._subscribers, files, strict=True):
            role.send(traces=traces, copies=copies, file=str(file), text_only=options.text_only, layers=options.layers)
        for role in self._subscribers:
            await anyio.to_thread.run_sync(role.next, "subscribed")
        before = self.cpu_s()
        self._pacer.send(msgspec.msgpack.encode(Command("go", "", len(traces), rate, options.spread, options.layers)))
        loaded = await anyio.to_thread.run_sync(self.bare_trip, seconds, 50)
        found = [await anyio.to_thread.run_sync(role.next, "received") for role in self._subscribers]
        after = self.cpu_s()
        quiet = await anyio.to_thread.run_sync(self.bare_trip, min(seconds, 2), 100)
        everyone = copies * options.processes
        async with Bus.open(self._server.url) as bus:
            wire = sum([len(entry.data) async for entry in bus.read(traces[0])])
        return {
            "sent": tokens * len(traces),
            "wire": wire / (tokens * (options.layers * 2 * WIDTH or ELEMENTS * 8)),
            "received": sum(one["received"] for one in found) / everyone,
            "entries": sum(one["entries"] for one in found) / everyone,
            "verified": sum(one["verified"] for one in found),
            "ages": np.concatenate([np.load(file) for file in files]),
            "bare": quiet,
            "bare_loaded": loaded,
            "cpu_s": {name: after[name] - before[name] for name in after},
        }

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far, by kind of process."""
        used = {"redis": cpu_s(self._server.pid)}
        for role in self._roles:
            used[role.name] = used.get(role.name, 0.0) + role.cpu_s
        return used


def summary(rounds: list[dict[str, Any]], options: argparse.Namespace, rate: float) -> dict[str, Any]:
    """All rounds as one."""
    sent = sum(one["sent"] for one in rounds)
    received = sum(one["received"] for one in rounds)
    ages = np.concatenate([one["ages"] for one in rounds])
    entries = sum(one["entries"] for one in rounds) / sent
    latency = quantiles(ages)
    copies = options.subscribers // options.processes * options.processes
    cpu = {name: sum(one["cpu_s"][name] for one in rounds) for name in rounds[0]["cpu_s"]}
    return {
        "rate": rate,
        "traces": options.traces,
        "subscribers": copies,
        "outputs_sent": sent,
        "outputs_received_by_each": received,
        "folds_verified": sum(one["verified"] for one in rounds),
        "folds": len(rounds) * options.traces * copies,
        "lost": sent - received,
        "entries_per_output": round(entries, 3),
        "wire_ratio": round(max(one["wire"] for one in rounds), 3),
        "latency_ms": latency,
        "bare_ms": quantiles(np.concatenate([one["bare"] for one in rounds])),
        "bare_loaded_ms": quantiles(np.concatenate([one["bare_loaded"] for one in rounds])),
        "keeps_up": bool(entries >= 0.95 and latency["p95"] < 1000 / rate),
        "cpu_s": {name: round(used, 2) for name, used in cpu.items()},
        # Of one output in the adapter and Redis; of one output at one subscriber.
        "cpu_us": {
            "adapter": round(1e6 * cpu["adapter"] / sent, 1),
            "redis": round(1e6 * cpu["redis"] / sent, 1),
            "delivery": round(1e6 * cpu["subscriber"] / (sent * copies), 1),
        },
    }


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The rounds at one rate; with `--sweep`, at lower and lower rates until one keeps up."""
    async with EmbeddedServer.start() as server, tracewire.connect(server.url) as client:
        bench = await anyio.to_thread.run_sync(Bench, server, client, folder, options.processes)
        try:
            await client.models.get(MODEL, timeout=30)
            await bench.round(options, min(options.rate, 10), 1.0)
            tried = []
            for rate in [rate for rate in RATES if rate <= options.rate] if options.sweep else [options.rate]:
                seconds = options.seconds / options.rounds
                rounds = [await bench.round(options, rate, seconds) for _ in range(options.rounds)]
                tried.append(summary(rounds, options, rate))
                print(json.dumps(tried[-1]), file=sys.stderr)
                if tried[-1]["keeps_up"]:
                    break
            return (
                {"tried": tried, "keeps_up_at": rate if tried[-1]["keeps_up"] else None} if options.sweep else tried[0]
            )
        finally:
            bench.stop()


def nothing_lost(figures: dict[str, Any]) -> bool:
    """Whether every subscriber received every output, at every rate that was tried, and verified what it folded."""
    return all(
        one["outputs_sent"] > 0 and not one["lost"] and one["folds_verified"] == one["folds"] > 0
        for one in figures.get("tried", [figures])
    )


def main() -> int:
    """Run from the command line; the exit status is 1 if a subscriber lacked something."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=at_least(1), default=32)
    parser.add_argument("--rate", type=float, default=100, help="outputs a second of each trace")
    parser.add_argument("--subscribers", type=at_least(1), default=8, help="of each trace")
    parser.add_argument("--processes", type=at_least(1), default=4, help="that the subscribers are spread over")
    parser.add_argument("--seconds", type=float, default=10, help="of outputs, over all rounds")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--spread", action="store_true", help="traces put out one after another, not together")
    parser.add_argument(
        "--layers", type=int, default=0, metavar="N", help="each token brings N declared reads of 4 KiB"
    )
    parser.add_argument(
        "--bulk",
        metavar="FOLDER",
        help="as of tracewire engine: outputs leave more than 32 KiB there",
    )
    parser.add_argument("--tracing", action="store_true", help="the adapter makes and exports OpenTelemetry spans")
    parser.add_argument("--text-only", action="store_true", help="subscribers read the text and fold nothing")
    parser.add_argument("--sweep", action="store_true", help="go down from --rate until nothing queues")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        ROLES[options.role](options.folder, options.url)
        return 0
    if options.subscribers < options.processes:
        parser.error(f"--processes: expected at most --subscribers ({options.subscribers}), got {options.processes}")
    if options.bulk:
        os.environ[BULK] = options.bulk
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as held:
        if options.tracing:
            os.environ[TRACING] = "1"
            os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = held.enter_context(collector()).url
            # The clients' traces are below it.
            held.enter_context(TracerProvider().get_tracer("benchmark").start_as_current_span("all"))
        figures = anyio.run(measure, options, Path(folder))
    show(figures, as_json=options.json, width=28)
    return 0 if nothing_lost(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
