"""The application's answers to what no route has, and to its own defects."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.support.gateways import Served


@pytest.mark.parametrize(
    ("path", "allowed"),
    [("/edits/m/e", "DELETE, GET, PUT"), ("/traces", "GET, POST"), ("/v1/models", "GET"), ("/traces/t/steer", "POST")],
)
async def test_a_method_that_a_path_does_not_have(served: Served, path: str, allowed: str) -> None:
    async with served.http() as http:
        answer = await http.patch(path)
    assert (answer.status_code, answer.headers["Allow"]) == (405, allowed)
    assert f"there is no PATCH {path}: this path takes {allowed}" in answer.text


async def test_what_no_route_has(served: Served) -> None:
    async with served.http() as http:
        plain, shaped = await http.get("/nowhere"), await http.get("/v1/nowhere")
    assert (plain.status_code, plain.json()["type"]) == (404, "urn:tracewire:unknown_route")
    assert (shaped.status_code, shaped.json()["error"]["code"]) == (404, "unknown_route")
    assert plain.json()["detail"].endswith(": /openapi.json lists the routes")


@pytest.mark.parametrize("path", ["/v1/completions", "/traces"])
async def test_a_body_without_its_type_is_told_which_is_expected(served: Served, path: str) -> None:
    """As `curl -d` sends it."""
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    async with served.http() as http:
        found = (await http.post(path, content=b'{"model": "tiny", "prompt": "x"}', headers=headers)).json()
    assert "Content-Type: application/json" in found.get("detail", "") + found.get("error", {}).get("message", "")
    assert found.get("field", found.get("error", {}).get("param")) == "Content-Type"


async def test_a_defect_shows_nothing_of_itself(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(served.gateway.client.engines, "list", broken)
    with caplog.at_level(logging.CRITICAL):
        async with served.http() as http:
            answer = await http.get("/engines")
    assert (answer.status_code, answer.json()["type"]) == (500, "urn:tracewire:internal_error")
    assert "secret" not in answer.text


async def test_an_answer_says_no_server(served: Served) -> None:
    async with served.http() as http:
        assert "Server" not in (await http.get("/healthz")).headers
