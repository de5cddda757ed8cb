"""Consumers on other hosts ask an engine for ranges over TCP."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from tracewire_bus.bulk.remote import RemoteStores, StoreRefused, serve_bulk
from tracewire_bus.bulk.stores import StorePlace
from tracewire_bus.wire.bulk_ranges import BulkRange

TOKEN = "0123" * 16
DATA = bytes(range(256)) * (5 << 12)


async def read(store: str, segment: str, offset: int, nbytes: int) -> bytes | None:
    """What the served store has: one segment."""
    if store == "broken":
        raise PermissionError(13, "Permission denied")
    return DATA[offset : offset + nbytes] if (store, segment) == ("s", "g") and offset + nbytes <= len(DATA) else None


def where(nbytes: int = len(DATA), offset: int = 0, store: str = "s", segment: str = "g") -> BulkRange:
    """A range of the served store."""
    return BulkRange(store, segment, offset, nbytes, bytes(16))


SERVE = partial(serve_bulk, token=TOKEN, read=read)
NONSENSE = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b'["s","g",-1,5]',
    b'["s","g",0,true]',
    b'["s","g",0]',
    b"[" * 3000,
    b"\xff\xfe",
]


@contextlib.asynccontextmanager
async def listening(
    handle: Callable[[SocketStream], Awaitable[None]] = SERVE,
) -> AsyncIterator[StorePlace]:
    """A server on a port of its own."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    # Closed with the server: the kernel would take connections for it.
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, handle)
        yield StorePlace("/nowhere", f"127.0.0.1:{listener.extra(SocketAttribute.local_port)}", TOKEN)
        group.cancel_scope.cancel()


@pytest.fixture
async def stores() -> AsyncIterator[RemoteStores]:
    """The consumer's side."""
    stores = RemoteStores()
    yield stores
    await stores.aclose()


async def test_ranges_come_as_they_are(stores: RemoteStores) -> None:
    async with listening() as place:
        assert await stores.read(place, where()) == DATA
        assert await stores.read(place, where(7, offset=3)) == DATA[3:10]
        assert await stores.read(place, where(0)) == b""
        # One connection has done all of that.
        assert sum(map(len, stores._idle.values())) == 1


async def test_many_ask_at_once(stores: RemoteStores) -> None:
    async def ask(offset: int) -> None:
        assert await stores.read(place, where(100_000, offset)) == DATA[offset : offset + 100_000]

    async with listening() as place:
        async with anyio.create_task_group() as group:
            for number in range(40):
                group.start_soon(ask, number * 1000)
        assert sum(map(len, stores._idle.values())) <= 4


async def test_what_is_not_there_is_refused_with_the_reason(stores: RemoteStores) -> None:
    async with listening() as place:
        with pytest.raises(StoreRefused, match="gone with their trace"):
            await stores.read(place, where(1, offset=len(DATA)))
        with pytest.raises(StoreRefused, match="Permission denied"):
            await stores.read(place, where(store="broken"))
        with pytest.raises(StoreRefused, match="this token is not the store's"):
            await stores.read(StorePlace(place.path, place.address, "another"), where())
        assert await stores.read(place, where()) == DATA


async def test_an_engine_that_is_gone_is_refused(stores: RemoteStores) -> None:
    async with listening() as place:
        assert await stores.read(place, where()) == DATA
    with pytest.raises(StoreRefused):
        await stores.read(place, where())


async def test_an_engine_that_does_not_answer_is_asked_once(
    stores: RemoteStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracewire_bus.bulk.remote._PATIENCE_S", 0.05)
    asked, answers = 0, True

    async def handle(stream: SocketStream) -> None:
        nonlocal asked
        received = BufferedByteReceiveStream(stream)
        with contextlib.suppress(anyio.EndOfStream, anyio.IncompleteRead):
            await received.receive_until(b"\n", 100)
            while await received.receive_until(b"\n", 1000):
                asked += 1
                if not answers:
                    await anyio.sleep_forever()
                await stream.send(b"ok 1\nx")

    async with listening(handle) as place:
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(stores.read, place, where(1))
        answers = False
        before = asked
        with pytest.raises(StoreRefused, match="does not answer in time"):
            await stores.read(place, where(1))
        for _ in range(3):
            with pytest.raises(StoreRefused, match="has not answered of late"):
                await stores.read(place, where(1))
        # Not over each of the idle connections.
        assert asked == before + 1
        monkeypatch.setattr("tracewire_bus.bulk.remote._SILENT_S", 0.0)
        stores._silent_until.clear()
        answers = True
        assert await stores.read(place, where(1)) == b"x"


@pytest.mark.parametrize("reply", [b"what?\n", b"ok -5\n", b"ok 1\nx", b"ok 99999999999999999999\n", b"x" * 5000, b""])
async def test_a_server_that_makes_no_sense_is_refused(stores: RemoteStores, reply: bytes) -> None:
    async def handle(stream: SocketStream) -> None:
        async with stream:
            await stream.receive()
            if reply:
                await stream.send(reply)

    async with listening(handle) as place:
        with pytest.raises(StoreRefused):
            await stores.read(place, where(10))
    assert not any(stores._idle.values())


@pytest.mark.parametrize(
    "line",
    [b"", b"{}", b"[]", b'["s","g",-1,5]', b'["s","g",0,true]', b'["s","g",0]', b"[" * 3000, b"\xff\xfe", b"null"],
)
async def test_a_request_that_makes_no_sense_is_refused(line: bytes) -> None:
    async with listening() as place:
        host, _, port = place.address.partition(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(TOKEN.encode() + b"\n" + line + b"\n")
            assert await stream.receive() == b"no a request is [store, segment, offset, nbytes]\n"
            await stream.send(b'["s","g",1,2]\n')
            assert await stream.receive() == b"ok 2\n" + DATA[1:3]
