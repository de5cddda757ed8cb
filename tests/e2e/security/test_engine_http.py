"""The engine's own HTTP API (`--openai`) with vLLM's real app: what a client cannot do."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.engine_process import EngineProcess
from tests.unit.tracewire_engine.adapter.test_http_fence import CLOSED
from tracewire import Client, Model
from tracewire_engine.adapter.http_server import parsed
from tracewire_engine.launch import cli


@pytest.fixture
async def api(engine: EngineProcess, client: Client, model: Model) -> Any:
    """A client of the shared engine's API."""
    (info,) = await client._session.open_bus().registry.list()
    async with httpx.AsyncClient(base_url=info.openai.removesuffix("/v1"), timeout=60) as http:
        yield http


async def test_routes_that_change_the_engine_are_closed(api: httpx.AsyncClient) -> None:
    for path in CLOSED:
        for method in ("GET", "POST"):
            answer = await api.request(method, path, json={} if method == "POST" else None)
            assert answer.status_code == 404, path
    assert (await api.get("/v1/models")).status_code == 200


async def test_no_request_goes_before_others_or_asks_for_too_much(api: httpx.AsyncClient, client: Client) -> None:
    body: dict[str, Any] = {"model": "demo", "prompt": "x", "max_tokens": 1}
    assert (await api.post("/v1/completions", json=body)).status_code == 200
    for more, says in (({"priority": -5}, "priority"), ({"n": 300}, "at most 256 choices")):
        answer = await api.post("/v1/completions", json=body | more)
        assert answer.status_code == 400, answer.text
        assert says in answer.text
    answer = await api.post("/v1/completions", content=b" " * ((32 << 20) + 1))
    assert answer.status_code == 413


@pytest.mark.parametrize("address", ["0.0.0.0:8000", "[::]:8000", "10.0.0.1:80", "engine.internal:8000"])
def test_a_public_address_needs_a_key(address: str) -> None:
    with pytest.raises(ValueError, match="can be reached from other hosts and needs a key"):
        parsed([], None, address)
    assert parsed([], "key", address).api_key == ["key"]
    assert parsed(["--api-key=own"], None, address).api_key == ["own"]
    assert parsed([], None, "127.0.0.1:8000").api_key is None


def test_development_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    with pytest.raises(ValueError, match="VLLM_SERVER_DEV_MODE opens routes that execute whatever clients send"):
        parsed([], "key", "127.0.0.1:8000")


def _arguments(*options: str) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    found: Namespace = parser.parse_args(["--model", str(cli.demo_model()), *options])
    found.drain, found.model_runner, found.tap = 1.0, "first", []
    return cli._vllm_arguments(found)


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/latest", "http://127.0.0.1:6379/", "https://example.org/a.png"]
)
def test_an_engine_fetches_from_no_host_that_is_not_allowed(url: str, tmp_path: Path) -> None:
    from vllm.multimodal.media import MediaConnector
    from vllm.multimodal.media.image import ImageMediaIO

    for options in ((), ("--allowed-media-domains", "images.internal")):
        connector = MediaConnector(allowed_media_domains=_arguments(*options).allowed_media_domains)
        with pytest.raises(ValueError, match="allowed domains"):
            connector.load_from_url(url, ImageMediaIO())
    assert _arguments("--allowed-media-domains", "images.internal").allowed_media_domains == ["images.internal"]
    # Nor does it read files.
    with pytest.raises((ValueError, RuntimeError), match="allowed-local-media-path"):
        connector.load_from_url(f"file://{tmp_path}/x.png", ImageMediaIO())
