"""What is asyncio's own in a connection: one read buffer for all, and no task that reads."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from tests.unit.tracewire_bus.transport.test_connection import asked
from tracewire_bus.transport.asyncio_connection import AsyncioConnection
from tracewire_bus.transport.server import Server


def opened(url: str) -> AsyncioConnection:
    """A connection of asyncio's to a server by its URL, not yet open."""
    return AsyncioConnection(Server(url)._factory.make_connection())


def test_replies_that_arrive_together_are_each_their_own_connections(embedded: str, prefix: str) -> None:
    """All connections of a thread read into the same buffer, a part of a reply at a time."""

    async def main() -> None:
        connections = [opened(embedded) for _ in range(8)]
        for connection in connections:
            await connection.connect()
        tasks = asyncio.all_tasks()

        async def echo(number: int, connection: AsyncioConnection) -> None:
            for round_ in range(5):
                value = bytes([65 + number]) * (700_000 + round_)
                assert await asked(connection, "ECHO", value) == value

        await asyncio.gather(*(echo(number, one) for number, one in enumerate(connections)))
        assert asyncio.all_tasks() == tasks
        for connection in connections:
            await connection.disconnect()

    asyncio.run(main())


def test_a_connection_that_breaks_while_it_sends_says_so(tmp_path: Path) -> None:
    """The sender waits until the transport takes more; it learns that there is nobody left to take it."""

    async def main() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "s"))
            listener.listen()
            connection = opened(f"unix://{tmp_path / 's'}")
            connection._settings.driver_info = None
            await connection.connect()
            accepted, _ = listener.accept()
            sending = asyncio.ensure_future(connection.send_packed_command([b"x" * 1_000_000] * 20))
            await asyncio.sleep(0)
            assert not sending.done()
            accepted.close()
            error = await asyncio.wait_for(asyncio.shield(asyncio.gather(sending, return_exceptions=True)), 30)
            assert type(error[0]).__name__ == "ConnectionError"
            assert "while writing" in str(error[0])
            await connection.disconnect()

    asyncio.run(main())
