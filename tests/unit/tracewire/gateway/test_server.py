"""Where a gateway binds, its TLS, and how it stops."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import httpx
import openai
import pytest
from websockets.protocol import CLOSING
from websockets.server import ServerProtocol

from tests.support.bus_engine import steered_once
from tests.support.redis.certificates import Certificates
from tests.support.sse import events
from tests.support.until import until
from tracewire import Client
from tracewire.gateway.keys import RIGHTS, InvalidKeys, entry_of
from tracewire.gateway.server import Binding, Server, _Socket
from tracewire.gateway.settings import Settings

Engine = Callable[..., Any]


def test_only_loopback_is_served_without_keys(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no keys"):
        Server(Settings(url="redis://localhost"), Binding(host="0.0.0.0", port=0))
    file = tmp_path / "keys.toml"
    with pytest.raises(FileNotFoundError):
        Server(Settings(url="redis://localhost", keys=file), Binding(host="0.0.0.0", port=0))
    file.write_text("")
    with pytest.raises(InvalidKeys):
        Server(Settings(url="redis://localhost", keys=file), Binding(host="0.0.0.0", port=0))
    file.write_text(entry_of("k", "root", RIGHTS, ""))
    server = Server(Settings(url="redis://localhost", keys=file), Binding(host="0.0.0.0", port=0))
    server._socket.close()


async def test_small_answers_leave_at_once() -> None:
    """Also on asyncio's own event loop, which lets the kernel hold them back unless the socket names its protocol."""
    connected = anyio.Event()
    server = Server(Settings(url="redis://localhost"), Binding(port=0))
    delays: list[int] = []

    def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken: socket.socket = writer.get_extra_info("socket")
        delays.append(taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        connected.set()

    async with await asyncio.start_server(take, sock=server._socket):
        _, writer = await asyncio.open_connection(*server._socket.getsockname())
        await connected.wait()
        writer.close()
    assert delays == [1]


@pytest.mark.parametrize("given", [{"certificate": "c"}, {"certificate_key": "k"}, {"client_ca": "a"}])
def test_tls_options_come_together(given: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="tls"):
        Server(Settings(url="redis://localhost"), Binding(port=0, **{name: Path(one) for name, one in given.items()}))


LIVE = {"live": {"alpha": 0.0}}


async def test_requests_that_run_may_end_and_no_new_ones_begin(
    engine: Engine, gateway: Callable[..., Any], client: Client
) -> None:
    async with engine(steered_once), gateway(drain_s=60.0) as served, served.openai() as api, served.http() as http:
        assert (await http.get("/readyz")).json() == {"status": "ok", "models": ["tiny"]}
        stream = await api.completions.create(model="tiny", prompt="x", stream=True, extra_body={"tracewire": LIVE})
        trace_id = (await anext(stream)).tracewire["trace_id"]
        served.stop()
        await until(lambda: served.gateway.closing)
        ready = await http.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (503, "closing")
        assert (await http.get("/healthz")).status_code == 200
        refused = await http.get("/traces")
        assert (refused.status_code, refused.json()["type"]) == (503, "urn:tracewire:gateway_closing")
        assert "Retry-After" in refused.headers
        await client.steer(trace_id, alpha=1.0)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "one two"


async def test_a_second_interrupt_waits_for_nothing(engine: Engine, gateway: Callable[..., Any]) -> None:
    async with engine(steered_once), gateway(drain_s=600.0) as served, served.openai() as api:
        stream = await api.completions.create(model="tiny", prompt="x", stream=True, extra_body={"tracewire": LIVE})
        await anext(stream)
        served.server.handle_exit(signal.SIGINT, None)
        await until(lambda: served.gateway.closing)
        served.server.handle_exit(signal.SIGINT, None)
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "gateway_closing"


async def test_a_stream_ends_with_its_place_and_goes_on_at_another_gateway(
    engine: Engine, gateway: Callable[..., Any], client: Client
) -> None:
    async with engine(steered_once), gateway() as other:
        async with gateway() as served, served.openai() as api:
            attached, detached = [
                await api.completions.create(
                    model="tiny", prompt="x", stream=True, extra_body={"tracewire": {**LIVE, "detach": detach}}
                )
                for detach in (False, True)
            ]
            ids = []
            for stream in (attached, detached):
                ids.append((await anext(stream)).tracewire["trace_id"])
                assert (await anext(stream)).choices[0].text == "one"
            async with served.http() as http, http.stream("GET", f"/traces/{ids[1]}/events") as followed:
                feed = events(followed)
                while (sent := await anext(feed)).name != "output":
                    pass
                served.stop()
                assert [event async for event in feed] == []
            places = []
            for stream in (attached, detached):
                with pytest.raises(openai.APIError) as caught:
                    await anext(stream)
                assert caught.value.code == "gateway_closing"
                places.append(caught.value.body["tracewire"]["position"])
        await client.steer(ids[1], alpha=1.0)
        async with other.http() as http:
            for last in (places[1], sent.id):
                headers = {"Last-Event-ID": last}
                async with http.stream("GET", f"/traces/{ids[1]}/events", headers=headers) as followed:
                    rest = [event async for event in events(followed)]
                assert [event.name for event in rest] == ["steered", "output", "final"]
                assert rest[1].data["text"] == " two"
        # Nobody holds the attached one any more.
        assert await client.subscribe(ids[0]).until_done() == "cancelled"


async def test_tls(engine: Engine, redis_url: str, prefix: str, tmp_path: Path) -> None:
    made = Certificates.make(tmp_path)
    binding = Binding(port=0, certificate=Path(made.certificate), certificate_key=Path(made.key))
    server = Server(Settings(url=redis_url, prefix=prefix, drain_s=0.0), binding)
    assert server.url.startswith("https://")
    context = ssl.create_default_context(cafile=str(made.authority))
    async with anyio.create_task_group() as group:
        group.start_soon(server._serve, [server._socket])
        await until(lambda: server.started)
        async with httpx.AsyncClient(verify=context) as http:
            assert (await http.get(f"{server.url}/healthz")).status_code == 200
        server.should_exit = True


def test_a_socket_that_its_client_closes_does_not_keep_the_server_from_stopping() -> None:
    socket, transport = object.__new__(_Socket), mock.Mock()
    vars(socket).update(transport=transport, close_sent=False, handshake_complete=True, queue=asyncio.Queue())
    vars(socket).update(stop_keepalive=mock.Mock(), conn=ServerProtocol(state=CLOSING))
    socket.shutdown()
    transport.close.assert_called_once()
