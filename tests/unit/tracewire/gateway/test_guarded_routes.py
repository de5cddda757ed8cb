"""What a route does before it reads a body: the key's right, and the number of values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.support.bus_engine import tiny
from tests.support.gateways import Served
from tests.support.until import until
from tracewire.gateway.guarded_routes import count_values
from tracewire.gateway.keys import entry_of
from tracewire.gateway.problems import Problem
from tracewire_bus.domain.limits import MAX_CONTAINERS, MAX_VALUES

Engine = Callable[..., Any]


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/traces", "/traces/t/steer", "/edits/m/e"]
)
async def test_a_key_without_the_right_is_refused_before_its_body_is_read(
    gateway: Callable[..., Any], tmp_path: Path, path: str
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry_of("reader-key", "reader", frozenset({"read"}), ""))
    async with gateway(keys=file) as served:
        host, _, port = served.url.removeprefix("http://").partition(":")
        method = "PUT" if path.startswith("/edits") else "POST"
        head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer reader-key\r\n"
        head += "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(head.encode())
            # The body never comes.
            with anyio.fail_after(30):
                assert (await stream.receive()).startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(
    "many", [b"[]," * MAX_CONTAINERS + b"[]", b"0," * MAX_VALUES + b"0", b'"",' * MAX_VALUES + b"0"]
)
@pytest.mark.parametrize(("path", "status"), [("/v1/completions", 400), ("/traces", 422)])
async def test_a_body_of_too_many_values_is_not_decoded(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, status: int, many: bytes
) -> None:
    monkeypatch.setattr("tracewire.gateway.guarded_routes.json", None)
    body = b'{"model": "tiny", "prompt": "x", "metadata": {"a": [' + many + b"]}}"
    async with served.http() as http:
        answer = await http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    assert "dtype" in answer.text
    assert "too_many_values" in answer.text


async def test_a_client_that_leaves_amid_its_body_is_no_defect(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    host, _, port = served.url.removeprefix("http://").partition(":")
    head = "POST /traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    async with await anyio.connect_tcp(host, int(port)) as stream:
        await stream.send(head.encode() + b"{")
        await until(lambda: served.gateway.running)
    await until(lambda: not served.gateway.running)
    assert [one.message for one in caplog.records if one.levelname == "ERROR"] == []


async def test_a_large_text_is_one_value(engine: Engine, served: Served) -> None:
    text = '[{\\"' * 50_000
    async with engine(tiny) as scripted, served.http() as http:
        answer = await http.post("/v1/completions", json={"model": "tiny", "prompt": text})
        assert answer.status_code == 200
    assert scripted.taken[0].invokes[0].prompt == text


async def test_json_in_another_encoding_is_refused(served: Served) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x"}).encode("utf-16")
    async with served.http() as http:
        answer = await http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400


@pytest.mark.parametrize(
    "text",
    [
        "[" + "[1, 2], " * (MAX_CONTAINERS - 2) + "[]]",
        json.dumps(["[" * MAX_VALUES]),
        json.dumps(['\\"[' * MAX_VALUES, "\\", "\\\\", '"', "[]"]),
        "0",
        "",
        '"',
    ],
)
def test_what_is_counted(text: str) -> None:
    count_values(text.encode())


@pytest.mark.parametrize(
    "text",
    [
        "[" * (MAX_CONTAINERS + 1),
        json.dumps([["\\"]] * MAX_CONTAINERS),
        json.dumps([["a"] * 1000] * (MAX_VALUES // 1000 + 1)),
        json.dumps({"a": [{str(one): one for one in range(MAX_VALUES // 2 + 1)}]}),
    ],
)
def test_what_is_too_many(text: str) -> None:
    with pytest.raises(Problem, match="more than 500,000 values"):
        count_values(text.encode())
