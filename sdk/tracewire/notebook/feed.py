"""The kernel's end of live views: it streams a trace's events to them, and carries their orders out.

The feed sends the events to all views as they come, with the `view` `*`, because a kernel takes no orders while it runs
a cell. A message holds a list of `[position, event]` pairs in JSON, and the last one has `over`.

A view sends an order as a dict with its own `view` and `id`. The feed sends messages with the same two. A `follow` of a
view that has missed the first events gets messages as above. Any other order gets one message, with a result in JSON or
an `error`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import anyio
import msgspec

from tracewire.errors import TracewireError
from tracewire.gateway.event_json import event_json
from tracewire.gateway.json_values import to_json
from tracewire.traces import control
from tracewire.traces.event_reader import EventReader
from tracewire.traces.output import Event
from tracewire.traces.subscription import Subscription
from tracewire_bus.domain.fold import Fold

if TYPE_CHECKING:
    from tracewire.traces.session import Session

__all__ = ["Feed", "Send", "Spawn"]

logger = logging.getLogger("tracewire")

#: The least time between two messages of one stream, and the most bytes a second. A notebook server drops messages of
#: more than a million bytes a second.
_BETWEEN_S, _BYTES_A_SECOND = 0.05, 400_000
#: How many events one message has at most.
_EVENTS = 64

Spawn: TypeAlias = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]
"""Runs a coroutine function in a task of the client's event loop. Any thread may call it."""


class Send(Protocol):
    """Sends one message to all views."""

    def __call__(self, content: dict[str, Any], /, buffers: list[bytes] | None = None) -> None: ...


class _Order(msgspec.Struct, tag_field="do", tag=str.lower):
    view: str
    id: int


class Follow(_Order):
    """Send the trace's events after `since`."""

    since: str = "start"


class Stop(_Order):
    """End the stream of this id."""

    stream: int


class Live(_Order):
    """Read the live parameters."""


class Steer(_Order):
    """Change live parameters."""

    values: dict[str, Any]


class Pause(_Order):
    """Pause the trace."""


class Resume(_Order):
    """Let the trace go on."""


class Cancel(_Order):
    """Cancel the trace."""


_Orders: TypeAlias = Follow | Stop | Live | Steer | Pause | Resume | Cancel


class Feed:
    """The events of one trace for its views.

    Args:
        begun: returns once the trace is submitted, or raises the error for which it is not.
    """

    def __init__(
        self, session: Session, trace_id: str, begun: Callable[[], Coroutine[Any, Any, None]], send: Send, spawn: Spawn
    ) -> None:
        self._session = session
        self._trace_id = trace_id
        self._begun = begun
        self._send = send
        self._spawn = spawn
        self._streams: dict[tuple[str, int], anyio.CancelScope] = {}

    async def push(self, fold: Fold, take: Callable[[Event], None]) -> None:
        """Send all events to all views, from the first to the final. `take` gets each of them, folded into `fold`."""
        try:
            await self._stream({"view": "*"}, "start", fold, take)
        except TracewireError as error:
            self._send({"view": "*", "over": True, "error": str(error)})
            raise
        self._send({"view": "*", "over": True, "error": None})

    def take(self, content: Any) -> None:
        """Take an order in. Any thread may call this. A message that is no order is logged and left out."""
        try:
            order = msgspec.convert(content, _Orders)
        except msgspec.ValidationError as error:
            logger.warning("a notebook's view of trace %s sent no order: %s", self._trace_id, error)
            return
        self._spawn(partial(self._execute, order))

    async def _execute(self, order: _Orders) -> None:
        match order:
            case Follow():
                await self._follow(order)
            case Stop():
                if (scope := self._streams.get((order.view, order.stream))) is not None:
                    scope.cancel()
            case _:
                await self._answer(order)

    async def _answer(self, order: Live | Steer | Pause | Resume | Cancel) -> None:
        about = {"view": order.view, "id": order.id}
        try:
            await self._begun()
            result = await self._call(order)
        except (TracewireError, OSError) as error:
            self._send({**about, "error": str(error)})
            return
        self._send(about, buffers=[msgspec.json.encode(result)])

    async def _call(self, order: Live | Steer | Pause | Resume | Cancel) -> Any:
        session, trace_id = self._session, self._trace_id
        match order:
            case Live():
                state = await control.live_state(session, trace_id)
                return {"version": state.version, "values": to_json(state.values, "small", trace_id)}
            case Steer():
                return {"version": await control.steer(session, trace_id, order.values, {}, if_version=None, by=None)}
            case Pause():
                return await control.pause(session, trace_id)
            case Resume():
                return await control.resume(session, trace_id)
            case Cancel():
                return await control.cancel(session, trace_id)

    async def _follow(self, order: Follow) -> None:
        key, error = (order.view, order.id), None
        try:
            with anyio.CancelScope() as self._streams[key]:
                await self._begun()
                await self._stream({"view": order.view, "id": order.id}, order.since, None, lambda _: None)
        except (TracewireError, ValueError) as failure:
            error = str(failure)
        finally:
            del self._streams[key]
        self._send({"view": order.view, "id": order.id, "over": True, "error": error})

    async def _stream(
        self, about: Mapping[str, Any], since: str, fold: Fold | None, take: Callable[[Event], None]
    ) -> None:
        await self._begun()
        reader = EventReader(self._trace_id, self._session.open_bus(), since)
        async with Subscription(self._session, self._trace_id, reader, None):
            while (event := await reader.next(fold)) is not None:
                batch = []
                while event is not None:
                    take(event)
                    batch.append((event.id, event_json(event, "small", self._trace_id)))
                    event = await reader.next(fold) if reader.ready and len(batch) < _EVENTS else None
                data = msgspec.json.encode(batch)
                self._send({**about}, buffers=[data])
                await asyncio.sleep(max(_BETWEEN_S, len(data) / _BYTES_A_SECOND))
