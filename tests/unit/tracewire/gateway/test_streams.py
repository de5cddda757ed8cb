"""Streams of server-sent events: silence, stalled readers, clients that leave, and the gateway's end."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from tracewire.gateway.streams import ClientLeft, EventSource, Streams, encoded, unless_left


class Fed:
    """A source that a test feeds."""

    def __init__(self) -> None:
        self.give, self._take = anyio.create_memory_object_stream[int](10)
        self.closed = False

    async def __anext__(self) -> int:
        try:
            return await self._take.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        self.closed = True
        self._take.close()


class Numbers(EventSource):
    """Sends what it reads."""

    async def rendered(self, event: int) -> bytes:
        return encoded(event)

    def closed(self) -> bytes:
        return b"closing"


class Ready:
    """A source whose events are all here, as where a stream was behind."""

    def __init__(self, count: int) -> None:
        self.left = list(range(count))

    @property
    def _ready(self) -> bool:
        return bool(self.left)

    async def __anext__(self) -> int:
        if not self.left:
            raise StopAsyncIteration
        return self.left.pop(0)

    async def aclose(self) -> None:
        self.left.clear()


class Reader:
    """The server's side of one request."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.left = anyio.Event()
        self.room = anyio.Event()
        self.room.set()
        self.came = anyio.Event()
        self.over = self.sending = False

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        await self.room.wait()
        if message["type"] == "http.response.body":
            self.over = not message.get("more_body")
            if message["body"]:
                self.sent.append(message["body"])
            self.came.set()
            self.came = anyio.Event()

    async def until(self, count: int) -> None:
        while len(self.sent) < count:
            await self.came.wait()


async def test_a_stream_ends_with_its_source() -> None:
    streams, fed, reader = Streams(keep_alive_s=60, stall_s=60), Fed(), Reader()
    for number in range(3):
        fed.give.send_nowait(number)
    fed.give.close()
    await Numbers(streams, fed)({"type": "http"}, reader.receive, reader.send)
    assert reader.sent == [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n"]
    assert reader.over
    assert fed.closed
    assert not len(streams)


async def test_a_silent_stream_says_so_and_loses_nothing() -> None:
    streams, fed, reader = Streams(keep_alive_s=0.01, stall_s=60), Fed(), Reader()
    async with anyio.create_task_group() as group:
        group.start_soon(Numbers(streams, fed), {"type": "http"}, reader.receive, reader.send)
        await reader.until(2)
        fed.give.send_nowait(7)
        fed.give.close()
    assert reader.sent[:2] == [b": waiting\n\n"] * 2
    assert [one for one in reader.sent if one != b": waiting\n\n"] == [b"data: 7\n\n"]


async def test_a_client_that_leaves_ends_its_stream() -> None:
    streams, fed, reader = Streams(keep_alive_s=60, stall_s=60), Fed(), Reader()
    async with anyio.create_task_group() as group:
        group.start_soon(Numbers(streams, fed), {"type": "http"}, reader.receive, reader.send)
        fed.give.send_nowait(7)
        await reader.until(1)
        reader.left.set()
    assert fed.closed
    assert not reader.over


async def test_a_reader_that_stalls_is_disconnected() -> None:
    streams, fed, reader = Streams(keep_alive_s=60, stall_s=0.01), Fed(), Reader()
    async with anyio.create_task_group() as group:
        group.start_soon(Numbers(streams, fed), {"type": "http"}, reader.receive, reader.send)
        fed.give.send_nowait(7)
        await reader.until(1)
        reader.room = anyio.Event()
        fed.give.send_nowait(8)
    assert fed.closed
    assert (reader.sent, reader.over) == ([b"data: 7\n\n"], False)


async def test_all_streams_end_when_they_are_closed() -> None:
    streams = Streams(keep_alive_s=60, stall_s=60)
    readers, sources = [Reader(), Reader()], [Fed(), Fed()]
    async with anyio.create_task_group() as group:
        for reader, fed in zip(readers, sources, strict=True):
            group.start_soon(Numbers(streams, fed), {"type": "http"}, reader.receive, reader.send)
            fed.give.send_nowait(7)
            await reader.until(1)
        assert len(streams) == 2
        streams.close()
        await streams.wait_over()
    assert [reader.sent[-1] for reader in readers] == [b"closing"] * 2
    assert all(fed.closed for fed in sources)


async def test_what_waits_to_be_sent_is_sent_before_the_end() -> None:
    class Fetching(Ready):
        """A source whose second event is here, but for its saves."""

        async def __anext__(self) -> int:
            if len(self.left) == 1:
                fetches.set()
                await anyio.sleep_forever()
            return await super().__anext__()

    fetches = anyio.Event()
    streams, source, reader = Streams(keep_alive_s=60, stall_s=60), Fetching(2), Reader()
    async with anyio.create_task_group() as group:
        group.start_soon(Numbers(streams, source), {}, reader.receive, reader.send)
        await fetches.wait()
        streams.close()
    assert reader.sent == [b"data: 0\n\nclosing"]
    assert reader.over


async def test_an_event_waits_until_a_comment_has_left() -> None:
    streams, fed, reader = Streams(keep_alive_s=0.01, stall_s=60), Fed(), Reader()
    reader.room = anyio.Event()
    started = False

    async def send(message: dict[str, Any]) -> None:
        nonlocal started
        if not started:
            started = True
            return
        assert not reader.sending, "two sends at once"
        reader.sending = True
        began.set()
        await reader.send(message)
        reader.sending = False

    began = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(Numbers(streams, fed), {}, reader.receive, send)
        await began.wait()
        fed.give.send_nowait(7)
        fed.give.close()
        await anyio.wait_all_tasks_blocked()
        reader.room.set()
    assert b"".join(reader.sent).replace(b": waiting\n\n", b"") == b"data: 7\n\n"
    assert reader.sent[0] == b": waiting\n\n"


async def test_a_silent_reader_that_stalls_is_disconnected() -> None:
    streams, fed, reader = Streams(keep_alive_s=0.01, stall_s=0.02), Fed(), Reader()
    async with anyio.create_task_group() as group:
        group.start_soon(Numbers(streams, fed), {}, reader.receive, reader.send)
        await reader.until(1)
        reader.room = anyio.Event()
    assert fed.closed
    assert not reader.over


async def test_what_a_source_raises_comes_out() -> None:
    class Broken(Fed):
        async def __anext__(self) -> int:
            raise ZeroDivisionError

    streams, fed, reader = Streams(keep_alive_s=60, stall_s=60), Broken(), Reader()
    with pytest.raises(ZeroDivisionError):
        await Numbers(streams, fed)({"type": "http"}, reader.receive, reader.send)
    assert fed.closed


class Asked:
    """A request whose body was read."""

    def __init__(self, reader: Reader) -> None:
        self.receive = reader.receive


async def test_work_ends_when_its_client_leaves() -> None:
    reader = Reader()
    ended = anyio.Event()

    async def work() -> None:
        try:
            reader.left.set()
            await anyio.sleep_forever()
        finally:
            ended.set()

    with pytest.raises(ClientLeft):
        await unless_left(Asked(reader), work)  # type: ignore[arg-type]
    assert ended.is_set()


async def test_work_has_its_result_and_its_error() -> None:
    async def good() -> int:
        return 7

    async def bad() -> int:
        raise ZeroDivisionError

    assert await unless_left(Asked(Reader()), good) == 7  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        await unless_left(Asked(Reader()), bad)  # type: ignore[arg-type]


def test_an_event_is_one_line_of_data() -> None:
    text = encoded({"text": "a\nb\r", "n": float("nan")}, name="output", event_id="1-2").decode()
    assert text == 'id: 1-2\nevent: output\ndata: {"text":"a\\nb\\r","n":null}\n\n'


async def test_events_that_are_here_leave_with_one_write() -> None:
    reader = Reader()
    await Numbers(Streams(keep_alive_s=60, stall_s=60), Ready(40))({}, reader.receive, reader.send)
    assert b"".join(reader.sent) == b"".join(encoded(number) for number in range(40))
    # No more at once than keeps the event loop free for others.
    assert [chunk.count(b"data: ") for chunk in reader.sent] == [16, 16, 8]
    assert reader.over


async def test_a_large_chunk_leaves_by_itself() -> None:
    class Texts(Numbers):
        async def rendered(self, event: int) -> bytes:
            return await super().rendered(event) if event != 2 else b"x" * 20_000

    reader = Reader()
    await Texts(Streams(keep_alive_s=60, stall_s=60), Ready(4))({}, reader.receive, reader.send)
    assert [len(chunk) > 20_000 for chunk in reader.sent] == [True, False]


async def test_an_event_that_waits_for_another_leaves_at_once() -> None:
    reader, source = Reader(), Fed()
    async with anyio.create_task_group() as group:
        group.start_soon(Numbers(Streams(keep_alive_s=60, stall_s=60), source), {}, reader.receive, reader.send)
        for number in range(3):
            await source.give.send(number)
            await reader.until(number + 1)
        source.give.close()
    assert reader.sent == [encoded(number) for number in range(3)]
