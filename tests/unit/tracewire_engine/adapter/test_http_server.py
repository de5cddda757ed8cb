"""The HTTP server beside an adapter: where it is bound, and how it ends. No engine: a small app in place of vLLM's."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import uvicorn

from tests.support.redis.certificates import Certificates
from tracewire_engine.adapter import http_server as openai_api
from tracewire_engine.adapter.http_server import Guarded, HttpApi, bound, parsed


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


async def _answers(scope: Any, receive: Any, send: Any) -> None:
    """An app that answers whatever it is asked, its life's events too."""
    if scope["type"] == "lifespan":
        for what in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{what}.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"done"})


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/completions", "/invocations", "/tokenize", "/generative_scoring", "/scale_elastic_ep", "/metrics"),
        *("/docs", "/openapi.json", "/load", "/version", "/", "/health/", "/healthy", "/x/health", "/v2/whatever"),
    ],
)
async def test_every_route_asks_for_an_api_key(path: str) -> None:
    """Also those that a version of vLLM adds, of which nobody here knows."""
    guarded = httpx.ASGITransport(Guarded(_answers, ["sesame", "other"], "/root"))
    async with httpx.AsyncClient(transport=guarded, base_url="http://host") as http:
        for wrong in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sesame"}, {"x-api-key": "sesame"}):
            refused = await http.get(path, headers=wrong)
            assert refused.status_code == 401
            assert refused.json()["error"]["message"] == "an API key is needed"
        for key in ("sesame", "other"):
            assert (await http.get(path, headers={"authorization": f"Bearer {key}"})).text == "done"


async def test_whether_it_lives_anybody_may_ask() -> None:
    guarded = httpx.ASGITransport(Guarded(_answers, ["sesame"], "/root"))
    async with httpx.AsyncClient(transport=guarded, base_url="http://host") as http:
        for path in ("/health", "/ping", "/root/health"):
            assert (await http.get(path)).status_code == 200
        assert (await http.options("/v1/completions")).status_code == 200


async def test_a_websocket_without_a_key_is_refused() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    await Guarded(_answers, ["sesame"])(scope, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_it_serves_tls_and_asks_for_the_key(tmp_path: Path) -> None:
    made = Certificates.make(tmp_path)
    options = [f"--ssl-certfile={made.certificate}", f"--ssl-keyfile={made.key}"]
    api = HttpApi.over(_answers, bound("127.0.0.1:0"), parsed(options, api_key="sesame"))
    assert api.url.startswith("https://")
    async with anyio.create_task_group() as group:
        group.start_soon(api.run)
        with anyio.fail_after(30):
            await started(api)
            trusted = ssl.create_default_context(cafile=str(made.authority))
            async with httpx.AsyncClient(verify=trusted, headers={"authorization": "Bearer sesame"}) as http:
                assert (await http.get(f"{api.url}/models")).text == "done"
                assert (await http.get(f"{api.url}/models", headers={"authorization": ""})).status_code == 401
            async with httpx.AsyncClient() as plain:
                with pytest.raises(httpx.HTTPError):
                    await plain.get(api.url.replace("https", "http"))
        await api.drop()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ssl-certfile=CERT"], "TLS needs both"),
        (["--ssl-keyfile=KEY"], "TLS needs both"),
        (["--ssl-ca-certs=CERT"], "need --ssl-certfile"),
        (["--ssl-certfile=CERT", "--ssl-keyfile=nowhere"], "No such file"),
        (["--ssl-certfile=CERT", "--ssl-keyfile=CERT"], "PEM"),
        (["--ssl-certfile=CERT", "--ssl-keyfile=KEY", "--enable-ssl-refresh"], "enable-ssl-refresh is not supported"),
        (["--host=0.0.0.0"], "host is not supported: the address is that of --openai"),
        (["--port=1"], "port is not supported"),
    ],
)
def test_options_that_would_be_ignored_are_refused_at_once(tmp_path: Path, options: list[str], message: str) -> None:
    made = Certificates.make(tmp_path)
    options = [one.replace("CERT", str(made.certificate)).replace("KEY", str(made.key)) for one in options]
    with pytest.raises((ValueError, OSError), match=message):
        parsed(options)


def test_routes_for_developers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them hands whatever it is sent to the workers, which would unpickle it."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    with pytest.raises(ValueError, match="VLLM_SERVER_DEV_MODE"):
        parsed([])


def test_an_option_counts_before_the_environment() -> None:
    assert parsed(["--api-key=one"], api_key="two").api_key == ["one"]
    assert parsed([], api_key="two").api_key == ["two"]
    assert parsed([]).api_key is None
