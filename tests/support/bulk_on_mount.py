"""A scripted engine whose bulk store lies on a file system of its own, which is full or read-only for a while.

    python -m tests.support.bulk_on_mount URL PREFIX FOLDER full|ro

Within `unshare --mount --map-root-user`. Prints one JSON object: `moved`, of each trace before, during and after that
time, how many of its outputs refer to the store; `outputs`, how many there were; `whole`, whether results, late readers
and traces beside them that save nothing had everything; and `warned`, which traces had a warning. It ends once the
segments of all traces are gone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

import tracewire
from tests.support.scripted_engine import ScriptedEngine, acts, expected, info, serving
from tests.support.until import until
from tracewire import Client
from tracewire_bus.bus import Bus
from tracewire_bus.wire.codec import find_bulk
from tracewire_engine.adapter import bulk_writer
from tracewire_engine.adapter.bulk_writer import BulkSettings

TOKENS = 40


def do(*command: str) -> None:
    """Run a command."""
    subprocess.run(command, check=True)


async def in_bulk(bus: Bus, trace: str) -> tuple[int, int]:
    """How many outputs refer to bulk, of how many."""
    entries = await bus.command("XRANGE", bus.keys.events(trace), "-", "+")
    found = [dict(zip(flat[::2], flat[1::2], strict=True))[b"d"] for _, flat in entries]
    outputs = [data for data in found if data[1:3] == b"\xa1o"]
    return sum(find_bulk(data) is not None for data in outputs), len(outputs)


def is_whole(result: Any, prompt: str) -> bool:
    """Whether a result, or a state, has every token and every save."""
    ids, saved = expected(prompt, TOKENS)
    return bool(result.token_ids == ids and [list(map(float, one)) for one in result.saves["acts"]] == saved)


class Run:
    """What came of the traces."""

    def __init__(self, bus: Bus, client: Client) -> None:
        self._bus = bus
        self._client = client
        self.moved: dict[str, int] = {}
        self.outputs: dict[str, int] = {}
        self.warned: list[str] = []
        self.whole = True

    async def traces(self, *names: str) -> None:
        """Run these traces together, with one beside them that saves nothing."""
        async with anyio.create_task_group() as group:
            for name in names:
                group.start_soon(self._trace, name)
            group.start_soon(self._plain)

    async def _trace(self, name: str) -> None:
        async with self._client.trace("tiny", name, acts, max_tokens=TOKENS, trace_id=name, detach=True) as trace:
            result = await trace.result()
        self.whole &= is_whole(result, name) and is_whole(await self._client.get_state(name), name)
        self.moved[name], self.outputs[name] = await in_bulk(self._bus, name)
        if result.warnings:
            self.warned.append(name)

    async def _plain(self) -> None:
        async with self._client.trace("tiny", "plain", max_tokens=TOKENS) as trace:
            self.whole &= (await trace.result()).token_ids == expected("plain", TOKENS)[0]


async def main(url: str, prefix: str, folder: str, how: str) -> None:
    """Run traces before, while the file system takes nothing, and after."""
    bulk_writer.LOOK_S = 0.05
    logging.getLogger("tracewire").addHandler(said := Said())
    settings = BulkSettings(Path(folder), 1, 1 << 30)
    filler = Path(folder) / "filler"
    async with (
        Bus.open(url, prefix=prefix) as bus,
        tracewire.connect(url, prefix=prefix) as client,
        serving(bus, ScriptedEngine(anyio.lowlevel.checkpoint), info(), bulk=settings),
    ):
        await client.models.get("tiny", timeout=60)
        run = Run(bus, client)
        await run.traces("before")
        kept = segments(folder)
        await run.traces("dropped")
        (dropped,) = segments(folder) - kept
        if how == "full":
            with filler.open("wb", buffering=0) as file:
                try:
                    while file.write(bytes(1024)):
                        pass
                except OSError:
                    pass
        else:
            # The engine has files open, so that the mount itself cannot be changed: another one lies above it.
            do("mount", "--bind", folder, folder)
            do("mount", "-o", "remount,bind,ro", folder)
        await run.traces("during", "beside")
        await bus.command("DEL", bus.keys.events("dropped"), bus.keys.record("dropped"))
        await until(lambda: not dropped.exists() if how == "full" else "segments of dropped traces stay" in said)
        run.whole &= is_whole(await client.get_state("before"), "before")
        if how == "full":
            filler.unlink()
        else:
            do("umount", folder)
        await run.traces("after")
        await until(lambda: not dropped.exists())
        for name in ("before", "during", "beside", "after"):
            await bus.command("DEL", bus.keys.events(name), bus.keys.record(name))
        await until(lambda: not segments(folder))
        found = {"moved": run.moved, "outputs": run.outputs, "whole": run.whole, "warned": sorted(run.warned)}
        print(json.dumps(found))


def segments(folder: str) -> set[Path]:
    """The segments of all stores in a folder."""
    return set(Path(folder).glob("*/" + "[0-9a-f]" * 16))


class Said(logging.Handler):
    """What the engine has logged."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record's text."""
        self._texts.append(record.getMessage())

    def __contains__(self, part: str) -> bool:
        return any(part in text for text in self._texts)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
