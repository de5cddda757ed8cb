"""Tasks that belong to an object, and what they wait for."""

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

#: How long a background task that failed waits before it begins anew, in seconds, the first time and at most.
_ANEW_S, _ANEW_MOST_S = 0.1, 5.0


class OwnedTask:
    """A task that belongs to an object instead of a scope, and lasts as long as that does.

    A task group would do, but one that is entered in `start()` and left in `aclose()` must be left by the task that
    entered it, which a fixture or a web framework does not promise.

    Nobody waits for it. So an error that it does not handle is logged at once, and it begins anew after a pause: what
    rests on it (a client's lease, everything that waits for events) must not end without a word. `name` says in the log
    what it does: "that ...".
    """

    def __init__(self, run: Callable[[], Awaitable[None]], name: str) -> None:
        self._run = run
        self._name = name
        self._task = running_loop().create_task(self._body(), name=f"tracewire: the task {name}")

    async def _body(self) -> None:
        backoff = Backoff(_ANEW_S, _ANEW_MOST_S)
        while True:
            begun = anyio.current_time()
            try:
                return await self._run()
            except Exception as error:
                if anyio.current_time() - begun > 2 * _ANEW_MOST_S:
                    backoff.reset()
                pause = backoff.next()
                logger.error(
                    "the task %s failed, and begins anew in %.1f s: %r",
                    *(self._name, pause, error),
                    exc_info=error if backoff.failures == 1 else None,
                )
            await anyio.sleep(pause)

    def cancel(self) -> None:
        """Have it end soon."""
        self._task.cancel()

    async def aclose(self) -> None:
        """Cancel it and wait for its end, from any task."""
        self._task.cancel()
        with anyio.CancelScope(shield=True):
            await wait(self._task)
        if not self._task.cancelled():
            self._task.result()


class Signal:
    """Wakes the tasks that wait, if any do. Costs nothing while none does, as an event that is renewed would."""

    __slots__ = ("_loop", "_waiters")

    def __init__(self) -> None:
        self._loop: Loop | None = None
        self._waiters: list[Future[None]] = []

    async def wait(self) -> None:
        """Wait for the next `notify`."""
        if self._loop is None:
            # Asked once: up to Python 3.11 each time is a system call.
            self._loop = running_loop()
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            self._waiters.remove(waiter)

    def notify(self) -> None:
        """Wake them."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


class Refreshed(Generic[T]):
    """What is asked for again when it is older than whoever wants it likes: once for all who want it meanwhile.

    If asking fails, it fails for all of them. It goes on for as long as one of them waits.
    """

    __slots__ = ("_asking", "_at", "_begun", "_run", "_value", "_waiting")

    def __init__(self, run: Callable[[], Awaitable[T]]) -> None:
        self._run = run
        self._at = -math.inf
        self._value: T
        self._asking: Task[T] | None = None
        #: When the asking under way began.
        self._begun = math.inf
        #: How many wait for it.
        self._waiting = 0

    def forget(self) -> None:
        """Ask the next time, however young it is."""
        self._at = -math.inf

    async def get(self, age_s: float) -> T:
        """It, as it was at most so many seconds ago. Raises what asking raises."""
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
            # Of its own: whoever raises an error writes to it.
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
    """Lets `count` callers through in each turn of the event loop, in their order, and anybody while there are fewer.

    What the first of a crowd have made is then on its way while the others make theirs.
    """

    __slots__ = ("_count", "_left", "_loop", "_waiting")

    def __init__(self, count: int) -> None:
        self._count = self._left = count
        self._loop: Loop | None = None
        self._waiting: deque[Future[None]] = deque()

    async def wait(self) -> None:
        """Wait for one's turn."""
        if self._loop is None:
            # Asked once: up to Python 3.11 each time is a system call.
            self._loop = running_loop()
        if self._left == self._count:
            self._loop.call_soon(self._next)
        if self._left:
            self._left -= 1
            return
        waiter = self._loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _next(self) -> None:
        """A turn of the loop has passed, and whoever waits goes first in the next."""
        assert self._loop is not None
        self._left = self._count
        while self._left and self._waiting:
            waiter = self._waiting.popleft()
            # Some have been cancelled.
            if not waiter.done():
                waiter.set_result(None)
                self._left -= 1
        if self._left < self._count:
            self._loop.call_soon(self._next)
