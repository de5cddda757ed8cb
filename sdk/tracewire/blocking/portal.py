"""An event loop on a thread of its own, and how other threads call what runs on it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, Final, Generic, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from tracewire.errors import ClientClosed, ConnectError, WrongEventLoop

__all__ = ["Bridge", "Portal"]

T = TypeVar("T")

#: How long a thread waits at a time. Python notices a signal between two waits at the latest.
_SLICE_S: Final = 1.0
#: What an iterator yields at its end.
_END: Any = object()


class Portal:
    """The event loop of one client. Any thread may call it, several at once.

    Its thread starts with `start`, and ends with `stop`, or when nothing refers to the client or its handles any more,
    or as the interpreter ends: it keeps no program alive.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._portal: BlockingPortal | None = None
        self._thread: threading.Thread | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._stopped = False

    def start(self, close: Callable[[], Awaitable[None]]) -> None:
        """Start the thread. `close` is awaited on it before it ends. A second call does nothing."""
        with self._lock:
            if self._stopped:
                raise ClientClosed("the client is closed: make another one")
            if self._portal is not None:
                return
            ready: Future[BlockingPortal] = Future()
            self._thread = threading.Thread(target=_serve, args=(ready,), name="tracewire.blocking", daemon=True)
            self._thread.start()
            self._portal = ready.result()
            self._finalizer = weakref.finalize(self, _shut, self._portal, self._thread, close)

    def stop(self) -> None:
        """Await `close`, and end the thread. Each caller returns when it has ended."""
        with self._lock:
            self._stopped = True
            if self._finalizer is not None:
                self._finalizer()
            self._portal = None

    def _running(self) -> BlockingPortal:
        portal = self._portal
        if portal is None or self._stopped:
            if self._stopped:
                raise ClientClosed("the client is closed")
            raise ConnectError(
                "the client is not connected yet: enter it with `with client:`, or call client.connect()"
            )
        if threading.current_thread() is self._thread:
            raise WrongEventLoop("a blocking client cannot be called on its own event loop")
        return portal

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine function on the event loop and return its result. An interrupt of this thread cancels it."""
        future: Future[T] = self._running().start_task_soon(function)
        try:
            return _result(future)
        except CancelledError:
            raise ClientClosed("the client was closed") from None
        except BaseException:
            # The caller's thread was interrupted, as by a KeyboardInterrupt.
            future.cancel()
            raise

    def spawn(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine function on the event loop, in a task of its own. A closed client runs nothing more."""
        try:
            self._running().start_task_soon(function)
        except ClientClosed:
            pass

    def leave(self, close: Callable[[], Awaitable[None]]) -> None:
        """Close a handle on the event loop, unless its client was closed, which closed the handle."""
        if not self._stopped:
            try:
                self.call(close)
            except ClientClosed:
                pass

    def run(self, function: Callable[[], T]) -> T:
        """Run a function on the event loop and return its result."""

        async def running() -> T:
            return function()

        return self.call(running)

    def iterate(self, make: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
        """Iterate over the async iterator that `make` creates on the event loop."""
        iterator = self.run(make)
        try:
            while (item := self.next(iterator)) is not _END:
                yield item
        finally:
            self._close(iterator)

    def next(self, iterator: AsyncIterator[T]) -> T:
        """The next item of an async iterator, `_END` at its end."""

        async def advance() -> T:
            return await anext(iterator, _END)

        return self.call(advance)

    def take(self, iterator: AsyncIterator[T]) -> T:
        """The next item of an async iterator.

        Raises:
            StopIteration: there is none.
        """
        item = self.next(iterator)
        if item is _END:
            raise StopIteration
        return item

    def _close(self, iterator: AsyncIterator[Any]) -> None:
        close: Callable[[], Awaitable[None]] | None = getattr(iterator, "aclose", None)
        portal = self._portal
        if close is None or portal is None or self._stopped:
            return
        if threading.current_thread() is self._thread:
            # The garbage collector closes the iterator on the loop's own thread.
            portal.start_task_soon(close)
        else:
            self.leave(close)


def _result(future: Future[T]) -> T:
    """The result of a future, once it is there.

    `Future.result` waits on a condition. A signal that comes as that wait begins is missed, or leaves the lock of the
    condition released, and a `RuntimeError` hides the `KeyboardInterrupt`. So this waits for a plain lock, in slices.
    """
    done = threading.Lock()
    done.acquire()
    future.add_done_callback(lambda _: done.release())
    while not done.acquire(timeout=_SLICE_S):
        pass
    return future.result()


def _serve(ready: Future[BlockingPortal]) -> None:
    async def main() -> None:
        async with BlockingPortal() as portal:
            ready.set_result(portal)
            await portal.sleep_until_stopped()

    anyio.run(main)


def _shut(portal: BlockingPortal, thread: threading.Thread, close: Callable[[], Awaitable[None]]) -> None:
    async def shut() -> None:
        try:
            await close()
        finally:
            await portal.stop(cancel_remaining=True)

    future = portal.start_task_soon(shut)
    if threading.current_thread() is not thread:
        try:
            future.result()
        except CancelledError:
            # `stop` cancels all remaining tasks, this one included.
            pass
        thread.join()


class Bridge(Generic[T]):
    """An object of the blocking client, in front of the one of the async client that it calls."""

    def __init__(self, portal: Portal, target: T) -> None:
        self._portal = portal
        self._async = target

    def __repr__(self) -> str:
        return repr(self._async)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """What the object of the async client shows in a notebook."""
        bundle = getattr(self._async, "_repr_mimebundle_", None)
        return {"text/plain": repr(self)} if bundle is None else bundle(include, exclude)

    def _ipython_display_(self) -> None:
        """Show a trace live, as the async client does, on this client's event loop."""
        display = getattr(self._async, "_ipython_display_", None)
        if display is None:
            raise NotImplementedError
        display(self._portal.spawn)

    @classmethod
    def _of(cls, bridge: Bridge[Any], target: T) -> Any:
        made = cls.__new__(cls)
        Bridge.__init__(made, bridge._portal, target)
        return made
