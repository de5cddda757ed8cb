"""Saves in a bulk store that cannot be read: the trace goes on without them, for each of its readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from tests.support.bus_engine import Stage
from tracewire import Client, InterventionError, Restarted, ValueMissing
from tracewire_bus.bulk.stores import StorePlace
from tracewire_bus.wire.bulk_ranges import BulkRange, bulk_digest, encode_bulk_range
from tracewire_bus.wire.codec import encode_output
from tracewire_bus.wire.messages import Failure, RawOutput

PATIENCE = 60


async def _lost(stage: Stage, index: int, text: str) -> None:
    """An output whose saves are in a folder that is gone."""
    await stage.bus.bulk.stores.register("store", StorePlace("/nowhere", "", "token"))
    deltas = encode_bulk_range(BulkRange("store", "segment", 10 * index, 10, bulk_digest(bytes(10))))
    place = {"attempt": stage.attempt, "seq": stage.seq, "index": index}
    raw = RawOutput(**place, token_ids=[100 + index], text=text, deltas=deltas)
    stage.fold.apply(raw, LookupError("gone"))
    await stage.append(encode_output(raw))


async def losing(stage: Stage) -> None:
    await stage.accept()
    await stage.save("one ", {"projection": 1.5})
    await _lost(stage, 1, "two ")
    # It adds to a list that the reader has, and whose second item it lacks.
    await stage.save("three", {"projection": 3.5})
    await stage.final()


async def test_a_trace_goes_on_without_saves_that_cannot_be_read(client: Client, engine: Callable[..., Any]) -> None:
    async with engine(losing):
        with anyio.fail_after(PATIENCE):
            async with client.trace("tiny", "x") as trace:
                outputs = [output async for output in trace.outputs()]
            assert [output.text for output in outputs] == ["one ", "two ", "three"]
            assert outputs[0].delta["projection"] == [1.5]
            with pytest.raises(ValueMissing, match=f"the saves of event 1-2 of trace {trace.id}"):
                _ = outputs[1].delta
            assert outputs[2].delta["projection"] == [3.5]
            assert await trace.until_done() == "finished"
            assert (await trace.final()).status == "finished"
            for read in (trace.result, client.subscribe(trace.id).result, lambda: client.get_state(trace.id)):
                with pytest.raises(ValueMissing, match="the saves of event 1-2"):
                    await read()
            with pytest.raises(ValueMissing):
                trace.state()
            assert "finished" in trace._repr_mimebundle_()["text/plain"]
            assert await client.subscribe(trace.id).until_done() == "finished"
        assert (await client.trace("tiny", "x").until_done()) == "finished"
        assert [text async for text in client.trace("tiny", "x").text_stream()] == ["one ", "two ", "three"]


async def test_a_trace_that_fails_says_so_although_its_saves_are_lost(
    client: Client, engine: Callable[..., Any]
) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await _lost(stage, 0, "one")
        await stage.final("failed", Failure(type="ZeroDivisionError", message="by zero", field="block"))

    async with engine(script):
        with pytest.raises(InterventionError, match="by zero") as caught:
            await client.trace("tiny", "x").result()
        assert caught.value.result is None


async def test_a_new_attempt_has_its_saves_again(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await _lost(stage, 0, "one")
        await stage.restart("its engine died")
        await stage.accept()
        await stage.save("one", {"projection": 1.5})
        await stage.final()

    async with engine(script):
        trace = client.trace("tiny", "x")
        result = await trace.result()
        assert result.saves["projection"] == [1.5]
        kinds = [type(event) async for event in client.subscribe(trace.id)]
        assert Restarted in kinds
