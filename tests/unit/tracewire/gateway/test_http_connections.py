"""Connections: how large the head of a request may be, and how long it may take."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream
from websockets.asyncio.client import connect

from tests.support.bus_engine import steered_once
from tests.support.gateways import Served
from tests.support.until import until
from tracewire import Client
from tracewire.gateway.http_connections import MOST_HEAD, HttpConnection
from tracewire.gateway.keys import entry_of

Engine = Callable[..., Any]
HEAD = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"


@asynccontextmanager
async def connected(served: Served) -> AsyncIterator[ByteStream]:
    """A connection without a request."""
    host, _, port = served.url.removeprefix("http://").partition(":")
    async with await anyio.connect_tcp(host, int(port)) as stream:
        yield stream


async def received(stream: ByteStream) -> bytes:
    """What comes until the connection ends."""
    found = b""
    with anyio.fail_after(60):
        while True:
            try:
                found += await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return found


@pytest.fixture
async def guarded(gateway: Callable[..., Any], tmp_path: Path) -> AsyncIterator[Served]:
    """A gateway with a key."""
    file = tmp_path / "keys.toml"
    file.write_text(entry_of("k", "alice", frozenset({"read"}), ""))
    async with gateway(keys=file, head_s=0.2) as served:
        yield served


@pytest.mark.parametrize("part", [b"X: " + b"a" * 1000 + b"\r\n", b"X:\r\n", b"aaaa"])
async def test_a_head_without_an_end_is_refused(gateway: Callable[..., Any], part: bytes) -> None:
    async with gateway(head_s=600.0) as served, connected(served) as stream:
        await stream.send(HEAD + b"Y: ")
        # With a socket that takes no more, the gateway has closed it.
        try:
            for _ in range(100):
                await stream.send(part * (MOST_HEAD // len(part)))
        except (anyio.BrokenResourceError, anyio.EndOfStream):
            pass
        await until(lambda: not served.server.server_state.connections)


async def test_a_head_that_is_too_large_gets_its_status(gateway: Callable[..., Any]) -> None:
    async with gateway(head_s=600.0) as served:
        for text in (
            b"GET /healthz HTTP/1.1\r\nX: " + b"a" * MOST_HEAD + b"\r\n\r\n",
            b"GET /healthz?" + b"a" * MOST_HEAD + b" HTTP/1.1\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\n" + b"X: aaaaaaaaaaaaa\r\n" * (MOST_HEAD // 10) + b"\r\n",
        ):
            async with connected(served) as stream:
                await stream.send(text)
                assert (await received(stream)).startswith(b"HTTP/1.1 431 ")
        async with connected(served) as stream:
            await stream.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"a" * (MOST_HEAD - 100) + b"\r\n\r\n")
            assert (await stream.receive()).startswith(b"HTTP/1.1 200 ")
        async with connected(served) as stream:
            await stream.send(b"no request\r\n\r\n")
            assert (await received(stream)).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET",
        HEAD,
        # The rest of a body that its request does not want.
        b"POST /traces HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n",
        b"GET /traces HTTP/1.1\r\nHost: x\r\n\r\n" + HEAD,
    ],
)
async def test_a_connection_that_asks_for_nothing_ends(guarded: Served, sent: bytes) -> None:
    async with connected(guarded) as stream:
        if sent:
            await stream.send(sent)
        if b"\r\n\r\n" in sent:
            assert (await stream.receive()).startswith(b"HTTP/1.1 401 ")
            # Further bytes are no further time.
            await stream.send(b"x")
        await received(stream)


def waits(served: Served) -> bool:
    """Whether the only connection waits for another request."""
    (protocol,) = served.server.server_state.connections
    return isinstance(protocol, HttpConnection) and protocol._timer is None and bool(protocol.timeout_keep_alive_task)


async def test_a_connection_is_kept_between_requests(guarded: Served) -> None:
    async with connected(guarded) as stream:
        for body in (b"", b"x" * 200_000):
            head = b"POST /traces HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            await stream.send(head)
            assert (await stream.receive()).startswith(b"HTTP/1.1 401 ")
            await stream.send(body)
            await until(lambda: waits(guarded))


async def test_streams_slow_bodies_and_sockets_outlast_the_time_of_a_head(
    engine: Engine, gateway: Callable[..., Any], client: Client
) -> None:
    async with engine(steered_once), gateway(head_s=0.1, keep_alive_s=0.1) as served, connected(served) as stream:
        body = b'{"model": "tiny", "prompt": "x", "stream": true, "tracewire": {"live": {"alpha": 0.0}}}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        await stream.send(head + b"Content-Length: %d\r\n\r\n" % len(body))
        async with connected(served) as idle:
            # It came later, so its end shows that the time of a head has passed.
            await received(idle)
        await stream.send(body)
        found = b""
        while found.count(b": waiting") < 3:
            found += await stream.receive()
        trace_id = found.partition(b'"trace_id":"')[2].partition(b'"')[0].decode()
        async with connect(f"{served.url.replace('http', 'ws')}/traces/{trace_id}/ws", proxy=None) as socket:
            assert '"accepted"' in await socket.recv()
            async with connected(served) as idle:
                await received(idle)
            await client.steer(trace_id, alpha=1.0)
            async for message in socket:
                last = message
        assert '"final"' in last
        while b"[DONE]" not in found:
            found += await stream.receive()
        assert b" two" in found
