"""Where the trials of one fault are played: a Redis, engines, clients, and wires between them, kept from trial to trial
as long as nothing breaks them.
"""

from __future__ import annotations

import json
import signal
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import anyio

import tracewire
from tests.faults.harness.checker import Violation, check_leftovers
from tests.faults.harness.processes import Child, Nursery
from tests.support.network import Wire, wire
from tracewire import Client
from tracewire_bus.bus import Bus

__all__ = ["MODEL", "Engine", "Stage", "stage"]

MODEL = "tiny"
#: Ends of names of keys that have no expiry: the registry's set, counters and names, and what waits to be looked at.
WITHOUT_EXPIRY = (":engines", "queue:state", "queue:holders", ":dead", ":deadlines")
#: How long what is left may take to go, in seconds.
SETTLING_S = 40.0


class Engine:
    """A scripted engine behind an adapter, in a process of its own; by a wire, if it has one."""

    def __init__(self, name: str, child: Child, line: Wire | None) -> None:
        self.name = name
        self.child = child
        self.wire = line
        self.since = time.monotonic()
        #: Whether somebody meant it to end.
        self.doomed = False

    def log(self) -> str:
        """What it said."""
        return self.child.log.read_text(errors="replace") if self.child.log.exists() else ""

    async def holds(self) -> dict[str, int] | None:
        """What it has of traces, or None if it does not say."""
        before = self.log().count("\nholds ")
        self.child.send(signal.SIGUSR2)
        with anyio.move_on_after(5):
            while not self.child.ended.is_set():
                said = self.log()
                if said.count("\nholds ") > before and said.endswith("\n"):
                    held: dict[str, int] = json.loads(said.rpartition("\nholds ")[2].splitlines()[0])
                    return held
                await anyio.sleep(0.02)
        return None


class Stage:
    """What a fault acts on, and a load runs on."""

    def __init__(self, folder: Path, server: Any, births: Nursery, options: tuple[str, ...]) -> None:
        self.folder = folder
        self.server = server
        self.nursery = births
        self.options = options
        self.prefix = f"f{uuid.uuid4().hex[:6]}"
        self.engines: dict[str, Engine] = {}
        self.clients: list[Client] = []
        self.bus: Bus
        #: For engines and for clients, if they are wired at all.
        self.engine_wires: list[Wire] = []
        self.client_wires: list[Wire] = []
        #: When something was broken or mended, by what it was.
        self.marks: dict[str, float] = {}
        #: How often what was done.
        self.done: Counter[str] = Counter()
        self._count = 0

    @property
    def consumer_url(self) -> str:
        """Where consumers in processes of their own find Redis."""
        return self.client_wires[-1].url if self.client_wires else self.server.url

    def mark(self, what: str) -> None:
        """Note when something happened."""
        self.marks[what] = time.monotonic()
        self.done[what] += 1

    async def start_engine(self) -> Engine:
        """Start another engine, and wait until it serves."""
        while True:
            with suppress(RuntimeError):
                return await self._start_engine()
            # Redis was away just then: whoever supervises it starts it again.
            self.done["engine that did not start"] += 1

    async def _start_engine(self) -> Engine:
        self._count += 1
        name = f"engine-{self._count}"
        line = self.engine_wires[self._count % len(self.engine_wires)] if self.engine_wires else None
        url = line.url if line is not None else self.server.url
        child = await self.nursery.start(
            *("engine", "--url", url, "--prefix", self.prefix, "--model", MODEL, "--engine", name, *self.options)
        )
        engine = self.engines[name] = Engine(name, child, line)
        with anyio.fail_after(60):
            while not await self.bus.registry.alive(name):
                if child.ended.is_set():
                    del self.engines[name]
                    raise RuntimeError(f"{name} ended with {child.status} as it started:\n{engine.log()[-2000:]}")
                await anyio.sleep(0.02)
        return engine

    def alive(self) -> list[Engine]:
        """Engines that nobody has ended, the oldest first."""
        return [engine for engine in self.engines.values() if not engine.doomed and not engine.child.ended.is_set()]

    async def end(self, engine: Engine, number: int) -> None:
        """Send an engine a signal that ends it, sooner or later, and note when."""
        engine.doomed = True
        self.mark("engine lost")
        engine.child.send(number)

    async def staff(self, count: int) -> None:
        """Start engines until there are so many."""
        while len(self.alive()) < count:
            await self.start_engine()

    def deserted(self) -> list[Violation]:
        """Engines that ended though nobody meant them to."""
        gone = [one for one in self.engines.values() if one.child.ended.is_set()]
        for engine in gone:
            del self.engines[engine.name]
        return [
            Violation("wrong", one.name, f"it ended with {one.child.status}: {one.log()[-500:]}")
            for one in gone
            if not one.doomed
        ]

    async def leftovers(self, traces: list[str]) -> list[Violation]:
        """What is left when all traces have ended, once it has had time to go."""
        found: list[Violation] = []
        with anyio.move_on_after(SETTLING_S):
            while found := await self._leftovers(traces):  # noqa: ASYNC110
                await anyio.sleep(0.05)
        return found

    async def _leftovers(self, traces: list[str]) -> list[Violation]:
        bus, keys = self.bus, self.bus.keys
        counts: dict[str, int] = {}
        for part, command in [
            *(("entries", "HLEN"), ("data", "HLEN"), ("taken", "HLEN")),
            *(("suspects", "ZCARD"), ("turns", "ZCARD"), ("leases", "SCARD")),
        ]:
            counts[part] = await bus.command(command, keys.queue(MODEL, part))
        counts["waiting"] = await bus.queue.waiting(MODEL)
        names = {engine.name for engine in self.alive()}
        counts["holders"] = len(set(await bus.queue.holders(MODEL)) - names)
        if any(counts.values()):
            return check_leftovers(counts, [], [], {})
        held: dict[str, int] = {}
        for engine in self.alive():
            for what, count in ((await engine.holds()) or {"unknown": 1}).items():
                held[f"{engine.name}: {what}"] = count
        for trace in traces:
            held[f"{trace}: changes"] = await bus.command("EXISTS", keys.changes(trace))
            for key in (keys.events(trace), keys.record(trace)):
                held[f"{key}: outlives its retention"] = int(await bus.command("TTL", key) > 3600)
        return check_leftovers(counts, await self._without_expiry(), WITHOUT_EXPIRY, held)

    async def _without_expiry(self) -> list[str]:
        found: list[str] = []
        for node in self.server.nodes():
            cursor: Any = b"0"
            while True:
                cursor, names = await node.ask("SCAN", cursor, "MATCH", f"{self.prefix}:*", "COUNT", 1000)
                left = [await self.bus.command("TTL", name) for name in names]
                found += [name.decode() for name, ttl in zip(names, left, strict=True) if ttl == -1]
                if cursor == b"0":
                    break
        return found


@asynccontextmanager
async def stage(
    folder: Path,
    births: Nursery,
    random: Random,
    *,
    backend: Callable[[Path], AbstractAsyncContextManager[Any]],
    options: tuple[str, ...],
    wired: bool,
    clients: int = 3,
) -> AsyncIterator[Stage]:
    """A stage with its Redis, its clients and no engine yet. Everything on it is ended with it."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(backend(folder))
        built = Stage(folder, server, births, options)
        for lines, count in ((built.engine_wires, 3), (built.client_wires, clients)) if wired else ():
            for _ in range(count):
                lines.append(await stack.enter_async_context(wire(server.port, random)))
        built.bus = await stack.enter_async_context(Bus.open(server.url, prefix=built.prefix, patience_s=60))
        for number in range(clients):
            url = built.client_wires[number].url if wired else server.url
            connected = tracewire.connect(
                url, prefix=built.prefix, name=f"client-{number}", lease_ttl=60, retry_timeout=30
            )
            built.clients.append(await stack.enter_async_context(connected))
        try:
            yield built
        finally:
            with anyio.CancelScope(shield=True):
                for engine in list(built.engines.values()):
                    await engine.child.kill()
