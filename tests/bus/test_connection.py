"""What the bus's tasks wait by, calls that share a round trip, and the URLs that name several servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from tests.support.redis.proxy import proxy
from tracewire_bus.transport.errors import BusError, BusUnavailable
from tracewire_bus.transport.link import Link
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.tasks import OwnedTask, PerTickLimiter, Refreshed, Signal
from tracewire_bus.transport.urls import Addresses, redacted


async def woken_as(wakeup: Signal, woken: list[int], number: int) -> None:
    """Wait, and leave a number."""
    await wakeup.wait()
    woken.append(number)


async def test_a_wakeup_wakes_whoever_waits_then_and_nobody_later() -> None:
    wakeup = Signal()
    woken: list[int] = []
    wait = partial(woken_as, wakeup, woken)
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


async def test_turns_let_some_through_at_a_time_in_order_and_nobody_waits_who_need_not() -> None:
    turns, through, scopes = PerTickLimiter(2), [], [anyio.CancelScope() for _ in range(9)]
    through_by_turn: list[list[int]] = []

    async def one(number: int) -> None:
        with scopes[number]:
            await turns.wait()
            through.append(number)

    async with anyio.create_task_group() as group:
        for number in range(9):
            group.start_soon(one, number)
        await checkpoint()
        # One that gives up takes nobody's turn.
        scopes[3].cancel()
        while len(through) < 8:
            through_by_turn.append(through[sum(map(len, through_by_turn)) :])
            await checkpoint()
    assert through == [0, 1, 2, 4, 5, 6, 7, 8]
    assert max(map(len, through_by_turn)) == 2
    # With fewer, nobody gives way to the loop at all; nor does a turn that nobody takes last.
    for _ in range(3):
        for _ in range(2):
            coroutine = turns.wait()
            with pytest.raises(StopIteration):
                coroutine.send(None)
        for _ in range(3):
            await checkpoint()


async def test_a_wakeup_wakes_all_that_wait_and_one_that_left_takes_nobody_along() -> None:
    wakeup = Signal()
    woken: list[int] = []
    wait = partial(woken_as, wakeup, woken)
    async with anyio.create_task_group() as group:
        group.start_soon(wait, 1)
        await checkpoint()
        wakeup.notify()
        # It waits before the one that was woken has gone on.
        group.start_soon(wait, 2)
        await checkpoint()
        assert woken == [1]
        group.start_soon(wait, 3)
        await checkpoint()
        wakeup.notify()
    assert woken == [1, 2, 3]


async def test_a_wakeup_whose_task_is_cancelled_at_the_same_time_is_not_an_error() -> None:
    wakeup = Signal()
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


async def test_closing_ends_calls_that_were_not_sent_and_lets_others_finish(embedded: str, prefix: str) -> None:
    connections = Connections(embedded, patience_s=5)
    found: list[Any] = []

    async def ask(*command: Any) -> None:
        found.extend(await together(connections, command))

    async with anyio.create_task_group() as group:
        group.start_soon(ask, "BLPOP", f"{prefix}:bell", "0")
        while not any(trip for trip in connections._trips) or connections._calls:
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
    assert not connections._trips
    assert not connections._idle


async def test_what_cannot_be_sent_is_its_callers_alone(connections: Connections, prefix: str) -> None:
    one, *wrong, other = await together(
        connections, ("SET", f"{prefix}:k", "a"), ("GET", "bad\udc80"), ("GET", None), ("GET", f"{prefix}:k")
    )
    assert (one, other) == (b"OK", b"a")
    assert [type(error) for error in wrong] == [UnicodeEncodeError, TypeError]
    (mine,) = await together(connections, ("CLIENT", "ID"))
    with pytest.raises(UnicodeEncodeError):
        await connections.command("GET", "bad\udc80", alone=True)
    # No connection was lost over it.
    assert await connections.command("CLIENT", "ID", alone=True) == mine


async def test_one_that_finds_redis_gone_spares_the_others_finding_out(embedded: str, tmp_path: Path) -> None:
    async with proxy(embedded, tmp_path) as way:
        connections = Connections(way.url, patience_s=5)
        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(partial(connections.command, "ECHO", "x", alone=True))
        assert len(connections._idle) == 8
        await way.cut()
        assert await connections.command("ECHO", "x") == b"x"
        assert len(connections._idle) == 1
        await connections.aclose()


@pytest.mark.parametrize("alone", [False, True])
async def test_who_is_cancelled_already_sends_nothing(connections: Connections, prefix: str, alone: bool) -> None:
    with anyio.move_on_after(0):
        await connections.command("SET", f"{prefix}:k", "x", alone=alone)
    assert await connections.command("EXISTS", f"{prefix}:k") == 0


async def test_a_command_that_takes_too_long_costs_no_other_connection(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    await together(connections, *[("PING",)] * 4, *[("ECHO", b"x" * 40_000)] * 4)
    idle = len(connections._idle)
    assert idle > 1
    monkeypatch.setattr(Link.ask, "__kwdefaults__", {**(Link.ask.__kwdefaults__ or {}), "timeout_s": 0.01})
    with pytest.raises(TimeoutError):
        await connections.once(("BLPOP", "nothing", 0), alone=True)
    assert len(connections._idle) == idle - 1


async def test_whoever_gives_up_waiting_leaves_nothing_behind(connections: Connections, prefix: str) -> None:
    async with anyio.create_task_group() as group:
        for _ in range(8):
            # All turns there are.
            group.start_soon(partial(connections.command, "BLPOP", f"{prefix}:nothing", "0", alone=True))
        while not connections._turn.locked():
            await checkpoint()
        for _ in range(3):
            with anyio.move_on_after(0.01):
                await connections.command("ECHO", "x")
        assert not connections._calls
        group.cancel_scope.cancel()
    assert await connections.command("ECHO", "x") == b"x"


async def test_an_error_of_the_way_is_raised_to_each_caller(connections: Connections) -> None:
    async def open_(spare: Any = None) -> Any:
        raise BusError("no such service")

    connections._transport.open = open_  # type: ignore[method-assign]
    replies = await together(connections, *[("ECHO", "x")] * 3)
    assert [str(reply) for reply in replies] == ["no such service"] * 3
    assert len({id(reply) for reply in replies}) == 3


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
    assert not connections._trips


async def test_calls_go_on_after_a_trip_that_never_began(connections: Connections) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(connections.command, "ECHO", "x")
        while connections._departing is None:
            await checkpoint()
        connections._departing.cancel()
    assert await connections.command("ECHO", "y") == b"y"


async def test_a_background_task_that_fails_says_so_at_once_and_begins_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tracewire_bus.transport.tasks._ANEW_S", 0.0)
    begun, works = 0, anyio.Event()

    async def run() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise ValueError(f"failure {begun}")
        works.set()
        await anyio.sleep_forever()

    task = OwnedTask(run, "that fails")
    with anyio.fail_after(20):
        await works.wait()
    said = [(one.levelname, one.getMessage(), one.exc_info is not None) for one in caplog.records]
    assert [(level, traceback) for level, _, traceback in said] == [("ERROR", True), ("ERROR", False)]
    assert "the task that fails failed" in said[0][1]
    assert "failure 1" in said[0][1]
    await task.aclose()
    assert begun == 3


class Asked:
    """Counts how often it is asked, and answers when it is told to."""

    def __init__(self) -> None:
        self.times = 0
        self.answered = anyio.Event()
        self.error: Exception | None = None
        self.ended = 0

    async def __call__(self) -> int:
        self.times += 1
        try:
            await self.answered.wait()
        finally:
            self.ended += 1
        if self.error is not None:
            raise self.error
        return self.times


async def test_what_many_want_at_once_is_asked_for_once() -> None:
    asked, found = Asked(), []
    refreshed = Refreshed(asked)

    async def get(age: float) -> None:
        found.append(await refreshed.get(age))

    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(get, 60)
        await checkpoint()
        await checkpoint()
        for _ in range(20):
            group.start_soon(get, 60)
        await checkpoint()
        asked.answered.set()
    assert found == [1] * 40
    assert await refreshed.get(60) == 1
    # Those who want it as it is now do not take what was asked for before; they share what is asked for them.
    found.clear()
    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(get, 0)
    assert found == [2] * 20
    refreshed.forget()
    assert await refreshed.get(60) == 3


async def test_what_fails_fails_for_all_who_wait_and_is_asked_for_again() -> None:
    asked, found = Asked(), []
    refreshed = Refreshed(asked)
    asked.error = ValueError("away")

    async def get() -> None:
        try:
            found.append(await refreshed.get(60))
        except ValueError as error:
            found.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(get)
        await checkpoint()
        asked.answered.set()
    assert [str(one) for one in found] == ["away"] * 3
    assert len({id(one) for one in found}) == 3
    asked.error = None
    assert await refreshed.get(60) == 2


async def test_asking_ends_with_the_last_who_waits() -> None:
    asked = Asked()
    refreshed = Refreshed(asked)
    scopes = [anyio.CancelScope() for _ in range(2)]

    async def get(scope: anyio.CancelScope) -> None:
        with scope:
            await refreshed.get(60)

    async with anyio.create_task_group() as group:
        for scope in scopes:
            group.start_soon(get, scope)
        while not asked.times:
            await checkpoint()
        scopes[0].cancel()
        await checkpoint()
        await checkpoint()
        assert not asked.ended
        scopes[1].cancel()
    while not asked.ended:
        await checkpoint()
    asked.answered.set()
    assert await refreshed.get(60) == 2
