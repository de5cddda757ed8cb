"""Recordings over HTTP: the events as the trace's own stream has them, and what is no recording."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.bus_engine import tiny
from tests.support.gateways import Served
from tests.support.sse import events
from tracewire import Client
from tracewire.gateway import recording_routes
from tracewire.gateway.keys import entry_of

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
