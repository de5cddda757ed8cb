"""A consumer in a process of its own, which keeps a journal: whoever kills it finds there what it had read.

`python -m tests.faults.harness.consumer --url URL --prefix PREFIX --journal FILE TRACE...` reads these traces to their
ends. An entry goes into the journal as it is handed out: trace, id and data. With a journal that is there already it
goes on behind the last whole entry of each trace.
"""

from __future__ import annotations

import argparse
import os
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec

from tracewire_bus.bus import Bus, BusUnavailable
from tracewire_bus.events.subscription import Entry, Gap

__all__ = ["journal_of", "main", "noted", "position"]

_encode = msgspec.msgpack.Encoder().encode


def journal_of(path: Path) -> dict[str, list[tuple[str, bytes]]]:
    """What a journal holds: the id and data of each entry, by trace. What was written half is not there."""
    read: dict[str, list[tuple[str, bytes]]] = {}
    data = path.read_bytes() if path.exists() else b""
    place = 0
    while place + 4 <= len(data):
        (size,) = struct.unpack_from(">I", data, place)
        if place + 4 + size > len(data):
            break
        trace, id_, body = msgspec.msgpack.decode(data[place + 4 : place + 4 + size])
        read.setdefault(trace, []).append((id_, body))
        place += 4 + size
    if place < len(data):
        os.truncate(path, place)
    return read


@asynccontextmanager
async def _opened(options: argparse.Namespace) -> AsyncIterator[Bus]:
    """A bus, once there is a Redis: it may be away just when this process starts, and opening asks only once."""
    while True:
        bus = Bus.open(options.url, prefix=options.prefix)
        try:
            await bus.__aenter__()
            break
        except BusUnavailable:
            await anyio.sleep(0.05)
    try:
        yield bus
    finally:
        await bus.aclose()


def noted(entry: Entry | Gap) -> tuple[str, bytes]:
    """An entry's id and data. What was trimmed before it was read stands as `gap <since> <until>`, with its state."""
    if isinstance(entry, Gap):
        return f"gap {entry.since} {entry.until}", entry.snapshot.data
    return entry.id, entry.data


def position(entries: Sequence[tuple[str, bytes]]) -> str:
    """Where to go on behind these entries."""
    return entries[-1][0].split()[-1] if entries else "start"


async def _main(options: argparse.Namespace) -> None:
    path = Path(options.journal)
    before = journal_of(path)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    async with _opened(options) as bus, anyio.create_task_group() as group:

        async def follow(trace: str) -> None:
            async for entry in bus.read(trace, position(before.get(trace, []))):
                line = _encode((trace, *noted(entry)))
                os.write(file, struct.pack(">I", len(line)) + line)

        for trace in options.traces:
            group.start_soon(follow, trace)


def main(arguments: Sequence[str] | None = None) -> int:
    """As a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--prefix", default="tw")
    parser.add_argument("--journal", required=True)
    parser.add_argument("traces", nargs="+")
    anyio.run(_main, parser.parse_args(arguments))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
