"""What `tracewire top` knows of a bus."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from tests.support.cli import steered_story
from tracewire import Client
from tracewire.cli.fleet import Fleet, Rate

PATIENCE = 60


@asynccontextmanager
async def looking(client: Client, model: str | None = None) -> AsyncIterator[Fleet]:
    """A fleet that looks when it is told to."""
    async with anyio.create_task_group() as group:
        yield Fleet(client, group, model)
        group.cancel_scope.cancel()


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(PATIENCE):
        while not condition():
            await checkpoint()


def test_tokens_a_second() -> None:
    rate = Rate(100.0)
    assert rate.value(100.0) == 0.0
    rate.add(10, 101.0)
    rate.add(10, 102.0)
    assert rate.value(102.0) == 10.0
    assert rate.value(106.5) == 2.0
    assert rate.value(110.0) == 0.0


async def test_traces_come_and_go(client: Client, engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    subscriptions, subscribe = [], client.subscribe

    def subscribed(*words: Any, **options: Any) -> Any:
        subscriptions.append(subscribe(*words, **options))
        return subscriptions[-1]

    monkeypatch.setattr(client, "subscribe", subscribed)
    async with engine(steered_story, engine="e1"), looking(client) as fleet:
        await fleet.look()
        assert fleet.traces == {}
        async with client.trace("tiny", "x", live={"alpha": 0.0}) as trace:
            await anext(trace)
            await fleet.look()
            followed = fleet.traces[trace.id]
            assert [one.name for one in fleet.engines] == ["e1"]
            # The fleet sees what comes from when its subscription has begun.
            await until(lambda: bool(subscriptions) and subscriptions[0]._started)
            await trace.steer(alpha=1.0)
            await until(lambda: followed.view.tokens == 5)
            assert fleet.tokens_per_second("e1") > 0
            assert fleet.tokens_per_second("another") == 0
            found = fleet.snapshot()
            assert set(found) == {"time", "engines", "traces"}
            assert set(found["engines"][0]) == {
                *("name", "model", "state", "running", "capacity", "tokens_per_second"),
            }
            (shown,) = found["traces"]
            assert set(shown) == {
                *("trace_id", "model", "client", "engine", "state", "tokens", "tokens_per_second", "saves"),
            }
            assert (shown["trace_id"], shown["tokens"], shown["saves"]) == (trace.id, 5, {"projection": "4"})
            await fleet.look()
            assert fleet.traces[trace.id] is followed
            await trace.cancel()
            await trace.until_done()
            await fleet.look()
        assert fleet.traces == {}


async def test_a_model_alone(client: Client, engine: Callable[..., Any]) -> None:
    trace = client.trace("tiny", "x", live={"alpha": 0.0})
    async with engine(steered_story), looking(client, "other") as fleet, trace:
        await anext(trace)
        await fleet.look()
        assert (fleet.engines, fleet.traces) == ([], {})


async def test_a_look_that_fails_is_told(client: Client) -> None:
    async with looking(client) as fleet:
        await client.aclose()
        await fleet.look()
        assert "the client is closed" in fleet.error
