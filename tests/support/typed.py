"""What type checkers must infer of the client, and what they must refuse. It is checked, and never run.

A comment that ignores an error is itself an error where there is none: `python -m tests.support.typecheck`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, assert_type

import tracewire
from tracewire import blocking


async def of_a_trace(client: tracewire.Client) -> None:
    model = await client.models.get("demo", timeout=timedelta(seconds=3))
    trace = client.trace(model, "a", max_tokens=3, temperature=0.0, stop=["."], deadline=3, live={"alpha": 1.0})
    assert_type(trace, tracewire.Trace)
    assert_type(client.trace("demo", prompts=["a", tracewire.Prompt("b", seed=3)], n=2), tracewire.Trace)
    client.trace("demo", "a", dedline=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    client.trace("demo", "a", max_tokens="3")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    client.trace("demo")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    client.trace("demo", "a", prompts=["b"])  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    tracewire.Prompt("a", temprature=1.0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    model.trace("a", max_new_tokens=3)
    model.trace("a", max_new_token=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    async for text in trace.text_stream():
        assert_type(text, str)
    async for output in trace.outputs():
        assert_type(output, tracewire.Output)
    assert_type(await trace.result(), tracewire.Result)
    assert_type(await client.subscribe("id").result(), tracewire.Result)
    assert_type(await client.get_live("id"), tracewire.LiveState)


async def of_lists(client: tracewire.Client) -> None:
    assert_type(await client.dead_letters.list(limit=3), list[tracewire.DeadLetter])
    async for engine in client.engines.list():
        assert_type(engine, tracewire.Engine)
    assert_type(await client.edits("demo").list(), list[tracewire.Edit])
    assert_type(await client.watch_groups.list(), list[str])


def of_events(event: tracewire.Event) -> Any:
    match event.type:
        case "output":
            return assert_type(event, tracewire.Output).text
        case "shared":
            return assert_type(event, tracewire.Shared).delta
        case "steered":
            return assert_type(event, tracewire.Steered).first_token()
        case "gap":
            return assert_type(event, tracewire.Gap).state
        case "final":
            return assert_type(event, tracewire.Final).status
        case "paused" | "resumed":
            return event.by
        case "waiting" | "restarted":
            return event.reason
        case "accepted":
            return assert_type(event, tracewire.Accepted).engine
        case "outptu":  # type: ignore[unreachable, unused-ignore]
            return None


def of_an_item(item: tracewire.Item) -> None:
    if item.type == "output":
        assert_type(item.delta, tracewire.Values)
    elif item.type == "steered":
        assert_type(item.version, int)


async def of_connecting() -> None:
    assert_type(await tracewire.connect("redis://localhost", lease_ttl=timedelta(minutes=1)), tracewire.Client)
    async with tracewire.connect(retry_timeout=None) as client:
        assert_type(client, tracewire.Client)
    tracewire.connect(patience=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    tracewire.connect().models  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    assert_type(tracewire.__version__, str)


def of_the_blocking_client() -> None:
    with blocking.Client("redis://localhost") as client:
        for item in client.trace("demo", "a", max_tokens=3):
            assert_type(item.id, str)
        assert_type(client.trace("demo", "a").result(), tracewire.Result)
        for letter in client.dead_letters.list():
            assert_type(letter, tracewire.DeadLetter)
        client.trace("demo", "a", dedline=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
        assert_type(client.models.get("demo").trace("a"), blocking.Tracer)
        with client.subscribe("id") as subscription:
            assert_type(next(subscription), tracewire.Event)
        assert_type(tracewire.blocking.connect(), blocking.Client)
