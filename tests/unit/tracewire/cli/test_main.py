"""The command: thin over the client, and open to subcommands of installed packages."""

# ruff: noqa: ASYNC220, ASYNC240

# ruff: noqa: ASYNC220, ASYNC240
from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

import tracewire
from tracewire.cli import main as cli


async def command(*arguments: str) -> int:
    """Run the command as a program would, with an event loop of its own."""
    return await anyio.to_thread.run_sync(partial(cli.main, list(arguments)))


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["models", "--url", "unix:///nowhere/redis.sock"], 1, "tracewire: cannot connect"),
        (["watch", "nowhere"], 1, "tracewire: no trace 'nowhere'"),
        (["watch", "nowhere", "--since", "later"], 2, "tracewire: since: expected 'start', 'now'"),
        (["watch", "--names", "scores"], 2, "tracewire: --names shows saved names of one trace"),
    ],
)
async def test_errors_are_one_line(
    redis_url: str,
    prefix: str,
    arguments: list[str],
    status: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "--url" not in arguments:
        arguments = [*arguments, "--url", redis_url, "--prefix", prefix]
    assert await command(*arguments) == status
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_no_url_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACEWIRE_URL", raising=False)
    assert cli.main(["models"]) == 1
    assert "TRACEWIRE_URL" in capsys.readouterr().err


def test_subcommands_of_other_packages(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [EntryPoint("extra", f"{__name__}:extra", cli.GROUP), EntryPoint("models", "nowhere:main", cli.GROUP)]
    monkeypatch.setattr(cli, "entry_points", lambda group: entries if group == cli.GROUP else [])
    monkeypatch.setattr(EntryPoint, "load", lambda self: extra)
    assert cli.main(["extra", "a", "--b"]) == 7
    assert capsys.readouterr().out == "['a', '--b']\n"
    # No package replaces one of ours.
    assert cli.main(["models", "--url", "unix:///nowhere/redis.sock"]) == 1
    with pytest.raises(SystemExit) as left:
        cli.main(["--help"])
    assert left.value.code == 0
    assert "Subcommands of installed packages: extra" in capsys.readouterr().out.replace("\n", " ")


def extra(arguments: list[str]) -> int:
    """A subcommand that another package brings."""
    print(arguments)
    return 7


def test_an_engine_that_is_not_installed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda group: [])
    assert cli.main(["engine", "demo"]) == 2
    assert "pip install 'tracewire[engine-gpu]'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        cli.main(["nothing"])
    assert left.value.code == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_redis_runs_until_it_is_told_to_end(number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "tracewire.cli", "redis"], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        path = Path(url.removeprefix("unix://"))
        assert path.exists()
        async with tracewire.connect(url) as client:
            assert await client.models.list() == []
        process.send_signal(number)
        assert await anyio.to_thread.run_sync(process.wait, 20) == 0
        assert not path.parent.exists()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_redis_listens_on_a_port(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "tracewire.cli", "redis", "--port", str(port)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"redis://127.0.0.1:{port}\n"
        async with tracewire.connect(f"redis://localhost:{port}") as client:
            assert await client.models.list() == []
        process.send_signal(signal.SIGTERM)
        assert await anyio.to_thread.run_sync(process.wait, 20) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    with pytest.raises(tracewire.BusUnavailable, match=f"start one with `tracewire redis --port {port}`"):
        await tracewire.connect(f"redis://localhost:{port}")
    with pytest.raises(SystemExit):
        cli.main(["redis", "--port", "70000"])
    assert "expected a port from 1 to 65535, got 70000" in capsys.readouterr().err
