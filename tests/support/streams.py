"""Events that are written and read, and what is looked up of the connections meanwhile."""

from __future__ import annotations

import anyio

from tests.support.until import until
from tracewire_bus.bus import FINAL_ID, Bus, Entry, Subscription
from tracewire_bus.events.writer import Writer
from tracewire_bus.wire.messages import Invoke, Submission


async def rest(subscription: Subscription) -> list[Entry]:
    """All entries to the end."""
    with anyio.fail_after(60):
        return [entry async for entry in subscription]


async def write(writer: Writer, trace: str, count: int, *, attempt: int = 1) -> None:
    """A trace of `count` events and a final."""
    for seq in range(count):
        await writer.append(trace, attempt, seq, f"{trace} {seq}".encode())
    await writer.append(trace, attempt, count, f"{trace} {count}".encode(), final=True)


def assert_whole(entries: list[Entry], trace: str, count: int, first: int = 0) -> None:
    assert [entry.data.decode() for entry in entries] == [f"{trace} {seq}" for seq in range(first, count + 1)]
    assert [entry.id for entry in entries] == [*(f"1-{seq}" for seq in range(first, count)), FINAL_ID]
    assert [entry.final for entry in entries] == [False] * (count - first) + [True]


def submission(trace: str = "t", model: str = "demo") -> Submission:
    return Submission(trace=trace, model=model, invokes=[Invoke(prompt="hello")])


async def clients(bus: Bus) -> list[dict[str, str]]:
    text = (await bus.command("CLIENT", "LIST")).decode()
    return [dict(field.partition("=")[::2] for field in line.split()) for line in text.splitlines()]


async def until_blocked(bus: Bus) -> None:
    """Until a connection waits in XREAD."""
    await until(lambda: _blocked(bus))


async def _blocked(bus: Bus) -> bool:
    return any(client["cmd"] == "xread" and "b" in client["flags"] for client in await clients(bus))


async def calls_of_xread(bus: Bus) -> int:
    stats = (await bus._connections.command("INFO", "commandstats")).decode()
    found = [line.partition("calls=")[2] for line in stats.splitlines() if line.startswith("cmdstat_xread:")]
    return int(found[0].partition(",")[0]) if found else 0


async def reads(watcher: Bus, bus: Bus, streams: int) -> bool:
    assert bus._reader is not None
    reader = bus._reader
    return len(reader._streams) == streams and reader._known == reader._added and await _blocked(watcher)


async def anext_is_waited_for(bus: Bus, subscription: Subscription) -> None:
    """Bring a subscription to its stream's end, then stop asking."""
    with anyio.move_on_after(10) as scope:
        async with anyio.create_task_group() as group:

            async def ask() -> None:
                await anext(subscription)

            group.start_soon(ask)
            await until_blocked(bus)
            group.cancel_scope.cancel()
    assert not scope.cancelled_caught


async def anext_is_waited_for_or_over(bus: Bus, subscription: Subscription) -> None:
    if subscription.key.endswith("t0"):
        await rest(subscription)
    else:
        await anext_is_waited_for(bus, subscription)


async def same_connections(bus: Bus, expected: set[str]) -> bool:
    return {client["id"] for client in await clients(bus)} == expected
