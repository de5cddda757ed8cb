"""What Redis itself lets each user do, on every server at hand (`TRACEWIRE_TEST_REDIS` names more)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest

import tracewire
from tests.support.access_files import FILES, FOLDER
from tests.support.guards import alarms_of
from tests.support.guards import rules as guard_rules
from tests.support.redis.servers import BINARIES, running_servers
from tests.support.scripted_engine import ScriptedEngine, acts, expected, info, serving
from tests.support.served import ENGINE, submission
from tests.support.until import until
from tracewire_bus.bus import Bus, NotAllowed
from tracewire_bus.store.access import ROLES, Role, rules
from tracewire_bus.transport.errors import BusUnavailable
from tracewire_bus.transport.scripts import Script
from tracewire_bus.wire.codec import encode

PATIENCE = 120
#: The users of two tenants, beside those of the operator.
USERS: dict[str, tuple[Role, dict[str, Any]]] = {
    "red": ("controller", {"tenant": "red"}),
    "red-reader": ("consumer", {"tenant": "red"}),
    "blue": ("controller", {"tenant": "blue"}),
    "guard": ("guard", {"pinned": True}),
    "pinned": ("controller", {"tenant": "blue", "pinned": True}),
    "editor": ("editor", {}),
    "operator": ("operator", {}),
    "engine": ("engine", {}),
}


def tells_reading(version: str) -> bool:
    """Whether a server tells reading a key from writing it."""
    return int(version.split(".")[0]) >= 7


@asynccontextmanager
async def users(version: str) -> AsyncIterator[Callable[[str], str]]:
    """The URL of each of `USERS`."""
    async with running_servers(version) as servers:
        server = await servers.start()
        for name, (role, options) in USERS.items():
            words = rules(role, server="7" if tells_reading(version) else "6.2", **options).split()
            await server.ask("ACL", "SETUSER", name, *words, ">secret")
        yield lambda name: f"redis://{name}:secret@{server.address}"


def test_the_shipped_files_are_those_of_the_code() -> None:
    assert {path.name: path.read_text() for path in FOLDER.glob("*.acl")} == FILES


@pytest.mark.parametrize("role", ROLES)
def test_no_role_but_an_engines_may_send_the_text_of_a_script(role: Role) -> None:
    allowed = set(rules(role).split())
    assert ("+eval" in allowed) is (role == "engine")
    assert not {"+@all", "+flushall", "+keys", "+config", "+acl", "+function", "+debug", "+monitor"} & allowed
    assert "-@all" in allowed


@pytest.mark.parametrize("version", BINARIES)
async def test_a_guard_shares_traces_and_acts(version: str, caplog: pytest.LogCaptureFixture) -> None:
    """With the rights of its role alone, by scripts that an engine has loaded. The audit trail stays the engines'."""
    decided: list[Any] = []

    class Watched(tracewire.Guard):
        async def decided(self, line: Any) -> None:
            decided.append(line)

    with anyio.fail_after(PATIENCE):
        async with (
            users(version) as url,
            Bus.open(url("engine")) as bus,
            serving(bus, ScriptedEngine(partial(anyio.sleep, 0.02)), info("tiny", engine=ENGINE)),
            tracewire.connect(url("guard")) as client,
            anyio.create_task_group() as group,
        ):
            await until(lambda: bus.registry.alive(ENGINE))
            caplog.set_level("INFO", "tracewire")
            group.start_soon(Watched(client, guard_rules(), name="g").run)
            names = [f"t{number}" for number in range(8)]
            for name in names:
                await client.trace("tiny", name, acts, max_tokens=30, trace_id=name, detach=True).start()
            expected_alarms = sum(len(alarms_of(name, 30)) for name in names)
            await until(lambda: len(decided) == expected_alarms)
            group.cancel_scope.cancel()
    assert {line.outcome for line in decided} <= {"done", "late"}
    assert any(line.paused for line in decided)
    assert "may not write to the audit trail" in caplog.text


@pytest.mark.parametrize("version", BINARIES)
async def test_a_tenant_works_within_its_own_traces(version: str) -> None:
    """Submits, follows, steers and cancels, by scripts that an engine has loaded."""
    engine = ScriptedEngine(partial(anyio.sleep, 0.002))
    with anyio.fail_after(PATIENCE):
        async with (
            users(version) as url,
            Bus.open(url("engine")) as bus,
            serving(bus, engine, info("tiny", engine=ENGINE)),
        ):
            await until(lambda: bus.registry.alive(ENGINE))
            for user in ("red", "pinned"):
                await _works(url(user), USERS[user][1]["tenant"])
            async with tracewire.connect(url("red-reader")) as reader:
                assert (await reader.subscribe("red:1").result()).token_ids == expected("x", 5)[0]


async def _works(url: str, tenant: str) -> None:
    async with tracewire.connect(url) as client:
        result = await client.trace("tiny", "x", acts(), max_tokens=5, trace_id=f"{tenant}:1").result()
        assert result.token_ids == expected("x", 5)[0]
        options: Any = {"live": {"alpha": 0.0}, "max_tokens": 100_000, "trace_id": f"{tenant}:2"}
        async with client.trace("tiny", "x", **options) as trace:
            assert await trace.steer(alpha=1.0) == 1
            await trace.pause()
            await trace.resume()
            await trace.cancel()
            with pytest.raises(tracewire.TraceCancelled):
                await trace.result()


@pytest.mark.parametrize("version", BINARIES)
async def test_a_tenant_reaches_nobody_elses_traces(version: str) -> None:
    async with users(version) as url, Bus.open(url("engine")) as engine, Bus.open(url("red")) as red:
        await engine.registry.load_scripts()
        await engine.registry.register(info("tiny", engine=ENGINE), ttl_s=60)
        async with Bus.open(url("blue")) as blue:
            await blue.submit(submission("blue:1", client="blue"), 10)
        keys = red.keys

        async def refused(action: Awaitable[Any]) -> None:
            with anyio.fail_after(10), pytest.raises(NotAllowed):
                await action

        trace = "blue:1"
        # Reading.
        await refused(red.command("HGETALL", keys.record(trace)))
        await refused(red.command("XREAD", "COUNT", 1, "STREAMS", keys.events(trace), "0"))
        await refused(red.command("HGETALL", keys.blobs(trace)))
        await refused(red.command("HGETALL", keys.snapshot(trace)))
        await refused(red.records.live(trace))
        # Steering, pausing and ending, forged events and finals.
        await refused(red.records.pause(trace, by="red"))
        await refused(red.records.cancel(trace, by="red", reason="", force=True))
        await refused(red.command("XADD", keys.events(trace), "*", "d", "forged"))
        await refused(red.command("DEL", keys.events(trace)))
        await refused(red.command("HSET", keys.record(trace), "l:alpha", "x"))
        # The lease of another tenant's client, without which engines cancel the client's traces.
        await refused(red.leases.release("blue:0f.15"))
        await refused(red.leases.renew("blue:0f.15", 1))
        # Another tenant's name for a trace of one's own.
        await refused(red.submit(submission("blue:2", client="red"), 10))
        # A registry with a forged engine, dead letters, edits, draining.
        if tells_reading(version):
            await refused(red.command("SET", keys.engine(ENGINE), "forged"))
        await refused(red.command("XADD", keys.dead(), "*", "a", "b"))
        await refused(red.command("HSET", keys.edits("tiny", "entries"), "a", "b"))
        await refused(red.registry.drain(ENGINE, by="red"))
        await refused(red.command("XADD", keys.operate(ENGINE), "*", "k", "drain"))
        if tells_reading(version):
            # Prompts and source of whoever waits, orders, and which traces there are.
            await refused(red.command("HGETALL", keys.queue("tiny", "data")))
            await refused(red.command("XREAD", "STREAMS", keys.control("t0", ENGINE), "0"))
            await refused(red.command("XREAD", "STREAMS", keys.firehose("t0"), "0"))
            await refused(red.command("ZRANGE", keys.deadlines("t0"), 0, -1))
        assert (await engine.queue.take("tiny", ENGINE, 1, 100))[0].trace == trace


@pytest.mark.parametrize("version", BINARIES)
@pytest.mark.parametrize("user", ["red", "red-reader", "pinned", "editor"])
async def test_nobody_but_an_engine_and_an_operator_brings_lua(version: str, user: str) -> None:
    """A loop in a script would stop Redis for all."""
    async with users(version) as url, Bus.open(url(user)) as bus:
        for command in (
            ("EVAL", "while true do end", 0),
            ("EVAL", "return redis.call('KEYS', '*')", 1, bus.keys.events("red:1")),
            ("SCRIPT", "LOAD", "while true do end"),
            ("SCRIPT", "FLUSH"),
            ("FLUSHALL",),
            ("KEYS", "*"),
            ("SCAN", 0),
            ("CONFIG", "GET", "*"),
            ("ACL", "LIST"),
            ("MONITOR",),
            ("CLIENT", "LIST"),
            ("CLIENT", "KILL", "TYPE", "normal"),
            ("SHUTDOWN",),
        ):
            with anyio.fail_after(10), pytest.raises(NotAllowed):
                await bus.command(*command)
        if tells_reading(version):
            lua = "#!lua name=x\nredis.register_function('x', function() while true do end end)"
            with anyio.fail_after(10), pytest.raises(NotAllowed):
                await bus.command("FUNCTION", "LOAD", lua)


@pytest.mark.parametrize("version", BINARIES)
async def test_a_pinned_user_runs_its_own_scripts_only(version: str) -> None:
    async with users(version) as url, Bus.open(url("engine")) as engine, Bus.open(url("pinned")) as pinned:
        await engine.registry.load_scripts()
        other = Script("queue_take").digest
        with anyio.fail_after(10), pytest.raises(NotAllowed):
            await pinned.command("EVALSHA", other, 0)
        await pinned.queue.put("tiny", "blue:1", encode(submission("blue:1")), client="blue")


@pytest.mark.parametrize("version", BINARIES)
async def test_a_tenant_waits_for_scripts_that_redis_has_lost(version: str) -> None:
    """No submission is queued without its trace's record, whatever Redis has lost."""
    async with users(version) as url, Bus.open(url("engine")) as engine:
        async with Bus.open(url("red"), patience_s=0) as red:
            with anyio.fail_after(10), pytest.raises(BusUnavailable, match="has not loaded a script"):
                await red.submit(submission("red:1"), 10)
            assert await engine.queue.waiting("tiny") == 0
            await engine.registry.load_scripts()
            await red.submit(submission("red:1"), 10)
        assert await engine.queue.waiting("tiny") == 1
        await engine.command("SCRIPT", "EXISTS", "x")
        # An engine's heartbeat loads them again.
        await engine.registry.register(info("tiny", engine=ENGINE), ttl_s=60)
        assert not await engine.registry.load_scripts()


@pytest.mark.parametrize("version", BINARIES)
async def test_an_operator_drains(version: str) -> None:
    async with users(version) as url, Bus.open(url("operator")) as operator, Bus.open(url("engine")) as engine:
        await engine.registry.load_scripts()
        await operator.registry.drain(ENGINE, by="operator", within_s=2)
        reader = engine.control(ENGINE)
        assert [(one.kind, one.by) for one in await reader.read(1000)] == [("drain", "operator")]
        await reader.aclose()
