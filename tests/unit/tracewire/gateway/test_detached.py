"""Detached traces count against the limits of their keys."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import anyio
import httpx
import pytest

from tests.support.bus_engine import Stage
from tests.support.gateways import Served
from tests.support.until import until
from tracewire import Output, TracewireError
from tracewire.gateway.detached import DetachedTokens
from tracewire.gateway.keys import Caller, entry_of

Engine = Callable[..., Any]
USUAL = frozenset({"read", "steer", "submit"})
ASKED = {"model": "tiny", "prompt": "x"}


@pytest.fixture
async def limited(gateway: Callable[..., Any], tmp_path: Path) -> AsyncIterator[Served]:
    """A gateway with a key of ten tokens a minute."""
    file = tmp_path / "keys.toml"
    file.write_text(entry_of("key", "alice", USUAL, "") + "tokens_per_minute = 10\n")
    async with gateway(keys=file) as served:
        yield served


@pytest.fixture
async def http(limited: Served) -> AsyncIterator[httpx.AsyncClient]:
    """A client with that key."""
    async with limited.http("key") as http:
        yield http


async def refused(http: httpx.AsyncClient) -> bool:
    """Whether the key has reached its limit."""
    answer = await http.get("/traces")
    if answer.status_code == 200:
        return False
    assert (answer.status_code, answer.json()["detail"]) == (429, "the key 'alice' has used its 10 tokens a minute")
    assert int(answer.headers["Retry-After"]) > 1
    return True


async def twenty(stage: Stage) -> None:
    """Twenty tokens."""
    await stage.accept()
    for _ in range(20):
        await stage.output("x")
    await stage.final()


async def test_a_submitted_trace_counts_as_its_tokens_come(
    engine: Engine, limited: Served, http: httpx.AsyncClient
) -> None:
    async with engine(twenty):
        assert (await http.post("/traces", json=ASKED)).status_code == 202

        async def reached() -> bool:
            return await refused(http)

        await until(reached)
        await until(lambda: not len(limited.gateway.detached))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_trace_that_its_client_has_left_counts_on(
    engine: Engine, limited: Served, http: httpx.AsyncClient, stream: bool
) -> None:
    go_on = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("one")
        await go_on.wait()
        for _ in range(19):
            await stage.output("x")
        await stage.final()

    bucket = limited.gateway.limits
    async with engine(script) as scripted:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:

                async def ask() -> None:
                    body = {**ASKED, "stream": stream, "tracewire": {"detach": True}}
                    async with http.stream("POST", "/v1/completions", json=body) as answer:
                        async for _ in answer.aiter_bytes():
                            pass

                group.start_soon(ask)
                # The first token is read by the request itself.
                await until(lambda: ("alice", "tokens") in bucket._buckets)
                await until(lambda: scripted.taken and bucket._buckets["alice", "tokens"]._level < 10)
                scope.cancel()
        await until(lambda: len(limited.gateway.detached) == 1)
        go_on.set()
        await until(lambda: not len(limited.gateway.detached))
        # Each token counted once. A minute brings ten.
        assert -10 <= bucket._buckets["alice", "tokens"]._level < -9
        assert await refused(http)


async def test_a_trace_that_is_submitted_again_counts_once(
    engine: Engine, limited: Served, http: httpx.AsyncClient
) -> None:
    async with engine(twenty):
        await http.post("/traces", json={**ASKED, "trace_id": "mine"})
        await until(lambda: not len(limited.gateway.detached))
        limited.gateway.detached.count(Caller("alice", tokens_per_minute=10), "mine")
        assert not len(limited.gateway.detached)


async def test_a_trace_that_is_submitted_again_after_a_failure_counts(
    engine: Engine, limited: Served, http: httpx.AsyncClient
) -> None:
    mine = {**ASKED, "trace_id": "mine"}
    assert (await http.post("/traces", json=mine)).status_code == 404
    await until(lambda: not len(limited.gateway.detached))
    async with engine(twenty):
        assert (await http.post("/traces", json=mine)).status_code == 202
        await until(lambda: not len(limited.gateway.detached))
        assert await refused(http)


async def test_a_trace_whose_events_break_off_is_counted_from_there(limited: Served) -> None:
    """Each token counts once, however often the trace is submitted again."""
    begun: list[str] = []

    class Breaks:
        position = ""

        async def __aenter__(self) -> Breaks:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def __aiter__(self) -> AsyncIterator[Output]:
            yield Mock(spec=Output, token_ids=[1, 2])
            self.position = "5-0"
            if len(begun) == 1:
                raise TracewireError("away")

    class Follows:
        def subscribe(self, trace_id: str, *, since: str, names: Any) -> Breaks:
            begun.append(since)
            return Breaks()

    detached = DetachedTokens(cast(Any, Follows()), limited.gateway.limits)
    for _ in range(3):
        detached.count(Caller("alice", tokens_per_minute=10), "mine")
        await until(lambda: not len(detached))
    assert begun == ["start", "5-0"]


async def test_what_has_no_limit_or_does_not_exist_is_left(served: Served) -> None:
    detached = served.gateway.detached
    detached.count(Caller("alice"), "mine")
    assert not len(detached)
    detached.count(Caller("alice", tokens_per_minute=1), "none")
    assert len(detached) == 1
    await until(lambda: not len(detached))


async def test_a_gateway_that_stops_follows_nothing_any_longer(
    engine: Engine, gateway: Callable[..., Any], tmp_path: Path
) -> None:
    async def waits(stage: Stage) -> None:
        await stage.accept()
        await anyio.sleep_forever()

    file = tmp_path / "keys.toml"
    file.write_text(entry_of("key", "alice", USUAL, "") + "tokens_per_minute = 10\n")
    async with engine(waits):
        async with gateway(keys=file) as served, served.http("key") as http:
            await http.post("/traces", json=ASKED)
            detached = served.gateway.detached
            assert len(detached) == 1
        assert not len(detached)
