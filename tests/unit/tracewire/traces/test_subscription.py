"""Subscriptions from any position, to any trace, beside a scripted engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import anyio
import pytest

import tracewire
from tests.support.bus_engine import Stage
from tests.support.clients import collected, texts
from tracewire import Client, Subscription, UnknownPosition, UnknownTrace
from tracewire_bus.domain.fold import Fold
from tracewire_bus.wire.messages import Final, Set

#: Nothing here takes longer; a test that would hang fails instead.
PATIENCE = 60


async def test_subscriptions_from_any_place_fold_to_the_same(client: Client, engine: Callable[..., Any]) -> None:
    gate = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        for number in range(10):
            await stage.save(str(number), {"a": number, "b": -number})
        await gate.wait()
        for number in range(10, 20):
            await stage.save(str(number), {"a": number, "b": -number})
        await stage.final()

    async def fold(events: Subscription, into: dict[str, Fold], name: str) -> None:
        into[name] = Fold()
        async for event in events:
            into[name].apply(event)
        into[name].verify()

    folds: dict[str, Fold] = {}
    async with engine(script), client.trace("tiny", "hello") as trace:
        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as group:
                group.start_soon(fold, client.subscribe(trace.id), folds, "before")
                seen = 0
                async for _ in trace:
                    seen += 1
                    if seen == 10:
                        group.start_soon(fold, client.subscribe(trace.id), folds, "in the middle")
                        group.start_soon(fold, client.subscribe(trace.id, names={"a"}), folds, "one name")
                        now = client.subscribe(trace.id, since="now")
                        await now.start()
                        gate.set()
        result = await trace.result()
        await fold(client.subscribe(trace.id), folds, "after")
        assert texts(await collected(now)) == [str(number) for number in range(10, 20)]
        for name in ("before", "in the middle", "after"):
            assert folds[name].choices[0, 0].saves == result.saves
            assert folds[name].digest() == result.digest()
        assert folds["one name"].choices[0, 0].saves == {"a": list(range(20))}


async def test_a_subscription_goes_on_after_any_event(client: Client, engine: Callable[..., Any]) -> None:
    async with engine():
        async with client.trace("tiny", "hello") as trace:
            await trace.result()
        events = await collected(client.subscribe(trace.id))
        kinds = [type(event).__name__ for event in events]
        assert kinds == ["Accepted", "Output", "Output", "Output", "Final"]
        assert isinstance(events[1], tracewire.Output)
        for cut in range(4):
            rest = await collected(client.subscribe(trace.id, since=f"1-{cut}"))
            assert [event.seq for event in rest] == [event.seq for event in events[cut + 1 :]]
        subscription = client.subscribe(trace.id)
        async with subscription:
            await anext(subscription)
            output = await anext(subscription)
            assert subscription.position == output.id
        assert await collected(subscription) == []
        state = await client.get_state(trace.id)
        assert await collected(client.subscribe(trace.id, since=state.position)) == []
        assert await collected(client.subscribe(trace.id, since="now")) == []
        recent = client.subscribe(trace.id, since="recent")
        assert [event.seq for event in await collected(recent)] == [event.seq for event in events]


async def test_names_limit_what_is_saved_and_nothing_else(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"keep": 1, "drop": 2})
        await stage.final(
            deltas=[(0, 0, [Set(path=("keep",), value=[3]), Set(path=("drop",), value=[4])])],
            save_errors={"0.0.keep.dotted": "r", "0.0.drop": "r", "0.0.keep": "r"},
        )

    async with engine(script):
        async with client.trace("tiny", "hello") as trace:
            await trace.result()
        events = await collected(client.subscribe(trace.id, names=["keep"]))
        assert events[1].delta == {"keep": [1]}
        assert events[1].text == "one"
        final = events[2]
        assert isinstance(final, Final)
        assert [change.path for _, _, changes in final.deltas for change in changes] == [("keep",)]
        assert [entry.name for entry in final.manifest] == ["keep"]
        assert set(final.save_errors) == {"0.0.keep"}
        with pytest.raises(TypeError, match="not 'keep'"):
            client.subscribe(trace.id, names="keep")


async def test_a_trace_that_was_never_submitted(client: Client) -> None:
    with pytest.raises(UnknownTrace, match="no trace 'nowhere'"):
        await anext(client.subscribe("nowhere"))
    with pytest.raises(UnknownTrace):
        async with client.subscribe("nowhere", since="now"):
            pass
    with pytest.raises(UnknownTrace):
        await client.get_state("nowhere")
    for since in ("yesterday", "1", "a-b", ""):
        with pytest.raises(ValueError, match="since"):
            client.subscribe("nowhere", since=since)
    with pytest.raises(TypeError, match="a trace's id"):
        client.subscribe(5)  # type: ignore[arg-type]


@pytest.mark.usefixtures("registered")
async def test_a_trace_can_be_followed_before_any_engine_took_it(client: Client, engine: Callable[..., Any]) -> None:
    events: list[Any] = []

    async def follow(trace: str, started: anyio.Event) -> None:
        async with client.subscribe(trace) as subscription:
            started.set()
            events.extend(await collected(subscription))

    async with client.trace("tiny", "hello") as trace:
        state = await client.get_state(trace.id)
        assert (state.seq, state.status, state.text, state.saves, state.position) == (-1, None, "", {}, "start")
        async with anyio.create_task_group() as group:
            started = anyio.Event()
            group.start_soon(follow, trace.id, started)
            await started.wait()
            async with engine():
                await trace.result()
    assert texts(events) == ["one", " two", " three"]


async def test_a_consumer_that_leaves_harms_nobody(
    client: Client, engine: Callable[..., Any], redis_url: str, prefix: str
) -> None:
    gate = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"x": 1})
        await gate.wait()
        await stage.save("two", {"x": 2})
        await stage.final()

    async with engine(script), client.trace("tiny", "hello") as trace:
        async with tracewire.connect(redis_url, prefix=prefix) as other:
            leaving = other.subscribe(trace.id)
            await anext(leaving)
        closing = client.subscribe(trace.id)
        await anext(closing)
        await closing.aclose()
        staying = client.subscribe(trace.id)
        await anext(staying)
        gate.set()
        assert (await trace.result()).saves == {"x": [1, 2]}
        assert texts(await collected(staying)) == ["one", "two"]


async def saving(stage: Stage) -> None:
    """One token that saves a value, and one save that could not travel."""
    await stage.accept()
    await stage.save("one", {"projection": 1.5})
    await stage.final(save_errors={"0.0.model": "a value of type Llama cannot travel"})


async def test_a_service_learns_before_it_answers_that_there_is_nothing_to_follow(client: Client) -> None:
    for junk in ("later", "5", "1-2-3", "-1", "0x1-2", ""):
        with pytest.raises(UnknownPosition, match="an event's id '<attempt>-<seq>'") as caught:
            client.subscribe("t", since=junk)
        assert isinstance(caught.value, ValueError)
        assert caught.value.since == junk
    for unknown in ("nobody-s", "no id at all \n", "x" * 5000):
        with pytest.raises(UnknownTrace):
            await client.subscribe(unknown).start()


async def test_a_name_that_was_never_saved_is_told(
    client: Client, engine: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with engine(saving), client.trace("tiny", "hello") as trace:
        await trace.result()
        with caplog.at_level(logging.WARNING, "tracewire"), anyio.fail_after(PATIENCE):
            async for _ in client.subscribe(trace.id, names={"projction", "projection", "model"}):
                pass
    (record,) = caplog.records
    assert "'projction'" in record.message
    assert "did you mean 'projection'?" in record.message
