"""What engines, traces and readers cost the Redis between them: `python -m benchmarks.sizing [--json]`.

Adapters, clients and Redis are real, engines scripted (`tests/support/scripted_engine.py`). Printed are, as Redis
counts them:

- of an idle engine: connections, and CPU, commands and bytes a second;
- of a trace: CPU and memory of one with a single token, and of each further output (one value of 16 bytes with each),
  which nobody reads; then CPU of each delivery to a reader, and a reading client's connections;
- of the registry: what the first look at so many engines of a real model's size costs a client, what a later one does,
  how long an engine's heartbeat is beside the whole of what it registers, and the memory of all;
- of looking after a queue with a tenth as many engines that run 64 traces each: what each engine does once a second,
  and what one of them does for all.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio

import tracewire
from benchmarks.processes import at_least
from tests.faults.harness.processes import Nursery, RedisServer, nursery
from tests.support.bus_engine import engine_info
from tests.support.scripted_engine import acts
from tracewire import Client
from tracewire_bus.bus import Bus
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.messages import EngineInfo, ModuleInfo

SHORT, LONG = 1, 101


async def info(server: RedisServer) -> dict[str, float]:
    """Redis's counters that are read here."""
    said: dict[str, str] = {}
    for section in ("cpu", "stats", "clients", "memory"):
        raw = bytes(await server.ask("INFO", section)).decode()
        said |= dict(line.split(":", 1) for line in raw.splitlines() if ":" in line)
    return {
        "cpu": float(said["used_cpu_user"]) + float(said["used_cpu_sys"]),
        "commands": float(said["total_commands_processed"]),
        "read": float(said["total_net_input_bytes"]),
        "written": float(said["total_net_output_bytes"]),
        "connections": float(said["connected_clients"]),
        "memory": float(said["used_memory"]),
    }


async def idle(server: RedisServer, started: Nursery, engines: int, seconds: float) -> dict[str, float]:
    """Of an engine without work, a second."""
    before = await info(server)
    children = [await started.start("engine", "--url", server.url, "--lease", "5") for _ in range(engines)]
    async with Bus.open(server.url) as bus:
        while len(await bus.registry.list()) < engines:  # noqa: ASYNC110
            await anyio.sleep(0.1)
    await anyio.sleep(1)
    begun, since = await info(server), time.monotonic()
    await anyio.sleep(seconds)
    ended, during = await info(server), time.monotonic() - since
    for child in children:
        await child.kill()
    each = {name: (ended[name] - begun[name]) / during / engines for name in ("cpu", "commands", "read", "written")}
    return {
        "connections": (begun["connections"] - before["connections"]) / engines,
        "cpu_us": each["cpu"] * 1e6,
        "commands": each["commands"],
        "bytes": each["read"] + each["written"],
    }


async def play(client: Client, name: str, count: int, tokens: int, readers: int) -> None:
    """Traces of so many tokens, to their ends, each followed by so many subscriptions."""

    async def follow(trace: str) -> None:
        async for _ in client.subscribe(trace):
            pass

    async with client.watch() as watch, anyio.create_task_group() as group:
        for number in range(count):
            trace = client.trace(
                "tiny", f"prompt {number}", acts, max_tokens=tokens, detach=True, trace_id=f"{name}-{number}"
            )
            await trace.start()
            await trace.aclose()
            for _ in range(readers):
                group.start_soon(follow, trace.id)
        left = count
        while left:
            left -= (await anext(watch)).type == "final"


async def traces(server: RedisServer, started: Nursery, count: int) -> dict[str, float]:
    """Of a trace, an output and a delivery."""
    engine = await started.start("engine", "--url", server.url, "--lease", "5", "--capacity", "64", "--rate", "50")
    found: dict[str, dict[str, float]] = {}
    async with tracewire.connect(server.url) as client:
        await client.models.get("tiny", timeout=60)
        await play(client, "warm", 20, SHORT, 0)
        for name, tokens, readers in (("short", SHORT, 0), ("long", LONG, 0), ("read", LONG, 2)):
            before = await info(server)
            await play(client, name, count, tokens, readers)
            after = await info(server)
            found[name] = {key: (after[key] - before[key]) / count for key in ("cpu", "memory")}
        connections = (await info(server))["connections"]
    await anyio.sleep(0.2)
    connections -= (await info(server))["connections"]
    await engine.kill()
    outputs = LONG - SHORT
    return {
        "cpu_us": found["short"]["cpu"] * 1e6,
        "memory": found["short"]["memory"],
        "output_cpu_us": (found["long"]["cpu"] - found["short"]["cpu"]) / outputs * 1e6,
        "output_memory": (found["long"]["memory"] - found["short"]["memory"]) / outputs,
        "delivery_cpu_us": (found["read"]["cpu"] - found["long"]["cpu"]) / LONG / 2 * 1e6,
        "client_connections": connections,
    }


def described(number: int) -> EngineInfo:
    """An engine of a model of 32 layers, with about what such a model's tree is on vLLM."""
    parts = ("", ".self_attn", ".self_attn.qkv_proj", ".self_attn.o_proj", ".self_attn.rotary_emb", ".self_attn.attn")
    parts += (".mlp", ".mlp.gate_up_proj", ".mlp.down_proj", ".mlp.act_fn", ".input_layernorm")
    parts += (".post_attention_layernorm",)
    modules = [ModuleInfo(f"model.layers.{layer}{part}", f"Class{part}") for layer in range(32) for part in parts]
    attributes = {f"Class{part}": [f"an_attribute_{index}" for index in range(120)] for part in parts}
    return engine_info("large", f"engine-{number}", modules=modules, attributes=attributes, capacity=256)


async def registry(server: RedisServer, engines: int) -> dict[str, float]:
    """Of a client's look at so many engines."""
    infos = [described(number) for number in range(engines)]
    async with Bus.open(server.url) as bus, Bus.open(server.url) as reader:
        before = await info(server)
        for one in infos:
            await bus.registry.register(one, ttl_s=600)
        stored = await info(server)
        for one in infos:
            one.running += 1
            await bus.registry.register(one, ttl_s=600)
        beaten = await info(server)
        looks = []
        for _ in range(5):
            begun, since = await info(server), time.perf_counter()
            assert len(await reader.registry.list()) == engines
            took, ended = time.perf_counter() - since, await info(server)
            looks.append((took, ended["written"] - begun["written"], ended["cpu"] - begun["cpu"]))
    again = looks[1:]
    return {
        "engines": engines,
        "whole_bytes": len(encode(infos[0])),
        "heartbeat_bytes": (beaten["read"] - stored["read"]) / engines,
        "heartbeat_cpu_us": (beaten["cpu"] - stored["cpu"]) / engines * 1e6,
        "memory": (stored["memory"] - before["memory"]) / engines,
        "first_look_ms": looks[0][0] * 1e3,
        "look_ms": sum(look[0] for look in again) / len(again) * 1e3,
        "look_bytes": sum(look[1] for look in again) / len(again),
        "look_cpu_ms": sum(look[2] for look in again) / len(again) * 1e3,
    }


async def looking(server: RedisServer, engines: int, running: int) -> dict[str, float]:
    """Of looking after a queue that so many engines have taken so many traces of, a time: Redis's CPU."""
    async with Bus.open(server.url) as bus:
        for engine in range(engines):
            for number in range(running):
                await bus.queue.put("large", f"{engine}-{number}", b"d" * 200, client=f"client {number % 8}")
            taken = 0
            while taken < running:
                # What waits is shared between those that have taken: an engine takes until nothing does.
                taken += len(await bus.queue.take("large", f"engine-{engine}", running, 0))
        holders = await bus.queue.holders("large")
        found: dict[str, float] = {"engines": engines, "running": running}
        for name, look in (
            ("each_ms", lambda: bus.registry.alive(*holders)),
            ("given_up_ms", lambda: bus.queue.given_up("large")),
            ("leases_ms", lambda: bus.queue.leases("large")),
        ):
            before = await info(server)
            for _ in range(20):
                await look()
            found[name] = ((await info(server))["cpu"] - before["cpu"]) / 20 * 1e3
    return found


async def run(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """All of it, each on a Redis of its own."""
    found: dict[str, dict[str, float]] = {}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sizing-")))
        started = await stack.enter_async_context(nursery(folder))
        for name in ("idle engine", "trace", "registry", "looking after"):
            (folder / name).mkdir()
            server = RedisServer(folder / name)
            await server.start()
            if name == "idle engine":
                found[name] = await idle(server, started, options.idle, options.seconds)
            elif name == "trace":
                found[name] = await traces(server, started, options.traces)
            elif name == "registry":
                found[name] = await registry(server, options.engines)
            else:
                found[name] = await looking(server, options.engines // 10, 64)
            await server.aclose()
    return found


def main() -> int:
    """As a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--idle", type=at_least(1), default=8, help="how many idle engines are measured")
    parser.add_argument("--seconds", type=float, default=10.0, help="for how long")
    parser.add_argument("--traces", type=at_least(1), default=300, help="how many traces of each kind")
    parser.add_argument(
        "--engines",
        type=at_least(10),
        default=1000,
        help="how many are in the registry, a tenth on a queue",
    )
    found: dict[str, Any] = anyio.run(run, parser.parse_args())
    for name, values in found.items():
        print(f"{name}: {', '.join(f'{key} {value:.4g}' for key, value in values.items())}")
    if "--json" in sys.argv:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
