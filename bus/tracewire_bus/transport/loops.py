"""The running event loop: asyncio's, or on trio an object with the same methods (`trio_loop.py`).

Code that needs a future, a task outside of a task group, or a callback gets the event loop by `running_loop`. On
asyncio that is asyncio's own loop, without overhead. All other code uses anyio.
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
    """A subset of `asyncio.Future`. At most one task awaits it; cancelling that task cancels the future."""

    def done(self) -> bool:
        """Whether the future has a result or an error, or is cancelled."""

    def set_result(self, result: T, /) -> None:
        """Wake the task that waits. The future must not be done."""

    def set_exception(self, exception: BaseException, /) -> None:
        """Raise an error in the task that waits. The future must not be done."""

    def cancel(self) -> bool:
        """Mark the future as done. Returns False if it was already. No task may be waiting."""

    def __await__(self) -> Generator[Any, None, T]: ...


class Task(Protocol[T_co]):
    """A subset of `asyncio.Task`."""

    def cancel(self) -> bool:
        """Request the task's cancellation. Returns False if the task has ended."""

    def cancelled(self) -> bool:
        """Whether the task was cancelled and has ended."""

    def result(self) -> T_co:
        """Return the task's result, or raise its error. The task must have ended."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        """Call `callback` with the task when it has ended."""


class Timer(Protocol):
    """A subset of `asyncio.Handle`: uvloop returns no `TimerHandle` for what is due at once."""

    def cancel(self) -> None:
        """Do not call the callback."""


class Loop(Protocol):
    """The part of `asyncio.AbstractEventLoop` that the bus and the client use."""

    def time(self) -> float:
        """The loop's clock in seconds, which is also `anyio.current_time`."""

    def is_closed(self) -> bool:
        """Whether the event loop has stopped, so that none of its tasks runs any more."""

    def create_future(self) -> Future[Any]:
        """A new future."""

    def create_task(self, coro: Coroutine[Any, Any, T], *, name: str) -> Task[T]:
        """Start a task outside of any task group. Its error is lost unless the caller asks for its result."""

    def call_soon(self, callback: Callable[[], object], /) -> object:
        """Call `callback` after the tasks that can run now have run."""

    def call_at(self, when: float, callback: Callable[[], object], /) -> Timer:
        """Call `callback` at a time of the loop's clock."""


def on_trio() -> bool:
    """Whether the caller runs in a task of trio."""
    # Only a program that has imported trio can run it.
    trio = sys.modules.get("trio")
    return trio is not None and trio.lowlevel.in_trio_task()


def running_loop() -> Loop:
    """The running event loop; the same object each time within one run.

    Raises:
        RuntimeError: no event loop is running.
    """
    if on_trio():
        from .trio_loop import running

        return running()
    return asyncio.get_running_loop()


def current_loop() -> Loop | None:
    """The running event loop, or None if there is none."""
    # Asked by each call of a client.
    return running_loop() if on_trio() else asyncio._get_running_loop()


def semaphore(count: int) -> AbstractAsyncContextManager[Any, Any]:
    """A first-come-first-served semaphore for `count` tasks. Acquiring a free one does not yield to the loop."""
    return anyio.Semaphore(count, fast_acquire=True) if on_trio() else asyncio.Semaphore(count)


async def wait(task: Task[Any]) -> None:
    """Wait for a task's end, without raising the task's error."""
    if isinstance(task, asyncio.Task):
        await asyncio.wait([task])
    else:
        await task.wait()  # type: ignore[attr-defined]


async def shielded(task: Task[T]) -> T:
    """The result of a task, or its error. The task continues if the caller is cancelled."""
    if isinstance(task, asyncio.Task):
        return await asyncio.shield(task)
    await task.wait()  # type: ignore[attr-defined]
    return task.result()
