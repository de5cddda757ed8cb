"""Ten thousand traces, a thousand at once, three consumers each: is anything lost, does anything grow?

    python -m tests.faults.harness.soak [--traces 10000] [--at-once 1000] [--consumers 3] [--tokens 50] [--rate 5]

A scripted engine behind the real adapter puts out `--rate` tokens a second of each trace, each with a small array; it,
Redis, and each consumer (one client that follows all traces, folds them and checks them against their manifests) are
processes of their own. Traces are kept for `--retention` seconds after their end, or fewer of them, with
`--retain-traces`. Prints one JSON object: what was lost, and for each process its memory (RSS and PSS, in MiB, first
and last) and the slope of a straight line through the samples, in KiB per 1000 traces; of Redis also what it says that
it uses. Samples begin when as many traces have ended as run at once, so that what merely fills up does not count.

`redis_kept` says what Redis has at the end, when what it kept of the last traces is gone too, beyond what it had before
the first, in KiB: by kind of key; its tables of keys and of their expiry; and the rest of what it says that it uses.
`redis_pages` says what its RSS is made of then, in KiB.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import numpy as np
import psutil

import tracewire
from tests.faults.harness.processes import ROOT, RedisServer
from tests.support.scripted_engine import acts, expected
from tracewire_bus.bus import Bus
from tracewire_bus.domain.fold import DigestMismatch, Fold, FoldError

__all__ = ["soak"]

MODEL = "tiny"


async def consume(url: str) -> None:
    """A consumer: a line on standard input is a trace, a line on standard output is what came of it."""
    reading = anyio.wrap_file(sys.stdin)
    async with tracewire.connect(url) as client, anyio.create_task_group() as group:

        async def follow(trace: str, prompt: str, tokens: int) -> None:
            fold = Fold(verifying=True)
            wrong = ""
            try:
                async for event in client.subscribe(trace):
                    fold.apply(event)
                fold.verify()
                ids, _ = expected(prompt, tokens)
                if fold.status != "finished" or fold.choices[0, 0].token_ids != ids:
                    wrong = f"it ended as {fold.status}, with {len(fold.choices[0, 0].token_ids)} of {tokens} tokens"
            except (FoldError, DigestMismatch, tracewire.TracewireError) as error:
                wrong = f"{type(error).__name__}: {error}"
            print(json.dumps([trace, wrong]), flush=True)

        await client.models.list()
        print("ready", flush=True)
        async for line in reading:
            group.start_soon(follow, *json.loads(line))


class Consumer:
    """A consumer's process, seen from here."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self.process = process
        self.wrong: list[str] = []
        self.ready = anyio.Event()
        self._waiting: dict[str, anyio.Event] = {}

    async def follow(self, trace: str, prompt: str, tokens: int) -> None:
        """Have it follow a trace, to its end."""
        assert self.process.stdin is not None
        ended = self._waiting[trace] = anyio.Event()
        await self.process.stdin.send(json.dumps([trace, prompt, tokens]).encode() + b"\n")
        await ended.wait()

    async def listen(self) -> None:
        """Take its answers."""
        assert self.process.stdout is not None
        rest = b""
        async for data in self.process.stdout:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line == b"ready":
                    self.ready.set()
                    continue
                trace, wrong = json.loads(line)
                if wrong:
                    self.wrong.append(f"{trace}: {wrong}")
                self._waiting.pop(trace).set()


def slope(done: list[int], values: list[float]) -> float:
    """By how much a straight line through these rises per 1000 traces."""
    return float(np.polyfit(np.array(done) / 1000, np.array(values), 1)[0]) if len(done) > 2 else float("nan")


async def _used(bus: Bus) -> float:
    """What Redis says that it uses, in KiB."""
    return (await bus.memory.usage())[1] / 1024


async def _kept(bus: Bus) -> dict[str, float]:
    """What Redis has, by the kind of key, in KiB; its tables of keys; and what it has in all."""
    kept: dict[str, float] = {}
    cursor: Any = b"0"
    while True:
        cursor, names = await bus.command("SCAN", cursor, "COUNT", 1000)
        sizes = await bus._connections.commands(*(("MEMORY", "USAGE", name, "SAMPLES", 0) for name in names), ("PING",))
        for name, size in zip(names, sizes, strict=False):
            kind = name.decode().split("}")[-1].split(":")[1 if b"}" in name else -1]
            kept[kind] = kept.get(kind, 0.0) + (size or 0) / 1024
        if cursor == b"0":
            break
    # Now that what had expired was met, and is gone.
    flat = await bus.command("MEMORY", "STATS")
    stats = dict(zip(flat[::2], flat[1::2], strict=True))
    tables = dict(zip(stats[b"db.0"][::2], stats[b"db.0"][1::2], strict=True))
    kept |= {
        "in all": stats[b"total.allocated"] / 1024,
        "table of keys": tables[b"overhead.hashtable.main"] / 1024,
        "table of expiries": tables[b"overhead.hashtable.expires"] / 1024,
        "clients": stats[b"clients.normal"] / 1024,
    }
    return kept


async def _pages(bus: Bus) -> dict[str, float]:
    """Of the pages that Redis holds, in KiB: what is in use, what is left between that, and what else there is."""
    flat = await bus.command("MEMORY", "STATS")
    stats = dict(zip(flat[::2], flat[1::2], strict=True))
    used, active, resident = (stats[b"allocator." + name] for name in (b"allocated", b"active", b"resident"))
    return {
        "in use": round(used / 1024, 1),
        "between": round((active - used) / 1024, 1),
        "kept by the allocator": round((resident - active) / 1024, 1),
        "outside of it": round(stats[b"rss-overhead.bytes"] / 1024, 1),
    }


def _gained(first: dict[str, float], last: dict[str, float]) -> dict[str, float]:
    """What has come since. Keys as Redis counts them have their entries in the table of keys with them."""
    gained = {kind: round(size - first.get(kind, 0.0), 1) for kind, size in last.items()}
    named = sum(size for kind, size in gained.items() if kind not in ("in all", "table of keys"))
    return {kind: size for kind, size in sorted(gained.items()) if abs(size) >= 1} | {
        "the rest": round(gained["in all"] - named, 1)
    }


async def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Run it, and say what came of it."""
    done = 0
    samples: list[tuple[int, dict[str, tuple[float, float]]]] = []
    with tempfile.TemporaryDirectory(prefix="tracewire-soak-") as folder:
        server = RedisServer(Path(folder), appendonly="no")
        await server.start()
        url = server.url
        command = [
            sys.executable,
            "-m",
            "tests.support.scripted_engine",
            "--url",
            url,
            "--model",
            MODEL,
            "--lease",
            "30",
        ]
        command += ["--capacity", str(options.at_once + 24), "--rate", str(options.rate)]
        command += ["--retention", str(options.retention), "--retain-traces", str(options.retain_traces)]
        engine = await anyio.open_process(command, cwd=ROOT, stderr=None)
        command = [sys.executable, "-m", "tests.faults.harness.soak", "--consumer", url]
        consumers = [
            Consumer(await anyio.open_process(command, cwd=ROOT, stderr=None)) for _ in range(options.consumers)
        ]
        watched = {"redis": psutil.Process(server.pid), "adapter": psutil.Process(engine.pid)}
        watched |= {f"consumer {place}": psutil.Process(one.process.pid) for place, one in enumerate(consumers)}
        watched["submitter"] = psutil.Process()

        async def sample() -> None:
            while True:
                found = {}
                for name, process in watched.items():
                    memory = process.memory_full_info()
                    found[name] = memory.rss / 1024, memory.pss / 1024
                used = await _used(bus)
                found["redis, by its own account"] = used, used
                samples.append((done, found))
                await anyio.sleep(options.every)

        try:
            async with (
                Bus.open(url) as bus,
                tracewire.connect(url, lease_ttl=120) as client,
                anyio.create_task_group() as group,
            ):
                for consumer in consumers:
                    group.start_soon(consumer.listen)
                # Traces expire soon: one that is late would miss them.
                for consumer in consumers:
                    await consumer.ready.wait()
                await client.models.get(MODEL, timeout=60)
                first = await _kept(bus)
                began = time.monotonic()
                group.start_soon(sample)
                room = anyio.Semaphore(options.at_once)

                async def one(number: int) -> None:
                    nonlocal done
                    trace, prompt = f"soak-{number}", f"prompt {number}"
                    handle = client.trace(MODEL, prompt, acts, trace_id=trace, detach=True, max_tokens=options.tokens)
                    while True:
                        try:
                            await handle.start()
                            break
                        except tracewire.UnknownModel:
                            # Its engine was too busy to renew its entry: it is there.
                            await anyio.sleep(0.5)
                    await handle.aclose()
                    async with anyio.create_task_group() as following:
                        for consumer in consumers:
                            following.start_soon(consumer.follow, trace, prompt, options.tokens)
                    done += 1
                    room.release()

                async with anyio.create_task_group() as traces:
                    for number in range(options.traces):
                        await room.acquire()
                        traces.start_soon(one, number)
                seconds = time.monotonic() - began
                left = await bus.command("HLEN", bus.keys.queue(MODEL, "entries"))
                # What ended last is kept for its time.
                await anyio.sleep(min(options.retention, 10) + 1)
                kept = _gained(first, await _kept(bus))
                pages = await _pages(bus)
                finished, _ = await bus.finished.total()
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                for consumer in consumers:
                    consumer.process.kill()
                    await consumer.process.aclose()
                engine.send_signal(signal.SIGTERM)
                await engine.wait()
                await engine.aclose()
                await server.aclose()
    steady = [(count, found) for count, found in samples if count >= options.at_once]
    memory = {}
    for name in (*watched, "redis, by its own account"):
        counts = [count for count, _ in steady]
        rss, pss = ([found[name][place] for _, found in steady] for place in (0, 1))
        memory[name] = {
            "rss_mib": [round(rss[0] / 1024, 1), round(rss[-1] / 1024, 1)] if rss else None,
            "rss_kib_per_1000": round(slope(counts, rss), 1),
            "pss_kib_per_1000": round(slope(counts, pss), 1),
        }
    return {
        "traces": done,
        "at_once": options.at_once,
        "consumers": options.consumers,
        "tokens": done * options.tokens,
        "seconds": round(seconds, 1),
        "lost": options.traces - done,
        "wrong": [wrong for consumer in consumers for wrong in consumer.wrong],
        "left_on_the_queue": left,
        "redis_kept": kept,
        "redis_pages": pages,
        "finished_left": finished,
        "samples": len(steady),
        "memory": memory,
    }


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=1000)
    parser.add_argument("--consumers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--rate", type=float, default=5.0, help="tokens a second of each trace")
    parser.add_argument("--retention", type=float, default=5.0, help="seconds that a trace is kept after its end")
    parser.add_argument("--retain-traces", type=int, default=0, help="how many finished traces are kept (0: all)")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between samples of memory")
    parser.add_argument("--consumer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.consumer:
        anyio.run(consume, options.consumer)
        return 0
    said = anyio.run(soak, options)
    print(json.dumps(said))
    return 1 if said["lost"] or said["wrong"] or said["left_on_the_queue"] else 0


if __name__ == "__main__":
    sys.exit(main())
