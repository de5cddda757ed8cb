"""Redis behind TLS, and with users that may do only what they have to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from redis.exceptions import ConnectionError

import tracewire
from tests.support import ROOT
from tests.support.bus_engine import engine_info
from tests.support.redis.certificates import Certificates, behind_tls, named_by_tls
from tests.support.redis.servers import BINARIES, Cluster, running_servers
from tests.support.redis.transports import end_to_end
from tests.support.vectors import encoded
from tracewire import ConnectError
from tracewire_bus.bulk.stores import StorePlace
from tracewire_bus.bus import Bus, BusError, NotAllowed
from tracewire_bus.transport import server
from tracewire_bus.transport.server import Server, discard
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.live_values import live_values
from tracewire_bus.wire.messages import Block, Edit, EditRecord, Invoke, Submission
from tracewire_bus.wire.packing import pack

RULES = ROOT / "deploy" / "redis"


ROLES = ("consumer", "controller", "editor", "operator", "engine")


@pytest.mark.parametrize("version", BINARIES)
async def test_everything_by_tls_with_client_certificates(version: str, prefix: str, tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path)
    (tmp_path / "other").mkdir()
    other = Certificates.make(tmp_path / "other")
    async with behind_tls(version, certificates) as address:
        await end_to_end(f"rediss://{address}?{certificates.query}", prefix)
        # Neither side takes the other for what it is not, and asking again does not help.
        for query, wrong in (
            (f"ssl_ca_certs={other.authority}", "CERTIFICATE_VERIFY_FAILED"),
            (f"ssl_ca_certs={certificates.authority}", "ALERT|alert|closed|reset"),
        ):
            with anyio.fail_after(15), pytest.raises(ConnectError, match=wrong):
                async with tracewire.connect(f"rediss://{address}?{query}", prefix=prefix):
                    pass


@pytest.mark.parametrize("version", BINARIES)
async def test_certificates_are_read_once_for_many_connections_and_again_after_a_while(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = Certificates.make(tmp_path)
    (tmp_path / "other").mkdir()
    other = Certificates.make(tmp_path / "other")
    async with behind_tls(version, certificates) as address:
        settings = [f"rediss://{address}?{one.query}" for one in (certificates, other)]
        right, again, wrong = (Server(url) for url in (settings[0], settings[0], settings[1]))
        connections = [await right.open()]
        # From now on, the authority in the file is not the server's.
        authority = certificates.authority.read_bytes()
        certificates.authority.write_bytes(other.authority.read_bytes())
        connections += [await right.open(), await again.open()]
        with pytest.raises(ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            await wrong.open()
        monkeypatch.setattr(server, "_tls_contexts", {})
        monkeypatch.setattr(server, "CERTIFICATES_S", 0.0)
        with pytest.raises(ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            await right.open()
        certificates.authority.write_bytes(authority)
        connections.append(await right.open())
        for connection in connections:
            await discard(connection)


@pytest.mark.parametrize("version", BINARIES)
async def test_sentinels_by_tls(version: str, prefix: str, tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path)
    async with running_servers(version) as servers, named_by_tls(servers, certificates) as start:
        master = await start()
        config = tmp_path / "sentinel.conf"
        config.write_text(
            f"sentinel monitor events {master.front.replace(':', ' ')} 1\n"
            # A sentinel without TLS of its own does not get through to the address that it names.
            "sentinel down-after-milliseconds events 600000\n"
        )
        sentinel = await start(str(config), "--sentinel")
        await end_to_end(f"rediss+sentinel://{sentinel.front}/events?{certificates.query}", prefix)


@pytest.mark.parametrize("version", BINARIES)
async def test_a_cluster_by_tls(version: str, prefix: str, tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path)
    async with running_servers(version) as servers, named_by_tls(servers, certificates) as start:
        cluster = Cluster([await start(cluster_enabled="yes", cluster_node_timeout=2000) for _ in range(3)], version)
        await cluster.join()
        addresses = ",".join(node.front for node in cluster.nodes[:2])
        await end_to_end(f"rediss+cluster://{addresses}?{certificates.query}", prefix)


def rules(version: str) -> Path:
    """The rules for a version."""
    return RULES / ("users.acl" if int(version[0]) >= 7 else "users-6.2.acl")


@asynccontextmanager
async def with_users(version: str) -> AsyncIterator[Callable[[str], str]]:
    """The URL for each role, of a server with the rules that are shipped."""
    async with running_servers(version) as servers:
        started = await servers.start(settings=[("aclfile", rules(version))])
        for role in ROLES:
            # Nobody gets in before this.
            with pytest.raises(BusError, match="credentials"):
                async with Bus.open(f"redis://tracewire-{role}:x@{started.address}"):
                    pass
            await started.ask("ACL", "SETUSER", f"tracewire-{role}", f">secret of {role}")

        def url(role: str) -> str:
            return f"redis://tracewire-{role}:secret%20of%20{role}@{started.address}"

        async with Bus.open(url("engine")) as bus:
            # As an engine does when it registers: the other users may only run scripts.
            assert await bus.registry.load_scripts()
        yield url


def of(trace: str) -> Submission:
    return Submission(trace=trace, model="tiny", invokes=[Invoke(prompt="hello")], live=pack({"alpha": 0.0}))


@pytest.mark.parametrize("version", BINARIES)
async def test_each_role_can_do_its_part(version: str) -> None:
    """A controller submits, steers and cancels, a consumer follows, an engine runs it."""
    async with with_users(version) as url:
        await end_to_end(url("controller"), "tw", follower=url("consumer"), engine=url("engine"))
        async with (
            Bus.open(url("controller")) as controller,
            Bus.open(url("engine")) as engine,
            Bus.open(url("consumer")) as consumer,
            Bus.open(url("editor")) as editor,
            Bus.open(url("operator")) as operator,
        ):
            # What a client and an engine do besides.
            await controller.leases.renew("lease", 5)
            assert await engine.leases.held(["lease", "none"]) == {"lease"}
            await controller.leases.release("lease")
            array = np.arange(300_000, dtype=np.float32)
            ref = await controller.blobs.store("large", array)
            assert np.array_equal(await consumer.blobs.load("large", ref), array)
            ref, payload = encoded(array)
            await controller.vectors.store({ref: payload})
            assert np.array_equal(await engine.vectors.fetch(ref), array)
            for other in (consumer, editor):
                with pytest.raises(NotAllowed):
                    await other.vectors.store({ref: payload})
            place = StorePlace("/dev/shm/x")
            await engine.bulk.stores.register("s", place)
            assert await consumer.bulk.stores.find("s") == await controller.bulk.stores.find("s") == place
            with pytest.raises(NotAllowed):
                await consumer.bulk.stores.unregister("s")
            assert await engine.records.existing(["one", "large"]) == set()
            await engine.bulk.stores.unregister("s")
            await controller.submit(of("one"))
            async with consumer.watch("start") as watch:
                assert (await anext(watch)).type == "queued"
            assert await controller.records.pause("one", by="me")
            assert await controller.records.pause("one", by="me", resume=True)
            assert (await consumer.records.live("one")).values == {"alpha": 0.0}
            assert await controller.queue.waiting("tiny") == 1
            await controller.cancel("one", by="me")
            await controller.sweep(controller.keys.tags)
            await operator.registry.drain("e", by="me", within_s=1.5)
            with pytest.raises(NotAllowed):
                await controller.registry.drain("e", by="me")
            orders = engine.control("e")
            assert [order.kind for order in await orders.read(1000)] == ["drain"]
            await orders.aclose()
            await controller.submit(of("two"))
            (taken,) = await engine.queue.take("tiny", "e", 10, 10)
            await engine.records.open("two", "e")
            await engine.records.close("two", 1)
            await engine.queue.dead_letter("tiny", taken, "a test")
            assert len(await engine.dead_letters.list()) == 1
            assert await engine.queue.leases("tiny") == []
            await engine.memory.refuse_eviction()
            assert (await controller.memory.usage())[0] == 0
            # What a new connection may lack is compared, and would be appended again.
            async with engine.writer() as out:
                await out.append("three", 1, 0, b"x")
                await out.restorer.link.drop()
                await out.append("three", 1, 1, b"y")
            await engine.cancel_orphans("tiny", "lease", by="e")
            await engine.sweep(engine.keys.tags)
            await engine.command("SADD", "tw:engines", "gone")
            # Who may not tidy the registry up reads it all the same.
            assert [info.engine for info in await consumer.registry.list()] == []
            await engine.registry.unregister("gone")


@pytest.mark.parametrize("version", BINARIES)
async def test_standing_interventions_are_an_editors(version: str) -> None:
    edit = Edit(name="a", block=Block(name="f", source="pass"))
    async with (
        with_users(version) as url,
        Bus.open(url("editor")) as editor,
        Bus.open(url("engine")) as engine,
        Bus.open(url("consumer")) as consumer,
        Bus.open(url("controller")) as controller,
    ):
        await engine.registry.register(engine_info(), ttl_s=600)
        first = await editor.edits.install("tiny", edit)
        await editor.edits.install("tiny", edit, replacing=first)
        (one,) = (await engine.edits.load("tiny")).edits
        await engine.edits.disable("tiny", "a", one.version, "it raised")
        assert [found.disabled for found in (await editor.edits.load("tiny")).edits] == ["it raised"]
        changes = engine.edits.changes("tiny")
        await changes.wait(10)
        await changes.aclose()
        await engine.edits.publish("tiny", "a", encode(EditRecord(edit="a", version=1, engine="e", request="r")))
        for reader in (consumer, editor):
            async with reader.edit_records("tiny", "a", "start") as records:
                assert (await anext(records))[1].request == "r"
        async with consumer.edit_records("tiny", "a") as records:
            assert records.position != "0-0"
        assert [info.model for info in await editor.registry.list()] == ["tiny"]
        await editor.edits.remove("tiny", "a")
        for other in (consumer, controller):
            with anyio.fail_after(10), pytest.raises(NotAllowed, match=r"a script on tw:\{tiny\}:edits:"):
                await other.edits.install("tiny", edit)
        with anyio.fail_after(10), pytest.raises(NotAllowed, match="does not allow this user"):
            await editor.submit(of("t"))


@pytest.mark.parametrize("version", BINARIES)
async def test_each_role_is_refused_the_rest_and_told_what(version: str) -> None:
    async with with_users(version) as url:
        async with Bus.open(url("engine")) as bus:
            await bus.registry.register(engine_info(), ttl_s=600)

        async def refused(of_what: str, action: Awaitable[Any]) -> None:
            with anyio.fail_after(10), pytest.raises(NotAllowed, match=f"does not allow this user {of_what}"):
                await action

        async with Bus.open(url("consumer")) as bus, bus.writer() as writer:
            events = r"on tw:\{t\d+\}:events:t: "
            await refused(r"a script on tw:\{t\d+\}:trace:t", bus.submit(of("t")))
            await refused(r"a script on tw:\{t\d+\}:trace:t", bus.records.steer("t", live_values({"a": 1}), by="me"))
            await refused(r"a script on tw:\{t\d+\}:trace:t", bus.cancel("t", by="me"))
            await refused(r"a script on tw:\{t0\}:operate:e", bus.registry.drain("e", by="me"))
            await refused(r"a script on tw:\{t\d+\}:trace:t", bus.records.pause("t", by="me"))
            await refused(f"XADD {events}", writer.append("t", 1, 1, b"x"))
            # The limits of the engine's queue come before its entry.
            await refused("HSET on tw:{tiny}:queue:", bus.registry.register(engine_info()))
            await refused("a script on tw:{tiny}:queue:", bus.queue.take("tiny", "e", 1, 10))
            await refused("GET on other:key", bus.command("GET", "other:key"))
            await refused("GET on tw:{tiny}:queue:x", bus.command("GET", "tw:{tiny}:queue:x"))
            await refused("XREAD on tw:dead", anext(bus._reader.subscribe("tw:dead", "start")))
        async with Bus.open(url("controller")) as bus:
            if int(version[0]) >= 7:
                # The registry is to be read, which Redis 6.2 cannot say.
                await refused("a script on tw:engine:", bus.registry.register(engine_info()))
            await refused("XADD on tw:dead", bus.command("XADD", "tw:dead", "*", "a", "b"))
            await refused("XTRIM on tw", bus.command("XTRIM", bus.keys.events("t"), "MAXLEN", 0))
            await refused("BLPOP on tw", bus.command("BLPOP", bus.keys.queue("tiny", "bell"), 0.01))
            await refused("FLUSHALL", bus.command("FLUSHALL"))
        async with Bus.open(url("engine")) as bus:
            await refused("SET on other:key", bus.command("SET", "other:key", 1))
            await refused("KEYS", bus.command("KEYS", "*"))
        # In the client's words.
        async with tracewire.connect(url("consumer")) as client:
            with anyio.fail_after(10), pytest.raises(ConnectError, match="does not allow this user"):
                async with client.trace("tiny", "hello"):
                    pass
