"""Many traces over one WebSocket, `/ws`: a browser opens few connections to a host, and a page shows many traces.

A client sends orders, each with an `id` of its own choice for the stream that it opens:

- `{"do": "follow", "id": 1, "trace": "mine", "since": "start"}` opens the events of a trace, as
  `GET /traces/{id}/events` has them, with `names`, `content` and `arrays`. `since` may be `recent` here, too.
- `{"do": "watch", "id": 2, "since": "now"}` opens the lifecycle events of all traces, as `GET /events` has them.
- `{"do": "stop", "id": 1}` closes a stream. No message with this id comes after the answer.

The gateway sends frames. A frame is a list of messages, each with the `id` of its stream:

- `{"id": 1, "open": true}`: the stream is open.
- `{"id": 1, "position": "1-3", "event": {...}}`: an event. `since` of a later order may be its position.
- `{"id": 1, "over": true, "error": null}`: the stream is over, because the trace has ended, because the client stopped
  the stream, or because of an error, which has the members of problem details.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import anyio
import msgspec
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from fastapi import APIRouter, WebSocket
from starlette.responses import Response
from starlette.websockets import WebSocketDisconnect

from tracewire import Event, Lifecycle, Subscription, TracewireError, Watch

from .browser_sockets import subprotocol_of
from .json_values import Form
from .keys import Caller
from .problems import Problem, of_error
from .state import Gateway, TheCaller, TheGateway, needs
from .streams import Source
from .trace_routes import Content, feed_json, resume_point

__all__ = ["DESCRIPTION", "MOST_STREAMS", "router"]

router = APIRouter(tags=["traces"])

#: What the API's document says of the socket, since WebSockets are no operations there.
DESCRIPTION = __doc__ or ""

_GOING_AWAY, _POLICY = 1001, 1008
#: How many streams one WebSocket may have open.
MOST_STREAMS = 256
#: How many messages wait for their frame. Streams read no further event while there is no room.
_WAITING = 256

Id: TypeAlias = str | int
Message: TypeAlias = dict[str, Any]


class _Order(msgspec.Struct, forbid_unknown_fields=True, tag_field="do", tag=str.lower):
    id: Id


class Follow(_Order):
    """Open the events of a trace."""

    trace: str
    since: str = "start"
    names: list[str] | None = None
    content: Content = "all"
    arrays: Form = "reference"


class Watching(_Order, tag="watch"):
    """Open the lifecycle events of all traces."""

    since: str = "now"
    model: str | None = None


class Stop(_Order):
    """Close a stream."""


_decode = msgspec.json.Decoder(Follow | Watching | Stop).decode


@router.get("/ws", dependencies=[needs("read")], include_in_schema=False)
async def explain() -> Response:
    """Many traces over one WebSocket."""
    raise Problem(426, "expected a WebSocket", code="upgrade_required", headers={"Upgrade": "websocket"})


@router.websocket("/ws")
async def connect(socket: WebSocket, gateway: TheGateway, caller: TheCaller) -> None:
    """Serve one WebSocket."""
    try:
        caller.require("read")
    except Problem as problem:
        await socket.send_denial_response(problem.response(socket.scope["path"]))
        return
    await socket.accept(subprotocol_of(socket.scope))
    await _Connection(socket, gateway, caller).run()


class _Connection:
    """One WebSocket that was accepted, with its streams."""

    def __init__(self, socket: WebSocket, gateway: Gateway, caller: Caller) -> None:
        self._socket = socket
        self._gateway = gateway
        self._caller = caller
        self._streams: dict[Id, anyio.CancelScope] = {}
        self._put: MemoryObjectSendStream[Message]
        self._take: MemoryObjectReceiveStream[Message]
        self._put, self._take = anyio.create_memory_object_stream[Message](_WAITING)

    async def run(self) -> None:
        """Serve until the client has left or stalls, or the gateway stops."""
        endless = self._gateway.endless
        try:
            async with anyio.create_task_group() as group:
                endless.add(group.cancel_scope)
                group.start_soon(self._send_frames, group.cancel_scope)
                await self._take_orders(group)
                group.cancel_scope.cancel()
        finally:
            endless.discard(group.cancel_scope)
            self._put.close()
            self._take.close()
            with anyio.CancelScope(shield=True), anyio.move_on_after(1):
                await self._close()

    async def _close(self) -> None:
        try:
            await self._socket.close(_GOING_AWAY if self._gateway.closing else _POLICY)
        except (RuntimeError, WebSocketDisconnect):
            # The client has closed it.
            return

    async def _send_frames(self, scope: anyio.CancelScope) -> None:
        """Send what waits, all of it in one frame."""
        try:
            async for message in self._take:
                frame = [message]
                while len(frame) < _WAITING:
                    try:
                        frame.append(self._take.receive_nowait())
                    except anyio.WouldBlock:
                        break
                with anyio.fail_after(self._gateway.settings.stall_s):
                    await self._socket.send_text(msgspec.json.encode(frame).decode())
        except (RuntimeError, TimeoutError, WebSocketDisconnect):
            # The client has left, or reads nothing.
            scope.cancel()

    async def _take_orders(self, group: TaskGroup) -> None:
        try:
            while True:
                await self._execute(await self._socket.receive_text(), group)
        except (WebSocketDisconnect, KeyError):
            # It has left, or has sent bytes.
            return

    async def _execute(self, text: str, group: TaskGroup) -> None:
        stream_id: Id | None = None
        try:
            order = _decode(text)
            stream_id = order.id
            if isinstance(order, Stop):
                if (scope := self._streams.pop(order.id, None)) is not None:
                    scope.cancel()
                await self._over(order.id)
                return
            self._gateway.admit_order(self._caller, text)
            if order.id in self._streams:
                raise Problem(409, f"a stream {order.id!r} is open", code="stream_open", field="id")
            if len(self._streams) >= MOST_STREAMS:
                raise Problem(429, f"a WebSocket may have {MOST_STREAMS} streams", code="too_many_streams")
            source = await (self._trace(order) if isinstance(order, Follow) else self._watch(order))
            scope = self._streams[order.id] = anyio.CancelScope()
            group.start_soon(self._stream, order, source, scope)
        except (msgspec.MsgspecError, RecursionError) as error:
            problem = Problem(422, f"expected an order: {error}", code="invalid_request")
            await self._over(stream_id, problem.details())
        except Problem as problem:
            await self._over(stream_id, problem.details())
        except TracewireError as error:
            await self._over(stream_id, of_error(error).details())

    async def _over(self, stream_id: Id | None, error: dict[str, Any] | None = None) -> None:
        await self._put.send({"id": stream_id, "over": True, "error": error})

    async def _trace(self, order: Follow) -> Subscription:
        self._gateway.check_visible(self._caller, order.trace)
        point = resume_point(None, order.since)
        names = () if order.content == "text" else order.names
        source = self._gateway.client.subscribe(order.trace, since=point, names=names)
        await self._begun(source, source.check)
        return source

    async def _watch(self, order: Watching) -> Watch:
        try:
            source = self._gateway.client.watch(model=order.model, since=order.since)
        except ValueError as error:
            raise Problem(422, str(error), code="unknown_position", field="since") from None
        await self._begun(source, source.start)
        return source

    async def _begun(self, source: Source, begin: Any) -> None:
        try:
            with self._gateway.patience():
                await begin()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await source.aclose()
            raise

    async def _stream(self, order: Follow | Watching, source: Subscription | Watch, scope: anyio.CancelScope) -> None:
        """Send the events of one stream until it is over or stopped."""
        failure = None
        try:
            with scope:
                await self._put.send({"id": order.id, "open": True})
                async for event in source:
                    if (shown := await self._shown(order, event)) is not None:
                        await self._put.send({"id": order.id, "position": source.position, "event": shown})
        except TracewireError as error:
            failure = of_error(error).details()
        finally:
            with anyio.CancelScope(shield=True):
                await source.aclose()
        if self._streams.get(order.id) is scope:
            del self._streams[order.id]
            await self._over(order.id, failure)

    async def _shown(self, order: Follow | Watching, event: Event | Lifecycle) -> Message | None:
        """An event as its stream has it; None if the caller may not see it."""
        if isinstance(event, Lifecycle):
            return msgspec.to_builtins(event) if self._caller.sees(event.trace_id) else None
        if not isinstance(order, Follow):
            return None
        return await feed_json(event, order.content, order.arrays, order.trace, self._gateway.settings.inline_bytes)
