"""Traces over HTTP: submitted, listed, read, followed, steered and cancelled."""

from __future__ import annotations

import io
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import httpx
import numpy as np
import pytest

import tracewire
from tests.support.bus_engine import Stage, tiny
from tests.support.gateways import Served
from tests.support.sse import Sent, events
from tests.support.until import until
from tracewire import Client
from tracewire.gateway import trace_routes
from tracewire_bus.wire.ids import FINAL_ID
from tracewire_bus.wire.messages import Append, Set
from tracewire_bus.wire.packing import wire

Engine = Callable[..., Any]


@pytest.fixture
async def http(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the gateway."""
    async with served.http() as http:
        yield http


async def submitted(http: httpx.AsyncClient, prompt: str = "count", **body: Any) -> str:
    answer = await http.post("/traces", json={"model": "tiny", "prompt": prompt, **body})
    assert answer.status_code == 202, answer.text
    return answer.json()["id"]


async def read(http: httpx.AsyncClient, path: str, last: str | None = None, **query: Any) -> list[Sent]:
    """A stream from its beginning to its end."""
    headers = {"Last-Event-ID": last} if last else {}
    async with http.stream("GET", path, params=query, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        return [event async for event in events(answer)]


async def test_a_trace_is_submitted_and_followed_to_its_end(engine: Engine, http: httpx.AsyncClient) -> None:
    async with engine(tiny) as scripted:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Count."}], "sampling": {"max_tokens": 3}}
        answer = await http.post("/traces", json={**body, "trace_id": "mine", "priority": 3})
        assert (answer.status_code, answer.headers["Location"]) == (202, "/traces/mine")
        links = answer.json()["links"]
        sent = await read(http, links["events"])
        assert [event.name for event in sent] == ["accepted", "output", "output", "output", "final"]
        assert [event.id for event in sent] == ["1-0", "1-1", "1-2", "1-3", FINAL_ID]
        assert [event.data["id"] for event in sent] == [event.id for event in sent]
        outputs = [event.data for event in sent if event.name == "output"]
        assert "".join(output["text"] for output in outputs) == "one two three"
        assert [output["delta"] for output in outputs] == [{"scores": [0.0]}, {"scores": [0.5]}, {"scores": [1.0]}]
        assert sent[-1].data["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 0}
        (taken,) = scripted.taken
        assert (taken.detach, taken.priority, taken.invokes[0].sampling) == (True, 3, {"max_tokens": 3})
        # The same id again is the same trace.
        again = await http.post("/traces", json={**body, "trace_id": "mine"})
        assert again.status_code == 202
        assert await read(http, links["events"]) == sent
        assert len(scripted.taken) == 1


async def test_a_stream_goes_on_after_any_event(engine: Engine, http: httpx.AsyncClient) -> None:
    async with engine(tiny):
        path = f"/traces/{await submitted(http)}/events"
        whole = await read(http, path)
        for index, event in enumerate(whole[:-1]):
            assert await read(http, path, last=event.id) == whole[index + 1 :]
            assert await read(http, path, since=event.id) == whole[index + 1 :]
        answer = await http.get(path, headers={"Last-Event-ID": FINAL_ID})
        assert answer.status_code == 204


async def many(stage: Stage) -> None:
    """A hundred tokens, each with a delta."""
    await stage.accept()
    for number in range(100):
        delta = Append(("n",), [number]) if number else Set(("n",), [0])
        await stage.output(f"{number} ", [delta])
    await stage.final()


async def test_a_stream_that_is_cut_at_random_bytes_brings_each_event_once(
    engine: Engine, http: httpx.AsyncClient
) -> None:
    places, cuts = random.Random(7), 0
    async with engine(many):
        path = f"/traces/{await submitted(http)}/events"
        whole = await read(http, path)
        while cuts < 200:
            found: list[Sent] = []
            while not found or found[-1].name != "final":
                headers = {"Last-Event-ID": found[-1].id} if found else {}
                left = places.randrange(200, 9000)
                async with http.stream("GET", path, headers=headers) as answer:
                    text = b""
                    async for chunk in answer.aiter_raw():
                        text += chunk
                        if len(text) >= left:
                            cuts += 1
                            break
                found += [event async for event in events(httpx.Response(200, content=text[:left]))]
            assert found == whole


async def test_only_the_saves_that_are_asked_for_are_followed(engine: Engine, http: httpx.AsyncClient) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"a": 1, "b": 2})
        await stage.final()

    async with engine(script):
        path = f"/traces/{await submitted(http)}/events"
        (output,) = [event.data for event in await read(http, path, names="a") if event.name == "output"]
        assert output["delta"] == {"a": [1]}
        (output,) = [event.data for event in await read(http, path, content="text") if event.name == "output"]
        assert "delta" not in output
        assert output["text"] == "one"
        missing = await http.get(path, params={"names": "c"})
        assert (missing.status_code, missing.json()["type"]) == (404, "urn:tracewire:save_missing")


async def test_a_trace_is_steered_if_its_version_is_still_the_same(engine: Engine, http: httpx.AsyncClient) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.steered()
        await stage.output("one", finish_reason="stop")
        await end.wait()
        await stage.final()

    end = anyio.Event()
    async with engine(script):
        trace_id = await submitted(http, live={"alpha": 0, "way": [0.0, 1.0]})
        path = f"/traces/{trace_id}"
        live = await http.get(f"{path}/live")
        assert (live.json(), live.headers["ETag"]) == (
            {"version": 0, "values": {"alpha": 0, "way": [0.0, 1.0]}},
            '"0"',
        )
        stale = await http.post(f"{path}/steer", json={"values": {"alpha": 1}}, headers={"If-Match": '"4"'})
        assert (stale.status_code, stale.headers["ETag"], stale.json()["field"]) == (412, '"0"', "If-Match")
        body = {"values": {"alpha": 2.5, "way": [1.0, 0.0]}, "if_version": 0, "by": "slider"}
        steered = await http.post(f"{path}/steer", json=body)
        assert (steered.status_code, steered.json(), steered.headers["ETag"]) == (200, {"version": 1}, '"1"')
        conflict = await http.post(f"{path}/steer", json=body)
        assert (conflict.status_code, conflict.json()["field"], conflict.json()["version"]) == (409, "if_version", 1)
        end.set()
        sent = await read(http, f"{path}/events")
        (event,) = [event.data for event in sent if event.name == "steered"]
        (change,) = event["changes"]
        assert (change["by"], change["values"]["alpha"]) == ("anonymous/slider", 2.5)
        assert event["first"] == [{"invoke": 0, "choice": 0, "index": 0}]
        late = await http.post(f"{path}/steer", json={"values": {"alpha": 1}})
        assert (late.status_code, late.json()["type"]) == (409, "urn:tracewire:trace_ended")


@pytest.mark.parametrize(
    ("values", "field"),
    [({"beta": 1}, "live.beta"), ({"alpha": "x"}, "live.alpha"), ({}, "live"), ({"alpha": [1, 2]}, "live.alpha")],
)
async def test_a_change_that_does_not_fit_is_refused(
    engine: Engine, http: httpx.AsyncClient, values: Any, field: str
) -> None:
    async with engine(waiting):
        trace_id = await submitted(http, live={"alpha": 0.0})
        answer = await http.post(f"/traces/{trace_id}/steer", json={"values": values})
        assert (answer.status_code, answer.json()["field"]) == (422, field)
        assert answer.headers["Content-Type"] == "application/problem+json"


async def waiting(stage: Stage) -> None:
    """Runs until it is cancelled."""
    await stage.accept()
    await anyio.sleep_forever()


async def test_a_trace_is_paused_resumed_and_cancelled(engine: Engine, http: httpx.AsyncClient, client: Client) -> None:
    async with engine(waiting):
        trace_id = await submitted(http)
        path = f"/traces/{trace_id}"
        for order in ("pause", "resume", "cancel"):
            headers = {"Content-Type": "application/json"}
            odd = await http.post(f"{path}/{order}", content=b'{"by": "\\ud800"}', headers=headers)
            assert (odd.status_code, odd.json()["field"]) == (422, "by")
        assert (await http.post(f"{path}/pause")).json() == {"paused": True}
        assert (await http.post(f"{path}/pause", json={"by": "me"})).json() == {"paused": False}
        assert (await http.post(f"{path}/resume")).json() == {"resumed": True}
        assert (await http.post(f"{path}/cancel", json={"reason": "enough"})).json() == {"cancelled": True}
        sent = await read(http, f"{path}/events")
        assert [event.name for event in sent] == ["accepted", "paused", "resumed", "final"]
        final = sent[-1].data
        assert (final["status"], final["error"]["reason"], final["error"]["by"]) == ("cancelled", "enough", "anonymous")
        assert (await http.post(f"{path}/cancel")).json() == {"cancelled": False}
        assert (await http.post(f"{path}/pause")).status_code == 409


LARGE = np.arange(90_000, dtype=np.float32).reshape(300, 300)
SMALL = np.array([1.0, -2.5], "float32")


async def saving(stage: Stage) -> None:
    """A large array and small ones."""
    import ml_dtypes

    await stage.accept()
    ref = await stage.store(LARGE, "large")
    brain = SMALL.astype(ml_dtypes.bfloat16)
    deltas = [Set(("large",), wire(ref)), Set(("small",), wire([SMALL])), Set(("brain",), wire(brain))]
    await stage.output("one", deltas, finish_reason="stop")
    await stage.final()


async def test_values_are_downloaded_by_their_digests(engine: Engine, http: httpx.AsyncClient) -> None:
    async with engine(saving):
        path = f"/traces/{await submitted(http)}"
        await read(http, f"{path}/events")
        state = (await http.get(f"{path}/state")).json()
        saves = state["invokes"][0][0]["saves"]
        assert saves["large"]["digest"] == tracewire.digest(LARGE).hex()
        answer = await http.get(saves["large"]["href"])
        assert np.array_equal(np.load(io.BytesIO(answer.content)), LARGE)
        assert (answer.headers["Tracewire-Dtype"], answer.headers["Tracewire-Shape"]) == ("float32", "300,300")
        etag = answer.headers["ETag"]
        assert (await http.get(saves["large"]["href"], headers={"If-None-Match": etag})).status_code == 304

        from safetensors.numpy import load

        small = saves["small"][0]["href"]
        accept = {"Accept": "text/html, application/vnd.safetensors;q=0.9"}
        assert np.array_equal(load((await http.get(small, headers=accept)).content)["value"], SMALL)
        raw = await http.get(small, params={"format": "raw"})
        assert np.array_equal(np.frombuffer(raw.content, np.float32), SMALL)

        brain = await http.get(saves["brain"]["href"])
        assert brain.headers["Tracewire-Dtype"] == "bfloat16"
        assert np.load(io.BytesIO(brain.content)).dtype == np.float32
        half = await http.get(saves["brain"]["href"], params={"dtype": "float16"})
        assert np.load(io.BytesIO(half.content)).tolist() == SMALL.tolist()

        inline = (await http.get(f"{path}/state", params={"arrays": "list"})).json()
        assert inline["invokes"][0][0]["saves"]["large"] == LARGE.tolist()
        for wrong, status in (("0" * 32, 404), ("x", 422)):
            assert (await http.get(f"{path}/values/{wrong}")).status_code == status
        assert (await http.get(small, headers={"Accept": "image/png"})).status_code == 406
        assert (await http.get(small, params={"dtype": "odd"})).json()["field"] == "dtype"


async def test_a_trace_is_described(engine: Engine, http: httpx.AsyncClient) -> None:
    async with engine(tiny):
        trace_id = await submitted(http, live={"alpha": 1.5})
        await read(http, f"/traces/{trace_id}/events")
        answer = await http.get(f"/traces/{trace_id}")
        found = answer.json()
        assert (found["id"], found["status"], answer.headers["ETag"]) == (trace_id, "finished", '"0"')
        assert found["live"] == {"version": 0, "values": {"alpha": 1.5}}
        (choice,) = found["invokes"][0]
        assert (choice["text"], choice["saves"]) == ("one two three", ["scores"])


async def test_traces_are_listed_by_pages(engine: Engine, http: httpx.AsyncClient) -> None:
    async with engine(tiny):
        ids = [await submitted(http) for _ in range(5)]

        async def ended() -> bool:
            found = (await http.get("/traces", params={"state": "finished"})).json()["data"]
            return len(found) == 5

        await until(ended)
        found: list[str] = []
        query: dict[str, Any] = {"limit": 2}
        while True:
            page = (await http.get("/traces", params=query)).json()
            found += [trace["id"] for trace in page["data"]]
            if "next" not in page:
                break
            query["before"] = page["next"]
        assert found == ids[::-1]
        assert (await http.get("/traces", params={"client": "anonymous", "limit": 1})).json()["data"][0]["tokens"] == 3
        assert (await http.get("/traces", params={"model": "other"})).json() == {"data": []}
        for query, field in (
            ({"state": "odd"}, "states"),
            ({"before": "x"}, "before"),
            ({"limit": 0}, "limit"),
            ({"model": ""}, "model"),
        ):
            answer = await http.get("/traces", params=query)
            assert (answer.status_code, answer.json()["field"]) == (422, field)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""),
        ("GET", "/state"),
        ("GET", "/live"),
        ("GET", "/events"),
        ("GET", "/values/" + "0" * 32),
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("POST", "/cancel"),
        ("POST", "/steer"),
    ],
)
async def test_an_unknown_trace_is_not_found(http: httpx.AsyncClient, method: str, path: str) -> None:
    body = {"values": {"a": 1}} if path == "/steer" else None
    answer = await http.request(method, f"/traces/nowhere{path}", json=body)
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:tracewire:unknown_trace")
    assert answer.json()["title"] == "Not found"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": []}, "prompt"),
        ({"prompt": "x", "sampling": {"temprature": 1}}, "sampling.temprature"),
        ({"prompt": "x", "sampling": {"detach": False}}, "sampling.detach"),
        ({"prompt": "x", "sampling": {"block": None}}, "sampling.block"),
        ({"prompt": "x", "detach": False}, "detach"),
        ({"prompt": "x", "deadline": -1}, "deadline"),
        ({"prompt": "x", "shared": {"a": 1}}, "shared.a"),
        ({"prompts": []}, "prompts"),
        ({"prompt": "x", "live": {"a b": 1}}, "live"),
    ],
)
async def test_a_wrong_field_is_named(engine: Engine, http: httpx.AsyncClient, body: Any, field: str) -> None:
    async with engine():
        answer = await http.post("/traces", json={"model": "tiny", **body})
        assert (answer.status_code, answer.json()["field"]) == (422, field), answer.text


@pytest.mark.parametrize("point", ["x", "1", "1-2-3", "1-" + "9" * 30, ""])
async def test_what_is_no_place_to_go_on_from(http: httpx.AsyncClient, point: str) -> None:
    answer = await http.get("/traces/some/events", headers={"Last-Event-ID": point})
    assert (answer.status_code, answer.json()["field"]) == (422, "Last-Event-ID")
    answer = await http.get("/traces/some/events", params={"since": point})
    assert (answer.status_code, answer.json()["field"]) == (422, "since")


async def test_two_follow_and_one_that_does_not_read_holds_nobody(
    engine: Engine, gateway: Callable[..., Any], client: Client
) -> None:
    async def large(stage: Stage) -> None:
        await stage.accept()
        for number in range(200):
            await stage.output(f"{number} " + "x" * 50_000)
        await stage.final()

    async with engine(large), gateway(stall_s=0.2) as served, served.http() as http:
        trace_id = await submitted(http)
        async with http.stream("GET", f"/traces/{trace_id}/events") as slow:
            assert slow.status_code == 200
            first = await read(http, f"/traces/{trace_id}/events")
            assert [event.name for event in first] == ["accepted", *["output"] * 200, "final"]
            # Ten megabytes are in no socket's buffer: the gateway gives the slow one up, and keeps nothing of it.
            await until(lambda: not len(served.gateway.streams))
            assert not served.gateway.running
        assert (await client.subscribe(trace_id).result()).text.startswith("0 x")


async def test_a_block_that_is_no_python_is_refused(engine: Engine, http: httpx.AsyncClient) -> None:
    async with engine(tiny):
        body = {"model": "tiny", "prompt": "x", "block": {"source": "\U000a4830"}, "live": {"": 0}}
        answer = await http.post("/traces", json=body)
    assert (answer.status_code, answer.json()["field"]) == (422, "block.source")


async def test_a_page_looks_through_so_many_entries(
    engine: Engine, served: Served, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine(tiny), served.http() as http:
        for name in ("old", *(f"t{number}" for number in range(8))):
            await client.trace("tiny", "x", trace_id=name, by="alice" if name == "old" else "bob").result()
        monkeypatch.setattr(trace_routes, "_ENTRIES", 5)
        query: dict[str, Any] = {"client": "alice", "limit": 50}
        pages = []
        while True:
            page = (await http.get("/traces", params=query)).json()
            pages.append([trace["id"] for trace in page["data"]])
            if "next" not in page:
                break
            query["before"] = page["next"]
        # Three entries of each trace.
        assert pages == [[]] * 5 + [["old"]]
        full = (await http.get("/traces", params={"limit": 1})).json()
        assert [trace["id"] for trace in full["data"]] == ["t7"]
        following = (await http.get("/traces", params={"limit": 1, "before": full["next"]})).json()
        assert [trace["id"] for trace in following["data"]] == ["t6"]
