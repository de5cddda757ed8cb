"""The event loop that runs here: asyncio's, or on trio one of its shape (`trio_loop.py`).

Code that needs a future, a task that no scope owns or a callback asks `running_loop` for its event loop. On asyncio
that is asyncio's own loop, at no further cost. Everything else uses anyio.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

import anyio

__all__ = [
    *("Future", "Loop", "Task", "Timer"),
    *("current_loop", "on_trio", "running_loop", "semaphore", "shielded", "wait"),
]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Future(Protocol[T]):
    """What `asyncio.Future` does, for one task that awaits it; that task's cancellation cancels the future."""

    def done(self) -> bool:
        """Whether the future has a result or an error, or is cancelled."""

    def set_result(self, result: T, /) -> None:
        """Wake the task that waits. The future must not be done."""

    def set_exception(self, exception: BaseException, /) -> None:
        """Have the task that waits raise an error. The future must not be done."""

    def cancel(self) -> bool:
        """Have it count as done, unless it is. No task may be waiting."""

    def __await__(self) -> Generator[Any, None, T]: ...


class Task(Protocol[T_co]):
    """What `asyncio.Task` does."""

    def cancel(self) -> bool:
        """Cancel it soon."""

    def cancelled(self) -> bool:
        """Whether it ended because it was cancelled."""

    def result(self) -> T_co:
        """What it returned or raised, once it has ended."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        """Call `callback` with the task when it has ended."""


class Timer(Protocol):
    """What `asyncio.TimerHandle` does."""

    def cancel(self) -> None:
        """Call nothing."""

    def cancelled(self) -> bool:
        """Whether it was cancelled."""

    def when(self) -> float:
        """When it rings, by the loop's clock, in seconds."""


class Loop(Protocol):
    """The part of `asyncio.AbstractEventLoop` that the bus and the client use."""

    def time(self) -> float:
        """The loop's clock, in seconds. It is `anyio.current_time`."""

    def is_closed(self) -> bool:
        """Whether the event loop has stopped, so that none of its tasks runs any more."""

    def create_future(self) -> Future[Any]:
        """A new future."""

    def create_task(self, coro: Coroutine[Any, Any, T], *, name: str) -> Task[T]:
        """Start a task that no scope owns. Nobody sees an error that it raises unless somebody asks for its result."""

    def call_soon(self, callback: Callable[[], object], /) -> object:
        """Call `callback` once the tasks that can run now have run."""

    def call_at(self, when: float, callback: Callable[[], object], /) -> Timer:
        """Call `callback` at a time of the loop's clock."""


def on_trio() -> bool:
    """Whether trio runs here."""
    # A program that runs trio has imported it.
    trio = sys.modules.get("trio")
    return trio is not None and trio.lowlevel.in_trio_task()


def running_loop() -> Loop:
    """The event loop that runs here: the same object each time within one run.

    Raises:
        RuntimeError: none does.
    """
    if on_trio():
        from .trio_loop import running

        return running()
    return asyncio.get_running_loop()


def current_loop() -> Loop | None:
    """The event loop that runs here, if one does."""
    # Asked by each call of a client.
    return running_loop() if on_trio() else asyncio._get_running_loop()


def semaphore(count: int) -> AbstractAsyncContextManager[Any, Any]:
    """A semaphore for `count` tasks at once, in the order in which they came."""
    # Neither gives way to the loop when it is free.
    return anyio.Semaphore(count, fast_acquire=True) if on_trio() else asyncio.Semaphore(count)


async def wait(task: Task[Any]) -> None:
    """Wait for a task's end, whatever it comes to."""
    if isinstance(task, asyncio.Task):
        await asyncio.wait([task])
    else:
        await task.wait()  # type: ignore[attr-defined]


async def shielded(task: Task[T]) -> T:
    """What a task returns or raises. It goes on if the caller is cancelled."""
    if isinstance(task, asyncio.Task):
        return await asyncio.shield(task)
    await task.wait()  # type: ignore[attr-defined]
    return task.result()
