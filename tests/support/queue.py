"""Submissions that are put into a queue and taken."""

from __future__ import annotations

from collections.abc import Iterable

from tests.support.streams import clients
from tests.support.until import until
from tracewire_bus.bus import Bus
from tracewire_bus.store.queue_entries import Taken, queue_names
from tracewire_bus.store.submission_queue import _PUT
from tracewire_bus.wire.messages import Invoke, Submission

HOSTILE = [
    "",
    " ",
    "ünï",
    "🦜",
    "a:b",
    "{m}",
    "}{",
    "*",
    "a\nb",
    "a\0b",
    "0000000000000001x",
    "client:x",
    "$(rm)",
    "x" * 300,
]


def submission(trace: str = "t", model: str = "demo", **fields: object) -> Submission:
    return Submission(trace=trace, model=model, invokes=[Invoke(prompt="hello")], **fields)  # type: ignore[arg-type]


async def put(bus: Bus, client: str, traces: Iterable[int | str], **fields: object) -> None:
    """Entries `client-<trace>` of a client's."""
    for trace in traces:
        await bus.queue.put("demo", f"{client}-{trace}", b"d", client=client, **fields)  # type: ignore[arg-type]


async def take(bus: Bus, count: int = 1, engine: str = "e") -> list[str]:
    """The traces of what can be taken now."""
    return traces(await bus.queue.take("demo", engine, count, 0))


def traces(found: Iterable[Taken]) -> list[str]:
    return [one.trace for one in found]


async def left_behind(bus: Bus) -> set[str]:
    """The parts of the queue that exist."""
    prefix = bus.keys.queue("demo", "")
    return {
        key.decode().removeprefix(prefix)
        for key in await bus.command("KEYS", "*:queue:*")
        if key.decode().startswith(prefix)
    }


async def settled(bus: Bus, model: str = "tiny") -> None:
    """Wait until a model's queue has no submission. One leaves it right after its trace's final has come."""

    async def is_empty() -> bool:
        return not await bus.command("HLEN", bus.keys.queue(model, "entries"))

    await until(is_empty)


async def idle(bus: Bus, count: int) -> bool:
    """Whether as many engines wait for the bell."""
    waiting = [client for client in await clients(bus) if client["cmd"] == "blpop" and "b" in client["flags"]]
    return len(waiting) == count


async def put_silently(bus: Bus, *some: str) -> None:
    """Entries whose tokens get lost."""
    names = [name + ":elsewhere" if name.endswith(":bell") else name for name in queue_names(bus.keys, "demo")]
    for trace in some:
        await bus.command(*_PUT([*names, bus.keys.submitted("demo", trace)], trace, "1.0", "A", 0, "", 0, 60, 1, b"d"))
