"""Traces of `with` statements are queued in the background, in order."""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

import tracewire
from tests.support.bus_engine import BusEngine, engine_info, tiny
from tests.support.captured import block_of
from tracewire import Client, Model, Overloaded, UnknownModulePath
from tracewire_bus.bus import Bus
from tracewire_bus.wire.packing import unpack

PATIENCE = 60


async def test_leaving_it_queues_it_whether_or_not_anybody_reads(
    model: Model, engine: Callable[[], Any], redis_url: str, prefix: str
) -> None:
    with model.trace("hello", max_tokens=3, detach=True) as tracer:
        logits = model.logits.save()
    async with engine(), tracewire.connect(redis_url, prefix=prefix) as other:
        with anyio.fail_after(PATIENCE):
            await tracer.start()
            texts = [event.text async for event in other.subscribe(tracer.id) if isinstance(event, tracewire.Output)]
    assert len(texts) == 3


async def test_a_client_that_is_closed_right_after_has_queued_it(redis_url: str, prefix: str) -> None:
    async with BusEngine.running(redis_url, prefix, tiny, engine_info()):
        tracers = []
        async with tracewire.connect(redis_url, prefix=prefix) as client:
            model = await client.models.get("tiny")
            for _ in range(20):
                with model.trace("hello", max_tokens=3, detach=True) as tracer:
                    logits = model.logits.save()
                tracers.append(tracer)
        async with tracewire.connect(redis_url, prefix=prefix) as client:
            for tracer in tracers:
                with anyio.fail_after(PATIENCE):
                    events = [event async for event in client.subscribe(tracer.id)]
                assert events[-1].status == "finished"


async def test_statements_are_queued_in_the_order_in_which_they_are_left(model: Model, client: Client) -> None:
    tracers = []
    for index in range(10):
        with model.trace("hello", max_tokens=1) as tracer:
            number = index.save()
        tracers.append(tracer)
    await tracers[-1].start()
    assert all(tracer._queued.ended.is_set() for tracer in tracers)
    assert [unpack(block_of(tracer).variables)["index"] for tracer in tracers] == list(range(10))


async def test_what_was_refused_is_raised_where_it_is_first_asked_for(
    model: Model, redis_url: str, prefix: str
) -> None:
    for ask in (
        lambda tracer: tracer.result(),
        lambda tracer: tracer.accepted(),
        lambda tracer: anext(aiter(tracer)),
        lambda tracer: tracer.start(),
    ):
        with model.trace("hello") as tracer:
            wrong = model.model.layerz[0].output.save()
        with pytest.raises(UnknownModulePath, match="layerz") as caught, anyio.fail_after(PATIENCE):
            await ask(tracer)
        assert caught.value.line == block_of(tracer).first_line


async def test_a_full_queue_refuses_it_and_it_can_be_started_again(client: Client, bus: Bus) -> None:
    await bus.registry.register(engine_info(queue_limit=1), 60)
    model = await client.models.get("tiny")
    tracers = []
    for _ in range(2):
        with model.trace("hello", max_tokens=1) as tracer:
            logits = model.logits.save()
        tracers.append(tracer)
    with pytest.raises(Overloaded):
        await tracers[1].accepted()
    await tracers[0].cancel()
    await tracers[1].start()
