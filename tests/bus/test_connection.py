"""What the bus's tasks wait by."""

from __future__ import annotations

import anyio
from anyio.lowlevel import checkpoint

from tracewire_bus.connection import Wakeup


async def test_a_wakeup_wakes_whoever_waits_then_and_nobody_later() -> None:
    wakeup = Wakeup()
    woken: list[int] = []

    async def wait(number: int) -> None:
        await wakeup.wait()
        woken.append(number)

    wakeup.notify()
    async with anyio.create_task_group() as group:
        group.start_soon(wait, 1)
        await checkpoint()
        assert woken == []
        wakeup.notify()
        wakeup.notify()
    async with anyio.create_task_group() as group:
        group.start_soon(wait, 2)
        await checkpoint()
        assert woken == [1]
        group.cancel_scope.cancel()
    async with anyio.create_task_group() as group:
        # One that was cancelled left nothing behind.
        group.start_soon(wait, 3)
        await checkpoint()
        wakeup.notify()
    assert woken == [1, 3]


async def test_a_wakeup_whose_task_is_cancelled_at_the_same_time_is_not_an_error() -> None:
    wakeup = Wakeup()
    async with anyio.create_task_group() as group:
        group.start_soon(wakeup.wait)
        await checkpoint()
        group.cancel_scope.cancel()
        wakeup.notify()
        await checkpoint()
        wakeup.notify()
