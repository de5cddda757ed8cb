"""Redis behind sentinels, real ones: whoever is on the bus goes on when the master is another."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream
from hiredis import Reader
from redis.exceptions import ConnectionError

import tracewire
from tests.support.bus_engine import engine_info
from tests.support.redis.servers import (
    BINARIES,
    HOST,
    Running,
    Servers,
    free_port,
    running_servers,
    see_that_it_is_dead,
)
from tests.support.redis.transports import end_to_end
from tests.support.until import until
from tracewire_bus.bus import FINAL_ID, Bus, BusError, BusUnavailable, Entry
from tracewire_bus.transport.link import Link
from tracewire_bus.transport.sentinel import Sentinels
from tracewire_bus.wire.codec import schema_text

pytestmark = pytest.mark.parametrize("version", BINARIES)


SERVICE = "events"
PATIENCE = 60


class Watched:
    """A master with a replica, and the sentinel that decides about them."""

    def __init__(self, servers: Servers, master: Running, replica: Running, sentinel: Running) -> None:
        self.servers = servers
        self.master = master
        self.replica = replica
        self.sentinel = sentinel
        # The first one that the URL names is down.
        self.url = f"redis+sentinel://{HOST}:{free_port()},{sentinel.address}/{SERVICE}"

    async def replica_is_known(self) -> None:
        """Wait until the sentinel could promote the replica."""

        async def known() -> bool:
            replicas = await self.sentinel.ask("SENTINEL", "REPLICAS", SERVICE)
            fields = [dict(zip(one[::2], one[1::2], strict=True)) for one in replicas]
            return [(one[b"flags"], one[b"master-link-status"]) for one in fields] == [(b"slave", b"ok")]

        await until(known)

    async def replica_is_master(self) -> None:
        """Wait until the sentinel names it as such."""

        async def named() -> bool:
            _, port = await self.sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
            return int(port) == self.replica.port

        await until(named)

    async def replica_has_all(self) -> None:
        """Wait until the replica has what the master has."""

        async def offset(server: Running, name: bytes) -> bytes:
            lines = (await server.ask("INFO", "replication")).split(b"\r\n")
            return next(line.partition(b":")[2] for line in lines if line.startswith(name + b":"))

        async def equal() -> bool:
            ahead = await offset(self.master, b"master_repl_offset")
            return ahead == await offset(self.replica, b"slave_repl_offset")

        await until(equal)


@asynccontextmanager
async def watched(version: str, *lines: str) -> AsyncIterator[Watched]:
    async with running_servers(version) as servers:
        master = await servers.start(settings=[("repl-diskless-sync", "yes"), ("repl-diskless-sync-delay", 0)])
        replica = await servers.start(
            settings=[("replicaof", (HOST, master.port)), ("repl-diskless-sync-delay", 0)],
        )

        async def linked() -> bool:
            return b"master_link_status:up" in await replica.ask("INFO", "replication")

        await until(linked)
        sentinel = await servers.sentinel(master, SERVICE, *lines)
        yield Watched(servers, master, replica, sentinel)


async def test_everything_by_sentinels_and_a_failover_in_the_middle_of_appends(version: str, prefix: str) -> None:
    count, cut = 600, 200
    async with watched(version) as service:
        await end_to_end(service.url, prefix)
        await service.replica_is_known()
        entries: list[Entry] = []
        appended = 0
        async with Bus.open(service.url, prefix=prefix) as bus:
            reached = anyio.Event()

            async def follow() -> None:
                entries.extend([entry async for entry in bus.read("t")])

            async def write() -> None:
                nonlocal appended
                async with bus.writer() as writer, anyio.create_task_group() as appends:
                    for seq in range(count):
                        appends.start_soon(writer.submit, "t", 1, seq, b"%d" % seq)
                        if seq % 20 == 0:
                            await writer.append("other", 1, seq // 20, b"x")
                        appended = seq
                        if seq == cut:
                            reached.set()
                async with bus.writer() as writer:
                    await writer.append("t", 1, count, b"%d" % count, final=True)

            with anyio.fail_after(60):
                async with anyio.create_task_group() as group:
                    group.start_soon(follow)
                    group.start_soon(write)
                    await reached.wait()
                    # What is replicated behind the writer's back may be lost: not here.
                    await service.master.ask("CLIENT", "PAUSE", 60_000, "WRITE")
                    await service.replica_has_all()
                    service.master.kill()
                    await see_that_it_is_dead(service.sentinel, SERVICE)
                # Scripts, the queue and the registry too.
                assert int((await bus.command("CONFIG", "GET", "port"))[1]) == service.replica.port
        assert [int(entry.data) for entry in entries] == list(range(count + 1))
        assert [entry.id for entry in entries] == [*(f"1-{seq}" for seq in range(count)), FINAL_ID]
        await end_to_end(service.url, prefix)


async def test_a_master_that_was_replaced_and_lives_is_left(version: str, prefix: str) -> None:
    async with watched(version) as service:
        await service.replica_is_known()
        async with Bus.open(service.url, prefix=prefix, patience_s=30) as bus, bus.writer() as writer:
            await writer.append("t", 1, 0, b"0")
            await service.replica_has_all()
            # Its connections stand, and for some seconds nobody tells it.
            await service.sentinel.ask("SENTINEL", "FAILOVER", SERVICE)
            await service.replica_is_master()

            async def left() -> bool:
                return int((await bus.command("CONFIG", "GET", "port"))[1]) == service.replica.port

            await until(left)
            # A writer's link asks for itself.
            await writer.append("t", 1, 1, b"1", final=True)
            entries = [entry.data async for entry in bus.read("t")]
        assert entries == [b"0", b"1"]
        assert await service.replica.ask("XLEN", bus.keys.events("t")) == 2


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies are awaited for ever."""
    monkeypatch.setattr(
        Link.execute, "__kwdefaults__", {**(Link.execute.__kwdefaults__ or {}), "timeout_s": float("inf")}
    )


@pytest.mark.usefixtures("_patient")
async def test_a_master_that_hangs_is_left_once_it_was_replaced(version: str, prefix: str) -> None:
    """It answers nothing more, and closes no connection."""
    async with watched(version) as service:
        await service.replica_is_known()
        link = Link(Sentinels(service.url))
        async with Bus.open(service.url, prefix=prefix, patience_s=1000) as bus:
            assert int((await bus.command("CONFIG", "GET", "port"))[1]) == service.master.port
            await link.connect()
            os.kill(service.master.pid, signal.SIGSTOP)
            ports: list[int] = []

            async def ask() -> None:
                ports.append(int((await bus.command("CONFIG", "GET", "port"))[1]))

            async def block() -> None:
                with pytest.raises(ConnectionError, match="another server has taken over"):
                    await link.execute(("BLPOP", "nothing", 0))

            with anyio.fail_after(PATIENCE):
                async with anyio.create_task_group() as group:
                    group.start_soon(ask)
                    group.start_soon(block)
                    await see_that_it_is_dead(service.sentinel, SERVICE)
            assert ports == [service.replica.port]
            assert not link.connected
            await link._transport.aclose()


@asynccontextmanager
async def silent() -> AsyncIterator[tuple[str, anyio.Event]]:
    """A server that says nothing: its address, and whether somebody has connected to it."""
    connected = anyio.Event()
    listener = await anyio.create_tcp_listener(local_host=HOST)

    async def serve(stream: SocketStream) -> None:
        connected.set()
        async with stream:
            await anyio.sleep_forever()

    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        yield f"{HOST}:{listener.extra(SocketAttribute.local_port)}", connected
        group.cancel_scope.cancel()


async def test_a_sentinel_that_does_not_answer_in_its_callers_time_is_asked_last(version: str) -> None:
    async with watched(version) as service, silent() as (address, connected):
        sentinels = Sentinels(f"redis+sentinel://{address},{service.sentinel.address}/{SERVICE}")
        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as group:
                group.start_soon(sentinels.open)
                await connected.wait()
                group.cancel_scope.cancel()
        assert [name for name, _ in sentinels._sentinels] == [service.sentinel.address, address]


class _NamesOne:
    """A sentinel that names the master that a test sets."""

    def __init__(self, master: int) -> None:
        self.master = master

    async def serve(self, stream: SocketStream) -> None:
        """Answer one client."""
        reader = Reader()
        async with stream:
            async for data in stream:
                reader.feed(data)
                while command := reader.gets():
                    port = str(self.master).encode()
                    named = b"*2\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(HOST), HOST.encode(), len(port), port)
                    await stream.send(named if command[0] == b"SENTINEL" else b"+OK\r\n")


@asynccontextmanager
async def partitioned(version: str) -> AsyncIterator[tuple[Running, Running, _NamesOne, str]]:
    """Two masters that know nothing of each other, what names the first of them, and its URL."""
    async with running_servers(version) as servers:
        first, second = await servers.start(), await servers.start()
        listener = await anyio.create_tcp_listener(local_host=HOST)
        sentinel = _NamesOne(first.port)
        async with listener, anyio.create_task_group() as group:
            group.start_soon(listener.serve, sentinel.serve)
            port = listener.extra(SocketAttribute.local_port)
            yield first, second, sentinel, f"redis+sentinel://{HOST}:{port}/{SERVICE}"
            group.cancel_scope.cancel()


async def test_another_master_counts_as_an_outage_though_the_old_one_still_answers(
    version: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracewire_bus.transport.sentinel._CHECK_S", 0.0)
    monkeypatch.setattr("tracewire_bus.transport.link.WATCH_S", 1000.0)
    async with partitioned(version) as (first, second, sentinel, url), Bus.open(url, prefix=prefix) as bus:
        await bus.command("PING")
        assert bus.broken_at == -math.inf
        link, replies = bus.link(), []

        async def block() -> None:
            replies.extend(await link.execute(("BLPOP", "k", 0)))

        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as group:
                group.start_soon(block)

                async def blocks() -> bool:
                    return b"cmd=blpop" in await first.ask("CLIENT", "LIST")

                await until(blocks)
                sentinel.master = second.port
                assert int((await bus.command("CONFIG", "GET", "port"))[1]) == second.port
                moved_at = bus.broken_at
                assert moved_at > -math.inf
                assert bus.vectors.kept_since == moved_at
                # What the first one acknowledges now may be lost, too.
                await first.ask("RPUSH", "k", "v")
        assert replies == [[b"k", b"v"]]
        assert bus.broken_at > moved_at
        await link.drop()


async def test_a_submission_that_the_next_master_lacks_is_sent_again(
    version: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master that has it still runs, and no connection has broken."""
    monkeypatch.setattr("tracewire_bus.transport.sentinel._CHECK_S", 0.0)
    monkeypatch.setattr("tracewire.traces.presence.GUARD_POLL_S", 0.05)
    async with (
        partitioned(version) as (first, second, sentinel, url),
        Bus.open(first.url, prefix=prefix) as bus,
        Bus.open(second.url, prefix=prefix) as other,
        tracewire.connect(url, prefix=prefix) as client,
    ):
        for one in (bus, other):
            await one.registry.register(engine_info(schema=schema_text()), 600)
        trace = client.trace("tiny", "x", max_tokens=4, detach=True)
        await trace.start()
        assert await bus.queue.waiting("tiny") == 1
        sentinel.master = second.port

        async def there() -> bool:
            return await other.queue.waiting("tiny") == 1

        await until(there)
        await trace.aclose()


async def test_whether_the_master_is_another_is_asked_over_one_connection(
    version: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As often as there is something to ask for.
    monkeypatch.setattr("tracewire_bus.transport.sentinel._CHECK_S", 0.0)
    async with watched(version) as service:

        async def count(name: bytes) -> int:
            lines = (await service.sentinel.ask("INFO")).split(b"\r\n")
            return int(next(line.partition(b":")[2] for line in lines if line.startswith(name + b":")))

        before = await count(b"connected_clients")
        async with Bus.open(service.url, prefix=prefix) as bus:

            async def use(number: int) -> None:
                await bus.command("PING")
                await bus.blobs.put("t", "b", number, b"x")
                await bus.snapshots.read("t")

            await use(0)
            opened = await count(b"total_connections_received")
            for number in range(1, 10):
                await use(number)
            assert await count(b"total_connections_received") == opened
            # One that breaks is opened again.
            assert await service.sentinel.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            for number in range(10, 20):
                await use(number)
            assert await count(b"connected_clients") == before + 1

        async def left() -> bool:
            return await count(b"connected_clients") <= before

        await until(left)


async def test_a_server_that_takes_no_writes_is_asked_about_again(version: str, prefix: str) -> None:
    async with watched(version) as service:
        sentinels = Sentinels(service.url)
        link = Link(sentinels)
        assert await link.execute(("SET", "k", "v")) == [b"OK"]
        # Demoted by hand; the sentinel is away, and what it said last is wrong.
        service.sentinel.kill()
        await service.master.ask("REPLICAOF", HOST, service.replica.port)
        refused, _ = await link.execute(("SET", "k", "v"), ("GET", "k"))
        assert "read only" in str(refused)
        assert not link.connected
        await link.drop()
    async with watched(version) as service:
        # The sentinel names a server that is no master (yet).
        await service.master.ask("REPLICAOF", HOST, service.replica.port)
        with pytest.raises(BusUnavailable, match="is a slave now"):
            async with Bus.open(service.url, prefix=prefix):
                pass


async def test_what_sentinels_refuse_is_said(version: str, prefix: str) -> None:
    async with running_servers(version) as servers:
        master = await servers.start(
            settings=[("requirepass", "of the data")], url="redis://:of%20the%20data@{host}:{port}"
        )
        sentinel = await servers.sentinel(master, SERVICE, f'sentinel auth-pass {SERVICE} "of the data"')
        good = f"redis+sentinel://:of%20the%20data@{sentinel.address}/{SERVICE}"
        async with Bus.open(good, prefix=prefix) as bus:
            assert await bus.command("PING") == b"PONG"
        with pytest.raises(BusError, match=r"no sentinel knows a service 'another'"):
            async with Bus.open(good.replace(f"/{SERVICE}", "/another"), prefix=prefix):
                pass
        with pytest.raises(BusError, match="credentials"):
            async with Bus.open(good.replace("of%20the%20data", "wrong"), prefix=prefix):
                pass
        with pytest.raises(BusUnavailable, match="no master of 'events'"):
            async with Bus.open(f"redis+sentinel://{HOST}:{free_port()}/{SERVICE}", prefix=prefix):
                pass
