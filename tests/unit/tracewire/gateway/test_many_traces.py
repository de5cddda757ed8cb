"""Many traces over one WebSocket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.support.bus_engine import steered_once, tiny
from tests.support.gateways import Served
from tests.support.until import until
from tracewire import Client
from tracewire.gateway import many_traces
from tracewire.gateway.keys import entry_of

Engine = Callable[..., Any]


class Page:
    """A client of the socket, as the dashboard is one."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._waiting: list[dict[str, Any]] = []

    async def order(self, do: str, **fields: Any) -> None:
        """Send an order."""
        await self.connection.send(json.dumps({"do": do, **fields}))

    async def next(self) -> dict[str, Any]:
        """The next message, whichever frame it is in."""
        while not self._waiting:
            self._waiting = json.loads(await self.connection.recv())
        return self._waiting.pop(0)

    async def over(self, stream_id: Any) -> list[dict[str, Any]]:
        """The messages up to the end of this stream, and with it."""
        found = [await self.next()]
        while found[-1].get("id") != stream_id or "over" not in found[-1]:
            found.append(await self.next())
        return found


@asynccontextmanager
async def opened(served: Served, **options: Any) -> AsyncIterator[Page]:
    """A socket of a gateway."""
    async with connect(served.url.replace("http", "ws") + "/ws", proxy=None, **options) as connection:
        yield Page(connection)


def of(found: list[dict[str, Any]], stream_id: Any) -> list[Any]:
    """The types of a stream's events."""
    return [one["event"]["type"] for one in found if one["id"] == stream_id and "event" in one]


async def test_several_traces_come_over_one_socket(engine: Engine, served: Served, client: Client) -> None:
    async with engine(tiny), opened(served) as page:
        traces = [await client.trace("tiny", str(number), detach=True).start() for number in range(3)]
        del traces
        listed = await client.traces.list(limit=3)
        for number, one in enumerate(listed):
            await page.order("follow", id=number, trace=one.trace_id)
        found = []
        while sum("over" in one for one in found) < 3:
            found.append(await page.next())
    for number in range(3):
        types = of(found, number)
        assert (types[0], types[-1]) == ("accepted", "final")
        assert "output" in types
        first, *_, last = (one for one in found if one["id"] == number)
        assert (first, last) == ({"id": number, "open": True}, {"id": number, "over": True, "error": None})


async def test_a_stream_goes_on_at_its_position(engine: Engine, served: Served, client: Client) -> None:
    async with engine(tiny):
        trace_id = (await client.trace("tiny", "x").result()).trace_id
    async with opened(served) as page:
        await page.order("follow", id="all", trace=trace_id)
        whole = [one for one in await page.over("all") if "event" in one]
        for at, message in enumerate(whole):
            await page.order("follow", id=at, trace=trace_id, since=message["position"])
            rest = [one for one in await page.over(at) if "event" in one]
            assert [one["position"] for one in rest] == [one["position"] for one in whole[at + 1 :]]


async def test_what_is_stopped_sends_nothing_more(engine: Engine, served: Served, client: Client) -> None:
    async with engine(steered_once), opened(served) as page:
        async with client.trace("tiny", "x", live={"alpha": 0.0}, detach=True) as trace:
            await trace.accepted()
        await page.order("follow", id=1, trace=trace.id)
        while (message := await page.next()).get("event", {}).get("type") != "output":
            pass
        await page.order("stop", id=1)
        assert (await page.over(1))[-1]["error"] is None
        # The id is free again.
        await page.order("follow", id=1, trace=trace.id, since=message["position"])
        assert await page.next() == {"id": 1, "open": True}
        await client.steer(trace.id, alpha=1.0)
        assert of(await page.over(1), 1) == ["steered", "output", "final"]


async def test_the_lifecycle_of_all_traces_is_watched(engine: Engine, served: Served, client: Client) -> None:
    async with engine(tiny), opened(served) as page:
        await page.order("watch", id="w")
        assert await page.next() == {"id": "w", "open": True}
        await client.trace("tiny", "x").result()
        events = [await page.next() for _ in range(3)]
        assert [one["event"]["type"] for one in events] == ["queued", "accepted", "final"]
        await page.order("watch", id="again", since=events[0]["position"])
        assert await page.next() == {"id": "again", "open": True}
        assert (await page.next())["event"]["type"] == "accepted"
        await page.order("watch", id="odd", since="long ago")
        assert (await page.over("odd"))[-1]["error"]["field"] == "since"


@pytest.mark.parametrize(
    ("order", "status"),
    [
        ('{"do": "follow", "id": 1, "trace": "nowhere"}', 404),
        ('{"do": "follow", "id": 1, "trace": "x", "since": "odd"}', 422),
        ('{"do": "follow", "id": 1}', 422),
        ('{"do": "bend", "id": 1}', 422),
        ("[" * 100_000, 422),
    ],
)
async def test_an_order_that_is_wrong_ends_its_stream_only(served: Served, order: str, status: int) -> None:
    async with opened(served) as page:
        await page.connection.send(order)
        message = await page.next()
        assert (message["over"], message["error"]["status"]) == (True, status)
        await page.order("watch", id=2)
        assert await page.next() == {"id": 2, "open": True}
        await page.order("watch", id=2)
        assert (await page.next())["error"]["status"] == 409


async def test_streams_are_limited(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_traces, "MOST_STREAMS", 2)
    async with opened(served) as page:
        for number in range(3):
            await page.order("watch", id=number)
        found = [await page.next() for _ in range(3)]
        assert {one["id"]: one.get("error", {}).get("status") for one in found} == {0: None, 1: None, 2: 429}


async def test_a_client_that_leaves_leaves_nothing_behind(engine: Engine, served: Served, client: Client) -> None:
    async with engine(steered_once):
        async with client.trace("tiny", "x", live={"alpha": 0.0}, detach=True) as trace:
            await trace.accepted()
        async with opened(served) as page:
            await page.order("follow", id=1, trace=trace.id)
            await page.next()
        await until(lambda: not served.gateway.running)
        assert not served.gateway.endless
        await client.cancel(trace.id)


async def test_a_gateway_that_stops_lets_its_clients_go_at_once(gateway: Callable[..., Any]) -> None:
    # The drain would take longer than any test.
    async with gateway(drain_s=3600.0) as served, opened(served) as page:
        await page.order("watch", id=1)
        await page.next()
        served.stop()
        with pytest.raises(ConnectionClosed):
            await page.next()
        assert page.connection.close_code == 1001


async def test_keys_rights_and_tenants_count(
    engine: Engine, gateway: Callable[..., Any], client: Client, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        entry_of("reader", "reader", frozenset({"read"}), "")
        + entry_of("writer", "writer", frozenset({"submit"}), "")
        + entry_of("red", "red", frozenset({"read"}), "red")
    )
    async with engine(tiny), gateway(keys=file) as served:
        for key, status in (("", 401), ("wrong", 401), ("writer", 403)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            with pytest.raises(InvalidStatus) as refused:
                async with opened(served, additional_headers=headers):
                    pass
            answer = refused.value.response
            assert (answer.status_code, json.loads(answer.body)["status"]) == (status, status)
            assert ("WWW-Authenticate" in answer.headers) == (status == 401)
        async with opened(served, additional_headers={"Authorization": "Bearer red"}) as page:
            await page.order("watch", id="w")
            await page.next()
            other = (await client.trace("tiny", "x").result()).trace_id
            await client.trace("tiny", "x", trace_id="red:mine").result()
            assert {(await page.next())["event"]["trace_id"] for _ in range(3)} == {"red:mine"}
            await page.order("follow", id=1, trace=other)
            assert (await page.next())["error"]["status"] == 404


async def test_streams_are_opened_within_the_limits_of_their_key(gateway: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    limits = "requests_per_minute = 2\nbody_bytes = 200\n"
    file.write_text(entry_of("alice", "alice", frozenset({"read"}), "") + limits)
    async with (
        gateway(keys=file) as served,
        opened(served, additional_headers={"Authorization": "Bearer alice"}) as page,
    ):
        await page.order("follow", id=1, trace="x" * 200)
        assert (await page.next())["error"]["status"] == 413
        await page.order("watch", id=2)
        assert (await page.next())["open"]
        await page.order("watch", id=3)
        assert (await page.next())["error"]["status"] == 429
        # What is open can be closed.
        await page.order("stop", id=2)
        assert (await page.next()) == {"id": 2, "over": True, "error": None}


async def test_a_plain_request_is_told_what_is_expected(served: Served) -> None:
    async with served.http() as http:
        answer: httpx.Response = await http.get("/ws")
        assert (answer.status_code, answer.headers["Upgrade"]) == (426, "websocket")
        document = (await http.get("/openapi.json")).json()
    assert '"do": "follow"' in document["info"]["description"]
