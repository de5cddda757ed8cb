"""A real engine that is asked to leave."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.to_thread
import psutil
import pytest

import tracewire
from tests.support.drained import run_command, runs
from tests.support.engine_process import running_engine
from tracewire_bus.transport.embedded import EmbeddedServer

PATIENCE = 60


@pytest.mark.usefixtures("starts_engine")
@pytest.mark.full
async def test_a_real_engine_drains_and_is_not_started_again(tmp_path: Path) -> None:
    async with EmbeddedServer.start() as server:
        with running_engine(server.url, tmp_path) as running:
            below = running.descendants()
            async with tracewire.connect(server.url) as client:
                trace = client.trace("demo", "def f(", max_tokens=100, ignore_eos=True, detach=True)
                await trace.start()
                await runs(trace)
                assert await run_command("ready", "--host", "--url", server.url) == 0
                assert await run_command("drain", "--host", "--url", server.url) == 0
                assert await client.engines.list() == []
                result = await trace.result()
                assert len(result.token_ids) == 100
                await trace.aclose()
            assert await anyio.to_thread.run_sync(running.process.wait, PATIENCE) == 0
            _, alive = psutil.wait_procs(below, timeout=PATIENCE)
            assert not alive
