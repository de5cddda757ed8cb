"""The arrays of traces whose values are being downloaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

from tests.support.bus_engine import Stage
from tests.support.gateways import Served
from tracewire import State, UnknownTrace, digest
from tracewire.gateway.value_index import ValueIndex
from tracewire_bus.domain.fold import Fold

Engine = Callable[..., Any]

COUNT = 20
ARRAYS = [np.full(4, number, np.float32) for number in range(COUNT)]


async def saves(stage: Stage) -> None:
    """A trace that saves an array with each token, and waits for the change of a live parameter half-way."""
    await stage.accept()
    for number, array in enumerate(ARRAYS):
        if number == COUNT // 2 and "alpha" in stage.live:
            await stage.steered()
        await stage.save(".", {"acts": array})
    await stage.final()


async def test_many_values_of_a_trace_are_read_once(engine: Engine, served: Served) -> None:
    async with engine(saves), served.http() as http:
        await http.post("/traces", json={"model": "tiny", "prompt": "x", "trace_id": "t"})
        async for _ in served.gateway.client.subscribe("t"):
            pass
        found: dict[int, bytes] = {}

        async def download(number: int) -> None:
            answer = await http.get(f"/traces/t/values/{digest(ARRAYS[number]).hex()}", params={"format": "raw"})
            found[number] = answer.content

        async with anyio.create_task_group() as group:
            for number in range(COUNT):
                group.start_soon(download, number)
        assert [found[number] for number in range(COUNT)] == [array.tobytes() for array in ARRAYS]
        assert served.gateway.values.reads == 1
        missing = await http.get(f"/traces/t/values/{'0' * 32}")
        assert (missing.status_code, served.gateway.values.reads) == (404, 2)


async def test_a_value_that_comes_later_is_found(engine: Engine, served: Served) -> None:
    async with engine(saves), served.http() as http:
        body = {"model": "tiny", "prompt": "x", "trace_id": "t", "live": {"alpha": 0.0}}
        await http.post("/traces", json=body)
        async for event in served.gateway.client.subscribe("t"):
            if event.type == "output" and event.index == COUNT // 2 - 1:
                break
        last = f"/traces/t/values/{digest(ARRAYS[-1]).hex()}"
        assert (await http.get(f"/traces/t/values/{digest(ARRAYS[0]).hex()}")).status_code == 200
        assert (await http.get(last)).status_code == 404
        await http.post("/traces/t/steer", json={"values": {"alpha": 1.0}})
        async for _ in served.gateway.client.subscribe("t"):
            pass
        assert (await http.get(last)).status_code == 200


async def test_what_was_read_is_forgotten_in_time_and_for_want_of_room(engine: Engine, served: Served) -> None:
    now = 0.0
    client, key = served.gateway.client, digest(ARRAYS[0])
    async with engine(saves):
        for name in ("one", "two"):
            async with client.trace("tiny", "x", trace_id=name, detach=True) as trace:
                await trace.result()
        index = ValueIndex(age_s=60.0, clock=lambda: now)
        for name in ("one", "two", "one", "two"):
            assert await index.find(name, key, partial(client.get_state, name)) is not None
        assert index.reads == 2
        now = 61.0
        assert await index.find("one", key, partial(client.get_state, "one")) is not None
        assert index.reads == 3
        small = ValueIndex(most_bytes=int(1.5 * COUNT * (500 + 16)))
        for name in ("one", "one", "two", "one"):
            assert await small.find(name, key, partial(client.get_state, name)) is not None
        assert small.reads == 3
        tiny = ValueIndex(most_bytes=10)
        for _ in range(2):
            assert await tiny.find("one", key, partial(client.get_state, "one")) is not None
        assert tiny.reads == 2


async def test_traces_without_arrays_are_forgotten_too() -> None:
    now = 0.0

    async def read() -> State:
        return State("t", Fold())

    index = ValueIndex(most_bytes=10_000, age_s=60.0, clock=lambda: now)
    for number in range(100):
        assert await index.find(f"t{number}", b"k", read) is None
    assert 1 < len(index._traces) <= 10
    assert index._nbytes == sum(one.nbytes for one in index._traces.values())
    now = 61.0
    assert await index.find("last", b"k", read) is None
    assert list(index._traces) == ["last"]
    assert index._nbytes == index._traces["last"].nbytes


async def test_a_trace_that_grows_old_as_it_is_asked_for_is_read() -> None:
    times = [0.0]

    async def read() -> State:
        return State("t", Fold())

    index = ValueIndex(age_s=60.0, clock=lambda: times.pop(0) if len(times) > 1 else times[0])
    assert await index.find("t", b"k", read) is None
    times[:] = [60.0, 60.1]
    assert await index.find("t", b"k", read) is None
    assert index.reads == 2


async def test_a_trace_that_does_not_exist_leaves_nothing(served: Served) -> None:
    index = ValueIndex()
    for _ in range(2):
        with pytest.raises(UnknownTrace):
            await index.find("none", b"k", partial(served.gateway.client.get_state, "none"))
    assert not index._traces
    assert index._nbytes == 0
