"""A trace over a WebSocket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Response

from tests.support.bus_engine import steered_once
from tests.support.gateways import Served
from tests.support.until import until
from tracewire import Client, RetryableError
from tracewire.gateway.keys import entry_of
from tracewire_bus.domain.limits import MAX_CONTAINERS

Engine = Callable[..., Any]


def socket(served: Served, trace_id: str, key: str = "", query: str = "") -> Any:
    """A WebSocket of a trace."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    address = served.url.replace("http", "ws")
    return connect(f"{address}/traces/{trace_id}/ws{query}", additional_headers=headers, proxy=None)


async def order(connection: ClientConnection, **fields: Any) -> None:
    await connection.send(json.dumps(fields))


async def rest(connection: ClientConnection) -> list[dict[str, Any]]:
    """All that still comes, up to the socket's end."""
    return [json.loads(text) async for text in received(connection)]


async def received(connection: ClientConnection) -> AsyncIterator[str | bytes]:
    """The messages up to the socket's end, whatever its code."""
    try:
        async for text in connection:
            yield text
    except ConnectionClosed:
        return


async def test_events_come_down_and_steering_goes_up(engine: Engine, served: Served, client: Client) -> None:
    async with engine(steered_once):
        async with client.trace("tiny", "x", live={"alpha": 0.0}, detach=True) as trace:
            await trace.accepted()
        async with socket(served, trace.id) as connection:
            assert [json.loads(await connection.recv())["type"] for _ in range(2)] == ["accepted", "output"]
            for wrong in (
                {"do": "bend"},
                {"do": "steer", "values": {"beta": 1}},
                {"values": {}},
                {"do": "steer", "x": 1},
            ):
                await order(connection, id="wrong", **wrong)
                reply = json.loads(await connection.recv())
                assert (reply["type"], reply["error"]["status"]) == ("reply", 422)
            await order(connection, do="steer", values={"alpha": 2}, if_version=7, id=1)
            reply = json.loads(await connection.recv())
            assert (reply["id"], reply["error"]["status"], reply["error"]["version"]) == (1, 409, 0)
            await connection.send("[" * 100_000)
            assert "error" in json.loads(await connection.recv())
            await connection.send('{"do": "steer", "id": 3, "values": {"alpha": [' + "[]," * MAX_CONTAINERS + "[]]}}")
            assert json.loads(await connection.recv())["error"]["type"] == "urn:tracewire:too_many_values"
            await order(connection, do="steer", values={"alpha": 2}, if_version=0, id=2)
            found = await rest(connection)
            assert connection.close_code == 1000
        replies = [one for one in found if one["type"] == "reply"]
        assert replies == [{"type": "reply", "id": 2, "version": 1}]
        assert [one["type"] for one in found if one["type"] != "reply"] == ["steered", "output", "final"]
        async with socket(served, trace.id, query="?since=1-1&content=text") as connection:
            assert [one["type"] for one in await rest(connection)] == ["steered", "output", "final"]


async def test_a_trace_is_cancelled(engine: Engine, served: Served, client: Client) -> None:
    async with engine(steered_once):
        async with client.trace("tiny", "x", live={"alpha": 0.0}, detach=True) as trace:
            await trace.accepted()
        async with socket(served, trace.id) as connection:
            await order(connection, do="pause", by="me")
            await order(connection, do="resume")
            await order(connection, do="cancel", reason="enough")
            found = await rest(connection)
        assert found[-1]["status"] == "cancelled"
        assert [list(one)[-1] for one in found if one["type"] == "reply"] == ["paused", "resumed", "cancelled"]
        assert [one["by"] for one in found if one["type"] in ("paused", "resumed")] == ["anonymous/me", "anonymous"]


async def test_a_client_that_leaves_ends_nothing_but_the_reading(
    engine: Engine, served: Served, client: Client
) -> None:
    async with engine(steered_once):
        async with client.trace("tiny", "x", live={"alpha": 0.0}, detach=True) as trace:
            await trace.accepted()
        async with socket(served, trace.id) as connection:
            await connection.recv()
        await until(lambda: not served.gateway.running)
        await client.steer(trace.id, alpha=1.0)
        assert (await client.subscribe(trace.id).result()).text == "one two"


async def test_a_gateway_that_stops_goes_away(engine: Engine, gateway: Callable[..., Any], client: Client) -> None:
    async with engine(steered_once):
        async with client.trace("tiny", "x", live={"alpha": 0.0}, detach=True) as trace:
            await trace.accepted()
        async with gateway() as served, socket(served, trace.id) as connection:
            await connection.recv()
            served.stop()
            await rest(connection)
            assert connection.close_code == 1001
        await client.cancel(trace.id)


@pytest.mark.parametrize("query", ["", "?since=odd"])
async def test_what_cannot_be_followed_is_refused(served: Served, query: str) -> None:
    with pytest.raises(InvalidStatus):
        async with socket(served, "nowhere", query=query):
            pass


async def refusal(served: Served, *given: str) -> Response:
    """The answer to a WebSocket that is refused."""
    with pytest.raises(InvalidStatus) as refused:
        async with socket(served, *given):
            pass
    return refused.value.response


@pytest.mark.parametrize(
    ("query", "status", "field"),
    [("", 404, None), ("?since=odd", 422, "since"), ("?content=odd", 422, "content"), ("?arrays=odd", 422, "arrays")],
)
async def test_a_refusal_has_the_status_of_its_problem(
    served: Served, query: str, status: int, field: str | None
) -> None:
    answer = await refusal(served, "nowhere", "", query)
    details = json.loads(answer.body)
    assert (answer.status_code, details["status"], details.get("field")) == (status, status, field)
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert details["detail"]


async def test_a_bus_that_is_away_is_a_refusal_that_passes(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    class Away:
        async def check(self) -> None:
            raise RetryableError("no answer")

        async def aclose(self) -> None: ...

    monkeypatch.setattr(served.gateway.client, "subscribe", lambda *_, **__: Away())
    answer = await refusal(served, "mine")
    assert (answer.status_code, int(answer.headers["Retry-After"])) == (503, 1)


async def test_keys_and_rights_count(
    engine: Engine, gateway: Callable[..., Any], client: Client, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        entry_of("reader", "r", frozenset({"read"}), "") + entry_of("red", "red", frozenset({"read"}), "red")
    )
    async with engine(steered_once), gateway(keys=file) as served:
        async with client.trace("tiny", "x", live={"alpha": 0.0}, detach=True) as trace:
            await trace.accepted()
        for key, status in (("", 401), ("wrong", 401), ("red", 404)):
            assert (await refusal(served, trace.id, key)).status_code == status
        async with socket(served, trace.id, "reader") as connection:
            await order(connection, do="cancel", id=1)
            while (reply := json.loads(await connection.recv()))["type"] != "reply":
                pass
            assert reply["error"]["status"] == 403
        await client.cancel(trace.id)


async def test_orders_count_against_the_limits_of_their_key(
    engine: Engine, gateway: Callable[..., Any], client: Client, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    limits = "requests_per_minute = 3\nbody_bytes = 200\n"
    file.write_text(entry_of("alice", "alice", frozenset({"read", "steer"}), "") + limits)
    async with engine(steered_once), gateway(keys=file) as served:
        async with client.trace("tiny", "x", live={"alpha": 0.0}, detach=True) as trace:
            # No event comes after that, but the replies.
            assert (await anext(trace)).text == "one"
        async with socket(served, trace.id, "alice", "?since=now") as connection:

            async def reply(**fields: Any) -> Any:
                await order(connection, **fields)
                return json.loads(await connection.recv())

            refused = await reply(do="cancel", id=1, reason="x" * 200)
            assert (refused["id"], refused["error"]["status"]) == (1, 413)
            # The socket itself was the first request.
            for number in (2, 3):
                assert (await reply(do="steer", values={"beta": 1}, id=number))["error"]["status"] == 422
            refused = await reply(do="cancel", id=4)
            assert (refused["id"], refused["error"]["status"]) == (4, 429)
            assert 0 < refused["error"]["retry_after"] <= 60
        # Changes over sockets are changes like others.
        assert served.gateway.metrics.steers.labels("refused")._value.get() == 2
        await client.cancel(trace.id)
