"""The library over HTTP: the same entries as through the SDK, and whose key may read and change which."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.bus_engine import tiny
from tests.support.gateways import Served
from tracewire import Client
from tracewire.gateway.keys import entry_of

Engine = Callable[..., Any]
VECTOR = [1.0, 0.0, 2.0, 0.5, 0.0, 0.0, 0.0, -1.0]
ENCODED = {"dtype": "float32", "shape": [8], "base64": base64.b64encode(np.array(VECTOR, "<f4").tobytes()).decode()}


@pytest.fixture
async def http(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway without keys."""
    async with served.http() as http:
        yield http


async def test_entries_are_put_shown_listed_and_removed(http: httpx.AsyncClient, client: Client) -> None:
    body = {"arrays": VECTOR, "at": "residual(1)", "licence": "MIT", "effect": {"score": 0.85}}
    made = await http.put("/library/calm", json=body, headers={"If-Match": '"0"'})
    assert made.status_code == 200, made.text
    found = made.json()
    assert made.headers["ETag"] == '"1"'
    assert (found["id"], found["kind"], found["shapes"]) == ("calm@1", "vector", {"vector": [8]})
    assert (found["licence"], found["effect"], found["removed"]) == ("MIT", {"score": 0.85}, None)
    assert "arrays" not in found
    entry = await client.library.get("calm")
    assert (entry.id, entry.digest, entry.at) == ("calm@1", found["digest"], "residual(1)")
    assert (await client.library.load("calm"))["vector"].tolist() == VECTOR
    again = (await http.put("/library/calm", json={**body, "arrays": ENCODED})).json()
    assert (again["id"], again["digest"]) == ("calm@2", found["digest"])
    assert [one["id"] for one in (await http.get("/library")).json()["data"]] == ["calm@1", "calm@2"]
    assert (await http.get("/library/calm")).json() == again
    shown = (await http.get("/library/calm@1", params={"arrays": "base64"})).json()
    assert shown.pop("arrays") == {"vector": ENCODED}
    assert shown == found
    assert (await http.get("/library/calm", params={"arrays": "list"})).json()["arrays"] == {"vector": VECTOR}
    assert (await http.delete("/library/calm@2")).json() == {"removed": ["calm@2"]}
    assert (await http.get("/library/calm")).json() == found
    history = (await http.get("/library/calm/history")).json()["data"]
    assert [(one["version"], one["removed"] is None) for one in history] == [(2, False), (1, True)]
    assert (await http.delete("/library/calm")).json() == {"removed": ["calm@1"]}
    assert (await http.get("/library")).json() == {"data": []}


async def test_arrays_by_layer_and_autoencoders(http: httpx.AsyncClient, client: Client) -> None:
    layers = {"arrays": {"3": VECTOR, "4": ENCODED}, "model": "tiny"}
    assert (await http.put("/library/honest", json=layers)).json()["layers"] == [3, 4]
    parts = {"W_enc": [[1.0, 0.0]], "W_dec": [[1.0], [0.0]], "b_enc": [0.0, 0.0], "b_dec": [0.0]}
    made = await http.put("/library/sae", json={"arrays": parts, "kind": "autoencoder", "settings": {"d_sae": 2}})
    assert made.json()["shapes"] == {"W_dec": [2, 1], "W_enc": [1, 2], "b_dec": [1], "b_enc": [2]}
    assert {one.id async for one in client.library.list()} == {"honest@1", "sae@1"}


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("calm", {"arrays": [[1.0]]}, 422, "arrays"),
        ("calm", {"arrays": ["a"]}, 422, "arrays"),
        ("calm", {"arrays": [10**400]}, 422, "arrays"),
        ("calm", {"arrays": {"dtype": ["float32"], "shape": [2], "base64": "AAAA"}}, 422, "arrays.dtype"),
        ("calm", {"arrays": {"dtype": "float32", "shape": [2], "base64": "AAAA"}}, 422, "arrays.base64"),
        ("calm", {"arrays": {"weight": [1.0]}}, 422, "arrays"),
        ("calm", {"arrays": [1.0], "kind": "matrix"}, 422, "kind"),
        ("calm", {"arrays": [1.0], "colour": "red"}, 422, "colour"),
        ("calm", {}, 422, "arrays"),
        ("calm@3", {"arrays": [1.0]}, 422, "name"),
        ("a b", {"arrays": [1.0]}, 422, "name"),
    ],
)
async def test_what_is_wrong_is_named(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, field: str
) -> None:
    answer = await http.put(f"/library/{path}", json=body)
    assert (answer.status_code, answer.json()["field"]) == (status, field), answer.text


async def test_conflicts_and_what_is_not_there(http: httpx.AsyncClient) -> None:
    await http.put("/library/calm", json={"arrays": VECTOR})
    conflict = await http.put("/library/calm", json={"arrays": VECTOR}, headers={"If-Match": '"0"'})
    assert (conflict.status_code, conflict.json()["type"]) == (412, "urn:tracewire:entry_conflict")
    assert (conflict.json()["version"], conflict.headers["ETag"], conflict.json()["field"]) == (1, '"1"', "If-Match")
    for answer in (await http.get("/library/none"), await http.get("/library/calm@7"), await http.delete("/library/x")):
        assert (answer.status_code, answer.json()["type"]) == (404, "urn:tracewire:unknown_entry")
    assert (await http.get("/library/none/history")).json() == {"data": []}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Keys of two tenants, of an operator, and of a client that may only read."""
    file = tmp_path / "keys.toml"
    held = [("red", {"read", "submit"}, "red"), ("blue", {"read", "submit"}, "blue")]
    held += [("root", {"read", "operate"}, ""), ("sender", {"read", "submit"}, ""), ("reader", {"read"}, "red")]
    file.write_text("\n".join(entry_of(name, name, frozenset(rights), tenant) for name, rights, tenant in held))
    return file


async def test_a_tenant_has_its_own_entries_and_the_shared_ones(
    gateway: Callable[..., Any], keys: Path, client: Client, engine: Engine
) -> None:
    body = {"arrays": VECTOR}
    async with gateway(keys=keys) as served:
        root, red, blue, sender, reader = (served.http(name) for name in ("root", "red", "blue", "sender", "reader"))
        assert (await root.put("/library/calm", json=body)).json()["id"] == "calm@1"
        assert (await root.put("/library/calm", json=body)).json()["id"] == "calm@2"
        # Until it has one of its own, the shared one.
        assert (await red.get("/library/calm")).json()["id"] == "calm@2"
        assert (await red.put("/library/calm", json=body)).json()["id"] == "red:calm@1"
        assert (await red.get("/library/calm")).json()["id"] == "red:calm@1"
        assert (await red.get("/library/calm@2")).json()["id"] == "calm@2"
        assert (await red.get("/library/red:calm")).json()["id"] == "red:calm@1"
        assert [one["id"] for one in (await red.get("/library")).json()["data"]] == ["red:calm@1", "calm@1", "calm@2"]
        # Another's are as if they were not there.
        assert [one["id"] for one in (await blue.get("/library")).json()["data"]] == ["calm@1", "calm@2"]
        for answer in (
            await blue.get("/library/red:calm"),
            await blue.get("/library/red:calm/history"),
            await blue.put("/library/red:calm", json=body),
            await blue.delete("/library/red:calm"),
        ):
            assert (answer.status_code, answer.json()["type"]) == (404, "urn:tracewire:unknown_entry")
        assert (await blue.get("/library", params={"tenant": "red"})).json()["field"] == "tenant"
        # Who may not put, and who may only put its own.
        for answer in (await reader.put("/library/x", json=body), await sender.put("/library/x", json=body)):
            assert (answer.status_code, answer.json()["type"]) == (403, "urn:tracewire:not_allowed")
        assert (await sender.delete("/library/calm")).status_code == 403
        listed = (await root.get("/library", params={"tenant": "red"})).json()["data"]
        assert [one["id"] for one in listed] == ["red:calm@1", "calm@1", "calm@2"]
        # A trace of the tenant's takes its own.
        declared = {"interventions": [{"do": "steer", "at": "residual(1)", "vector": "calm"}]}
        async with engine(tiny) as scripted, served.openai("red") as api:
            await api.completions.create(model="tiny", prompt="x", extra_body={"tracewire": declared})
        assert [one.library for one in scripted.taken] == [{"interventions[0].vector": "red:calm@1"}]
        assert (await red.delete("/library/calm")).json() == {"removed": ["red:calm@1"]}
        for one in (root, red, blue, sender, reader):
            await one.aclose()
    assert [one.id async for one in client.library.list()] == ["calm@1", "calm@2"]


async def test_a_trace_names_a_version(served: Served, engine: Engine) -> None:
    """Of `POST /traces`, and of an OpenAI request."""
    declared = [{"do": "steer", "at": "residual(1)", "vector": "calm@1"}]
    async with engine(tiny) as scripted, served.http() as http, served.openai() as api:
        for array in (VECTOR, VECTOR[::-1]):
            await http.put("/library/calm", json={"arrays": array, "at": "residual(1)"})
        posted = await http.post("/traces", json={"model": "tiny", "prompt": "x", "interventions": declared})
        assert posted.status_code < 300, posted.text
        await api.completions.create(model="tiny", prompt="x", extra_body={"tracewire": {"interventions": declared}})
        missing = await http.post(
            "/traces", json={"model": "tiny", "prompt": "x", "interventions": [{**declared[0], "vector": "calm@9"}]}
        )
        assert (missing.status_code, missing.json()["field"]) == (422, "interventions[0].vector")
    assert [one.interventions[0].vector.tolist() for one in scripted.taken] == [VECTOR, VECTOR]
    assert [one.library for one in scripted.taken] == [{"interventions[0].vector": "calm@1"}] * 2
