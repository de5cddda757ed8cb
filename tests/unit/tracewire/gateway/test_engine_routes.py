"""Engines, standing interventions and lifecycle events over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from tests.support.bus_engine import tiny
from tests.support.gateways import Served
from tests.support.sse import events
from tracewire import Client, Steer
from tracewire_bus.bus import Bus

Engine = Callable[..., Any]


@pytest.fixture
async def http(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the gateway."""
    async with served.http() as http:
        yield http


async def test_engines_are_listed_and_drained(engine: Engine, http: httpx.AsyncClient, bus: Bus) -> None:
    assert (await http.get("/engines")).json() == {"data": []}
    async with engine(engine="one", schema="2.0", capacity=3), engine(engine="two", schema="2.0"):
        found = (await http.get("/engines", params={"model": "tiny"})).json()["data"]
        assert [(one["name"], one["capacity"], one["ready"]) for one in found] == [
            ("one", 3, True),
            ("two", 16, True),
        ]
        assert (await http.get("/engines", params={"model": "other"})).json() == {"data": []}
        assert (await http.get("/engines/one")).json() == found[0]
        answer = await http.post("/engines/one/drain", json={"timeout": 3, "by": "me"})
        assert (answer.status_code, answer.json()) == (202, {"engine": "one", "others": ["two"], "waiting": 0})
        unknown = await http.post("/engines/none/drain")
        assert (unknown.status_code, unknown.json()["type"]) == (404, "urn:tracewire:unknown_engine")
        assert (await http.post("/engines/one/drain", json={"timeout": -1})).json()["field"] == "timeout"


async def test_edits_are_installed_listed_and_removed(engine: Engine, http: httpx.AsyncClient, client: Client) -> None:
    # Its registry says that it follows any change.
    async with engine(edits=2**31):
        path = "/edits/tiny/calm"
        steer = {"do": "steer", "at": "residual(1)", "vector": [1.0] * 8, "scale": 2.0}
        body = {"interventions": [steer], "scope": "asked", "on_error": "fail"}
        made = await http.put(path, json=body, headers={"If-Match": '"0"'})
        assert made.status_code == 200, made.text
        found = made.json()
        assert (found["name"], found["scope"], found["on_error"]) == ("calm", "asked", "fail")
        assert found["interventions"][0]["vector"] == [1.0] * 8
        assert made.headers["ETag"] == f'"{found["version"]}"'
        (listed,) = await client.edits("tiny").list()
        assert (listed.name, type(listed.interventions[0])) == ("calm", Steer)
        assert (await http.get("/edits/tiny")).json() == {"data": [found]}
        assert (await http.get(path)).json() == found
        conflict = await http.put(path, json=body, headers={"If-Match": '"0"'})
        assert (conflict.status_code, conflict.json()["type"]) == (412, "urn:tracewire:edit_conflict")
        told = conflict.json()
        assert (told["field"], told["version"], conflict.headers["ETag"]) == ("If-Match", 1, made.headers["ETag"])
        block = {"source": "seen = model.residual(1).output.save()\n", "name": "watch"}
        again = await http.put(path, json={"block": block}, headers={"If-Match": made.headers["ETag"]})
        assert again.json()["block"] == "watch"
        wrong = await http.put(path, json={"interventions": [{**steer, "at": "nowhere"}]})
        assert (wrong.status_code, wrong.json()["field"]) == (422, "interventions[0].at")
        probe = json.dumps({"interventions": [{"do": "probe", "name": "\ud800", "at": "residual(1)"}]})
        wrong = await http.put(path, content=probe, headers={"Content-Type": "application/json"})
        assert (wrong.status_code, wrong.json()["field"]) == (422, "interventions[0].name")
        stale = await http.delete(path, headers={"If-Match": made.headers["ETag"]})
        assert (stale.status_code, stale.json()["field"]) == (412, "If-Match")
        assert (await http.delete(path, headers={"If-Match": again.headers["ETag"]})).status_code == 204
        assert (await http.get(path)).status_code == 404
        assert (await http.delete(path)).status_code == 404


async def test_lifecycle_events_go_on_after_the_last(engine: Engine, http: httpx.AsyncClient, client: Client) -> None:
    async with engine(tiny):
        await client.trace("tiny", "x", trace_id="first").result()
        seen: list[tuple[str, str]] = []
        last = None
        for _ in range(3):
            headers = {} if last is None else {"Last-Event-ID": last}
            async with http.stream("GET", "/events", params={"since": "start"}, headers=headers) as answer:
                async for event in events(answer):
                    seen.append((event.name, event.data["trace_id"]))
                    last = event.id
                    break
        assert seen == [("queued", "first"), ("accepted", "first"), ("final", "first")]
        answer = await http.get("/events", headers={"Last-Event-ID": "odd"})
        assert (answer.status_code, answer.json()["field"]) == (422, "Last-Event-ID")
