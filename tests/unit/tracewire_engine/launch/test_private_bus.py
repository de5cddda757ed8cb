"""A Redis is private where the kernel says that nobody else can open it, and nowhere else."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.redis.process import RedisServer
from tracewire_bus.transport.embedded import EmbeddedServer
from tracewire_engine.launch.private_bus import why_shared


@pytest.fixture
def bound(tmp_path: Path) -> Iterator[Path]:
    """A unix socket below a folder that others can enter."""
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents:
        if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o077:
            pytest.skip(f"no other user gets below {folder}")
    with closing(socket.socket(socket.AF_UNIX)) as one:
        one.bind(str(tmp_path / "redis.sock"))
        yield tmp_path / "redis.sock"


async def test_an_embedded_redis_is_private_by_its_socket() -> None:
    async with EmbeddedServer.start() as server:
        assert why_shared(server.url) == ""
        assert why_shared(f"{server.url}?username=default&password=p") == ""


async def test_an_embedded_redis_is_private_by_its_port(free_port: int) -> None:
    async with EmbeddedServer.start(port=free_port) as server:
        assert why_shared(server.url) == ""
        assert why_shared(f"redis://localhost:{free_port}/0") == ""
    assert "no Redis that `tracewire redis`" in why_shared(f"redis://localhost:{free_port}")


@pytest.fixture
def free_port() -> int:
    """A port on which nothing listens."""
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_another_server_on_a_loopback_port_is_not(tmp_path: Path) -> None:
    """It may be a tunnel, or a Redis that others share."""
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        assert "no Redis that `tracewire redis`" in why_shared(f"redis://127.0.0.1:{one.getsockname()[1]}")


async def test_nor_is_any_other_redis_of_this_user(tmp_path: Path, free_port: int) -> None:
    url = f"redis://127.0.0.1:{free_port}"
    redis = RedisServer(tmp_path, url, [("port", free_port), ("bind", "127.0.0.1")])
    try:
        await redis.start()
        assert "no Redis that `tracewire redis`" in why_shared(url)
    finally:
        await redis.aclose()


@pytest.mark.parametrize(
    "url",
    [
        "redis://10.0.0.1",
        "redis://host:6379",
        "rediss://localhost",
        "redis+cluster://localhost",
        "redis+sentinel://localhost/main",
    ],
)
def test_a_redis_on_a_network_is_not(url: str) -> None:
    assert "may be shared" in why_shared(url)
    assert "p4ss" not in why_shared(url.replace("://", "://user:p4ss@"))


def test_a_socket_is_as_private_as_its_mode_or_a_folder_above_it(bound: Path) -> None:
    bound.chmod(0o755)
    assert "other users can open the socket" in why_shared(f"unix://{bound}")
    bound.chmod(0o700)
    assert why_shared(f"unix://{bound}") == ""
    bound.parent.chmod(0o777)
    assert "other users can write to" in why_shared(f"unix://{bound}")
    bound.parent.chmod(0o700)
    bound.chmod(0o777)
    assert why_shared(f"unix://{bound}") == ""


def test_a_socket_that_is_not_there_is_not(tmp_path: Path) -> None:
    assert "cannot be looked at: No such file" in why_shared(f"unix://{tmp_path}/none.sock")
