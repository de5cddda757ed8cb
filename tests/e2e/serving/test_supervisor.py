"""A supervisor whose engine cannot serve."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from tests.support.adapter_command import Done, adapter_command
from tests.support.redis.durable import server
from tracewire_bus.bus import Bus


@pytest.mark.usefixtures("starts_engine")
@pytest.mark.parametrize("problem", ["it evicts", "it does not say what keys take"])
async def test_the_command_ends_for_good_on_a_redis_that_it_refuses(tmp_path: Path, problem: str) -> None:
    """Exit status 2, which no supervisor starts again, before a model is loaded. Once it is the whole command."""
    async with server(tmp_path / "redis") as redis, Bus.open(redis.url) as bus:
        if problem == "it evicts":
            await bus.command("CONFIG", "SET", "maxmemory", "100mb")
            await bus.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        else:
            await bus.command("ACL", "SETUSER", "default", "-memory")
        options = ("demo", "--url", redis.url, "--retain-total-bytes", "1000000")
        if problem == "it evicts":
            command = [sys.executable, "-m", "tracewire.cli", "engine", *options]
            whole = await anyio.run_process(command, check=False)
            ended = Done(whole.returncode, whole.stdout.decode(), whole.stderr.decode())
        else:
            ended = await anyio.to_thread.run_sync(adapter_command, tmp_path, *options)
    assert ended.returncode == 2, ended.stderr
    assert ("maxmemory-policy allkeys-lru" if problem == "it evicts" else "MEMORY USAGE") in ended.stderr
    assert "starting the adapter again" not in ended.stderr
    assert ended.stdout == ""
