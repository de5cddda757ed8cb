"""A bus: opening it, closing it, and what it leaves."""

from __future__ import annotations

import time

import anyio
import pytest

from tests.support.streams import (
    anext_is_waited_for_or_over,
    clients,
    rest,
    same_connections,
    submission,
    until_blocked,
    write,
)
from tests.support.tasks import all_tasks
from tests.support.until import until
from tracewire_bus.bus import FINAL_ID, Bus, BusError, BusUnavailable


async def test_closing_the_bus_closes_its_subscriptions(embedded: str, prefix: str) -> None:
    async with anyio.create_task_group() as group, Bus.open(embedded, prefix=prefix) as bus:
        subscription = bus.read("t")

        async def wait() -> None:
            with pytest.raises(anyio.ClosedResourceError):
                await anext(subscription)

        group.start_soon(wait)
        await until_blocked(bus)
    for use in (lambda: anext(subscription), lambda: bus.tail_id("t"), lambda: bus.submit(submission())):
        with pytest.raises(anyio.ClosedResourceError):
            await use()
    with pytest.raises(anyio.ClosedResourceError):
        bus.read("t")


async def test_nobody_there_is_said_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(BusUnavailable, match="no Redis answers at unix:///nowhere"):
        async with Bus.open("unix:///nowhere"):
            pytest.fail("not reached")
    with pytest.raises(ConnectionError, match=r"redis://user:\*\*\*@127\.0\.0\.1:1"):
        async with Bus.open("redis://user:secret@127.0.0.1:1"):
            pytest.fail("not reached")
    assert time.monotonic() - started < 5


async def test_a_wrong_password_is_said_without_it(bus: Bus) -> None:
    url = bus.url.replace("unix://", "unix://nobody@") + "?password=guess"
    with pytest.raises(BusError, match="credentials") as caught:
        async with Bus.open(url):
            pytest.fail("not reached")
    assert "guess" not in str(caught.value)
    assert not isinstance(caught.value, BusUnavailable)


def test_a_url_of_another_kind_is_refused() -> None:
    for url in ("http://localhost", "localhost:6379", ""):
        with pytest.raises(ValueError, match="begins with redis://"):
            Bus.open(url)


async def test_no_task_and_no_connection_outlives_a_bus(bus: Bus, prefix: str) -> None:
    await bus.exists("t")
    tasks, connections = all_tasks(), {client["id"] for client in await clients(bus)}
    async with Bus.open(bus.url, prefix=prefix) as other:
        waiting = [other.read(f"t{number}") for number in range(5)]
        async with other.writer() as writer:
            await write(writer, "t0", 3)
            for subscription in waiting:
                await anext_is_waited_for_or_over(bus, subscription)
            await other.queue.take("demo", "e", 1, 0)
        assert len(all_tasks()) > len(tasks)
    assert all_tasks() == tasks
    await until(lambda: same_connections(bus, connections))


async def test_a_bus_may_be_closed_by_another_task(embedded: str, prefix: str) -> None:
    buses: list[Bus] = []

    async def enter() -> None:
        buses.append(await Bus.open(embedded, prefix=prefix).__aenter__())

    async with anyio.create_task_group() as group:
        group.start_soon(enter)
    async with buses[0].writer() as writer:
        await write(writer, "t", 2)
    assert len(await rest(buses[0].read("t"))) == 3
    await buses[0].aclose()
    await buses[0].aclose()


async def test_commands_cancelled_at_any_moment_break_nothing(bus: Bus) -> None:
    async with bus.writer() as writer:
        await write(writer, "t", 3)
    for step in range(200):
        with anyio.move_on_after(step * 0.00001):
            await bus.tail_id("t")
    assert await bus.tail_id("t") == FINAL_ID
    assert len(await clients(bus)) < 30
