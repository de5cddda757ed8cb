"""What the kernel sends to live views, and the orders that it carries out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from tests.support.bus_engine import Stage
from tests.unit.tracewire.notebook.conftest import Views
from tracewire import Client, UnknownModel
from tracewire.notebook.feed import Feed
from tracewire_bus.domain.fold import Fold

Made = Callable[..., Feed]


async def play(stage: Stage) -> None:
    """Three tokens with a save, the last one after a change of live parameters."""
    await stage.accept()
    await stage.save(" one", {"norm": 1.0})
    await stage.save(" two", {"norm": float("nan")})
    if stage.live:
        await stage.steered()
    await stage.save(" three", {"norm": 3.0}, finish_reason="length")
    await stage.final()


async def finished(client: Client, engine: Any) -> str:
    async with engine(play), client.trace("tiny", "x", detach=True) as trace:
        await trace.until_done()
        return trace.id


async def test_all_events_are_pushed_in_order(client: Client, engine: Any, feed: Made, views: Views) -> None:
    trace_id = await finished(client, engine)
    fold, taken = Fold(), []
    await feed(trace_id).push(fold, taken.append)
    sent = views.events("*")
    assert [event["type"] for _, event in sent] == ["accepted", "output", "output", "output", "final"]
    assert [position for position, _ in sent] == [event.id for event in taken]
    assert fold.finished
    # What JSON does not have is null.
    assert [event["delta"]["norm"] for _, event in sent[1:4]] == [[1.0], [None], [3.0]]
    assert views.messages[-1] == {"view": "*", "over": True, "error": None, "body": None}


async def test_a_view_follows_from_its_position(client: Client, engine: Any, feed: Made, views: Views) -> None:
    made = feed(await finished(client, engine))
    made.take({"do": "follow", "view": "a", "id": 1})
    assert (await views.over("a"))["error"] is None
    position = views.events("a")[2][0]
    made.take({"do": "follow", "view": "b", "id": 1, "since": position})
    await views.over("b")
    assert views.events("b") == views.events("a")[3:]


async def test_a_stream_is_stopped(client: Client, registered: str, feed: Made, views: Views) -> None:
    async with client.trace("tiny", "x") as trace:
        made = feed(trace.id)
        made.take({"do": "follow", "view": "a", "id": 1})
        await anyio.lowlevel.checkpoint()
        made.take({"do": "stop", "view": "a", "id": 2, "stream": 1})
        assert (await views.over("a"))["id"] == 1
        assert made._streams == {}


async def test_orders_are_carried_out(client: Client, registered: str, feed: Made, views: Views) -> None:
    async with client.trace("tiny", "x", live={"alpha": 0.0}) as trace:
        made = feed(trace.id)

        async def order(number: int, what: str, **fields: Any) -> dict[str, Any]:
            made.take({"do": what, "view": "a", "id": number, **fields})
            return await views.answer(number)

        assert (await order(1, "steer", values={"alpha": 2.5}))["body"] == {"version": 1}
        assert (await order(2, "live"))["body"] == {"version": 1, "values": {"alpha": 2.5}}
        assert "beta" in (await order(3, "steer", values={"beta": 1}))["error"]
        assert (await order(4, "pause"))["body"] is True
        assert (await order(5, "resume"))["body"] is True
        assert (await order(6, "cancel"))["body"] is True
        assert "has ended" in (await order(7, "pause"))["error"]


async def test_a_trace_that_is_not_submitted_says_why(feed: Made, views: Views) -> None:
    async def refused() -> None:
        raise UnknownModel("tiny", [])

    made = feed("mine", refused)
    made.take({"do": "follow", "view": "a", "id": 1})
    made.take({"do": "live", "view": "a", "id": 2})
    assert "tiny" in (await views.over("a"))["error"]
    assert "tiny" in (await views.answer(2))["error"]
    with pytest.raises(UnknownModel):
        await made.push(Fold(), lambda _: None)
    assert "tiny" in (await views.over("*"))["error"]


async def test_an_unknown_trace_is_an_error(feed: Made, views: Views) -> None:
    feed("nowhere").take({"do": "follow", "view": "a", "id": 1})
    assert "nowhere" in (await views.over("a"))["error"]


@pytest.mark.parametrize("content", [{"do": "jump", "view": "a", "id": 1}, {"do": "live"}, "text", None])
async def test_what_is_no_order_is_left_out(
    content: Any, feed: Made, views: Views, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tracewire"):
        feed("mine").take(content)
    assert "sent no order" in caplog.text
    assert views.messages == []
