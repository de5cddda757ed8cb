"""An answer as server-sent events.

Each event of the bus is one event here, under the id that it has there, so a browser whose connection broke says by
`Last-Event-ID` where to go on, and any process of the service goes on from there: this one keeps nothing. Reading is
pulled by the client's own pace, and what waits in between is bounded by the SDK (a page of events) and the socket.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from tracewire import (
    Accepted,
    BrokenStream,
    Event,
    Final,
    Gap,
    Output,
    Restarted,
    Steered,
    Subscription,
    TracewireError,
    Waiting,
)

from .settings import Settings

__all__ = ["EventStream", "told"]

logger = logging.getLogger(__name__)

#: How soon a browser comes back, in milliseconds.
RETRY_MS = 500


def told(event: Event | Gap) -> tuple[str, dict[str, Any]] | None:
    """An event's name and what is said of it; `None` for a kind that the page need not know."""
    match event:
        case Accepted():
            return "accepted", {
                "engine": event.engine,
                "prompt_tokens": event.prompt_tokens[0] if event.prompt_tokens else 0,
                "version": event.live_version,
            }
        case Output():
            # An output may hold several tokens when Redis lags: the meter has one value for each.
            return "token", {
                "index": event.index,
                "count": len(event.token_ids),
                "text": event.text,
                "meter": event.delta.get("meter", []),
                "finish_reason": event.finish_reason,
            }
        case Steered():
            values = {name: value for change in event.changes for name, value in change.values.items()}
            return "steered", {
                "version": event.version,
                "values": {"alpha": values["alpha"]} if "alpha" in values else {},
                "by": event.changes[-1].by if event.changes else None,
                "first": next((place.index for place in event.first), None),
            }
        case Gap():
            # Trimmed before it was read: all there is so far, in place of what is shown.
            state = event.state
            return "gap", {
                "count": len(state.token_ids),
                "text": state.text,
                "meter": state.saves.get("meter", []),
                "version": state.live_version,
            }
        case Waiting():
            return "waiting", {"reason": event.reason}
        case Restarted():
            return "restarted", {"reason": event.reason}
        case Final():
            return "final", {
                "status": event.status,
                "error": {"type": event.error.type, "message": event.error.message} if event.error else None,
                "usage": {
                    "prompt_tokens": event.usage.prompt_tokens,
                    "completion_tokens": event.usage.completion_tokens,
                },
            }
        case _:
            return None


def encoded(name: str, data: dict[str, Any], event_id: str | None = None) -> bytes:
    """One server-sent event. What is no number in JSON is null."""
    head = f"id: {event_id}\n" if event_id is not None else ""
    return f"{head}event: {name}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"


class EventStream(StreamingResponse):
    """Follows one answer to its end, for as long as its client reads. Leaving it ends nothing but the reading.

    It is among `streams` meanwhile: a subscription that is closed from elsewhere ends its stream as if it were over.
    """

    def __init__(self, subscription: Subscription, settings: Settings, streams: set[Subscription]) -> None:
        super().__init__(
            self._chunks(),
            media_type="text/event-stream",
            # The second is for nginx, which would collect what should leave at once.
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        self._subscription = subscription
        self._settings = settings
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. A client that reads nothing for `stall_s` is disconnected, and may resume by event id."""

        async def send_in_time(message: Message) -> None:
            # The server notices that the client has left when its event loop turns, which a burst of events at hand
            # would keep it from. Until it has, asyncio logs a warning of each that is sent.
            await anyio.lowlevel.checkpoint()
            with anyio.fail_after(self._settings.stall_s):
                await send(message)

        # Here and not in the generator, which is left alone where a send is cancelled.
        async with self._subscription:
            self._streams.add(self._subscription)
            try:
                await super().__call__(scope, receive, send_in_time)
            except TimeoutError:
                logger.info("a reader of %s has stalled and is let go", self._subscription.trace_id)
            finally:
                self._streams.discard(self._subscription)

    async def _chunks(self) -> AsyncIterator[bytes]:
        yield f"retry: {RETRY_MS}\n\n".encode()
        while True:
            event = None
            try:
                # A read that is given up loses nothing: the next one goes on where it was.
                with anyio.move_on_after(self._settings.keep_alive_s) as waiting:
                    event = await anext(self._subscription, None)
            except BrokenStream as error:
                logger.exception("the stream of %s cannot be read", self._subscription.trace_id)
                yield encoded("broken", {"message": str(error)})
                return
            except TracewireError as error:
                # The service stops, or Redis refuses it. A browser that reconnects may reach another process.
                logger.warning("a stream of %s ends: %s", self._subscription.trace_id, error)
                return
            if waiting.cancelled_caught:
                yield b": still here\n\n"
            elif event is None:
                return
            elif (shown := told(event)) is not None:
                # Its place in the stream, which not every event knows by itself.
                yield encoded(*shown, self._subscription.position)
