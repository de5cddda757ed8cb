"""The faults: what each needs on its stage, and what it does to it while a load runs."""

from __future__ import annotations

import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import anyio
from redis.crc import key_slot

from tests.faults.harness.load import Load
from tests.faults.harness.processes import RedisServer
from tests.faults.harness.stage import MODEL, Stage
from tests.support.redis.servers import (
    BINARIES,
    Cluster,
    Running,
    Servers,
    running_servers,
    see_that_it_is_dead,
    slot_of,
)
from tests.support.until import until

__all__ = ["FAULTS", "Fault"]

#: Leases of engines on a stage, and what follows from them, in seconds: short, so that trials are.
LEASE_S = 1.0


class Fault:
    """One way to break things. Subclasses say how."""

    name: ClassVar[str] = ""
    #: How many engines there are when a trial begins, and how many traces each runs at once.
    engines: ClassVar[int] = 2
    capacity: ClassVar[int] = 64
    #: Whether engines and clients reach Redis by wires.
    wired: ClassVar[bool] = False
    #: Redis's settings.
    settings: ClassVar[dict[str, str]] = {"appendonly": "no"}
    #: How many trials one stage is good for.
    lasts: ClassVar[int] = 10**9
    #: More options for engines.
    options: ClassVar[tuple[str, ...]] = ()
    traces: ClassVar[tuple[int, int]] = (20, 36)
    tokens: ClassVar[tuple[int, int]] = (20, 60)
    #: Steps an engine makes in a second.
    rate: ClassVar[int] = 60

    async def act(self, stage: Stage, load: Load, random: Random) -> None:
        """Break something, and mend it, while the load runs."""
        raise NotImplementedError

    @asynccontextmanager
    async def backend(self, folder: Path) -> AsyncIterator[Any]:
        """The Redis of its stage: one server, if it says nothing else."""
        server = RedisServer(folder, **self.settings)
        try:
            await server.start()
            yield server
        finally:
            await server.aclose()


async def _moment(load: Load, random: Random, most: float = 0.9) -> None:
    """Wait for a random moment while the load runs."""
    await load.begun.wait()
    await anyio.sleep(random.uniform(0.0, most))


class KillAdapter(Fault):
    """SIGKILL of an adapter's process; another takes its place."""

    name = "kill adapter"

    async def act(self, stage: Stage, load: Load, random: Random) -> None:
        await _moment(load, random)
        await stage.end(random.choice(stage.alive()), signal.SIGKILL)
        await stage.start_engine()


class EngineDies(Fault):
    """The engine dies under its adapter, which lives to say so."""

    name = "engine dies"

    async def act(self, stage: Stage, load: Load, random: Random) -> None:
        await _moment(load, random)
        await stage.end(random.choice(stage.alive()), signal.SIGUSR1)
        await stage.start_engine()


class Sigterm(Fault):
    """Adapters are told to end under load, one after another, as when a new version is rolled out."""

    name = "sigterm under load"
    options = ("--drain", "0.1")

    async def act(self, stage: Stage, load: Load, random: Random) -> None:
        for engine in stage.alive():
            await _moment(load, random, 0.5)
            await stage.start_engine()
            await stage.end(engine, signal.SIGTERM)
            with anyio.fail_after(60):
                await engine.child.ended.wait()


class Stopped(Fault):
    """An adapter stands still for longer than its lease, and then goes on as if nothing had been."""

    name = "adapter stopped"

    async def act(self, stage: Stage, load: Load, random: Random) -> None:
        await _moment(load, random)
        engine = random.choice(stage.alive())
        stage.mark("engine lost")
        stage.done["stopped"] += 1
        engine.child.send(signal.SIGSTOP)
        await anyio.sleep(random.uniform(0.8, 3.0) * LEASE_S)
        engine.child.send(signal.SIGCONT)


class Race(Fault):
    """Three engines race for claims, and somebody takes one for lost again and again that is not."""

    name = "engines racing"
    engines = 3
    capacity = 12

    async def act(self, stage: Stage, load: Load, random: Random) -> None:
        for _ in range(random.randint(2, 5)):
            await _moment(load, random, 0.4)
            name = random.choice(stage.alive()).name
            stage.done["traces taken away"] += await stage.bus.queue.put_back(
                MODEL, name, "it was taken for lost", lost=False
            )


class KillRedis(Fault):
    """kill -9 of a Redis that keeps a log, fsynced always, which comes back where it was."""

    name = "kill -9 redis"
    settings: ClassVar[dict[str, str]] = {"appendonly": "yes", "appendfsync": "always"}

    async def act(self, stage: Stage, load: Load, random: Random) -> None:
        await _moment(load, random)
        stage.server.kill()
        await anyio.sleep(random.uniform(0.0, 1.5))
        await stage.server.start()
        stage.mark("redis back")


class CutAppends(Fault):
    """Connections are cut at a random byte of what appends events, or of the answer to it."""

    name = "cut mid-XADD"
    wired = True

    async def act(self, stage: Stage, load: Load, random: Random) -> None:
        await load.begun.wait()
        for _ in range(random.randint(4, 12)):
            await anyio.sleep(random.uniform(0.0, 0.2))
            # Clients submit and steer by the same scripts.
            line = random.choice([*stage.engine_wires, *stage.engine_wires, *stage.client_wires])
            line.cut_next(random.choice(["up", "down"]))
            if random.random() < 0.1:
                await line.cut()


class HalfOpen(Fault):
    """Connections go dead without a word, one way or both; what was held comes late, or never."""

    name = "half-open"
    wired = True
    options = ("--command", "3")

    async def act(self, stage: Stage, load: Load, random: Random) -> None:
        await _moment(load, random)
        lines = random.sample([*stage.engine_wires, *stage.client_wires], random.randint(1, 2))
        up, down = random.choice([(True, False), (False, True), (True, True)])
        new = random.random() < 0.3
        for line in lines:
            stage.done["connections held"] += line.hold(up, down, new=new, share=random.choice([0.5, 1.0]))
        await anyio.sleep(random.uniform(0.3, 4.0))
        for line in lines:
            if random.random() < 0.7:
                line.let_go()
            else:
                line.hold_new = None
                await line.cut()


class Delays(Fault):
    """Everything takes its time, each piece another."""

    name = "delayed"
    wired = True

    async def act(self, stage: Stage, load: Load, random: Random) -> None:
        await load.begun.wait()
        lines = [*stage.engine_wires, *stage.client_wires]
        for line in random.sample(lines, random.randint(1, len(lines))):
            line.delay = (0.0, random.uniform(0.02, 0.3))
        await anyio.sleep(random.uniform(0.5, 2.0))
        for line in lines:
            line.delay = (0.0, 0.0)


class KillConsumer(Fault):
    """Consumers' processes are killed, and go on in another process behind what they had written down."""

    name = "kill consumer"

    async def act(self, stage: Stage, load: Load, random: Random) -> None:
        for _ in range(random.randint(1, 4)):
            await _moment(load, random, 0.5)
            name = random.choice(list(load.processes))
            old = load.processes[name]
            if old.ended.is_set() and old.status == 0:
                continue
            await old.kill()
            stage.mark("consumer killed")
            await load.start_consumer(name)


class FullRedis(Fault):
    """Redis is at its maxmemory for a while, and takes nothing that needs any."""

    name = "redis at maxmemory"

    async def act(self, stage: Stage, load: Load, random: Random) -> None:
        await _moment(load, random)
        stage.done["full"] += 1
        try:
            await stage.server.ask("CONFIG", "SET", "maxmemory", "1mb")
            await anyio.sleep(random.uniform(0.2, 2.5))
        finally:
            with anyio.CancelScope(shield=True):
                await stage.server.ask("CONFIG", "SET", "maxmemory", "0")
        stage.mark("redis back")


class Trim(Fault):
    """Streams are trimmed under their consumers, which are away for a while; sometimes an adapter is killed as well."""

    name = "trim overrun"
    options = ("--retain-events", "8")
    tokens = (80, 200)
    rate = 100

    async def act(self, stage: Stage, load: Load, random: Random) -> None:
        await _moment(load, random)
        name = random.choice(list(load.processes))
        if random.random() < 0.5:
            load.processes[name].send(signal.SIGSTOP)
            await anyio.sleep(random.uniform(0.2, 1.5))
            load.processes[name].send(signal.SIGCONT)
        elif not load.processes[name].ended.is_set():
            await load.processes[name].kill()
            await anyio.sleep(random.uniform(0.0, 0.15))
            await load.start_consumer(name)
        if random.random() < 0.4:
            await stage.end(random.choice(stage.alive()), signal.SIGKILL)
            await stage.start_engine()


class Failover(Fault):
    """The master behind a sentinel is killed, once its replica has what it has, and the replica takes its place."""

    name = "sentinel failover"
    lasts = 1

    @asynccontextmanager
    async def backend(self, folder: Path) -> AsyncIterator[Any]:
        async with running_servers(next(iter(BINARIES))) as servers:
            yield await Pair.start(servers)

    async def act(self, stage: Stage, load: Load, random: Random) -> None:
        await _moment(load, random)
        await stage.server.fail_over()
        stage.mark("redis back")


class Pair:
    """A master, its replica, and the sentinel that decides about them."""

    def __init__(self, master: Running, replica: Running, sentinel: Running) -> None:
        self.master, self.replica, self.sentinel = master, replica, sentinel
        self.url = f"redis+sentinel://{sentinel.address}/events"

    @classmethod
    async def start(cls, servers: Servers) -> Pair:
        """Start them, and wait until the sentinel could promote the replica."""
        at_once = [("repl-diskless-sync", "yes"), ("repl-diskless-sync-delay", 0)]
        master = await servers.start(settings=at_once)
        replica = await servers.start(settings=[("replicaof", ("127.0.0.1", master.port)), at_once[1]])

        async def linked() -> bool:
            return b"master_link_status:up" in await replica.ask("INFO", "replication")

        await until(linked)
        sentinel = await servers.sentinel(master, "events")

        async def known() -> bool:
            replicas = await sentinel.ask("SENTINEL", "REPLICAS", "events")
            fields = [dict(zip(one[::2], one[1::2], strict=True)) for one in replicas]
            return [(one[b"flags"], one[b"master-link-status"]) for one in fields] == [(b"slave", b"ok")]

        await until(known)
        return cls(master, replica, sentinel)

    def nodes(self) -> list[Running]:
        """Where keys lie."""
        return [self.replica]

    async def fail_over(self) -> None:
        """Let nobody write until the replica has everything, and kill the master."""
        await self.master.ask("CLIENT", "PAUSE", 60_000, "WRITE")

        async def equal() -> bool:
            said = (await self.master.ask("INFO", "replication")).decode()
            ahead = re.search(r"master_repl_offset:(\d+)", said)
            behind = re.search(r"slave_repl_offset:(\d+)", (await self.replica.ask("INFO", "replication")).decode())
            return ahead is not None and behind is not None and ahead[1] == behind[1]

        await until(equal)
        self.master.kill()
        await see_that_it_is_dead(self.sentinel, "events")

        async def promoted() -> bool:
            return (await self.replica.ask("ROLE"))[0] == b"master"

        await until(promoted)


class MoveSlots(Fault):
    """Slots of a cluster move to other nodes, with the traces and the queue that lie on them."""

    name = "cluster slot move"

    @asynccontextmanager
    async def backend(self, folder: Path) -> AsyncIterator[Any]:
        async with running_servers(next(iter(BINARIES))) as servers:
            yield Slots(await servers.cluster(3))

    async def act(self, stage: Stage, load: Load, random: Random) -> None:
        await load.begun.wait()
        keys = stage.bus.keys
        for _ in range(random.randint(2, 6)):
            await anyio.sleep(random.uniform(0.0, 0.3))
            if random.random() < 0.3:
                slot = key_slot(keys.queue(MODEL, "entries").encode())
            else:
                slot = slot_of(keys, random.choice([*load.asked]))
            await stage.server.cluster.move(slot)
            stage.done["slots moved"] += 1


class Slots:
    """A cluster as a stage has it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.url = cluster.url

    def nodes(self) -> list[Running]:
        """Where keys lie."""
        return self.cluster.nodes


class Several(Fault):
    """Some of the others at once, on a stage that has it all."""

    name = "several at once"
    engines = 3
    wired = True
    settings: ClassVar[dict[str, str]] = KillRedis.settings
    options = ("--command", "3")
    tokens = (30, 90)

    async def act(self, stage: Stage, load: Load, random: Random) -> None:
        others = random.sample(
            [KillAdapter, EngineDies, Sigterm, Stopped, Race, KillRedis, CutAppends, HalfOpen, Delays, KillConsumer],
            random.randint(2, 4),
        )
        async with anyio.create_task_group() as group:
            for other in others:
                group.start_soon(other().act, stage, load, Random(random.random()))


#: By name.
FAULTS: dict[str, type[Fault]] = {fault.name: fault for fault in Fault.__subclasses__()}
