"""`Session`: the state that a client shares with its handles: bus, lease, registry and background submissions."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Awaitable, Callable
from functools import partial

import anyio

from tracewire.error_mapping import connect_error
from tracewire.errors import ClientClosed, InvalidUrl, NotConnected, PrivateRedisError, WrongEventLoop
from tracewire_bus.bus import Bus, BusError
from tracewire_bus.store.proofs import Proofs
from tracewire_bus.transport.loops import Loop, current_loop
from tracewire_bus.transport.tasks import PerTickLimiter

from .background import BackgroundSubmissions, QueuedSubmission
from .library_names import NamedArrays
from .presence import Presence
from .served_models import ServedModels
from .vectors import ReferredLists

__all__ = ["Session"]

logger = logging.getLogger("tracewire")

#: Upper limit on closing, after the submissions that a `with` has queued, in seconds.
_CLOSE_S = 10.0
#: How many traces that start at the same time are set up in one turn of the event loop.
_TRACES_PER_TICK = 8

_OTHER_LOOP = "the client belongs to another event loop: connect() in each, or use tracewire.blocking in threads"


class Session:
    """One client, as its traces, subscriptions and resources see it: connected by `open`, and closed by `aclose`.

    Attributes:
        url: URL of its Redis. For `embedded://`, the private one's URL once the session is open.
        name: name of the client, which engines and other clients see.
        presence: its lease, and the deadlines of its traces. Made by `open`.
        models: the registry as it was last read.
        library: the library's entries that interventions name.
        referred: the lists of interventions that its traces brought last.
        turns: spreads traces that are started at the same time over turns of the event loop, so that the client sends
            the first while it still makes the others.
    """

    presence: Presence

    def __init__(
        self,
        url: str,
        *,
        name: str | None,
        prefix: str,
        lease_ttl: float,
        retry_timeout: float,
        read_interval: float | None,
        proofs: Proofs,
    ) -> None:
        self.url = url
        self.name = name if name is not None else f"{socket.gethostname()}:{os.getpid()}"
        self.models = ServedModels(self.open_bus)
        self.library = NamedArrays(self.open_bus)
        self.referred = ReferredLists()
        self.turns = PerTickLimiter(_TRACES_PER_TICK)
        self._make_bus = partial(Bus.open, url, prefix=prefix, patience_s=retry_timeout, read_interval_s=read_interval)
        self._proofs = proofs
        self._lease_ttl = lease_ttl
        try:
            self._make_bus()
        except ValueError as error:
            raise InvalidUrl(f"cannot connect: {error}") from error
        self._bus: Bus | None = None
        self._loop: Loop | None = None
        #: While one task connects: set when it has, or has failed.
        self._opening: anyio.Event | None = None
        self._opening_scope: anyio.CancelScope | None = None
        #: Once one task closes it: set when it is closed.
        self._closing: anyio.Event | None = None
        self._submissions: BackgroundSubmissions | None = None

    @property
    def opened(self) -> bool:
        """Whether the session is connected and not closed."""
        return self._bus is not None

    @property
    def closed(self) -> bool:
        """Whether the session is closed, or a task is closing it."""
        return self._closing is not None

    def open_bus(self) -> Bus:
        """The bus.

        Raises:
            ClientClosed: the client is closed.
            NotConnected: the client is not connected yet.
            WrongEventLoop: another event loop runs here than the client's.
        """
        if self._bus is None:
            if self._closing is not None:
                raise ClientClosed("the client is closed: make another one")
            raise NotConnected(
                "the client is not connected yet: enter it with `async with client:`, or `await client.connect()`"
            )
        if current_loop() not in (None, self._loop):
            # The client's connections break if another loop uses them.
            raise WrongEventLoop(_OTHER_LOOP)
        return self._bus

    # --- life ---------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect. A call while another task connects waits for that task. A later call does nothing.

        Raises:
            ConnectError: the URL cannot be used; `BusUnavailable` and `BusRefused` say more.
            ClientClosed: the client is closed, or another task closed it meanwhile.
        """
        while self._opening is not None:
            await self._opening.wait()
        if self._closing is not None:
            raise ClientClosed("the client is closed: make another one")
        if self._bus is not None:
            self.open_bus()
            return
        loop = current_loop()
        if loop is None:
            raise WrongEventLoop("no event loop runs here: connect in a coroutine that asyncio or trio runs")
        opening = self._opening = anyio.Event()
        try:
            with anyio.CancelScope() as self._opening_scope:
                await self._open(loop)
        finally:
            self._opening = self._opening_scope = None
            opening.set()
        if self._bus is None:
            raise ClientClosed("the client was closed while it connected")

    async def _open(self, loop: Loop) -> None:
        from tracewire_bus.transport.embedded import EmbeddedServerError

        bus = self._make_bus()
        bus.proofs = self._proofs.on(bus.keys.prefix)
        try:
            await bus.__aenter__()
        except BusError as error:
            raise connect_error(error, "cannot connect: ") from error
        except EmbeddedServerError as error:
            raise PrivateRedisError(f"cannot connect: {error}") from error
        except ValueError as error:
            raise InvalidUrl(f"cannot connect: {error}") from error
        try:
            await bus.warm()
        except BaseException:
            await bus.aclose()
            raise
        self.url, self.presence = bus.url, Presence(bus, self._lease_ttl)
        self._bus, self._loop = bus, loop

    async def aclose(self) -> None:
        """Submit the traces that are queued, give the lease up, and disconnect.

        Any task may call it, and several at once, which all return when it is closed. It takes as long as Redis takes
        to answer, at most `retry_timeout` for queued traces (a minute, if that is longer) and ten seconds for the rest.

        Raises:
            WrongEventLoop: another event loop runs here than the client's, which still runs.
        """
        if self._bus is not None and current_loop() is not self._loop:
            assert self._loop is not None
            if not self._loop.is_closed():
                raise WrongEventLoop(_OTHER_LOOP)
            # Its tasks and connections ended with their loop.
            self._bus, self._closing = None, anyio.Event()
            self._closing.set()
        if self._closing is not None:
            await self._closing.wait()
            return
        closing = self._closing = anyio.Event()
        try:
            while self._opening is not None:
                if self._opening_scope is not None:
                    self._opening_scope.cancel()
                await self._opening.wait()
            if self._bus is not None:
                await self._close(self._bus)
        finally:
            self._bus = None
            closing.set()

    async def _close(self, bus: Bus) -> None:
        try:
            if self._submissions is not None:
                await self._submissions.drain()
        finally:
            with anyio.move_on_after(_CLOSE_S, shield=True) as limited:
                if self._submissions is not None:
                    await self._submissions.aclose()
                self._bus = None
                await self.presence.aclose()
                await bus.aclose()
            if limited.cancelled_caught:
                logger.warning("closing the client took more than %g s, and was given up", _CLOSE_S)

    # --- submissions in the background --------------------------------------------------------------------------------

    def queue(self, trace_id: str, submit: Callable[[], Awaitable[None]]) -> QueuedSubmission:
        """Have a trace submitted in the background by `submit`; `aclose` waits for it."""
        bus = self.open_bus()
        if self._submissions is None:
            self._submissions = BackgroundSubmissions(bus.patience_s)
        return self._submissions.add(trace_id, submit)
