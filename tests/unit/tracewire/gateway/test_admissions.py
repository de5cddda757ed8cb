"""Requests end with the key that let them in."""

# ruff: noqa: ASYNC240

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.support.bus_engine import Stage
from tests.support.gateways import Served
from tests.support.sse import events
from tests.support.until import until
from tracewire import Client
from tracewire.gateway.admissions import Admissions
from tracewire.gateway.keys import RIGHTS, Keys, entry_of

Engine = Callable[..., Any]
ROOT, ALICE = "root-key", "alice-key"
USUAL = frozenset({"read", "steer", "submit"})
KEPT = entry_of(ROOT, "root", RIGHTS, "")


async def running(stage: Stage) -> None:
    """A token, and no more until it is cancelled."""
    await stage.accept()
    await stage.output("one")
    await anyio.sleep_forever()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file of two keys."""
    file = tmp_path / "keys.toml"
    file.write_text(KEPT + entry_of(ALICE, "alice", USUAL, ""))
    return file


@pytest.fixture
async def guarded(gateway: Callable[..., Any], keys: Path) -> AsyncIterator[Served]:
    """A gateway with these keys, which looks at them often."""
    async with gateway(keys=keys, keys_age_s=0.0) as served:
        yield served


async def test_a_stream_of_a_withdrawn_key_ends_and_its_trace_is_cancelled(
    engine: Engine, guarded: Served, keys: Path, client: Client
) -> None:
    async with engine(running), guarded.openai(ALICE) as api, guarded.openai(ROOT) as root:
        stream = await api.completions.create(model="tiny", prompt="x", stream=True)
        kept = await root.completions.create(model="tiny", prompt="x", stream=True)
        trace_id = stream.response.headers["Tracewire-Trace-Id"]
        text = ""
        with pytest.raises(openai.APIError, match="was withdrawn"):
            async for chunk in stream:
                text += chunk.choices[0].text
                if text:
                    keys.write_text(KEPT)
        assert text == "one"
        assert await client.subscribe(trace_id).until_done() == "cancelled"
        # Another key's goes on.
        assert len(guarded.gateway.streams) == 1
        await kept.close()


async def test_a_follower_is_told_and_an_answer_that_has_not_begun_is_refused(
    engine: Engine, guarded: Served, keys: Path
) -> None:
    async with engine(running) as scripted, guarded.http(ALICE) as http, anyio.create_task_group() as group:
        trace_id = (await http.post("/traces", json={"model": "tiny", "prompt": "x"})).json()["id"]
        whole = []

        async def ask() -> None:
            whole.append(await http.post("/v1/completions", json={"model": "tiny", "prompt": "x"}))

        group.start_soon(ask)
        await until(lambda: len(scripted.stages) == 2)
        async with http.stream("GET", f"/traces/{trace_id}/events") as answer:
            found = []
            async for event in events(answer):
                found.append(event.name)
                if event.name == "output":
                    # A right that is taken away is as good as the key.
                    keys.write_text(KEPT + entry_of(ALICE, "alice", USUAL - {"steer"}, ""))
            assert found == ["accepted", "output", "interrupted"]
            assert event.data["type"] == "urn:tracewire:invalid_api_key"
        await until(lambda: whole)
    assert (whole[0].status_code, whole[0].json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("path", ["/traces/{}/ws", "/ws"])
async def test_a_socket_of_a_withdrawn_key_takes_no_more_orders(
    engine: Engine, guarded: Served, keys: Path, path: str
) -> None:
    async with engine(running), guarded.http(ALICE) as http:
        body = {"model": "tiny", "prompt": "x", "live": {"alpha": 0.0}}
        trace_id = (await http.post("/traces", json=body)).json()["id"]
        address = guarded.url.replace("http", "ws") + path.format(trace_id)
        headers = {"Authorization": f"Bearer {ALICE}"}
        async with connect(address, additional_headers=headers, proxy=None) as socket:
            order = {"do": "steer", "id": 1, "values": {"alpha": 1.0}} if path != "/ws" else {"do": "watch", "id": 1}
            await socket.send(json.dumps(order))
            await socket.recv()
            keys.write_text(KEPT)
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    await socket.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1008


async def test_without_a_file_nothing_is_looked_at() -> None:
    admissions = Admissions(Keys(None), age_s=0.0)
    with admissions.request(Keys(None).caller(None)):
        assert admissions._timer is None


async def test_the_timer_ends_with_the_last_request(keys: Path) -> None:
    known = Keys(keys)
    admissions = Admissions(known, age_s=60.0)
    with admissions.request(known.caller(f"Bearer {ALICE}")) as outer:
        with admissions.request(known.caller(f"Bearer {ROOT}")):
            assert admissions._timer is not None
        assert admissions._timer is not None
        assert not outer.cancel_called
    assert admissions._timer is None
