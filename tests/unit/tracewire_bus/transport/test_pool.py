"""What the bus's tasks wait by, calls that share a round trip, and the URLs that name several servers."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from tests.support.redis.proxy import proxy
from tests.support.trips import together
from tracewire_bus.transport.errors import BusUnavailable
from tracewire_bus.transport.link import Link
from tracewire_bus.transport.pool import Connections


@pytest.fixture
async def connections(embedded: str) -> AsyncIterator[Connections]:
    """Connections to the embedded Redis."""
    connections = Connections(embedded, patience_s=5)
    yield connections
    await connections.aclose()


async def test_calls_at_the_same_time_share_a_round_trip(connections: Connections) -> None:
    (mine,) = await together(connections, ("CLIENT", "ID"))
    replies = await together(connections, *[("CLIENT", "ID")] * 100, *[("ECHO", str(n)) for n in range(100)])
    # The second trip left while the first was under way, on another connection.
    assert replies[:100] == [mine] * 100
    assert replies[100:] == [str(n).encode() for n in range(100)]


async def test_large_calls_go_by_themselves(connections: Connections) -> None:
    (mine,) = await together(connections, ("CLIENT", "ID"))
    large, *small = await together(connections, ("ECHO", b"x" * 100_000), ("CLIENT", "ID"), ("CLIENT", "ID"))
    assert len(large) == 100_000
    assert small[0] == small[1] != mine


async def test_a_call_that_may_wait_goes_with_the_next_one_or_when_its_time_is_over(connections: Connections) -> None:
    order: list[str] = []

    async def ask(name: str, within_s: float) -> None:
        assert await connections.commands(("ECHO", name), within_s=within_s) == [name.encode()]
        order.append(name)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(ask, "waits", 3600.0)
            await anyio.wait_all_tasks_blocked()
            assert not order
            await ask("does not", 0.0)
        assert order == ["waits", "does not"]
        await ask("alone", 0.001)


async def test_a_call_that_waits_is_sent_to_nobody_once_it_is_cancelled(connections: Connections, prefix: str) -> None:
    key = f"{prefix}:list"
    async with anyio.create_task_group() as group:
        group.start_soon(partial(connections.commands, ("RPUSH", key, "x"), within_s=3600.0))
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert await connections.command("LLEN", key) == 0


async def test_calls_whose_replies_may_be_large_go_by_themselves(embedded: str, connections: Connections) -> None:
    apart = Connections(embedded, patience_s=5, unbatched=True)
    assert len(set(await together(apart, *[("CLIENT", "ID")] * 4))) == 4
    await apart.aclose()
    found: list[Any] = []

    async def ask(unbatched: bool) -> None:
        found.append(await connections.command("CLIENT", "ID", unbatched=unbatched))

    async with anyio.create_task_group() as group:
        for alone in (True, False, True, False):
            group.start_soon(ask, alone)
    assert len(set(found)) == 3


async def test_a_caller_that_is_cancelled_disturbs_nobody(connections: Connections, prefix: str) -> None:
    key = f"{prefix}:list"
    scopes = [anyio.CancelScope() for _ in range(4)]

    async def push(place: int) -> None:
        with scopes[place]:
            await connections.command("RPUSH", key, str(place))

    async with anyio.create_task_group() as group:
        for place in range(4):
            group.start_soon(push, place)
        await checkpoint()
        # Asked for, and not sent.
        scopes[1].cancel()
    assert await connections.command("LRANGE", key, 0, -1) == [b"0", b"2", b"3"]


async def test_callers_of_a_trip_whose_connection_breaks_try_again_or_hear_of_it(
    embedded: str, prefix: str, tmp_path: Path
) -> None:
    async with proxy(embedded, tmp_path) as way:
        connections = Connections(way.url, patience_s=5)
        way.swallow = b"swallowed"
        keys = [f"{prefix}:{n}" for n in range(10)]
        assert await together(connections, *[("SET", key, "swallowed") for key in keys]) == [b"OK"] * 10
        assert way.swallowed.is_set()
        connections._patience_s = 0.0
        way.away = True
        await way.cut()
        replies = await together(connections, *[("GET", key) for key in keys])
        assert [type(reply) for reply in replies] == [BusUnavailable] * 10
        assert len({id(reply) for reply in replies}) == 10
        await connections.aclose()


async def test_closing_ends_calls_that_were_not_sent_and_lets_others_finish(embedded: str, prefix: str) -> None:
    connections = Connections(embedded, patience_s=5)
    found: list[Any] = []

    async def ask(*command: Any) -> None:
        found.extend(await together(connections, command))

    async with anyio.create_task_group() as group:
        group.start_soon(ask, "BLPOP", f"{prefix}:bell", "0")
        while not any(flush for flush in connections._flushes) or connections._calls:
            await checkpoint()
        group.start_soon(ask, "ECHO", "late")
        while not connections._calls:
            await checkpoint()
        await connections.aclose()
        while not found:
            await checkpoint()
        assert [type(one) for one in found] == [anyio.ClosedResourceError]
        other = Connections(embedded, patience_s=5)
        await other.command("RPUSH", f"{prefix}:bell", "rung")
        await other.aclose()
    assert found[1:] == [[f"{prefix}:bell".encode(), b"rung"]]
    assert not connections._flushes
    assert not connections._idle


async def test_what_cannot_be_sent_is_its_callers_alone(connections: Connections, prefix: str) -> None:
    one, *wrong, other = await together(
        connections, ("SET", f"{prefix}:k", "a"), ("GET", "bad\udc80"), ("GET", None), ("GET", f"{prefix}:k")
    )
    assert (one, other) == (b"OK", b"a")
    assert [type(error) for error in wrong] == [UnicodeEncodeError, TypeError]
    (mine,) = await together(connections, ("CLIENT", "ID"))
    with pytest.raises(UnicodeEncodeError):
        await connections.command("GET", "bad\udc80", unbatched=True)
    # No connection was lost over it.
    assert await connections.command("CLIENT", "ID", unbatched=True) == mine


async def test_one_that_finds_redis_gone_spares_the_others_finding_out(embedded: str, tmp_path: Path) -> None:
    async with proxy(embedded, tmp_path) as way:
        connections = Connections(way.url, patience_s=5)
        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(partial(connections.command, "ECHO", "x", unbatched=True))
        assert len(connections._idle) == 8
        await way.cut()
        assert await connections.command("ECHO", "x") == b"x"
        assert len(connections._idle) == 1
        await connections.aclose()


@pytest.mark.parametrize("unbatched", [False, True])
async def test_who_is_cancelled_already_sends_nothing(connections: Connections, prefix: str, unbatched: bool) -> None:
    with anyio.move_on_after(0):
        await connections.command("SET", f"{prefix}:k", "x", unbatched=unbatched)
    assert await connections.command("EXISTS", f"{prefix}:k") == 0


async def test_whoever_gives_up_waiting_leaves_nothing_behind(
    connections: Connections, embedded: str, prefix: str
) -> None:
    other = Connections(embedded, patience_s=5)
    async with anyio.create_task_group() as group:
        for _ in range(8):
            # All turns there are.
            group.start_soon(partial(connections.command, "BLPOP", f"{prefix}:nothing", "0", unbatched=True))
        while (await other.command("CLIENT", "LIST")).count(b"cmd=blpop") < 8:
            await checkpoint()
        for _ in range(3):
            with anyio.move_on_after(0.01):
                await connections.command("ECHO", "x")
        assert not connections._calls
        group.cancel_scope.cancel()
    assert await connections.command("ECHO", "x") == b"x"
    await other.aclose()


async def test_a_caller_that_is_cancelled_while_a_connection_is_made_has_not_asked(
    embedded: str, prefix: str, connections: Connections
) -> None:
    opening, go_on = anyio.Event(), anyio.Event()
    usual = connections._transport.open

    async def open_(spare: Any = None) -> Any:
        opening.set()
        await go_on.wait()
        return await usual(spare)

    connections._transport.open = open_  # type: ignore[method-assign]
    key, scope = f"{prefix}:list", anyio.CancelScope()

    async def cancelled() -> None:
        with scope:
            await connections.command("RPUSH", key, "cancelled")

    async with anyio.create_task_group() as group:
        group.start_soon(cancelled)
        group.start_soon(connections.command, "RPUSH", key, "other")
        await opening.wait()
        scope.cancel()
        await checkpoint()
        go_on.set()
    assert await connections.command("LRANGE", key, 0, -1) == [b"other"]


async def test_a_trip_for_nobody_is_given_up(connections: Connections, prefix: str) -> None:
    for _ in range(20):
        # More than there are turns: each of them would hold one.
        with anyio.move_on_after(0.01):
            await connections.command("BLPOP", f"{prefix}:nothing", "0")
    assert await connections.command("ECHO", "x") == b"x"
    await checkpoint()
    assert not connections._flushes


async def test_calls_go_on_after_a_trip_that_never_began(connections: Connections) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(connections.command, "ECHO", "x")
        while connections._scheduled is None:
            await checkpoint()
        connections._scheduled.cancel()
    assert await connections.command("ECHO", "y") == b"y"


@pytest.mark.parametrize("unbatched", [False, True])
async def test_a_try_lasts_no_longer_than_the_patience(
    embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch, unbatched: bool
) -> None:
    """Replies are awaited for ever otherwise."""
    monkeypatch.setattr("tracewire_bus.transport.pool._LEAST_TRY_S", 0.01)
    monkeypatch.setattr(
        Link.execute, "__kwdefaults__", {**(Link.execute.__kwdefaults__ or {}), "timeout_s": float("inf")}
    )
    connections = Connections(embedded, patience_s=0.01)
    with anyio.fail_after(60), pytest.raises(BusUnavailable):
        await connections.command("BLPOP", f"{prefix}:nothing", 0, unbatched=unbatched)
    assert connections.broken_at > -math.inf
    await connections.aclose()
