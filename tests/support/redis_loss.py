"""An engine that steps as a test says on a Redis that is lost, and what waits for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import tracewire
from tests.support.scripted_engine import ScriptedEngine, serving
from tests.support.stepping import Gate
from tracewire import Client
from tracewire_bus.bus import Bus
from tracewire_bus.store.control import ControlReader, Order
from tracewire_bus.wire.messages import EngineInfo
from tracewire_engine.adapter.service import Adapter

PATIENCE = 60


@asynccontextmanager
async def played(
    url: str, described: EngineInfo | None = None, **settings: Any
) -> AsyncIterator[tuple[Gate, Client, Bus, Adapter]]:
    """An engine that steps as its gate says, and a client: both there, on the bus at `url`."""
    gate = Gate()
    async with (
        tracewire.connect(url) as client,
        Bus.open(url) as bus,
        serving(bus, ScriptedEngine(gate), described, **settings) as adapter,
    ):
        await client.models.get("tiny", timeout=PATIENCE)
        yield gate, client, bus, adapter


class HeldOrders:
    """Has the engines of this process read no orders while it is closed. It begins open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gate, self._waits = anyio.Event(), anyio.Event()
        self._gate.set()
        read = ControlReader.read

        async def held(reader: ControlReader, block_ms: int) -> list[Order]:
            if not self._gate.is_set():
                self._waits.set()
            await self._gate.wait()
            return await read(reader, min(block_ms, 50))

        monkeypatch.setattr(ControlReader, "read", held)

    async def close(self) -> None:
        """An engine has read all orders that were given before, and reads none that is given from now on."""
        self._gate, self._waits = anyio.Event(), anyio.Event()
        await self._waits.wait()

    def open(self) -> None:
        """The engines read on."""
        self._gate.set()


async def limit(bus: Bus, size: int | str) -> None:
    """Set how much memory Redis may take; 0 for any amount."""
    await bus.command("CONFIG", "SET", "maxmemory", size)


def ids(events: list[Any]) -> list[tuple[int, int]]:
    """The numbers of events."""
    return [(event.attempt, event.seq) for event in events]


async def _settled(bus: Bus) -> bool:
    return not await bus.command("HLEN", bus.keys.queue("tiny", "entries"))
