"""What the bus's tasks wait by, calls that share a round trip, and the URLs that name several servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from tests.bus.proxy import proxy
from tracewire_bus.addresses import Addresses
from tracewire_bus.connection import BusError, BusUnavailable, Connections, Wakeup, redacted


async def test_a_wakeup_wakes_whoever_waits_then_and_nobody_later() -> None:
    wakeup = Wakeup()
    woken: list[int] = []

    async def wait(number: int) -> None:
        await wakeup.wait()
        woken.append(number)

    wakeup.notify()
    async with anyio.create_task_group() as group:
        group.start_soon(wait, 1)
        await checkpoint()
        assert woken == []
        wakeup.notify()
        wakeup.notify()
    async with anyio.create_task_group() as group:
        group.start_soon(wait, 2)
        await checkpoint()
        assert woken == [1]
        group.cancel_scope.cancel()
    async with anyio.create_task_group() as group:
        # One that was cancelled left nothing behind.
        group.start_soon(wait, 3)
        await checkpoint()
        wakeup.notify()
    assert woken == [1, 3]


async def test_a_wakeup_whose_task_is_cancelled_at_the_same_time_is_not_an_error() -> None:
    wakeup = Wakeup()
    async with anyio.create_task_group() as group:
        group.start_soon(wakeup.wait)
        await checkpoint()
        group.cancel_scope.cancel()
        wakeup.notify()
        await checkpoint()
        wakeup.notify()


def test_a_url_of_several_servers() -> None:
    secret = (
        "rediss+sentinel://me:geheim@one,[::1]:7000/s?db=2&ssl_ca_certs=/ca&sentinel_username=u&sentinel_password=p"
    )
    parsed = Addresses(secret, 26379)
    assert parsed.servers == [("one", 26379), ("::1", 7000)]
    assert parsed.path == "s"
    assert parsed.url("h", 1) == "rediss://me:geheim@h:1?db=2&ssl_ca_certs=%2Fca"
    assert parsed.sentinel_url("::1", 1) == "rediss://[::1]:1?ssl_ca_certs=%2Fca&username=u&password=p"
    shown = redacted(secret)
    assert "geheim" not in shown
    assert "sentinel_password=***" in shown
    for bad in ("redis+sentinel://one,,two/s", "redis+sentinel:///s", "redis+sentinel://one:port/s"):
        with pytest.raises(ValueError, match=r"between the commas|[Pp]ort"):
            Addresses(bad, 26379)


@pytest.fixture
async def connections(embedded: str) -> AsyncIterator[Connections]:
    """Connections to the embedded Redis."""
    connections = Connections(embedded, patience_s=5)
    yield connections
    await connections.aclose()


async def together(connections: Connections, *commands: tuple[Any, ...]) -> list[Any]:
    """What each of these commands comes to, all asked for at once by tasks of their own."""
    found: dict[int, Any] = {}

    async def one(place: int, command: tuple[Any, ...]) -> None:
        try:
            found[place] = await connections.command(*command)
        except Exception as error:
            found[place] = error

    async with anyio.create_task_group() as group:
        for place, command in enumerate(commands):
            group.start_soon(one, place, command)
    return [found[place] for place in range(len(commands))]


async def test_calls_at_the_same_time_share_a_round_trip(connections: Connections) -> None:
    (mine,) = await together(connections, ("CLIENT", "ID"))
    replies = await together(connections, *[("CLIENT", "ID")] * 100, *[("ECHO", str(n)) for n in range(100)])
    # The second trip left while the first was under way, on another connection.
    assert replies[:100] == [mine] * 100
    assert replies[100:] == [str(n).encode() for n in range(100)]


async def test_a_refused_call_is_its_callers_alone(connections: Connections, prefix: str) -> None:
    key = f"{prefix}:k"
    one, refused, other = await together(connections, ("SET", key, "a"), ("INCR", key), ("GET", key))
    assert (one, other) == (b"OK", b"a")
    assert isinstance(refused, BusError)


async def test_large_calls_go_by_themselves(connections: Connections) -> None:
    (mine,) = await together(connections, ("CLIENT", "ID"))
    large, *small = await together(connections, ("ECHO", b"x" * 100_000), ("CLIENT", "ID"), ("CLIENT", "ID"))
    assert len(large) == 100_000
    assert small[0] == small[1] != mine


async def test_calls_whose_replies_may_be_large_go_by_themselves(embedded: str, connections: Connections) -> None:
    apart = Connections(embedded, patience_s=5, alone=True)
    assert len(set(await together(apart, *[("CLIENT", "ID")] * 4))) == 4
    await apart.aclose()
    found: list[Any] = []

    async def ask(alone: bool) -> None:
        found.append(await connections.command("CLIENT", "ID", alone=alone))

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


async def test_closing_ends_calls_under_way(embedded: str) -> None:
    connections = Connections(embedded, patience_s=5)

    async def close() -> None:
        await connections.aclose()

    async with anyio.create_task_group() as group:
        found: list[Any] = []

        async def ask() -> None:
            found.extend(await together(connections, *[("BLPOP", "nothing-here", "0")] * 3))

        group.start_soon(ask)
        while not connections._trips:
            await checkpoint()
        for _ in range(5):
            await checkpoint()
        await close()
    assert [type(one) for one in found] == [anyio.ClosedResourceError] * 3
