"""Submissions in the background: leaving a `with model.trace(...)` cannot await the submission.

A client submits them one after the other, in the order in which they were queued, and waits for them when it is closed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio

from tracewire.errors import BusUnavailable, ClientClosed, TraceClosed, WrongEventLoop
from tracewire_bus.transport.tasks import OwnedTask

__all__ = ["BackgroundSubmissions", "QueuedSubmission"]

logger = logging.getLogger("tracewire")

#: How long a closing client still waits for submissions after `retry_timeout`, in seconds.
_LEAVE_S = 2.0
#: Upper limit on how long a closing client waits for submissions, in seconds; `retry_timeout` may be longer.
_DRAIN_S = 60.0


class QueuedSubmission:
    """One submission of the queue.

    Attributes:
        trace_id: the id of its trace.
        ended: set once the submission is durable, refused or withdrawn.
        refused: the error with which it ended, if it did.
    """

    def __init__(self, trace_id: str) -> None:
        self.trace_id = trace_id
        self.ended = anyio.Event()
        self.refused: Exception | None = None
        self._withdrawn = False
        #: Around the submission, while that is under way.
        self._scope: anyio.CancelScope | None = None

    async def wait(self) -> None:
        """Wait until it has ended, and raise the error with which it did."""
        await self.ended.wait()
        if self.refused is not None:
            raise self.refused

    def take_error(self) -> Exception | None:
        """Return and clear the error with which it ended, since the caller submits the trace again."""
        error, self.refused = self.refused, None
        return error

    async def withdraw(self) -> None:
        """End the submission before it begins, or cancel it if it is under way."""
        self._withdrawn = True
        if self._scope is not None:
            self._scope.cancel()
            with anyio.CancelScope(shield=True):
                await self.ended.wait()

    async def run(self, submit: Callable[[], Awaitable[None]], outage: BusUnavailable | None) -> None:
        """Await `submit`, unless an `outage` of Redis is given or the submission was withdrawn."""
        try:
            if outage is not None:
                raise BusUnavailable(str(outage))
            with anyio.CancelScope() as self._scope:
                if not self._withdrawn:
                    await submit()
            if self._withdrawn:
                raise TraceClosed(f"trace {self.trace_id} was closed before it was submitted")
        except Exception as error:
            if not self._withdrawn:
                logger.warning("trace %s was not submitted: %s", self.trace_id, error)
            self.refused = error
        finally:
            self.ended.set()

    def give_up(self) -> None:
        """End it with an error, because the client is closed."""
        if not self.ended.is_set():
            logger.warning("trace %s was not submitted: its client was closed before", self.trace_id)
            self.refused = ClientClosed("the client is closed: make another one")
            self.ended.set()


class BackgroundSubmissions:
    """The submissions of a client that run in the background, in the order in which they were queued."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._tasks: dict[QueuedSubmission, OwnedTask] = {}
        self._last: anyio.Event | None = None
        #: The error of the last submission, if Redis did not answer it.
        self._outage: BusUnavailable | None = None

    def add(self, trace_id: str, submit: Callable[[], Awaitable[None]]) -> QueuedSubmission:
        """Queue a submission: a task awaits `submit` once the submissions queued before have ended."""
        try:
            queued, before, added = QueuedSubmission(trace_id), self._last, anyio.current_time()

            async def run() -> None:
                try:
                    if before is not None:
                        await before.wait()
                    late = anyio.current_time() - added >= self._patience_s
                    await queued.run(submit, self._outage if late else None)
                    self._outage = queued.refused if isinstance(queued.refused, BusUnavailable) else None
                finally:
                    self._tasks.pop(queued, None)

            self._tasks[queued] = OwnedTask(run, f"that submits trace {trace_id}")
        except RuntimeError:
            raise WrongEventLoop("a trace is queued in the background: write its with in a coroutine") from None
        self._last = queued.ended
        return queued

    async def drain(self) -> None:
        """Wait until Redis has stored or refused all queued submissions, for `retry_timeout` and at most a minute."""
        with anyio.move_on_after(min(self._patience_s, _DRAIN_S)):
            await self._drain()

    async def _drain(self) -> None:
        while self._tasks:
            queued = next(iter(self._tasks))
            await queued.ended.wait()
            self._tasks.pop(queued, None)

    async def aclose(self) -> None:
        """Give up all that are not submitted within two seconds."""
        with anyio.move_on_after(_LEAVE_S):
            await self._drain()
        left = dict(self._tasks)
        for queued in left:
            queued.give_up()
        for task in left.values():
            task.cancel()
        for task in left.values():
            await task.aclose()
