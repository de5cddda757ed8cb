"""The methods of asyncio's event loop that the bus and the client use, on trio. `loops.py` imports it if trio runs.

Tasks are trio's system tasks: any task may start and cancel them, no nursery has to stay open meanwhile, and trio
cancels them after the main task. Trio treats an error that a system task raises as an internal error and ends the
program, so `_Task` keeps the error of its coroutine instead.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from contextvars import copy_context
from typing import Any, Final, Generic, TypeVar

import anyio
import trio

__all__ = ["TrioLoop", "running"]

T = TypeVar("T")


class TrioLoop:
    """One run of trio, with the methods of `asyncio.AbstractEventLoop` that `loops.Loop` names."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()

    def time(self) -> float:
        """Trio's clock, in seconds."""
        return trio.current_time()

    def is_closed(self) -> bool:
        """Whether the run is over."""
        try:
            self._token.run_sync_soon(lambda: None)
        except trio.RunFinishedError:
            return True
        return False

    def create_future(self) -> _Future[Any]:
        """A new future."""
        return _Future()

    def create_task(self, coro: Coroutine[Any, Any, T], *, name: str) -> _Task[T]:
        """Start a system task, with the context variables of its caller."""
        return _Task(coro, name)

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call `callback` in one of the next passes over the tasks that can run."""
        self._token.run_sync_soon(callback)

    def call_at(self, when: float, callback: Callable[[], object]) -> _Timer:
        """Call `callback` at a time of trio's clock."""
        return _Timer(when, callback)


_loop: Final[trio.lowlevel.RunVar[TrioLoop]] = trio.lowlevel.RunVar("tracewire")


def running() -> TrioLoop:
    """The loop of the current run of trio."""
    try:
        return _loop.get()
    except LookupError:
        loop = TrioLoop()
        _loop.set(loop)
        return loop


class _Future(Generic[T]):
    """See `loops.Future`."""

    __slots__ = ("_done", "_error", "_result", "_waiter")

    def __init__(self) -> None:
        self._done = False
        self._error: BaseException | None = None
        self._result: T
        self._waiter: trio.lowlevel.Task | None = None

    def done(self) -> bool:
        return self._done

    def set_result(self, result: T) -> None:
        self._result = result
        self._finish()

    def set_exception(self, exception: BaseException) -> None:
        self._error = exception
        self._finish()

    def cancel(self) -> bool:
        done, self._done = self._done, True
        return not done

    def _finish(self) -> None:
        self._done = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            trio.lowlevel.reschedule(waiter)

    def _abort(self, _: Any) -> trio.lowlevel.Abort:
        self._done, self._waiter = True, None
        return trio.lowlevel.Abort.SUCCEEDED

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        if not self._done:
            self._waiter = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._abort)
        if self._error is not None:
            raise self._error
        return self._result


class _Task(Generic[T]):
    """See `loops.Task`."""

    def __init__(self, coro: Coroutine[Any, Any, T], name: str) -> None:
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._callbacks: list[Callable[[_Task[T]], object]] = []
        self._cancelled = True
        self._error: BaseException | None = None
        self._result: T
        trio.lowlevel.spawn_system_task(self._run, coro, name=name, context=copy_context())

    async def _run(self, coro: Coroutine[Any, Any, T]) -> None:
        try:
            with self._scope:
                if self._scope.cancel_called:
                    # Cancelled before its first step: as on asyncio, the coroutine never runs.
                    coro.close()
                    return
                self._result = await coro
                self._cancelled = False
        except trio.Cancelled:
            # Trio cancels all system tasks at the end of its run.
            raise
        except BaseException as error:
            self._error, self._cancelled = error, False
        finally:
            self._ended.set()
            for callback in self._callbacks:
                callback(self)

    def cancel(self) -> bool:
        self._scope.cancel()
        return not self._ended.is_set()

    def cancelled(self) -> bool:
        return self._cancelled

    async def wait(self) -> None:
        await self._ended.wait()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        if self._cancelled:
            raise anyio.ClosedResourceError("the task was cancelled")
        return self._result

    def add_done_callback(self, callback: Callable[[_Task[T]], object]) -> None:
        self._callbacks.append(callback)


class _Timer:
    """See `loops.Timer`."""

    def __init__(self, when: float, callback: Callable[[], object]) -> None:
        self._task = _Task(self._ring(when, callback), "tracewire: a timer")

    @staticmethod
    async def _ring(when: float, callback: Callable[[], object]) -> None:
        await trio.sleep_until(when)
        callback()

    def cancel(self) -> None:
        self._task.cancel()
