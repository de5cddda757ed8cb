"""WebSockets of browsers: keys as subprotocols, and the pages that may open them."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.support.gateways import Served
from tracewire.gateway.browser_sockets import (
    authorization_of,
    check_host,
    check_origin,
    is_loopback,
    subprotocol_of,
)
from tracewire.gateway.keys import entry_of
from tracewire.gateway.problems import Problem


def offered(key: str) -> list[str]:
    """The subprotocols of a page with this key."""
    return ["tracewire", f"tracewire.key.{base64.urlsafe_b64encode(key.encode()).decode().rstrip('=')}"]


def scope(*subprotocols: str, kind: str = "websocket", **headers: str) -> dict[str, Any]:
    """A WebSocket as the server describes it."""
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": kind, "headers": pairs, "subprotocols": list(subprotocols)}


@pytest.mark.parametrize("key", ["k", "tw-a_b", "schlüssel?>", "four"])
def test_a_key_is_read_from_the_subprotocol(key: str) -> None:
    assert authorization_of(scope(*offered(key))) == f"Bearer {key}"
    # A header goes before it.
    assert authorization_of(scope(*offered(key), authorization="Bearer other")) == "Bearer other"
    assert authorization_of(scope(*offered(key), kind="http")) is None


@pytest.mark.parametrize("text", ["tracewire.key.", "tracewire.key.a", "tracewire.key.\u00ff", "tracewire.key._w"])
def test_what_is_no_key_is_an_unknown_one(text: str) -> None:
    assert authorization_of(scope(text)) == "Bearer "


def test_the_subprotocol_is_chosen_if_it_is_offered() -> None:
    assert subprotocol_of(scope(*offered("k"))) == "tracewire"
    assert subprotocol_of(scope("other")) is None


@pytest.mark.parametrize("origin", ["http://gateway:80", "https://gateway:80", "https://friend.example"])
def test_pages_of_the_gateway_and_allowed_ones_may_open_a_socket(origin: str) -> None:
    check_origin(scope(host="gateway:80", origin=origin), ["https://friend.example"])


@pytest.mark.parametrize(
    "origin", ["http://gateway:81", "https://evil.example", "null", "http://gateway:80.evil.example"]
)
def test_other_pages_may_not(origin: str) -> None:
    with pytest.raises(Problem, match="may not do this") as raised:
        check_origin(scope(host="gateway:80", origin=origin), ["https://friend.example"])
    assert raised.value.status == 403
    check_origin(scope(host="gateway:80", origin=origin), ["*"])
    check_origin(scope(host="gateway:80"), [])


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *(("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True)),
        *(("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("", False), ("example.org", False)),
    ],
)
def test_what_is_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8080", "127.0.0.1:8080", "[::1]:80", "a.localhost:1", "App.example", "LOCALHOST."]
)
def test_names_of_this_machine_and_of_allowed_origins_may_be_asked_for(host: str) -> None:
    check_host({"headers": [(b"host", host.encode())]}, ["https://app.example"])
    check_host({"headers": []}, [])


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "10.0.0.1", "localhost.evil", "[::1", ""])
def test_other_names_may_not(host: str) -> None:
    scope = {"headers": [(b"host", host.encode())]}
    with pytest.raises(Problem, match="--cors"):
        check_host(scope, ["https://app.example"])
    check_host(scope, ["*"])


async def test_a_page_whose_name_points_here_reads_and_changes_nothing(
    served: Served, gateway: Callable[..., Any], tmp_path: Path
) -> None:
    evil = {"Host": "evil.example:8080", "Origin": "http://evil.example:8080"}
    async with served.http() as http:
        for answer in (await http.get("/traces", headers=evil), await http.post("/traces/t/pause", headers=evil)):
            assert (answer.status_code, answer.json()["field"]) == (403, "Host")
    there = {"host": "127.0.0.1", "port": int(served.url.rpartition(":")[2]), "origin": evil["Origin"]}
    with pytest.raises(InvalidStatus) as refused:
        await connect("ws://evil.example:8080/ws", proxy=None, **there)
    assert refused.value.response.status_code == 403
    # With keys, any name will do: a page has none.
    file = tmp_path / "keys.toml"
    file.write_text(entry_of("k", "alice", frozenset({"read"}), ""))
    async with gateway(keys=file) as guarded, guarded.http("k") as http:
        assert (await http.get("/traces", headers={"Host": "api.example"})).status_code == 200


async def test_a_page_of_another_host_opens_no_socket_here(served: Served) -> None:
    for path in ("/ws", "/traces/x/ws"):
        with pytest.raises(InvalidStatus):
            async with connect(served.url.replace("http", "ws") + path, proxy=None, origin="https://evil.example"):
                pass


async def test_a_page_opens_a_socket_with_its_key(gateway: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry_of("k", "k", frozenset({"read"}), ""))
    async with gateway(keys=file) as served:
        address = served.url.replace("http", "ws") + "/ws"
        async with connect(address, proxy=None, subprotocols=offered("k"), origin=served.url) as connection:
            assert connection.subprotocol == "tracewire"
        with pytest.raises(InvalidStatus):
            async with connect(address, proxy=None, subprotocols=offered("other")):
                pass
