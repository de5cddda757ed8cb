"""The connection for trio runs on asyncio, too, and takes what the other one takes."""

from __future__ import annotations

from tests.unit.tracewire_bus.transport.test_connection import asked
from tracewire_bus.transport.anyio_connection import AnyioConnection
from tracewire_bus.transport.server import Server


async def test_it_sends_in_one_buffer_or_in_several_and_reads_large_replies(embedded: str) -> None:
    connection = AnyioConnection(Server(embedded)._factory.make_connection())
    assert not connection.connected
    await connection.connect()
    await connection.send_packed_command([b"*2\r\n$4\r\nECHO\r\n$3\r\n", memoryview(b"abc"), b"\r\n"])
    assert await connection.read_response() == b"abc"
    assert await asked(connection, "ECHO", b"x" * 1_000_000) == b"x" * 1_000_000
    await connection.disconnect()
    assert not connection.connected
