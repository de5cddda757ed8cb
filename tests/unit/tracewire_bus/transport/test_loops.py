"""Futures, tasks and callbacks are alike on asyncio and on trio: each test runs on both."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from tracewire_bus.transport.loops import Task, current_loop, on_trio, running_loop, semaphore, shielded, wait


async def test_a_loop_is_the_same_object_throughout_its_run() -> None:
    loop = running_loop()
    assert running_loop() is current_loop() is loop
    assert not loop.is_closed()
    assert loop.time() == pytest.approx(anyio.current_time(), abs=1)
    assert await anyio.to_thread.run_sync(current_loop) is None
    assert on_trio() == (type(loop).__name__ == "TrioLoop")


def test_there_is_none_where_none_runs() -> None:
    assert current_loop() is None
    with pytest.raises(RuntimeError):
        running_loop()


async def test_a_future_wakes_its_task_with_a_result_or_an_error() -> None:
    loop = running_loop()
    found: list[Any] = []

    async def waits(future: Any) -> None:
        try:
            found.append(await future)
        except ValueError as error:
            found.append(error)

    one, other, early = (loop.create_future() for _ in range(3))
    early.set_result("early")
    assert await early == "early"
    async with anyio.create_task_group() as group:
        group.start_soon(waits, one)
        group.start_soon(waits, other)
        await anyio.wait_all_tasks_blocked()
        assert not one.done()
        assert not found
        one.set_result(1)
        other.set_exception(problem := ValueError("no"))
        assert one.done()
        assert other.done()
    assert found == [1, problem]


async def test_a_future_is_cancelled_with_the_task_that_waits() -> None:
    future = running_loop().create_future()
    with anyio.move_on_after(0.01) as scope:
        await future
    assert scope.cancelled_caught
    assert future.done()
    spare = running_loop().create_future()
    assert spare.cancel()
    assert spare.done()
    assert not spare.cancel()


async def test_a_task_is_no_scope_s_and_ends_with_what_it_comes_to() -> None:
    loop = running_loop()
    ended: list[Any] = []

    async def comes_to(what: Any) -> Any:
        await checkpoint()
        if isinstance(what, Exception):
            raise what
        return what

    async def starts() -> list[Task[Any]]:
        return [loop.create_task(comes_to(what), name="one") for what in (1, ValueError("no"))]

    with anyio.CancelScope() as scope:
        scope.cancel()
        fine, wrong = await starts()
    fine.add_done_callback(ended.append)
    await wait(fine)
    await wait(wrong)
    await checkpoint()
    assert fine.result() == await shielded(fine) == 1
    assert ended == [fine]
    with pytest.raises(ValueError, match="no"):
        wrong.result()
    with pytest.raises(ValueError, match="no"):
        await shielded(wrong)
    assert not fine.cancelled()
    assert not wrong.cancelled()


async def test_a_task_that_is_cancelled_before_its_first_step_takes_none() -> None:
    steps: list[str] = []

    async def run() -> None:
        steps.append("first")
        await anyio.sleep_forever()

    task = running_loop().create_task(run(), name="one")
    task.cancel()
    await wait(task)
    assert task.cancelled()
    assert not steps
    task = running_loop().create_task(run(), name="another")
    await anyio.wait_all_tasks_blocked()
    task.cancel()
    await wait(task)
    assert task.cancelled()
    assert steps == ["first"]


async def test_a_task_goes_on_when_who_waits_for_it_is_cancelled() -> None:
    go_on = anyio.Event()

    async def run() -> str:
        await go_on.wait()
        return "done"

    task = running_loop().create_task(run(), name="one")
    with anyio.move_on_after(0.01):
        await shielded(task)
    go_on.set()
    assert await shielded(task) == "done"


async def test_callbacks_run_soon_in_their_order_and_timers_when_they_ring() -> None:
    loop = running_loop()
    called: list[str] = []
    all_called = anyio.Event()
    loop.call_soon(lambda: called.append("one"))
    loop.call_soon(lambda: called.append("two"))
    assert not called
    never = loop.call_at(loop.time() + 0.01, lambda: called.append("never"))
    when = loop.time() + 0.02
    loop.call_at(when, all_called.set)
    never.cancel()
    await all_called.wait()
    assert called == ["one", "two"]
    assert loop.time() >= when - 0.001


async def test_a_semaphore_lets_as_many_in_in_their_order() -> None:
    turns, entered, go_on = semaphore(2), list[int](), anyio.Event()

    async def one(number: int) -> None:
        async with turns:
            entered.append(number)
            await go_on.wait()

    async with anyio.create_task_group() as group:
        for number in range(5):
            group.start_soon(one, number)
        await anyio.wait_all_tasks_blocked()
        assert entered == [0, 1]
        go_on.set()
    assert entered == [0, 1, 2, 3, 4]
