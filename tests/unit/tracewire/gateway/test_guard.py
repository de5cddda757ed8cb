"""What stands before every route: keys, rights, tenants, limits and the size of bodies."""

# ruff: noqa: ASYNC240

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from fastapi.routing import APIRoute
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.support.bus_engine import Stage, tiny
from tests.support.gateways import Served
from tests.support.until import until
from tracewire import Client
from tracewire.gateway.guard import OPEN
from tracewire.gateway.keys import RIGHTS, entry_of

Engine = Callable[..., Any]
ROOT, RED, BLUE, READER = "root-key", "red-key", "blue-key", "reader-key"
USUAL = frozenset({"read", "steer", "submit"})


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file of four keys: of an operator, of two tenants, and of one that only reads."""
    file = tmp_path / "keys.toml"
    file.write_text(
        entry_of(ROOT, "root", RIGHTS, "")
        + entry_of(RED, "alice", USUAL, "red")
        + "concurrency = 1\n"
        + entry_of(BLUE, "bob", USUAL, "blue")
        + "body_bytes = 1000\n"
        + entry_of(READER, "reader", frozenset({"read"}), "")
    )
    return file


@pytest.fixture
async def guarded(gateway: Callable[..., Any], keys: Path) -> AsyncIterator[Served]:
    """A gateway with these keys."""
    async with gateway(keys=keys) as served:
        yield served


def routes(served: Served) -> list[tuple[str, str, Any]]:
    """All routes with a method and a path of each."""
    found = []

    def walk(router: Any) -> None:
        for route in router.routes:
            if isinstance(route, APIRoute):
                path = route.path.replace("{model:path}", "m")
                for name in ("trace_id", "digest", "model", "name"):
                    path = path.replace(f"{{{name}}}", "0" * 32)
                found.extend((method, path, route) for method in route.methods)
            elif hasattr(route, "original_router"):
                walk(route.original_router)

    walk(served.server.app.router)
    return found


async def test_every_route_asks_for_a_key_and_a_right(guarded: Served) -> None:
    everything = routes(guarded)
    assert {path for _, path, _ in everything} > {
        "/v1/models",
        "/traces",
        "/metrics",
        "/engines",
        "/healthz",
        "/events",
    }
    async with guarded.http() as http:
        for method, path, route in everything:
            answer = await http.request(method, path)
            if path in OPEN:
                assert answer.status_code == 200
                continue
            assert answer.status_code == 401, path
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            asked = [one.dependency.right for one in route.dependencies]
            assert len(asked) == 1, path
            assert set(asked) <= RIGHTS
        # One without a key learns of no route.
        assert (await http.get("/nowhere")).status_code == 401


async def test_a_key_that_only_reads_changes_nothing(engine: Engine, guarded: Served) -> None:
    async with engine(tiny) as scripted, guarded.http(READER) as http, guarded.openai(READER) as api:
        for method, path, route in routes(guarded):
            right = [one.dependency.right for one in route.dependencies]
            if right and right != ["read"]:
                answer = await http.request(method, path, json={})
                assert answer.status_code == 403, path
        assert (await api.models.list()).data[0].id == "tiny"
        with pytest.raises(openai.PermissionDeniedError, match="'submit'"):
            await api.completions.create(model="tiny", prompt="x")
        assert scripted.taken == []


async def test_an_id_of_ones_own_takes_the_right_to_read(
    engine: Engine, gateway: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry_of("writer", "writer", frozenset({"submit"}), "") + entry_of(ROOT, "root", RIGHTS, ""))
    named = {"model": "tiny", "prompt": "x", "trace_id": "secret"}
    async with engine(tiny), gateway(keys=file) as served, served.http("writer") as http, served.http(ROOT) as root:
        assert (await root.post("/traces", json=named)).status_code == 202
        # Submitted again, this would be the trace that has the id.
        assert (await http.post("/traces", json=named)).status_code == 403
        body = {"model": "tiny", "prompt": "x", "tracewire": {"trace_id": "secret"}}
        assert (await http.post("/v1/completions", json=body)).status_code == 403
        assert (await http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})).status_code == 200


async def test_code_and_precedence_take_rights_of_their_own(engine: Engine, guarded: Served) -> None:
    block = {"block": {"source": "x = 1\n"}}
    async with engine(tiny), guarded.openai(RED) as red, guarded.openai(ROOT) as root:
        with pytest.raises(openai.PermissionDeniedError, match="'code'"):
            await red.completions.create(model="tiny", prompt="x", extra_body={"tracewire": block})
        with pytest.raises(openai.PermissionDeniedError, match="'operate'"):
            await red.completions.create(model="tiny", prompt="x", extra_body={"priority": -1})
        await red.completions.create(model="tiny", prompt="x", extra_body={"priority": 1})
        await root.completions.create(model="tiny", prompt="x", extra_body={"tracewire": block, "priority": -1})


async def waiting(stage: Stage) -> None:
    """Runs until it is cancelled."""
    await stage.accept()
    await anyio.sleep_forever()


async def test_a_tenant_does_not_see_anothers_traces(engine: Engine, guarded: Served, client: Client) -> None:
    async with engine(waiting) as scripted, guarded.http(RED) as red, guarded.http(BLUE) as blue:
        body = {"model": "tiny", "prompt": "x", "trace_id": "mine", "live": {"alpha": 0}}
        assert (await red.post("/traces", json=body)).json()["id"] == "red:mine"
        await until(lambda: scripted.taken)
        assert scripted.taken[0].client == "alice"
        path = "/traces/red:mine"
        for right in ("", "/state", "/live", "/events", "/values/" + "0" * 32):
            assert (await blue.get(path + right)).status_code == 404
        for order in ("pause", "resume", "cancel"):
            assert (await blue.post(f"{path}/{order}")).status_code == 404
        steered = {"values": {"alpha": 1}, "by": "slider"}
        assert (await blue.post(f"{path}/steer", json=steered)).status_code == 404
        assert (await blue.post("/traces", json={**body, "trace_id": "red:other"})).status_code == 422
        assert (await blue.get("/traces")).json() == {"data": []}
        assert [trace["id"] for trace in (await red.get("/traces")).json()["data"]] == ["red:mine"]
        assert (await red.post(f"{path}/steer", json=steered)).status_code == 200
        assert (await red.post(f"{path}/cancel")).json() == {"cancelled": True}
        state = await client.get_state("red:mine")
        assert state.error is None or state.error.by == "alice"


async def test_a_key_has_a_limit_on_its_requests(engine: Engine, guarded: Served) -> None:
    async with engine(waiting), guarded.openai(RED) as red, guarded.http(RED) as http, guarded.http(BLUE) as blue:
        stream = await red.completions.create(model="tiny", prompt="x", stream=True)
        answer = await http.get("/traces")
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
        shaped = await http.get("/v1/models")
        assert (shaped.status_code, shaped.json()["error"]["type"]) == (429, "rate_limit_error")
        assert (await blue.get("/traces")).status_code == 200
        await stream.close()

        async def admitted() -> bool:
            return (await http.get("/traces")).status_code == 200

        await until(admitted)


async def test_a_body_beyond_the_limit_is_refused(engine: Engine, guarded: Served) -> None:
    async def chunks(count: int) -> AsyncIterator[bytes]:
        yield b'{"model": "tiny", "prompt": "'
        for _ in range(count):
            yield b"x" * 100
        yield b'"}'

    async with engine(tiny), guarded.http(BLUE) as blue, guarded.http(ROOT) as root:
        headers = {"Content-Type": "application/json"}
        assert (await blue.post("/v1/completions", content=chunks(3), headers=headers)).status_code == 200
        # Neither the announced length nor the size of one without a length.
        for content in (b"x" * 1001, chunks(100)):
            answer = await blue.post("/v1/completions", content=content, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert (await root.post("/v1/completions", content=chunks(100), headers=headers)).status_code == 200


async def test_a_key_that_was_removed_is_refused(engine: Engine, gateway: Callable[..., Any], keys: Path) -> None:
    async with gateway(keys=keys, keys_age_s=0.0) as served, served.http(READER) as http:
        assert (await http.get("/engines")).status_code == 200
        keys.write_text(entry_of(ROOT, "root", RIGHTS, ""))
        assert (await http.get("/engines")).status_code == 401


async def test_browsers_may_call_from_the_origins_that_are_configured(gateway: Callable[..., Any], keys: Path) -> None:
    origin = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    # As OpenAI's client in a browser asks.
    wanted = {"Access-Control-Request-Headers": "authorization,content-type,x-stainless-arch,x-stainless-runtime"}
    async with gateway(keys=keys) as served, served.http() as http:
        assert (await http.options("/traces", headers=origin)).status_code == 401
    async with gateway(keys=keys, cors=("https://app.example",)) as served, served.http(READER) as http:
        answer = await http.options("/traces", headers=origin)
        assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
        assert (await http.options("/v1/chat/completions", headers=origin | wanted)).status_code == 200
        read = (await http.get("/traces", headers=origin)).headers["Access-Control-Expose-Headers"]
        assert {"Tracewire-Trace-Id", "Tracewire-Dtype", "ETag", "Retry-After"} <= set(read.split(", "))
        assert (
            "Access-Control-Allow-Origin"
            not in (await http.get("/traces", headers={"Origin": "https://evil.example"})).headers
        )


async def test_a_foreign_page_changes_nothing_without_a_key(gateway: Callable[..., Any]) -> None:
    evil, good = {"Origin": "https://evil.example"}, {"Origin": "https://app.example"}
    async with gateway(cors=("https://app.example",)) as served, served.http() as http:
        own = {"Origin": f"http://{http.base_url.netloc.decode()}"}
        for headers in (evil, good, own, {}):
            answer = await http.post("/traces/t/pause", headers=headers)
            assert (answer.status_code == 403) == (headers is evil), headers
            if headers is evil:
                assert answer.json()["detail"] == "pages of https://evil.example may not do this here: see --cors"
            assert (await http.get("/traces", headers=headers)).status_code == 200


async def test_a_socket_is_refused_with_the_status_and_the_time_to_come_back(
    gateway: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry_of(ROOT, "root", RIGHTS, "") + "requests_per_minute = 1\n")

    async def refused(served: Served) -> Any:
        headers = {"Authorization": f"Bearer {ROOT}"}
        with pytest.raises(InvalidStatus) as found:
            await connect(served.url.replace("http", "ws") + "/ws", additional_headers=headers, proxy=None)
        return found.value.response

    async with (
        gateway(keys=file, drain_s=60.0) as served,
        served.http(ROOT) as http,
        http.stream("GET", "/events") as running,
    ):
        assert running.status_code == 200
        answer = await refused(served)
        assert (answer.status_code, json.loads(answer.body)["type"]) == (429, "urn:tracewire:rate_limited")
        assert 1 <= int(answer.headers["Retry-After"]) <= 60
        served.stop()
        await until(lambda: served.gateway.closing)
        answer = await refused(served)
        assert (answer.status_code, json.loads(answer.body)["type"]) == (503, "urn:tracewire:gateway_closing")
        assert "Retry-After" in answer.headers
    # uvicorn takes what ends without a handshake for a defect.
    assert [one for one in caplog.records if one.name == "uvicorn.error" and one.levelname == "ERROR"] == []
