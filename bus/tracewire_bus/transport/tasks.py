"""Tasks that are owned by an object, and synchronisation between tasks."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import anyio
import anyio.lowlevel

from .backoff import Backoff
from .errors import copy_of
from .loops import Future, Loop, Task, running_loop, shielded, wait

__all__ = ["OwnedTask", "PerTickLimiter", "Refreshed", "Signal"]

logger = logging.getLogger("tracewire")


T = TypeVar("T")

#: The first and the longest pause before a failed background task restarts, in seconds.
_RESTART_S, _RESTART_MOST_S = 0.1, 5.0


class OwnedTask:
    """A background task that is owned by an object instead of a task group.

    A task group that is entered in `start()` and left in `aclose()` must be left by the task that entered it, which
    test fixtures and web frameworks do not guarantee.

    No caller awaits the task. If its coroutine raises, the error is logged at once and the coroutine is started again
    after a pause, since other tasks depend on it (a client's lease, readers of events).

    Args:
        run: the function whose coroutine the task runs.
        name: what the task does, for the log: "that ...".
    """

    def __init__(self, run: Callable[[], Awaitable[None]], name: str) -> None:
        self._run = run
        self._name = name
        self._task = running_loop().create_task(self._run_forever(), name=f"tracewire: the task {name}")

    async def _run_forever(self) -> None:
        backoff = Backoff(_RESTART_S, _RESTART_MOST_S)
        while True:
            begun = anyio.current_time()
            try:
                return await self._run()
            except Exception as error:
                if anyio.current_time() - begun > 2 * _RESTART_MOST_S:
                    backoff.reset()
                pause = backoff.next()
                logger.error(
                    "the task %s failed, and restarts in %.1f s: %r",
                    *(self._name, pause, error),
                    exc_info=error if backoff.failures == 1 else None,
                )
            await anyio.sleep(pause)

    def cancel(self) -> None:
        """Cancel the task without waiting for its end."""
        self._task.cancel()

    async def aclose(self) -> None:
        """Cancel the task and wait for its end. Any task may call this."""
        self._task.cancel()
        with anyio.CancelScope(shield=True):
            await wait(self._task)
        if not self._task.cancelled():
            self._task.result()


class Signal:
    """Wakes all waiting tasks. Unlike an event that is replaced after each `set`, it is free while no task waits."""

    __slots__ = ("_loop", "_waiters")

    def __init__(self) -> None:
        self._loop: Loop | None = None
        self._waiters: list[Future[None]] = []

    async def wait(self) -> None:
        """Wait for the next `notify`."""
        if self._loop is None:
            # Kept, since up to Python 3.11 `get_running_loop` makes a system call.
            self._loop = running_loop()
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            self._waiters.remove(waiter)

    def notify(self) -> None:
        """Wake all tasks that wait now."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


class Refreshed(Generic[T]):
    """A cached value that concurrent callers refresh together.

    A caller that needs a younger value starts a refresh, and callers that arrive meanwhile share it. An error of the
    refresh is raised in all of them. The refresh is cancelled when all of them are.

    Args:
        run: fetches the value.
    """

    __slots__ = ("_asking", "_at", "_begun", "_run", "_value", "_waiting")

    def __init__(self, run: Callable[[], Awaitable[T]]) -> None:
        self._run = run
        self._at = -math.inf
        self._value: T
        self._asking: Task[T] | None = None
        # When the refresh under way began, and how many callers wait for it.
        self._begun = math.inf
        self._waiting = 0

    def forget(self) -> None:
        """Have the next `get` refresh the value."""
        self._at = -math.inf

    async def get(self, age_s: float) -> T:
        """The value, fetched at most `age_s` seconds ago. Raises the errors of the fetch."""
        now = anyio.current_time()
        if now - self._at < age_s:
            return self._value
        if self._asking is None or self._begun < now - age_s:
            self._begun, self._waiting = math.inf, 0
            self._asking = running_loop().create_task(self._ask(), name="tracewire asks for all")
        asking = self._asking
        self._waiting += 1
        try:
            return await shielded(asking)
        except Exception as error:
            # A copy for each caller: raising an error changes its traceback.
            raise copy_of(error) from error.__cause__
        finally:
            if asking is self._asking:
                self._waiting -= 1
                if not self._waiting:
                    self._asking = None
                    asking.cancel()

    async def _ask(self) -> T:
        self._begun = anyio.current_time()
        self._value = value = await self._run()
        self._at = anyio.current_time()
        return value


class PerTickLimiter:
    """Lets at most `count` callers continue in each tick of the event loop, in the order of their calls.

    In a burst of calls, the commands of the first callers are thus sent while later callers still prepare theirs.
    """

    __slots__ = ("_count", "_left", "_loop", "_waiting")

    def __init__(self, count: int) -> None:
        self._count = self._left = count
        self._loop: Loop | None = None
        self._waiting: deque[Future[None]] = deque()

    async def wait(self) -> None:
        """Wait until the caller may continue; returns at once while fewer than `count` continued in this tick."""
        if self._loop is None:
            # Kept, since up to Python 3.11 `get_running_loop` makes a system call.
            self._loop = running_loop()
        if self._left == self._count:
            self._loop.call_soon(self._next_tick)
        if self._left:
            self._left -= 1
            return
        waiter = self._loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _next_tick(self) -> None:
        """Let the longest waiting callers continue in the next tick."""
        assert self._loop is not None
        self._left = self._count
        while self._left and self._waiting:
            waiter = self._waiting.popleft()
            # A waiter that is done was cancelled.
            if not waiter.done():
                waiter.set_result(None)
                self._left -= 1
        if self._left < self._count:
            self._loop.call_soon(self._next_tick)
