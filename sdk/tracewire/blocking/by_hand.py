"""The parts of the blocking client that are not plain calls: connecting and closing, and inline traces."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self, Unpack

from tracewire.checks import Duration
from tracewire.client import Client as AsyncClient
from tracewire.client import KeyOptions
from tracewire.errors import AlreadyEntered
from tracewire.options import SamplingOptions
from tracewire.submission import PromptInput
from tracewire.traces.large import load as load_arrays
from tracewire.traces.state import State
from tracewire.traces.values import Values
from tracewire.traces.with_blocks import Invoker

from .portal import Bridge, Portal

__all__ = ["BlockingClient", "InlineTracer"]


class BlockingClient(Bridge[AsyncClient]):
    """Base of the blocking client: creates, connects and closes it."""

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str = "tw",
        name: str | None = None,
        lease_ttl: Duration = 10.0,
        retry_timeout: Duration | None = 20.0,
        read_interval: Duration | None = 0.0,
        **keys: Unpack[KeyOptions],
    ) -> None:
        made = AsyncClient(
            url,
            prefix=prefix,
            name=name,
            lease_ttl=lease_ttl,
            retry_timeout=retry_timeout,
            read_interval=read_interval,
            **keys,
        )
        super().__init__(Portal(), made)
        self._entered = False
        self._add_resources()

    def _add_resources(self) -> None:
        raise NotImplementedError

    def connect(self) -> Self:
        """Connect and return the client: see `tracewire.Client.connect`. A second call does nothing."""
        self._portal.start(self._async.aclose)
        self._portal.call(self._async.connect)
        return self

    def close(self) -> None:
        """Close the client, as `tracewire.Client.aclose` does, and end its thread. Several threads may call this."""
        self._portal.stop()

    def __enter__(self) -> Self:
        if self._entered:
            raise AlreadyEntered("this client was entered before: make another one for each with")
        self._entered = True
        try:
            return self.connect()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """URL of the Redis, for other processes to connect to."""
        return self._async.url

    def load(self, value: Any, *, dtype: str | None = None, exact: bool = False) -> Any:
        """`tracewire.load`: `value` with the arrays that it refers to. A result, or its saves, keep the downloaded
        arrays, as `result.load` does, and can be converted then.
        """

        async def load() -> Any:
            if isinstance(value, State | Values):
                return await value.load(dtype=dtype, exact=exact)
            return await load_arrays(value, dtype=dtype, exact=exact)

        return self._portal.call(load)


class InlineTracer:
    """How a trace that is written as a `with` is captured, in the caller's thread."""

    _portal: Portal
    _async: Any

    def __enter__(self) -> Self:
        self._async._enter(sys._getframe(1), self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not self._async._leave(kind, error):
            return False
        self._portal.run(self._async._queue)
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._async, name)

    def invoke(self, prompt: PromptInput | None = None, /, **sampling: Unpack[SamplingOptions]) -> Invoker:
        """A prompt with a block of its own: `tracewire.Tracer.invoke`."""
        invoker: Invoker = self._async.invoke(prompt, **sampling)
        return invoker
