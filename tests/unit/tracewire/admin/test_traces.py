"""The list of traces, over a scripted engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from tests.support.bus_engine import Stage
from tests.support.until import until
from tracewire import Client


async def script(stage: Stage) -> None:
    """Ends at once, unless its prompt says otherwise."""
    prompt = stage.submission.invokes[0].prompt
    await stage.accept()
    if prompt == "run":
        await anyio.sleep_forever()
    await stage.output("x", finish_reason="stop")
    await stage.final()


async def states(client: Client, **options: Any) -> list[tuple[str, str]]:
    return [(trace.trace_id, trace.state) for trace in await client.traces.list(**options)]


async def test_traces_are_listed_the_newest_first(client: Client, engine: Callable[..., Any]) -> None:
    assert await client.traces.list() == []
    async with engine(script):
        await client.trace("tiny", "end", trace_id="a").result()
        async with client.trace("tiny", "run", trace_id="b", by="alice") as running:
            await running.accepted()
            await until(lambda: listed(client, "b", "running"))
            assert await states(client) == [("b", "running"), ("a", "finished")]
        await until(lambda: listed(client, "b", "cancelled"))
    (second, first) = await client.traces.list()
    assert (second.client, second.error, second.model) == ("alice", "Cancelled", "tiny")
    assert (first.client, first.error, first.tokens, first.prompt_tokens) == ("one", None, 1, 3)
    assert first.engine == second.engine
    assert first.attempt == 1
    assert first.queued_at <= first.ended_at <= second.queued_at <= second.ended_at


async def listed(client: Client, trace_id: str, state: str) -> bool:
    return (trace_id, state) in await states(client)


async def test_a_list_is_limited_and_goes_on(client: Client, engine: Callable[..., Any]) -> None:
    async with engine(script):
        # More than one read fetches of any stream.
        for number in range(100):
            async with client.trace("tiny", "end", trace_id=f"{'red' if number % 2 else 'blue'}:{number}") as trace:
                await trace.until_done()
    await until(lambda: listed(client, "red:99", "finished"))
    found = []
    before = None
    while page := await client.traces.list(limit=7, before=before):
        assert len(page) <= 7
        found += page
        before = page[-1].place
    assert [trace.trace_id.partition(":")[2] for trace in found] == [str(number) for number in reversed(range(100))]
    assert {trace.state for trace in found} == {"finished"}
    assert len(await client.traces.list(id_prefix="red:")) == 50
    assert await client.traces.list(model="other") == []
    assert await client.traces.list(client="other") == []
    assert await client.traces.list(states=["running", "queued"]) == []


@pytest.mark.parametrize("options", [{"before": "x"}, {"before": "1-1-99"}, {"states": ["odd"]}, {"limit": 0}])
async def test_what_is_no_option_of_a_list(client: Client, options: Any) -> None:
    with pytest.raises(ValueError):
        client.traces.list(**options)
