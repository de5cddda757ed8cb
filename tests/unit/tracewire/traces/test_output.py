"""Outputs: their deltas by name, decoded when a caller asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import tracewire
from tests.support.bus_engine import Stage
from tests.support.clients import collected
from tracewire import BrokenStream, Client, MalformedEvent
from tracewire.traces.output import merged
from tracewire_bus.wire import messages
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.messages import Append, Delete, Set


async def test_the_delta_of_an_output_by_name(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        first = [Set(path=("xs",), value=[1]), Set(path=("table",), value={"a": 1, "in": {"b": [1]}})]
        await stage.output("a", first, [Append(path=("xs",), items=[2, 3])])
        await stage.output(
            "b",
            [Append(path=("xs",), items=[[4]]), Set(path=("table", "in", "c"), value=5), Set(path=("v",), value=1.5)],
        )
        nested = [Append(path=("table", "in", "b"), items=[2]), Append(path=("xs", 3), items=[9])]
        await stage.output("c", nested, [Set(path=("xs", 0), value=7), Delete(path=("table", "a"))])
        await stage.output("d", [Delete(path=("v",))])
        await stage.final()

    async with engine(script), client.trace("tiny", "hello") as trace:
        items = await collected(trace)
        result = await trace.result()
    assert items[0].delta == {"xs": [1, 2, 3], "table": {"a": 1, "in": {"b": [1]}}}
    assert items[1].delta == {"xs": [[4]], "table": {"in": {"c": 5}}, "v": 1.5}
    assert items[2].delta["table"] == {"in": {"b": [2]}}
    assert items[3].delta == {}
    assert len(items[0].deltas) == 2
    assert result.saves == {"xs": [7, 2, 3, [4, 9]], "table": {"in": {"b": [1, 2], "c": 5}}}
    # What was merged is a copy: reading it twice gives the same, and the state is not changed by it.
    items[0].delta["xs"].append(0)
    assert items[0].delta["xs"] == [1, 2, 3]


@pytest.mark.parametrize("depth", [60, 300, 400])
@pytest.mark.parametrize("around", [lambda value: [value], lambda value: {"k": value}, lambda value: (value,)])
def test_saves_that_nest_deeper_than_an_engine_sends_them_are_malformed(
    depth: int, around: Callable[[Any], Any]
) -> None:
    value: Any = 1
    for _ in range(depth):
        value = around(value)
    for change in (Set(path=("s",), value=value), Append(path=("s",), items=[value])):
        if depth <= 60:
            assert merged([[change]])["s"] == (value if isinstance(change, Set) else [value])
        else:
            with pytest.raises(MalformedEvent, match="nest deeper than 64"):
                merged([[change]])


async def test_what_was_saved_is_decoded_when_it_is_asked_for(client: Client, engine: Callable[..., Any]) -> None:
    """Whoever reads only the text of an output does not see what it saved, be it malformed."""
    good, bad = [["s", ["x"], 1], ["s", ["y"], 2]], [["s", ["x"], msgspec.msgpack.Ext(99, b"")]]

    async def script(stage: Stage) -> None:
        await stage.accept()
        for index, step in enumerate((good, bad)):
            raw = messages.RawOutput(
                attempt=1,
                seq=stage.seq,
                index=index,
                token_ids=[1],
                text="ab"[index],
                deltas=[msgspec.Raw(msgspec.msgpack.encode(step))],
            )
            await stage.append(encode(raw))
        await stage.final(manifest=[])

    async with engine(script), client.trace("tiny", "hello") as trace:
        outputs = [event async for event in client.subscribe(trace.id) if isinstance(event, tracewire.Output)]
        assert [output.text for output in outputs] == ["a", "b"]
        assert "<Output 1-1 of invoke 0, choice 0, from token 0: [1], 'a'" in repr(outputs[0])
        assert outputs[0].delta == {"x": 1, "y": 2}
        assert outputs[0].only(frozenset({"y"})).delta == {"y": 2}
        with pytest.raises(BrokenStream, match="1-2"):
            _ = outputs[1].delta
        nothing = [event async for event in client.subscribe(trace.id, names=()) if isinstance(event, tracewire.Output)]
        assert [output.deltas for output in nothing] == [[[]], [[]]]
        with pytest.raises(BrokenStream, match="1-2"):
            await trace.result()


async def test_arrays_arrive_as_arrays(client: Client, engine: Callable[..., Any]) -> None:
    vector = torch.linspace(-1, 1, 7, dtype=torch.bfloat16)

    async def script(stage: Stage) -> None:
        await stage.accept()
        for _ in range(2):
            await stage.save("a", {"vectors": vector})
        await stage.final(deltas=[(0, 0, [Set(path=("last",), value=1)])])

    async with engine(script), client.trace("tiny", "hello") as trace:
        output = await anext(trace)
        assert output.delta["vectors"][0].dtype.name == "bfloat16"
        result = await trace.result()
    assert len(result.saves["vectors"]) == 2
    assert result.saves["vectors"][1].astype(np.float32).tolist() == vector.float().tolist()
    assert result.saves["last"] == 1
