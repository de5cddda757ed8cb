"""Routes of an allow-list, bodies up to a size, and so many requests at once, before an app that answers everything."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
import pytest

from tracewire_engine.adapter.http_fence import ROUTES, Fence, is_public


class App:
    """Reads a body and answers with its length; at `/v1/completions` it first waits."""

    def __init__(self) -> None:
        self.begun, self.go_on = anyio.Event(), anyio.Event()
        self.asked: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope["path"])
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        if scope["path"] == "/v1/completions":
            self.begun.set()
            await self.go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % size})


def fenced(app: App, reached: list[str] | None = None, **options: Any) -> httpx.AsyncClient:
    given = {"routes": ROUTES, "body_bytes": 100, "requests": 1, "reached": (reached or []).append, **options}
    transport = httpx.ASGITransport(Fence(app, **given))
    return httpx.AsyncClient(transport=transport, base_url="http://engine")


#: Routes of vLLM's that change the engine, execute what they are sent, or show other clients' requests.
CLOSED = [
    *("/pause", "/resume", "/abort_requests", "/update_weights", "/init_weight_transfer_engine", "/collective_rpc"),
    *("/sleep", "/wake_up", "/reset_prefix_cache", "/server_info", "/start_profile", "/v1/load_lora_adapter"),
    *("/scale_elastic_ep", "/v1/unload_lora_adapter", "/inference/v1/generate", "/docs", "/openapi.json", "/"),
    *("/fault_tolerance/apply", "//pause", "/v1/completions/", "/V1/COMPLETIONS", "/v1/modelsx"),
]


@pytest.mark.parametrize("path", CLOSED)
async def test_a_route_that_is_not_listed_is_refused(path: str) -> None:
    app = App()
    async with fenced(app) as http:
        for method in ("GET", "POST", "OPTIONS"):
            answer = await http.request(method, f"http://engine{path}")
            assert (answer.status_code, app.asked) == (404, [])
            assert "--openai-route" in answer.json()["error"]["message"]


async def test_an_operator_allows_a_route() -> None:
    app = App()
    async with fenced(app, routes=(*ROUTES, "/pause", "/x/*")) as http:
        for path in ("/pause", "/x/y/z", "/v1/models/demo", "/health"):
            assert (await http.post(path)).status_code == 200
        assert (await http.post("/x")).status_code == 404


async def test_a_body_has_a_size_whether_it_says_so_or_not() -> None:
    app, reached = App(), []

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b"x" * 10

    async with fenced(app, reached) as http:
        app.go_on.set()
        assert (await http.post("/v1/completions", content=b"x" * 100)).text == "100"
        for content in (b"x" * 101, chunks()):
            answer = await http.post("/v1/completions", content=content)
            assert answer.status_code == 413
            assert "at most 100 bytes (--limit http-body-bytes)" in answer.json()["error"]["message"]
    assert len(app.asked) == 2


async def test_so_many_requests_run_at_once() -> None:
    app, reached = App(), []
    async with fenced(app, reached=reached) as http, anyio.create_task_group() as group:
        group.start_soon(http.post, "/v1/completions")
        await app.begun.wait()
        answer = await http.post("/tokenize")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        # Whether it works is to be asked all the same.
        assert (await http.get("/health")).status_code == 200
        app.go_on.set()
    async with fenced(app) as http:
        assert (await http.post("/tokenize")).status_code == 200


async def test_a_websocket_is_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    fence = Fence(App(), routes=ROUTES, body_bytes=1, requests=1)
    for path in ("/v1/realtime", "/v1/completions"):
        await fence({"type": "websocket", "path": path, "headers": []}, lambda: None, send)  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == ["websocket.close"] * 2


@pytest.mark.parametrize(
    ("host", "public"),
    [
        ("127.0.0.1", False),
        ("127.1.2.3", False),
        ("::1", False),
        ("[::1]", False),
        ("localhost", False),
        ("0.0.0.0", True),
        ("::", True),
        ("10.0.0.1", True),
        ("engine.internal", True),
    ],
)
def test_which_addresses_other_hosts_reach(host: str, public: bool) -> None:
    assert is_public(host) is public
