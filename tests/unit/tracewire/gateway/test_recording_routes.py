"""Recordings over HTTP: the events as the trace's own stream has them, and what is no recording."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from tests.support.bus_engine import tiny
from tests.support.gateways import Served
from tests.support.sse import events
from tests.support.until import until
from tracewire import Client
from tracewire.gateway import recording_routes
from tracewire.gateway.keys import entry_of
from tracewire.traces.recorder.container import Content, write_content
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.messages import Accepted

Engine = Callable[..., Any]


async def recorded(client: Client, engine: Engine, folder: Path) -> bytes:
    """The file of a trace."""
    async with engine(tiny):
        trace = client.trace("tiny", "x", trace_id="mine")
        await trace.result()
        (await trace.record()).save(folder / "mine.twrec")
    return (folder / "mine.twrec").read_bytes()


async def test_a_recording_has_the_events_of_its_trace(
    engine: Engine, served: Served, client: Client, tmp_path: Path
) -> None:
    file = await recorded(client, engine, tmp_path)
    async with served.http() as http:
        answer = await http.post("/recordings", content=file)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        async with http.stream("GET", "/traces/mine/events", params={"arrays": "small"}) as stream:
            expected = [event.data async for event in events(stream)]
    assert (found["trace_id"], found["model"], found["complete"]) == ("mine", "tiny", True)
    assert [one["type"] for one in found["events"]] == [one["type"] for one in expected]
    assert found["events"][-1]["status"] == "finished"
    assert [one.get("text") for one in found["events"]] == [one.get("text") for one in expected]


async def test_what_is_no_recording_is_refused(
    engine: Engine, served: Served, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = await recorded(client, engine, tmp_path)
    cases = [
        (b"", "the file is none"),
        (b"GIF89a", "the file is none"),
        (file[:-1], "it is damaged"),
        (file + b"x", "it is"),
    ]
    async with served.http() as http:
        for body, says in cases:
            answer = await http.post("/recordings", content=body)
            assert (answer.status_code, answer.json()["type"]) == (422, "urn:tracewire:invalid_recording")
            assert says in answer.json()["detail"]
        monkeypatch.setattr(recording_routes, "_MOST", 100)
        answer = await http.post("/recordings", content=file)
        assert (answer.status_code, "more than 100 bytes" in answer.json()["detail"]) == (422, True)


async def test_a_recording_is_read_with_a_right_and_within_the_size(
    gateway: Callable[..., Any], tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(entry_of("none", "none", frozenset({"steer"}), ""))
    async with gateway(keys=keys) as served, served.http("none") as http:
        assert (await http.post("/recordings", content=b"x")).status_code == 403
    async with gateway(body_bytes=10) as served, served.http() as http:
        assert (await http.post("/recordings", content=b"x" * 11)).status_code == 413


def expanding(folder: Path, count: int) -> bytes:
    """A small file of an event with so many empty dicts."""
    event = Accepted(attempt=1, seq=0, engine="e", model="m", queued_at=0.0, sampling=[{"q": 1}])
    one, many = msgspec.msgpack.encode([{"q": 1}]), b"\xdd" + count.to_bytes(4, "big") + b"\x80" * count
    content = Content(trace="t", model="m", made_at=0.0, events=[("event", "2.6", encode(event).replace(one, many))])
    write_content(folder / "expanding.twrec", content)
    return (folder / "expanding.twrec").read_bytes()


async def test_a_recording_that_expands_is_refused_undecoded(served: Served, tmp_path: Path) -> None:
    async with served.http() as http:
        answer = await http.post("/recordings", content=expanding(tmp_path, 1000))
        assert (answer.status_code, len(answer.json()["events"][0]["sampling"])) == (200, 1000)
        file = expanding(tmp_path, recording_routes._VALUES)
        assert len(file) < 10_000
        tracemalloc.start()
        try:
            answer = await http.post("/recordings", content=file)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert (answer.status_code, "more than 2000000 values" in answer.json()["detail"]) == (422, True)
        # A dict for each of the values would take 128 MB.
        assert peak < 50_000_000


async def test_one_recording_is_read_after_the_other(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = anyio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    answered = recording_routes._answer
    running: list[int] = []

    def slow(body: bytes) -> bytes:
        running.append(len(running))
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(60)
        return answered(body)

    monkeypatch.setattr(recording_routes, "_answer", slow)
    file = expanding(tmp_path, 1)
    async with served.http() as http, anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(partial(http.post, "/recordings", content=file))
        await begun.wait()
        await until(lambda: served.gateway.recordings.statistics().tasks_waiting == 2)
        assert running == [0]
        go_on.set()
    assert running == [0, 1, 2]
