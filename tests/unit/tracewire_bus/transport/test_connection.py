"""Connections as the bus opens them on each backend, to real servers and to some that are none."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream
from redis import exceptions as redis

from tests.support.redis.servers import BINARIES, running_servers
from tracewire_bus.bus import Bus
from tracewire_bus.transport.anyio_connection import AnyioConnection
from tracewire_bus.transport.asyncio_connection import AsyncioConnection
from tracewire_bus.transport.connection import Connection
from tracewire_bus.transport.link import pack_arguments, pack_commands
from tracewire_bus.transport.loops import on_trio
from tracewire_bus.transport.server import Server
from tracewire_bus.wire.pieces import Pieces


def made(url: str, **options: Any) -> Connection:
    """A connection to a server by its URL, not yet open."""
    connection: Connection = Server(url, **options)._make()
    assert isinstance(connection, AnyioConnection if on_trio() else AsyncioConnection)
    return connection


async def asked(connection: Connection, *command: Any) -> Any:
    await connection.send_command(*command)
    return await connection.read_response()


@asynccontextmanager
async def playing(path: Path, serve: Callable[[SocketStream], Awaitable[None]]) -> AsyncIterator[str]:
    """The URL of a server that does as `serve` says."""
    listener = await anyio.create_unix_listener(path)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        yield f"unix://{path}"
        group.cancel_scope.cancel()


async def test_it_logs_in_and_says_who_it_is(bus: Bus, embedded: str, prefix: str) -> None:
    await bus.command("ACL", "SETUSER", prefix, "on", ">geheim: @", "~*", "+@all")
    login = f"username={prefix}&password=geheim%3A%20%40"
    connection = made(f"{embedded}?{login}&db=3&client_name=me")
    await connection.connect()
    assert await asked(connection, "ACL", "WHOAMI") == prefix.encode()
    assert await asked(connection, "CLIENT", "GETNAME") == b"me"
    listed = await asked(connection, "CLIENT", "LIST", "ID", await asked(connection, "CLIENT", "ID"))
    assert b" db=3 " in listed
    await connection.disconnect()
    with pytest.raises(redis.ConnectionError):
        await asked(connection, "PING")
    # It can be used again.
    await connection.connect()
    await connection.connect()
    assert await asked(connection, "PING") == b"PONG"
    await connection.disconnect()
    with pytest.raises(redis.AuthenticationError):
        await made(f"{embedded}?username={prefix}&password=wrong").connect()
    await bus.command("ACL", "DELUSER", prefix)


async def test_replies_and_refusals_are_those_of_redis_py(embedded: str, prefix: str) -> None:
    connection = made(embedded)
    await connection.connect()
    packed = pack_commands([("SET", prefix, "a"), ("INCR", prefix), ("EVALSHA", "0" * 40, 0), ("GET", prefix)])
    assert isinstance(packed, bytes)
    await connection.send_packed_command(packed)
    assert await connection.read_response() == b"OK"
    with pytest.raises(redis.ResponseError, match="not an integer"):
        await connection.read_response()
    with pytest.raises(redis.NoScriptError):
        await connection.read_response()
    assert await connection.read_response() == b"a"
    large = "x" * 3_000_000
    assert await asked(connection, "ECHO", large) == large.encode()
    await connection.disconnect()


async def test_replies_are_read_together_and_a_refusal_stands_in_its_place(embedded: str, prefix: str) -> None:
    connection = made(embedded)
    await connection.connect()
    packed = pack_commands([("SET", prefix, "a"), ("INCR", prefix), ("GET", prefix), ("PING",)])
    assert isinstance(packed, bytes)
    await connection.send_packed_command(packed)
    done, refused, got = await connection.read_replies(3)
    assert (done, got) == (b"OK", b"a")
    assert isinstance(refused, redis.ResponseError)
    assert await connection.read_replies(0) == []
    assert await connection.read_replies(1) == [b"PONG"]
    await connection.disconnect()


async def test_an_error_other_than_a_refusal_is_raised_before_later_replies_come(tmp_path: Path) -> None:
    async def loads(stream: SocketStream) -> None:
        await stream.receive()
        await stream.send(b"+OK\r\n+OK\r\n")  # to the connection's names
        await stream.receive()
        await stream.send(b"+OK\r\n-LOADING Redis is loading the dataset in memory\r\n")
        await anyio.sleep_forever()

    async with playing(tmp_path / "socket", loads) as url:
        connection = made(url)
        await connection.connect()
        await connection.send_packed_command(b"".join(3 * [b"*1\r\n$4\r\nPING\r\n"]))
        with anyio.fail_after(30), pytest.raises(redis.BusyLoadingError):
            await connection.read_replies(3)
        await connection.disconnect()


def test_arguments_are_packed_one_by_one_as_in_a_command() -> None:
    arguments = ("XREAD", "STREAMS", "tw:{t1}:events:é", "1-0", "")
    assert b"*5\r\n" + pack_arguments(*arguments) == pack_commands([arguments])


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "unix:///nowhere/redis.sock", "redis://nowhere.invalid"])
async def test_where_nobody_is_the_error_says_where(url: str) -> None:
    with pytest.raises(redis.ConnectionError, match=r"connecting to (127\.0\.0\.1:1|/nowhere|nowhere\.invalid:6379)"):
        await made(url).connect()


async def test_who_does_not_answer_is_given_up_and_so_is_who_hangs_up_or_talks_nonsense(tmp_path: Path) -> None:
    async def silent(stream: SocketStream) -> None:
        await anyio.sleep_forever()

    async def hangs_up(stream: SocketStream) -> None:
        await stream.receive()
        await stream.send(b"$10\r\nabc")
        await stream.aclose()

    async def talks(stream: SocketStream) -> None:
        await stream.receive()
        await stream.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await anyio.sleep_forever()

    async with playing(tmp_path / "a", silent) as url:
        with pytest.raises(redis.TimeoutError, match="connecting to"):
            await made(f"{url}?password=p", socket_connect_timeout=0.05).connect()
    async with playing(tmp_path / "b", hangs_up) as url:
        with pytest.raises(redis.ConnectionError, match="closed by server"):
            await made(f"{url}?password=p").connect()
    async with playing(tmp_path / "c", talks) as url:
        with pytest.raises(redis.InvalidResponse):
            await made(f"{url}?password=p").connect()


async def test_a_reply_may_come_in_pieces_and_who_waits_for_it_may_be_cancelled(tmp_path: Path) -> None:
    go_on = anyio.Event()

    async def serve(stream: SocketStream) -> None:
        async with stream:
            await stream.receive()
            for piece in (b"*2\r", b"\n$3\r\none\r\n", b"$3\r\ntw", b"o\r\n"):
                await stream.send(piece)
                await anyio.sleep(0.001)
            await go_on.wait()

    async with playing(tmp_path / "a", serve) as url:
        connection = made(url)
        # No handshake: what the server gets first is the command.
        connection._settings.driver_info = None
        await connection.connect()
        assert await asked(connection, "X") == [b"one", b"two"]
        with anyio.move_on_after(0.01) as scope:
            await connection.read_response()
        assert scope.cancelled_caught
        go_on.set()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await connection.disconnect()
        assert not connection.connected


async def test_sockets_over_tcp_send_at_once_and_are_kept_alive() -> None:
    async with running_servers(next(iter(BINARIES))) as servers:
        server = await servers.start()
        connection = made(server.url)
        await connection.connect()
        assert (connection.host, connection.port) == ("127.0.0.1", server.port)
        if isinstance(connection, AsyncioConnection):
            assert connection._socket is not None
            raw = connection._socket.transport.get_extra_info("socket")
        else:
            assert isinstance(connection, AnyioConnection)
            assert connection._stream is not None
            raw = connection._stream.extra(SocketAttribute.raw_socket)
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        await connection.disconnect()


async def test_large_arguments_go_in_pieces_and_arrive_whole(embedded: str, prefix: str) -> None:
    large, parts = b"a" * 200_000, Pieces([b"head", memoryview(b"b" * 100_000), b"", b"tail"])
    commands = [("SET", prefix, Pieces([large])), ("APPEND", prefix, 1.5), ("APPEND", prefix, parts), ("GET", prefix)]
    packed = pack_commands(commands)
    assert isinstance(packed, Pieces)
    assert any(buffer is large for buffer in packed.buffers)
    connection = made(embedded)
    await connection.connect()
    await connection.send_packed_command(packed.buffers)
    assert await connection.read_response() == b"OK"
    assert await connection.read_response() == 200_003
    assert await connection.read_response() == 200_003 + len(parts)
    assert await connection.read_response() == large + b"1.5" + bytes(parts)
    await connection.disconnect()


def test_what_no_command_can_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="a list cannot be an argument"):
        pack_commands([("SET", "key", Pieces([b"a"]), ["x"])])


async def test_replies_that_came_before_the_end_are_read(tmp_path: Path) -> None:
    async def serve(stream: SocketStream) -> None:
        await stream.receive()
        await stream.send(b"+OK\r\n:7\r\n$5\r\nhal")
        await stream.aclose()

    async with playing(tmp_path / "a", serve) as url:
        connection = made(url)
        connection._settings.driver_info = None
        await connection.connect()
        assert await asked(connection, "X") == b"OK"
        assert await connection.read_response() == 7
        for _ in range(2):
            with pytest.raises(redis.ConnectionError, match="closed"):
                await connection.read_response()
        with pytest.raises(redis.ConnectionError):
            for _ in range(100):
                await connection.send_command("X")
                await anyio.lowlevel.checkpoint()
        await connection.disconnect()


async def test_a_server_that_reads_nothing_holds_the_sender_and_nobody_else(tmp_path: Path) -> None:
    reads = anyio.Event()

    async def serve(stream: SocketStream) -> None:
        read = 0
        async with stream:
            await reads.wait()
            while read < 64_000_000:
                read += len(await stream.receive(1_000_000))
            await stream.send(b"+OK\r\n")
            await anyio.sleep_forever()

    async with playing(tmp_path / "a", serve) as url:
        connection = made(url)
        connection._settings.driver_info = None
        await connection.connect()
        with anyio.move_on_after(0.2) as scope:
            await connection.send_packed_command([b"x" * 1_000_000] * 64)
        assert scope.cancelled_caught
        await connection.disconnect()
    async with playing(tmp_path / "b", serve) as url:
        connection = made(url)
        connection._settings.driver_info = None
        await connection.connect()
        async with anyio.create_task_group() as group:
            group.start_soon(connection.send_packed_command, [b"x" * 1_000_000] * 64)
            await anyio.wait_all_tasks_blocked()
            reads.set()
        assert await connection.read_response() == b"OK"
        await connection.disconnect()
