"""A trace over a WebSocket: its events down, and control up.

The gateway sends each event as one JSON text. A client sends `{"do": "steer", "values": {...}, "if_version": 3}`, or
`pause`, `resume` or `cancel`, with any `id`. The gateway replies `{"type": "reply", "id": ..., "version": 4}`, or with
`error`, which has the members of problem details. The final comes behind the replies, and the socket closes with 1000
behind it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any

import anyio
import msgspec
from fastapi import APIRouter, Query, WebSocket
from starlette.websockets import WebSocketDisconnect

from tracewire import Final, Subscription, TracewireError

from .browser_sockets import subprotocol_of
from .guarded_routes import count_values
from .json_values import Form
from .keys import Caller
from .problems import Problem, of_error
from .state import Gateway, TheCaller, TheGateway
from .trace_routes import Content, author, feed_json, resume_point, steered, subscribed

__all__ = ["router"]

router = APIRouter()

#: Codes of a WebSocket's end: its use, that the server goes away, and a message that cannot be read.
_NORMAL, _GOING_AWAY, _POLICY, _INTERNAL = 1000, 1001, 1008, 1011


class Order(msgspec.Struct, forbid_unknown_fields=True):
    """What a client sends."""

    do: str
    id: str | int | None = None
    values: dict[str, Any] = {}
    if_version: int | None = None
    by: str | None = None
    reason: str = ""


@router.websocket("/traces/{trace_id}/ws")
async def connect(
    socket: WebSocket,
    trace_id: str,
    gateway: TheGateway,
    caller: TheCaller,
    since: str = "start",
    names: Annotated[list[str] | None, Query()] = None,
    content: Content = "all",
    arrays: Form = "reference",
) -> None:
    """Serve one WebSocket."""
    try:
        caller.require("read")
        gateway.check_visible(caller, trace_id)
        point = resume_point(None, since)
        subscription = await subscribed(gateway, trace_id, point, content, names)
    except (Problem, TracewireError) as error:
        problem = error if isinstance(error, Problem) else of_error(error)
        await socket.send_denial_response(problem.response(socket.scope["path"]))
        return
    await socket.accept(subprotocol_of(socket.scope))
    await _Conversation(socket, gateway, caller, subscription, content, arrays).run()


class _Conversation:
    """One WebSocket that was accepted."""

    def __init__(
        self,
        socket: WebSocket,
        gateway: Gateway,
        caller: Caller,
        subscription: Subscription,
        content: Content,
        form: Form,
    ) -> None:
        self._socket = socket
        self._gateway = gateway
        self._caller = caller
        self._subscription = subscription
        self._content: Content = content
        self._form = form
        #: One message at a time.
        self._lock = anyio.Lock()
        #: An order from its execution to its reply; the final waits for it.
        self._ordering = anyio.Lock()
        #: Unless the trace ends first: the client stalls, sends bytes, or has a key that holds no longer.
        self._code = _POLICY

    async def run(self) -> None:
        """Serve until the trace has ended, the client has left or stalls, or the gateway stops."""
        sockets = self._gateway.sockets
        try:
            async with anyio.create_task_group() as group:
                sockets.add(group.cancel_scope)
                group.start_soon(self._take_orders, group.cancel_scope)
                await self._send_events()
                group.cancel_scope.cancel()
        finally:
            sockets.discard(group.cancel_scope)
            with anyio.CancelScope(shield=True):
                await self._subscription.aclose()
                with anyio.move_on_after(1):
                    await self._close()

    async def _close(self) -> None:
        code = _GOING_AWAY if self._gateway.closing else self._code
        try:
            await self._socket.close(code)
        except RuntimeError:
            # The client has closed it.
            return

    async def _send(self, message: Any) -> None:
        async with self._lock:
            with anyio.fail_after(self._gateway.settings.stall_s):
                try:
                    await self._socket.send_text(msgspec.json.encode(message).decode())
                except RuntimeError as error:
                    # The client has closed it, and another task has read so.
                    raise WebSocketDisconnect from error

    async def _send_events(self) -> None:
        limit = self._gateway.settings.inline_bytes
        try:
            async for event in self._subscription:
                message = await feed_json(event, self._content, self._form, self._subscription.trace_id, limit)
                if isinstance(event, Final):
                    # An order in progress gets its reply: a cancelled trace ends before its cancellation returns.
                    await self._ordering.acquire()
                await self._send(message)
            self._code = _NORMAL
        except TracewireError as error:
            self._code = _INTERNAL
            with suppress(TimeoutError, WebSocketDisconnect):
                await self._send({"type": "broken", **of_error(error).details()})
        except (TimeoutError, WebSocketDisconnect):
            return

    async def _take_orders(self, scope: anyio.CancelScope) -> None:
        try:
            while True:
                text = await self._socket.receive_text()
                async with self._ordering:
                    await self._send(await self._reply(text))
        except (WebSocketDisconnect, TimeoutError, KeyError):
            # It has left, or has sent bytes.
            scope.cancel()

    async def _reply(self, text: str) -> dict[str, Any]:
        head: dict[str, Any] = {"type": "reply", "id": None}
        try:
            count_values(text.encode())
            order = msgspec.json.decode(text, type=Order)
            head["id"] = order.id
            self._gateway.admit_order(self._caller, text)
            return {**head, **await self._execute(order)}
        except (msgspec.MsgspecError, RecursionError) as error:
            problem = Problem(422, f"expected an order: {error}", code="invalid_request")
        except Problem as found:
            problem = found
        except TracewireError as error:
            problem = of_error(error)
        return {**head, "error": problem.details()}

    async def _execute(self, order: Order) -> dict[str, Any]:
        self._caller.require("steer")
        client, trace_id, by = self._gateway.client, self._subscription.trace_id, author(self._caller, order.by)
        with self._gateway.patience():
            match order.do:
                case "steer":
                    return {"version": await steered(self._gateway, trace_id, order.values, order.if_version, by)}
                case "pause":
                    return {"paused": await client.pause(trace_id, by=by)}
                case "resume":
                    return {"resumed": await client.resume(trace_id, by=by)}
                case "cancel":
                    return {"cancelled": await client.cancel(trace_id, order.reason, by=by)}
        raise Problem(422, "do: expected steer, pause, resume or cancel", code="invalid_request", field="do")
