"""`tracewire redis` runs a private Redis."""

# ruff: noqa: ASYNC240
from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

import tracewire
from tracewire.cli import main as cli


@contextmanager
def running(*options: str) -> Iterator[subprocess.Popen[str]]:
    """The command as a process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tracewire.cli", "redis", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_redis_runs_until_it_is_told_to_end(number: signal.Signals) -> None:
    with running() as process:
        assert process.stdout is not None
        assert process.stderr is not None
        url = process.stdout.readline().strip()
        assert process.stderr.readline() == f"Every other command finds it by: export TRACEWIRE_URL={url}\n"
        path = Path(url.removeprefix("unix://"))
        assert path.exists()
        async with tracewire.connect(url) as client:
            assert await client.models.list() == []
        process.send_signal(number)
        assert await anyio.to_thread.run_sync(process.wait, 20) == 0
        assert not path.parent.exists()


async def test_redis_listens_on_a_port(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with running("--port", str(port)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"redis://127.0.0.1:{port}\n"
        async with tracewire.connect(f"redis://localhost:{port}") as client:
            assert await client.models.list() == []
        process.send_signal(signal.SIGTERM)
        assert await anyio.to_thread.run_sync(process.wait, 20) == 0
    with pytest.raises(tracewire.BusUnavailable, match=f"start one with `tracewire redis --port {port}`"):
        await tracewire.connect(f"redis://localhost:{port}")
    for wrong in ("70000", "0", "x"):
        with pytest.raises(SystemExit):
            cli.main(["redis", "--port", wrong])
        assert f"expected a port from 1 to 65535, got {wrong}" in capsys.readouterr().err
