"""The chat service over real HTTP: answers stream, resume, bend, restart and outlive their readers."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
import uvicorn

import tracewire
from examples.chat_backend import run
from examples.chat_backend.app import create_app
from examples.chat_backend.problems import of_bus
from examples.chat_backend.settings import Bend, Settings
from examples.chat_backend.stream import EventStream
from tests.support import ROOT
from tests.support.bus_engine import BusEngine, Script, Stage, engine_info
from tests.support.documented import commands as documented
from tests.support.redis.proxy import proxy
from tests.support.until import until
from tracewire_bus.bus import FINAL_ID, Bus
from tracewire_bus.transport.embedded import EmbeddedServer
from tracewire_bus.wire.messages import Failure

#: Nothing here takes longer; a test that would hang fails instead.
PATIENCE = 60


BEND = Bend(np.eye(8, dtype=np.float32)[0], layer=2, distance=2.0)


class Server(run.Server):
    """The service's server, which leaves the signals to pytest."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def server(settings: Settings) -> AsyncIterator[tuple[Server, str]]:
    """The service as a process of its own would serve it, and its address."""
    # Named as TCP, or asyncio leaves Nagle's algorithm on, and each small answer waits 40 ms.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    config = uvicorn.Config(create_app(settings), log_level="warning", timeout_graceful_shutdown=5)
    one = Server(config)
    running = asyncio.create_task(one.serve(sockets=[listening]))
    try:
        await until(lambda: one.started or running.done())
        yield one, f"http://127.0.0.1:{port}"
    finally:
        one.should_exit = True
        with anyio.CancelScope(shield=True):
            await running


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """The service, and an HTTP client of it."""
    async with server(settings) as (_, address), httpx.AsyncClient(base_url=address, timeout=PATIENCE) as http:
        yield http


@pytest.fixture
def settings(embedded: str, prefix: str) -> Settings:
    """The service's settings for the scripted engine."""
    return Settings(url=embedded, prefix=prefix, model="tiny", bend=BEND)


@pytest.fixture
async def http(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the service."""
    async with serving(settings) as http:
        yield http


@pytest.fixture
def engine(embedded: str, prefix: str) -> Callable[..., Any]:
    """Runs a scripted engine: `async with engine(script):`."""

    def running(script: Script, **info: Any) -> Any:
        described = {"max_model_len": 1024, **info}
        return BusEngine.running(embedded, prefix, script, engine_info(**described))

    return running


async def opened(http: httpx.AsyncClient, **opening: Any) -> str:
    """A new conversation's id."""
    response = await http.post("/conversations", json=opening)
    assert response.status_code == 201, response.text
    return str(response.json()["id"])


async def said(http: httpx.AsyncClient, conversation: str, text: str, **more: Any) -> dict[str, Any]:
    """Say something; returns what is told of the answer."""
    response = await http.post(f"/conversations/{conversation}/messages", json={"text": text, **more})
    assert response.status_code == 202, response.text
    return dict(response.json())


async def steered(http: httpx.AsyncClient, conversation: str, **steering: Any) -> httpx.Response:
    return await http.post(f"/conversations/{conversation}/steer", json=steering)


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a request that was refused with `status`."""
    assert response.status_code == status, response.text
    return dict(response.json()["error"])


@dataclass
class Seen:
    """One event as a browser gets it."""

    id: str
    name: str
    data: Any


class Events:
    """What a stream says, event by event. `comments` counts the comments so far."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()
        self.comments = 0
        self.retry = 0

    def __aiter__(self) -> Events:
        return self

    async def __anext__(self) -> Seen:
        fields: dict[str, str] = {}
        async for line in self._lines:
            if line.startswith(":"):
                self.comments += 1
            elif line:
                name, _, value = line.partition(": ")
                assert name not in fields, f"{name} twice in one event"
                fields[name] = value
            elif "data" in fields:
                return Seen(fields["id"], fields["event"], json.loads(fields["data"]))
            else:
                self.retry = int(fields.get("retry", self.retry))
                fields = {}
        assert not fields, "the stream ended within an event"
        raise StopAsyncIteration

    async def through(self, name: str) -> list[Seen]:
        """Everything up to and with the next event of this name."""
        seen = []
        with anyio.fail_after(PATIENCE):
            async for event in self:
                seen.append(event)
                if event.name == name:
                    return seen
        raise AssertionError(f"the stream ended before a {name!r}")

    async def tokens(self, count: int) -> list[Seen]:
        """Everything up to and with so many more tokens."""
        return [event for _ in range(count) for event in await self.through("token")]

    async def rest(self) -> list[Seen]:
        """Everything to the end."""
        with anyio.fail_after(PATIENCE):
            return [event async for event in self]


@asynccontextmanager
async def following(
    http: httpx.AsyncClient, path: str, last_event_id: str | None = None, **query: Any
) -> AsyncIterator[Events]:
    """A stream, as a browser's EventSource asks for it."""
    headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last_event_id} if last_event_id else {})
    if query:
        path = str(httpx.URL(path).copy_merge_params(query))
    async with http.stream("GET", path, headers=headers) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Events(response)


async def all_of(http: httpx.AsyncClient, path: str, last_event_id: str | None = None) -> list[Seen]:
    """A stream to its end."""
    async with following(http, path, last_event_id) as events:
        return await events.rest()


def names(seen: list[Seen]) -> list[str]:
    return [event.name for event in seen]


def text(seen: list[Seen]) -> str:
    return "".join(event.data["text"] for event in seen if event.name == "token")


async def short(stage: Stage) -> None:
    """Three tokens that say which answer they are of."""
    await stage.accept()
    for number in range(3):
        await stage.save(f" {number}", {"meter": number / 4})
    await stage.final()


async def bends(stage: Stage) -> None:
    """Three tokens, and, once it is steered after them, three more; each says the alpha that it was sampled with."""
    await stage.accept()
    for _ in range(3):
        await stage.save(f" {stage.live['alpha']:g}", {"meter": stage.live["alpha"]})
    await stage.steered()
    for _ in range(3):
        await stage.save(f" {stage.live['alpha']:g}", {"meter": stage.live["alpha"]})
    await stage.final()


class Gated:
    """A script that puts out two tokens and then waits for its gate."""

    def __init__(self) -> None:
        self.gate = anyio.Event()

    async def __call__(self, stage: Stage) -> None:
        await stage.accept()
        for number in range(2):
            await stage.save(f" {number}", {"meter": 0.0})
        await self.gate.wait()
        for number in range(2, 4):
            await stage.save(f" {number}", {"meter": 0.0})
        await stage.final()


async def test_an_answer_streams_from_its_acceptance_to_its_end(
    http: httpx.AsyncClient, engine: Callable[..., Any]
) -> None:
    async with engine(short) as scripted:
        conversation = await opened(http, alpha=1.5, temperature=0.0, max_tokens=7)
        told = await said(http, conversation, "This module")
        assert told["answer"] == 0
        assert told["alpha"] == 1.5
        assert told["trace"] == f"chat.{conversation}.0"
        seen = await all_of(http, told["stream"])
        assert names(seen) == ["accepted", "token", "token", "token", "final"]
        assert seen[0].data["engine"] == scripted.info.engine
        assert [(one.data["index"], one.data["count"], one.data["text"], one.data["meter"]) for one in seen[1:4]] == [
            (0, 1, " 0", [0.0]),
            (1, 1, " 1", [0.25]),
            (2, 1, " 2", [0.5]),
        ]
        assert seen[-1].data["status"] == "finished"
        assert seen[-1].data["error"] is None
        assert seen[-1].data["usage"]["completion_tokens"] == 3
        (submission,) = scripted.taken
        assert submission.detach
        assert submission.deadline_s == 120
        assert submission.invokes[0].prompt == "This module"
        assert submission.invokes[0].sampling == {"temperature": 0.0, "max_tokens": 7}
        assert [type(one).__name__ for one in submission.interventions] == ["Steer", "Probe"]


async def test_what_was_trimmed_comes_as_one(http: httpx.AsyncClient, engine: Callable[..., Any]) -> None:
    trimmed = anyio.Event()

    async def trims(stage: Stage) -> None:
        await stage.accept()
        for number in range(3):
            await stage.save(f" {number}", {"meter": number / 4})
        await stage.bus.snapshots.take(stage.trace, stage.attempt)
        trimmed.set()
        await stage.save(" 3", {"meter": 0.75})
        await stage.final()

    async with engine(trims):
        told = await said(http, await opened(http), "This module")
        await trimmed.wait()
        seen = await all_of(http, told["stream"])
        assert names(seen) == ["gap", "token", "final"]
        assert seen[0].data == {"count": 3, "text": " 0 1 2", "meter": [0.0, 0.25, 0.5], "version": 0}
        assert seen[1].data["index"] == 3
        again = await all_of(http, told["stream"] + f"&after={seen[0].id}")
        assert names(again) == ["token", "final"]


async def test_ids_are_those_of_the_bus(
    http: httpx.AsyncClient, engine: Callable[..., Any], settings: Settings
) -> None:
    async with engine(short), tracewire.connect(settings.url, prefix=settings.prefix) as client:
        told = await said(http, await opened(http), "This module")
        seen = await all_of(http, told["stream"])
        async with client.subscribe(told["trace"]) as subscription:
            positions = [subscription.position async for _ in subscription]
        assert [event.id for event in seen] == positions
        assert seen[-1].id == FINAL_ID


async def test_two_readers_see_the_same_at_their_own_pace(http: httpx.AsyncClient, engine: Callable[..., Any]) -> None:
    script = Gated()
    async with engine(script):
        conversation = await opened(http)
        told = await said(http, conversation, "This module")
        async with following(http, told["stream"]) as early:
            first = await early.through("token")
            async with following(http, f"/conversations/{conversation}/stream") as late:
                # It has everything that there is before the answer goes on.
                second = await late.tokens(2)
                script.gate.set()
                second += await late.rest()
            first += await early.rest()
        assert first == second
        assert text(first) == " 0 1 2 3"


async def test_several_tokens_of_one_output_are_one_event(http: httpx.AsyncClient, engine: Callable[..., Any]) -> None:
    from tracewire_bus.wire.messages import Append, Set

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output(
            " a b c",
            [Set(path=("meter",), value=[0.5])],
            [Append(path=("meter",), items=[float("nan")])],
            [Append(path=("meter",), items=[1.5])],
        )
        await stage.final()

    async with engine(script):
        seen = await all_of(http, (await said(http, await opened(http), "x"))["stream"])
    (token,) = (event.data for event in seen if event.name == "token")
    # JSON has no NaN.
    assert (token["index"], token["count"], token["meter"]) == (0, 3, [0.5, None, 1.5])


async def test_a_silent_stream_is_kept_alive(settings: Settings, engine: Callable[..., Any]) -> None:
    script = Gated()
    async with serving(replace(settings, keep_alive_s=0.01)) as http, engine(script):
        told = await said(http, await opened(http), "x")
        async with following(http, told["stream"]) as events:
            reading = asyncio.create_task(events.rest())
            await until(lambda: events.comments > 3)
            script.gate.set()
            assert text(await reading) == " 0 1 2 3"
            assert events.retry


async def test_the_page_is_one_file(http: httpx.AsyncClient) -> None:
    response = await http.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    for elsewhere in ("http://", "https://", "src=", "@import"):
        assert elsewhere not in response.text


async def test_a_reader_resumes_after_any_event_without_loss_or_repeat(
    http: httpx.AsyncClient, engine: Callable[..., Any]
) -> None:
    async with engine(short):
        told = await said(http, await opened(http), "This module")
        seen = await all_of(http, told["stream"])
        for number, event in enumerate(seen[:-1]):
            assert await all_of(http, told["stream"], event.id) == seen[number + 1 :]
            async with following(http, told["stream"], after=event.id) as events:
                assert await events.rest() == seen[number + 1 :]
            # A browser that comes back says where it is by itself, and asks for the address that it was given.
            async with following(http, told["stream"], event.id, after=seen[0].id) as events:
                assert await events.rest() == seen[number + 1 :]


async def test_a_dropped_connection_is_taken_up_where_it_broke(
    http: httpx.AsyncClient, engine: Callable[..., Any]
) -> None:
    script = Gated()
    async with engine(script):
        told = await said(http, await opened(http), "This module")
        async with following(http, told["stream"]) as events:
            seen = await events.through("token")
        script.gate.set()
        seen += await all_of(http, told["stream"], seen[-1].id)
        assert seen == await all_of(http, told["stream"])
        assert text(seen) == " 0 1 2 3"


async def test_a_stream_goes_on_when_redis_is_back(
    settings: Settings, engine: Callable[..., Any], tmp_path: Path
) -> None:
    script = Gated()
    async with (
        proxy(str(settings.url), tmp_path) as way,
        engine(script),
        serving(replace(settings, url=way.url)) as http,
        tracewire.connect(settings.url, prefix=settings.prefix) as client,
    ):
        told = await said(http, await opened(http), "This module")
        async with following(http, told["stream"]) as events:
            seen = await events.through("token")
            way.away = True
            await way.cut()
            script.gate.set()
            await until_ended(client, told["trace"])
            way.away = False
            seen += await events.rest()
        assert seen == await all_of(http, told["stream"])
        assert text(seen) == " 0 1 2 3"


async def test_after_the_end_a_browser_is_told_to_stay_away(
    http: httpx.AsyncClient, engine: Callable[..., Any]
) -> None:
    async with engine(short):
        told = await said(http, await opened(http), "This module")
        seen = await all_of(http, told["stream"])
        response = await http.get(told["stream"], headers={"Last-Event-ID": seen[-1].id})
        assert response.status_code == 204


async def test_an_id_that_is_none_is_refused(http: httpx.AsyncClient, engine: Callable[..., Any]) -> None:
    async with engine(short):
        told = await said(http, await opened(http), "This module")
        for wrong in (
            "now",
            "start",
            "1",
            "1-",
            "-1-2",
            "1-2-3",
            "1-2\u00b2",
            "9" * 21 + "-0",
            f"{2**64}-0",
            f"1-{2**64}",
        ):
            headers = {"Last-Event-ID": wrong.encode()}
            assert refused(await http.get(told["stream"], headers=headers), 422)["field"] == "Last-Event-ID"
            params = {"answer": "0", "after": wrong}
            assert refused(await http.get(told["stream"], params=params), 422)["field"] == "after"


async def test_a_reader_that_leaves_ends_only_its_stream(
    http: httpx.AsyncClient, engine: Callable[..., Any], settings: Settings
) -> None:
    script = Gated()
    async with engine(script), tracewire.connect(settings.url, prefix=settings.prefix) as client:
        conversation = await opened(http)
        told = await said(http, conversation, "This module")
        await client.get_state(told["trace"])
        await http.get("/")
        before = asyncio.all_tasks()
        for _ in range(3):
            async with following(http, told["stream"]) as events:
                await events.through("token")
        await until(lambda: asyncio.all_tasks() <= before)
        script.gate.set()
        await until_ended(client, told["trace"])
        assert (await client.get_state(told["trace"])).text == " 0 1 2 3"
        assert (await http.get(f"/conversations/{conversation}")).json()["turns"][0]["reply"] == " 0 1 2 3"


async def until_ended(client: tracewire.Client, trace: str) -> None:
    with anyio.fail_after(PATIENCE):
        async for _ in client.subscribe(trace):
            pass


async def test_a_reader_that_does_not_read_is_let_go(settings: Settings, engine: Callable[..., Any]) -> None:
    gate = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        await gate.wait()
        for _ in range(64):
            await stage.save("x" * 256 * 1024, {"meter": 0.0})
        await stage.final()

    async with serving(replace(settings, stall_s=0.2)) as http, engine(script):
        told = await said(http, await opened(http), "x")
        await http.get("/")
        before = asyncio.all_tasks()
        address = (http.base_url.host, http.base_url.port)
        with socket.socket() as idle:
            idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            idle.setblocking(False)
            await asyncio.get_running_loop().sock_connect(idle, address)
            request = f"GET {told['stream']} HTTP/1.1\r\nHost: here\r\n\r\n".encode()
            await asyncio.get_running_loop().sock_sendall(idle, request)
            await until(lambda: asyncio.all_tasks() - before)
            gate.set()
            # Others are not held up, and the server's side of it ends while the client is still connected.
            seen: list[Seen] = []
            while not seen or seen[-1].name != "final":
                with suppress(httpx.RemoteProtocolError):
                    async with following(http, told["stream"], seen[-1].id if seen else None) as events:
                        async for event in events:
                            seen.append(event)  # noqa: PERF401
            assert len(text(seen)) == 64 * 256 * 1024
            await until(lambda: asyncio.all_tasks() <= before)


async def test_a_reader_that_leaves_amid_a_burst_is_noticed_at_once(
    settings: Settings, engine: Callable[..., Any]
) -> None:
    """However many events are at hand: asyncio complains of each that is written to a connection that was lost."""

    async def script(stage: Stage) -> None:
        await stage.accept()
        for _ in range(64):
            await stage.save("x", {"meter": 0.0})
        await stage.final()

    left = anyio.Event()
    sent = 0

    async def receive() -> dict[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal sent
        sent += bool(message.get("body"))
        if sent == 5:
            left.set()

    async with engine(script), tracewire.connect(settings.url, prefix=settings.prefix) as client:
        async with client.trace(await client.models.get("tiny", timeout=PATIENCE), "x", detach=True) as trace:
            await trace.result()
        subscription = client.subscribe(trace.id)
        await EventStream(subscription, settings, set())({"type": "http", "asgi": {}}, receive, send)
    assert sent <= 7


async def test_the_requests_of_its_page(settings: Settings, engine: Callable[..., Any]) -> None:
    """Each `curl` of the page, in its order, on an answer that is written until it is cancelled."""
    page = (ROOT / "examples" / "chat_backend" / "README.md").read_text()
    curls = [line for line in documented(page) if line.startswith("curl ")]
    assert len(curls) == 8
    answers: list[Any] = []
    seen: list[Seen] = []

    async def script(stage: Stage) -> None:
        await stage.accept()
        for _ in range(8):
            await stage.save(" word", {"meter": 0.0})
        while True:
            await stage.steered()
            await stage.save(" bent", {"meter": stage.live["alpha"]})

    async with serving(settings) as http, engine(script), anyio.create_task_group() as group:
        for number, curl in enumerate(curls):
            conversation = answers[0]["id"] if answers else ""
            line = (
                curl.replace("$C", conversation).replace('"$H"', "'Content-Type: application/json'").partition(" | ")[0]
            )
            parser = argparse.ArgumentParser()
            for flag in ("-s", "-N"):
                parser.add_argument(flag, action="store_true")
            parser.add_argument("-H", action="append", default=[])
            parser.add_argument("-d")
            parser.add_argument("-X")
            parser.add_argument("url")
            asked = parser.parse_args(shlex.split(line)[1:])
            path = asked.url.removeprefix("localhost:8000")
            headers = dict(header.split(": ", 1) for header in asked.H)
            if asked.N:
                follow = partial(all_of, http, path, headers.get("Last-Event-ID"))
                if number < 5:

                    async def watch(follow: Callable[[], Any] = follow) -> None:
                        seen.extend(await follow())

                    group.start_soon(watch)
                else:
                    answers.append(await follow())
                continue
            method = asked.X or ("POST" if asked.d else "GET")
            response = await http.request(method, path, headers=headers, content=asked.d)
            assert response.is_success, (line, response.text)
            answers.append(response.json())
    opened_, told, first, second, cancelled, rest, whole = answers
    assert told["answer"] == 0
    assert told["stream"].startswith(f"/conversations/{opened_['id']}/stream")
    assert (first["version"], second["version"], cancelled) == (1, 2, {"cancelled": True})
    # The first reader saw all of it; the second what came after the event that it named.
    assert names(seen)[0] == "accepted"
    assert [event.data["values"] for event in seen if event.name == "steered"][-1] == {"alpha": 0.0}
    assert seen[-1].data["status"] == "cancelled"
    assert rest == seen[[event.id for event in seen].index("1-7") + 1 :]
    assert whole["id"] == opened_["id"]


async def test_the_service_as_uvicorn_starts_it(embedded: str, prefix: str, tmp_path: Path) -> None:
    """The page's command, with a port of its own and two workers."""
    page = (ROOT / "examples" / "chat_backend" / "README.md").read_text()
    (command,) = (line for line in documented(page) if line.startswith("uvicorn "))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [*shlex.split(command.replace("--workers 4", "--workers 2"))[1:], "--port", str(port)]
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-m", "uvicorn", *words],
            cwd=ROOT,
            stdout=out,
            stderr=out,
            env={**os.environ, "TRACEWIRE_URL": embedded, "CHAT_PREFIX": prefix, "CHAT_MODEL": "tiny"},
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as http:
            with anyio.fail_after(60):
                while True:
                    assert process.poll() is None, log.read_text()
                    with suppress(httpx.ConnectError):
                        page = (await http.get("/")).text
                        break
                    await anyio.sleep(0.05)
            assert "<html" in page
            conversation = await opened(http, alpha=1.0)
            assert (await http.get(f"/conversations/{conversation}")).json()["id"] == conversation
    finally:
        process.terminate()
        await anyio.to_thread.run_sync(process.wait, 30)


async def test_an_answer_is_bent_while_it_is_written(http: httpx.AsyncClient, engine: Callable[..., Any]) -> None:
    async with engine(bends):
        conversation = await opened(http, alpha=0.5)
        told = await said(http, conversation, "This module")
        async with following(http, told["stream"]) as events:
            seen = await events.tokens(3)
            response = await steered(http, conversation, alpha=3, if_version=0)
            assert response.status_code == 200
            assert response.json() == {"version": 1, "alpha": 3.0}
            seen += await events.rest()
    assert names(seen) == ["accepted", *["token"] * 3, "steered", *["token"] * 3, "final"]
    change = seen[4].data
    assert (change["version"], change["values"], change["by"], change["first"]) == (1, {"alpha": 3.0}, "chat", 3)
    tokens = [event.data for event in seen if event.name == "token"]
    assert all(token["index"] < change["first"] and token["text"] == " 0.5" for token in tokens[:3])
    assert all(token["index"] >= change["first"] and token["text"] == " 3" for token in tokens[3:])


async def test_an_answer_is_bent_before_an_engine_has_taken_it(
    http: httpx.AsyncClient, engine: Callable[..., Any], bus: Bus
) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save(f" {stage.live['alpha']:g}", {"meter": 0.0})
        await stage.final()

    # One that is there, and takes nothing.
    await bus.registry.register(engine_info(engine="busy", max_model_len=1024), ttl_s=600)
    conversation = await opened(http)
    told = await said(http, conversation, "This module", alpha=1)
    assert (await steered(http, conversation, alpha=2)).json()["version"] == 1
    async with engine(script):
        seen = await all_of(http, told["stream"])
    assert names(seen) == ["accepted", "steered", "token", "final"]
    assert seen[0].data["version"] == 1
    assert (seen[1].data["first"], seen[1].data["values"]) == (0, {"alpha": 2.0})
    assert text(seen) == " 2"


async def test_the_next_answer_begins_where_the_slider_was_left(
    http: httpx.AsyncClient, engine: Callable[..., Any]
) -> None:
    async with engine(bends) as scripted:
        conversation = await opened(http)
        told = await said(http, conversation, "one", alpha=1)
        async with following(http, told["stream"]) as events:
            await events.tokens(3)
            await steered(http, conversation, alpha=-2.5)
            await events.rest()
        told = await said(http, conversation, "two")
        assert told["alpha"] == -2.5
        await http.post(f"/conversations/{conversation}/cancel")
        await all_of(http, told["stream"])
        assert len(scripted.taken) == 2


async def test_a_change_for_another_version_is_refused(http: httpx.AsyncClient, engine: Callable[..., Any]) -> None:
    script = Gated()
    async with engine(script):
        conversation = await opened(http)
        await said(http, conversation, "x")
        assert (await steered(http, conversation, alpha=1, if_version=None)).json()["version"] == 1
        error = refused(await steered(http, conversation, alpha=2, if_version=0), 409)
        assert error["field"] == "if_version"
        assert error["version"] == 1
        assert (await steered(http, conversation, alpha=2, if_version=1)).json()["version"] == 2
        script.gate.set()
        seen = await all_of(http, f"/conversations/{conversation}/stream")
    assert [event.data["values"] for event in seen if event.name == "steered"][-1] == {"alpha": 2.0}


#: Bodies that steering refuses, and the field that is named.
BAD_STEERING = [
    ('{"alpha": NaN}', "alpha"),
    ('{"alpha": Infinity}', "alpha"),
    ('{"alpha": 1e999}', "alpha"),
    ('{"alpha": 1' + "0" * 400 + "}", "alpha"),
    ('{"alpha": 8.5}', "alpha"),
    ('{"alpha": "3"}', "alpha"),
    ('{"alpha": true}', "alpha"),
    ('{"alpha": null}', "alpha"),
    ('{"alpha": [1]}', "alpha"),
    ('{"alpha": {"value": 1}}', "alpha"),
    ("{}", "alpha"),
    ('{"beta": 1}', "alpha"),
    ('{"alpha": 1, "beta": 1}', "beta"),
    ('{"alpha": 1, "turn": "mine"}', "turn"),
    ('{"alpha": 1, "if_version": "0"}', "if_version"),
    ('{"alpha": 1, "if_version": 0.5}', "if_version"),
    ('{"alpha": 1, "if_version": true}', "if_version"),
    ('{"alpha": 1, "if_version": -1}', "if_version"),
    ("[1]", "body"),
    ("3", "body"),
    ("{", "body"),
    ("", "body"),
]


#: What cannot be opened (no path) or said, and the field that is named.
BAD_OPENING = [
    ("", '{"alpha": 9}', "alpha"),
    ("", '{"temperature": NaN}', "temperature"),
    ("", '{"temperature": -1}', "temperature"),
    ("", '{"max_tokens": 0}', "max_tokens"),
    ("", '{"seed": "x"}', "seed"),
    ("", '{"top_p": 0.5}', "top_p"),
    ("/messages", '{"text": ""}', "text"),
    ("/messages", '{"text": "  \\n "}', "text"),
    ("/messages", '{"text": 3}', "text"),
    ("/messages", '{"text": "\\ud800"}', "text"),
    ("/messages", '{"text": "x", "alpha": "y"}', "alpha"),
    ("/messages", '{"text": "' + "x" * 2000 + '"}', "text"),
    ("/messages", "{}", "text"),
]


JSON = {"Content-Type": "application/json"}


async def test_a_bad_value_is_refused_and_named(http: httpx.AsyncClient, engine: Callable[..., Any]) -> None:
    script = Gated()
    async with engine(script):
        conversation = await opened(http)
        await said(http, conversation, "x")
        for body, field in BAD_STEERING:
            response = await http.post(f"/conversations/{conversation}/steer", content=body, headers=JSON)
            error = refused(response, 422)
            assert (error["field"], bool(error["message"])) == (field, True), body
        script.gate.set()
        # Nothing of it holds.
        assert "steered" not in names(await all_of(http, f"/conversations/{conversation}/stream"))


async def test_what_cannot_be_opened_or_said_is_refused_and_named(
    http: httpx.AsyncClient, engine: Callable[..., Any]
) -> None:
    async with engine(short) as scripted:
        conversation = await opened(http)
        for path, body, field in BAD_OPENING:
            where = f"/conversations/{conversation}{path}" if path else "/conversations"
            assert refused(await http.post(where, content=body, headers=JSON), 422)["field"] == field, body
        assert not scripted.taken


async def test_an_answer_that_has_ended_is_not_bent(http: httpx.AsyncClient, engine: Callable[..., Any]) -> None:
    async with engine(short):
        conversation = await opened(http)
        assert "nothing has been said" in refused(await steered(http, conversation, alpha=1), 409)["message"]
        await all_of(http, (await said(http, conversation, "x"))["stream"])
        assert "ended" in refused(await steered(http, conversation, alpha=1), 409)["message"]


async def test_what_does_not_exist_is_not_found(http: httpx.AsyncClient) -> None:
    for name in ("0" * 32, "unknown", "chat.x", "%00", "a" * 300):
        where = f"/conversations/{name}"
        refused(await http.get(where), 404)
        refused(await http.get(f"{where}/stream"), 404)
        refused(await http.get(f"{where}/stream?answer=0"), 404)
        refused(await http.post(f"{where}/messages", json={"text": "x"}), 404)
        refused(await http.post(f"{where}/steer", json={"alpha": 1}), 404)
        refused(await http.post(f"{where}/cancel"), 404)


async def test_an_answer_that_was_not_asked_for_is_not_found(
    http: httpx.AsyncClient, engine: Callable[..., Any]
) -> None:
    async with engine(short):
        conversation = await opened(http)
        await said(http, conversation, "x")
        refused(await http.get(f"/conversations/{conversation}/stream?answer=1"), 404)
        error = refused(await http.get(f"/conversations/{conversation}/stream?answer=-1"), 422)
        assert error["field"] == "answer"


async def test_an_answer_is_cancelled_and_what_was_written_stays(
    http: httpx.AsyncClient, engine: Callable[..., Any]
) -> None:
    async with engine(Gated()):
        conversation = await opened(http)
        told = await said(http, conversation, "x")
        async with following(http, told["stream"]) as events:
            seen = await events.tokens(2)
            assert (await http.post(f"/conversations/{conversation}/cancel")).json() == {"cancelled": True}
            seen += await events.rest()
        assert seen[-1].data["status"] == "cancelled"
        assert "the user stopped it" in seen[-1].data["error"]["message"]
        assert (await http.post(f"/conversations/{conversation}/cancel")).json() == {"cancelled": False}
        turn = (await http.get(f"/conversations/{conversation}")).json()["turns"][0]
        assert (turn["reply"], turn["status"]) == (" 0 1", "cancelled")


async def test_a_lost_engine_shows_as_a_restart(http: httpx.AsyncClient, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save(" lost", {"meter": 0.0})
        await stage.bus.records.publish_waiting([(stage.trace, stage.attempt)], "the engine stopped answering")
        await stage.restart("the engine stopped answering")
        await stage.accept()
        await stage.save(" again", {"meter": 0.0})
        await stage.final()

    async with engine(script):
        conversation = await opened(http)
        told = await said(http, conversation, "x")
        seen = await all_of(http, told["stream"])
        assert names(seen) == ["accepted", "token", "waiting", "restarted", "accepted", "token", "final"]
        assert [event.data for event in seen[2:4]] == [{"reason": "the engine stopped answering"}] * 2
        # A reader that was there before the loss hears of it when it comes back.
        assert await all_of(http, told["stream"], seen[1].id) == seen[2:]
        assert len({event.id for event in seen}) == len(seen)
        turn = (await http.get(f"/conversations/{conversation}")).json()["turns"][0]
        assert turn["reply"] == " again"


async def test_an_engine_that_fails_says_why(http: httpx.AsyncClient, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.final("failed", Failure(type="EngineShutdown", message="the engine has gone", traceback="secret"))

    async with engine(script):
        seen = await all_of(http, (await said(http, await opened(http), "x"))["stream"])
    assert seen[-1].data["status"] == "failed"
    assert seen[-1].data["error"] == {"type": "EngineShutdown", "message": "the engine has gone"}


async def test_without_an_engine_one_is_told_to_come_back(http: httpx.AsyncClient) -> None:
    response = await http.post(f"/conversations/{await opened(http)}/messages", json={"text": "x"})
    assert "no engine" in refused(response, 503)["message"]
    assert int(response.headers["Retry-After"]) > 0


async def test_without_redis_one_is_told_to_come_back(settings: Settings) -> None:
    async with EmbeddedServer.start() as redis:
        patient = replace(settings, url=redis.url, patience_s=0.3)
        async with serving(patient) as http:
            async with BusEngine.running(redis.url, settings.prefix, short, engine_info(max_model_len=1024)):
                conversation = await opened(http)
                told = await said(http, conversation, "x")
                await all_of(http, told["stream"])
            await redis.aclose()
            for response in (
                await steered(http, conversation, alpha=1),
                await http.get(told["stream"]),
                await http.get(f"/conversations/{conversation}"),
                await http.post(f"/conversations/{conversation}/messages", json={"text": "y"}),
                await http.post(f"/conversations/{conversation}/cancel"),
            ):
                assert refused(response, 503)["message"]
                assert int(response.headers["Retry-After"]) > 0


def test_a_bus_that_is_overloaded_or_full_says_when_to_come_back() -> None:
    for error, seconds in ((tracewire.Overloaded("demo", 4096, 4096, 2.3), "3"), (tracewire.BusFull("no memory"), "5")):
        response = of_bus(error).response()
        assert response.status_code == 503
        assert response.headers["Retry-After"] == seconds


async def test_a_message_goes_on_from_what_was_said_before(http: httpx.AsyncClient, engine: Callable[..., Any]) -> None:
    async with engine(short) as scripted:
        conversation = await opened(http, system="Manual.")
        await all_of(http, (await said(http, conversation, "This module "))["stream"])
        second = await said(http, conversation, "It also")
        assert second["answer"] == 1
        await all_of(http, second["stream"])
        assert [one.invokes[0].prompt for one in scripted.taken] == [
            "Manual.\n\nThis module",
            "Manual.\n\nThis module 0 1 2\n\nIt also",
        ]
        history = (await http.get(f"/conversations/{conversation}")).json()
        assert [(turn["text"], turn["reply"], turn["status"]) for turn in history["turns"]] == [
            ("This module", " 0 1 2", "finished"),
            ("It also", " 0 1 2", "finished"),
        ]


async def test_the_oldest_turns_make_room(http: httpx.AsyncClient, engine: Callable[..., Any]) -> None:
    async with engine(short, max_model_len=60) as scripted:
        conversation = await opened(http, system="Head.", max_tokens=10)
        for letter in "abcd":
            await all_of(http, (await said(http, conversation, letter * 10))["stream"])
        prompts = [one.invokes[0].prompt for one in scripted.taken]
    assert prompts[-1] == "Head.\n\n" + "c" * 10 + " 0 1 2\n\n" + "d" * 10
    assert all(len(prompt.encode()) <= 60 - 10 for prompt in prompts)


async def test_one_answer_at_a_time(http: httpx.AsyncClient, engine: Callable[..., Any]) -> None:
    script = Gated()
    async with engine(script) as scripted:
        conversation = await opened(http)
        first = await said(http, conversation, "x", key="one")
        response = await http.post(f"/conversations/{conversation}/messages", json={"text": "y"})
        assert "still being written" in refused(response, 409)["message"]
        # The same message again is the same answer.
        assert await said(http, conversation, "x", key="one") == first
        script.gate.set()
        await all_of(http, first["stream"])
        assert (await said(http, conversation, "y"))["answer"] == 1
        await all_of(http, f"/conversations/{conversation}/stream")
        assert len(scripted.taken) == 2


async def test_any_process_serves_any_conversation(settings: Settings, engine: Callable[..., Any]) -> None:
    async with serving(settings) as here, serving(settings) as there, engine(bends) as scripted:
        conversation = await opened(here, system="Manual.", temperature=0.5)
        told = await said(here, conversation, "one")
        async with following(here, told["stream"]) as events:
            seen = await events.tokens(3)
            # The process that took the message is not the one that is asked from now on.
            assert (await steered(there, conversation, alpha=2)).json()["version"] == 1
            seen += await events.through("steered")
        seen += await all_of(there, told["stream"], seen[-1].id)
        assert seen == await all_of(here, told["stream"])
        told = await said(there, conversation, "two")
        assert told["answer"] == 1
        assert told["alpha"] == 2.0
        # The first one learns of the second answer from the bus.
        async with following(here, f"/conversations/{conversation}/stream") as events:
            seen = await events.tokens(3)
            assert (await steered(here, conversation, alpha=-1)).json()["version"] == 1
            assert text(seen + await events.rest()) == " 2 2 2 -1 -1 -1"
        assert (await here.get(f"/conversations/{conversation}")).json() == (
            await there.get(f"/conversations/{conversation}")
        ).json()
        assert scripted.taken[1].invokes[0].prompt == "Manual.\n\none 0 0 0 2 2 2\n\ntwo"
        assert scripted.taken[1].invokes[0].sampling["temperature"] == 0.5


async def test_an_answer_outlives_the_process_that_asked_for_it(settings: Settings, engine: Callable[..., Any]) -> None:
    script = Gated()
    async with engine(script):
        async with (
            server(settings) as (stopping, address),
            httpx.AsyncClient(base_url=address, timeout=PATIENCE) as http,
        ):
            conversation = await opened(http)
            told = await said(http, conversation, "x")
            async with following(http, told["stream"]) as events:
                seen = await events.through("token")
                # It does not wait for the answer, and ends the stream as it should be ended.
                stopping.should_exit = True
                seen += await events.rest()
                assert "final" not in names(seen)
        script.gate.set()
        async with serving(settings) as http:
            seen += await all_of(http, told["stream"], seen[-1].id)
            assert text(seen) == " 0 1 2 3"
            turns = (await http.get(f"/conversations/{conversation}")).json()["turns"]
            assert turns[0]["reply"] == " 0 1 2 3"
