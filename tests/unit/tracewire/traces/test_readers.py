"""Readers end where they are closed, and raise what else ended them."""

from __future__ import annotations

import anyio
import pytest

from tracewire import TracewireError
from tracewire.traces.readers import Watcher


class Source:
    """A reader of the bus that hands out one number and then waits until it is closed."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._closed = anyio.Event()
        self._told = False

    async def start(self) -> None:
        self.calls.append("start")

    async def aclose(self) -> None:
        self.calls.append("close")
        self._closed.set()

    async def __anext__(self) -> int:
        if not self._told:
            self._told = True
            return 1
        await self._closed.wait()
        raise anyio.ClosedResourceError


class Numbers(Watcher[int]):
    """What a test reads."""

    async def __anext__(self) -> int:
        return await self._next()


async def test_it_starts_as_it_is_entered_and_ends_as_it_is_left() -> None:
    source = Source()
    async with Numbers(source) as numbers:
        assert await anext(numbers) == 1
    assert source.calls == ["start", "close"]
    assert [number async for number in numbers] == []


async def test_closing_it_ends_a_wait_in_another_task() -> None:
    numbers = Numbers(Source())
    seen: list[int] = []

    async def read() -> None:
        seen.append(await anext(numbers))
        with pytest.raises(StopAsyncIteration):
            await anext(numbers)

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        while not seen:
            await anyio.lowlevel.checkpoint()
        await numbers.aclose()
    assert seen == [1]


async def test_a_source_that_others_closed_is_an_error() -> None:
    source = Source()
    numbers = Numbers(source)
    await anext(numbers)
    await source.aclose()
    with pytest.raises(TracewireError):
        await anext(numbers)
