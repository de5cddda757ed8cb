"""An adapter with a scripted engine that can still serve, after whatever it has read."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import msgspec

import tracewire
from tests.support.scripted_engine import ScriptedEngine, acts, expected, info, serving
from tracewire import Client
from tracewire_bus.bus import Bus
from tracewire_bus.wire.messages import Invoke, Submission
from tracewire_engine.adapter.service import Adapter

PATIENCE = 60


ENGINE = "the-engine"


@asynccontextmanager
async def served(bus: Bus, embedded: str, prefix: str, **settings: Any) -> AsyncIterator[tuple[Adapter, Client]]:
    """An adapter in this process with these settings, and a client of another bus."""
    engine = ScriptedEngine(partial(anyio.sleep, 0.005))
    with anyio.fail_after(PATIENCE):
        async with (
            serving(bus, engine, info("tiny", engine=ENGINE), **settings) as adapter,
            tracewire.connect(embedded, prefix=prefix) as client,
        ):
            while not await bus.registry.alive(ENGINE):  # noqa: ASYNC110
                await anyio.sleep(0.01)
            yield adapter, client


async def runs(client: Client) -> None:
    """A valid trace is none the worse."""
    async with client.trace("tiny", "valid", acts(), max_tokens=5) as trace:
        assert (await trace.result()).token_ids == expected("valid", 5)[0]


async def counted(client: Client, least: int = 1) -> None:
    """The registry says that something malformed was found."""
    while (await client.engines.list())[0].malformed < least:  # noqa: ASYNC110
        await anyio.sleep(0.01)


def submission(trace: str = "t", **fields: Any) -> Submission:
    return Submission(**{"trace": trace, "model": "tiny", "invokes": [Invoke(prompt="x")], "detach": True} | fields)


async def failure(client: Client, trace: str) -> Any:
    """What a trace has ended with."""
    async with client.subscribe(trace) as events:
        async for event in events:
            if isinstance(event, tracewire.Final):
                return event.error
    raise AssertionError(trace)


def many(item: bytes, count: int) -> msgspec.Raw:
    return msgspec.Raw(b"\xdd" + struct.pack(">I", count) + item * count)


def check(found: dict[str, Any]) -> None:
    """What a fuzz must find, by its seed."""
    assert found["adapter"] == "served to the end", found
    assert found["registered"], found
    assert not found["valid"]["wrong"], found
    assert found["valid"]["after_the_last_entry"] >= 8, found
    assert not found["consumers_wrong"], found
    assert found["malformed_in_registry"] > 0, found
