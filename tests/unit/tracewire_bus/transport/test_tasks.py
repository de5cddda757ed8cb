"""What the bus's tasks wait by."""

from __future__ import annotations

from functools import partial

import anyio
import pytest
from anyio.lowlevel import checkpoint

from tests.support.failed_tasks import failed_tasks
from tracewire_bus.transport.tasks import OwnedTask, PerTickLimiter, Refreshed, Signal


async def woken_as(wakeup: Signal, woken: list[int], number: int) -> None:
    """Wait, and leave a number."""
    await wakeup.wait()
    woken.append(number)


async def test_a_wakeup_wakes_whoever_waits_then_and_nobody_later() -> None:
    wakeup = Signal()
    woken: list[int] = []
    wait = partial(woken_as, wakeup, woken)
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


async def test_turns_let_some_through_at_a_time_in_order_and_nobody_waits_who_need_not() -> None:
    turns, through, scopes = PerTickLimiter(2), [], [anyio.CancelScope() for _ in range(9)]
    through_by_turn: list[list[int]] = []

    async def one(number: int) -> None:
        with scopes[number]:
            await turns.wait()
            through.append(number)

    async with anyio.create_task_group() as group:
        for number in range(9):
            group.start_soon(one, number)
        await checkpoint()
        # One that gives up takes nobody's turn.
        scopes[3].cancel()
        while len(through) < 8:
            through_by_turn.append(through[sum(map(len, through_by_turn)) :])
            await checkpoint()
    assert through == [0, 1, 2, 4, 5, 6, 7, 8]
    assert max(map(len, through_by_turn)) == 2
    # With fewer, nobody gives way to the loop at all; nor does a turn that nobody takes last.
    for _ in range(3):
        for _ in range(2):
            coroutine = turns.wait()
            with pytest.raises(StopIteration):
                coroutine.send(None)
        for _ in range(3):
            await checkpoint()


async def test_a_wakeup_wakes_all_that_wait_and_one_that_left_takes_nobody_along() -> None:
    wakeup = Signal()
    woken: list[int] = []
    wait = partial(woken_as, wakeup, woken)
    async with anyio.create_task_group() as group:
        group.start_soon(wait, 1)
        await checkpoint()
        wakeup.notify()
        # It waits before the one that was woken has gone on.
        group.start_soon(wait, 2)
        await checkpoint()
        assert woken == [1]
        group.start_soon(wait, 3)
        await checkpoint()
        wakeup.notify()
    assert woken == [1, 2, 3]


async def test_a_wakeup_whose_task_is_cancelled_at_the_same_time_is_not_an_error() -> None:
    wakeup = Signal()
    async with anyio.create_task_group() as group:
        group.start_soon(wakeup.wait)
        await checkpoint()
        group.cancel_scope.cancel()
        wakeup.notify()
        await checkpoint()
        wakeup.notify()


async def test_a_background_task_that_fails_says_so_at_once_and_begins_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tracewire_bus.transport.tasks._RESTART_S", 0.0)
    begun, works = 0, anyio.Event()

    async def run() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise ValueError(f"failure {begun}")
        works.set()
        await anyio.sleep_forever()

    task = OwnedTask(run, "that fails")
    with anyio.fail_after(20):
        await works.wait()
    said = [(one.levelname, one.getMessage(), one.exc_info is not None) for one in caplog.records]
    assert [(level, traceback) for level, _, traceback in said] == [("ERROR", True), ("ERROR", False)]
    assert "the task that fails failed" in said[0][1]
    assert "failure 1" in said[0][1]
    # Had it failed by a mistake of ours, its test would fail (`conftest.py`).
    assert not failed_tasks(said[0][1])
    assert failed_tasks(f"2026 ERROR {said[0][1].replace('ValueError', 'AttributeError')}\nmore")
    await task.aclose()
    assert begun == 3


class Asked:
    """Counts how often it is asked, and answers when it is told to."""

    def __init__(self) -> None:
        self.times = 0
        self.answered = anyio.Event()
        self.error: Exception | None = None
        self.ended = 0

    async def __call__(self) -> int:
        self.times += 1
        try:
            await self.answered.wait()
        finally:
            self.ended += 1
        if self.error is not None:
            raise self.error
        return self.times


async def test_what_many_want_at_once_is_asked_for_once() -> None:
    asked, found = Asked(), []
    refreshed = Refreshed(asked)

    async def get(age: float) -> None:
        found.append(await refreshed.get(age))

    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(get, 60)
        await checkpoint()
        await checkpoint()
        for _ in range(20):
            group.start_soon(get, 60)
        await checkpoint()
        asked.answered.set()
    assert found == [1] * 40
    assert await refreshed.get(60) == 1
    # Those who want it as it is now do not take what was asked for before; they share what is asked for them.
    found.clear()
    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(get, 0)
    assert found == [2] * 20
    refreshed.forget()
    assert await refreshed.get(60) == 3


async def test_what_fails_fails_for_all_who_wait_and_is_asked_for_again() -> None:
    asked, found = Asked(), []
    refreshed = Refreshed(asked)
    asked.error = ValueError("away")

    async def get() -> None:
        try:
            found.append(await refreshed.get(60))
        except ValueError as error:
            found.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(get)
        await checkpoint()
        asked.answered.set()
    assert [str(one) for one in found] == ["away"] * 3
    assert len({id(one) for one in found}) == 3
    asked.error = None
    assert await refreshed.get(60) == 2


async def test_asking_ends_with_the_last_who_waits() -> None:
    asked = Asked()
    refreshed = Refreshed(asked)
    scopes = [anyio.CancelScope() for _ in range(2)]

    async def get(scope: anyio.CancelScope) -> None:
        with scope:
            await refreshed.get(60)

    async with anyio.create_task_group() as group:
        for scope in scopes:
            group.start_soon(get, scope)
        while not asked.times:
            await checkpoint()
        scopes[0].cancel()
        await checkpoint()
        await checkpoint()
        assert not asked.ended
        scopes[1].cancel()
    while not asked.ended:
        await checkpoint()
    asked.answered.set()
    assert await refreshed.get(60) == 2
