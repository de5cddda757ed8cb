"""A trace as a cell's output: a static rendering that stays in the notebook, and beside it the live view.

While a live view is shown, it hides the static rendering. That is written anew while the trace runs and at its end, so
that a notebook that is opened again shows the trace as it was.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import uuid
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from tracewire.errors import TracewireError
from tracewire.rendering.page import Page, as_html, as_text
from tracewire.traces.output import Event
from tracewire.traces.subscription import Subscription

from .feed import Feed, Send, Spawn
from .recording import Recording

if TYPE_CHECKING:
    from tracewire.traces.event_stream import EventStream

    from .widget import TraceWidget

__all__ = ["show"]

logger = logging.getLogger("tracewire")

#: How often the static rendering is written anew: beside a live view, and where there is none.
_BESIDE_S, _ALONE_S = 5.0, 0.5
#: Tasks that nothing else refers to, and outputs whose trace has not ended.
_tasks: set[asyncio.Task[None]] = set()
_running: set[_Output] = set()


def show(stream: EventStream[Any], spawn: Spawn | None = None) -> None:
    """Show a trace as the output of the cell that runs.

    Args:
        spawn: runs coroutines on the client's event loop; None for the loop of the client's session.

    Raises:
        NotImplementedError: no notebook's kernel runs here, or the client is not connected or runs on trio.
    """
    shell = _shell()
    if shell is None:
        raise NotImplementedError
    _Output(shell, stream, spawn or _spawner(stream)).show()


def _shell() -> Any:
    """The kernel's IPython, if a kernel runs in this process."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return None if getattr(shell, "kernel", None) is None else shell


def _spawner(stream: EventStream[Any]) -> Spawn:
    loop: object = stream._session._loop
    if not isinstance(loop, asyncio.AbstractEventLoop) or stream._session.closed:
        raise NotImplementedError

    def start(function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = loop.create_task(function())
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)

    def spawn(function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(start, function)

    return spawn


class _Output:
    """One output of one trace."""

    def __init__(self, shell: Any, stream: EventStream[Any], spawn: Spawn) -> None:
        self._shell = shell
        self._stream = stream
        self._spawn = spawn
        self._trace_id = stream._trace_id
        self._key = uuid.uuid4().hex
        self._recording = Recording(self._trace_id)
        self._problem: str | None = None
        self._begun = asyncio.Event()
        self._failure: TracewireError | None = None
        self._widget = _widget(self._key, self._trace_id)
        send: Send = _no_view if self._widget is None else self._widget.push
        self._feed = Feed(stream._session, self._trace_id, self._wait_begun, send, spawn)
        self._published = monotonic()

    def show(self) -> None:
        """Publish the outputs, and follow the trace."""
        self._publish(update=False)
        if (widget := self._widget) is not None:
            widget.feed_from(self._feed)
            self._shell.display_pub.publish(data=widget.bundle(), metadata={})
        _running.add(self)
        self._spawn(self._run)

    async def _wait_begun(self) -> None:
        await self._begun.wait()
        if self._failure is not None:
            raise self._failure

    async def _run(self) -> None:
        try:
            await self._begin()
            await self._feed.push(self._recording.fold, self._take)
        except TracewireError as error:
            self._problem = str(error)
        finally:
            self._publish(update=True)
            _running.discard(self)

    async def _begin(self) -> None:
        try:
            if not isinstance(self._stream, Subscription):
                await self._stream.start()
        except TracewireError as error:
            self._failure = error
        finally:
            self._begun.set()

    def _take(self, event: Event) -> None:
        self._recording.take(event)
        pace = _ALONE_S if self._widget is None else _BESIDE_S
        if monotonic() - self._published > pace:
            self._publish(update=True)

    def _page(self) -> Page:
        page = self._recording.page()
        if self._problem is not None:
            page.problem = self._problem
        if not self._recording.fold.finished:
            page.status = "not shown to its end" if self._problem is not None else page.status
        return page

    def _publish(self, *, update: bool) -> None:
        self._published = monotonic()
        page = self._page()
        data = {"text/html": as_html(page, self._key), "text/plain": as_text(page)}
        publish = partial(self._shell.display_pub.publish, data=data, metadata={}, transient={"display_id": self._key})
        if update:
            # Not in the context of the cell that has shown the trace: programs that run notebooks take the outputs of
            # the cell that runs now, and no others.
            Context().run(publish, update=True)
        else:
            publish()


def _no_view(content: dict[str, Any], /, buffers: list[bytes] | None = None) -> None:
    """Send nothing: there is no view."""


def _widget(key: str, trace_id: str) -> TraceWidget | None:
    """The live view, if the extra that it needs is installed."""
    try:
        from .widget import TraceWidget
    except ImportError as error:
        logger.debug("no live view: %s", error)
        return None
    return TraceWidget(key=key, trace_id=trace_id)
