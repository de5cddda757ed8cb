"""The HTTP server beside an adapter: where it is bound, and how it ends. No engine: a small app in place of vLLM's."""

from __future__ import annotations

import socket
from typing import Any

import anyio
import httpx
import pytest
import uvicorn

from tracewire_engine import openai_api
from tracewire_engine.openai_api import HttpApi, bound


@pytest.mark.parametrize("address", ["", "8000", ":8000", "localhost:", "localhost:http", "localhost:70000"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        bound(address)


def test_an_address_that_is_taken_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError):
        bound(f"127.0.0.1:{taken.getsockname()[1]}")


class Slow:
    """An app that answers in two parts, the second when it is let."""

    def __init__(self) -> None:
        self.begun, self.go_on = anyio.Event(), anyio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        self.begun.set()
        await self.go_on.wait()
        await send({"type": "http.response.body", "body": b"second"})


def serving(app: Any) -> HttpApi:
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
    return HttpApi(openai_api._Server(config), bound("127.0.0.1:0"))


async def fetched(api: HttpApi, app: Slow, answers: list[str]) -> None:
    async with httpx.AsyncClient(timeout=30) as http:
        answers.append((await http.get(api.url)).text)


async def started(api: HttpApi) -> None:
    while not api._server.started:
        await anyio.lowlevel.checkpoint()


async def test_what_is_being_answered_is_answered_and_nothing_new_is_taken() -> None:
    app, answers = Slow(), []
    api = serving(app)
    async with anyio.create_task_group() as group:
        group.start_soon(api.run)
        await started(api)
        group.start_soon(fetched, api, app, answers)
        await app.begun.wait()
        api.stop()
        with anyio.fail_after(30):
            while True:
                try:
                    async with httpx.AsyncClient() as http, http.stream("GET", api.url):
                        await anyio.lowlevel.checkpoint()
                except httpx.ConnectError:
                    break
                except (httpx.RemoteProtocolError, httpx.ReadError):
                    pass  # connected while the server still listened, asked when it no longer read: closed, not taken
        app.go_on.set()
        await api.drop()
    assert answers == ["first second"]
    assert api.url.startswith("http://127.0.0.1:"), "known after its end, too"


async def test_what_does_not_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_api, "_END_S", 0.5)
    app, answers = Slow(), []
    api = serving(app)
    async with anyio.create_task_group() as group:
        group.start_soon(api.run)
        await started(api)
        group.start_soon(fetched, api, app, answers)
        await app.begun.wait()
        with anyio.fail_after(30):
            await api.drop()
            await api._over.wait()
        group.cancel_scope.cancel()
    app.go_on.set()
    assert answers == []
