"""An adapter beside the first one registers, says so, and ends when it is told to."""

from __future__ import annotations

import multiprocessing
from argparse import Namespace
from typing import Any

import anyio
import pytest

from tests.support.bus_engine import engine_info
from tests.support.played_engine import PlayedEngine
from tests.unit.tracewire_engine.launch.test_adapter_process import parsed
from tracewire_bus.bus import Bus
from tracewire_engine.launch import beside
from tracewire_engine.launch.adapter_group import DRAINING, SERVING, Beside

PATIENCE = 60


def options(embedded: str, prefix: str) -> Namespace:
    found = parsed("--url", embedded, "--prefix", prefix, "--drain", "0", "--retention", "60")
    found.chats = None
    return found


@pytest.mark.parametrize("message", [b"stop", b"drain", b"lost"])
async def test_it_serves_until_the_first_says_otherwise(
    bus: Bus, embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch, message: bytes
) -> None:
    monkeypatch.setattr(beside, "VllmEngine", lambda *arguments: PlayedEngine())
    info = engine_info(engine="e.1")
    ours, theirs = multiprocessing.Pipe()
    given = Beside(1, 2, "ipc:///nowhere/link", None, options(embedded, prefix))
    run: Any = beside._run
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as group:
            group.start_soon(run, None, None, None, info, given, theirs)
            await anyio.wait_readable(ours)
            assert ours.recv_bytes() == SERVING
            assert await bus.registry.alive("e.1")
            ours.send_bytes(message)
    assert not await bus.registry.alive("e.1")
    if message == b"drain":
        assert ours.recv_bytes() == DRAINING
