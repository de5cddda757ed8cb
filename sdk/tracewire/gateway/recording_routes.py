"""Recordings of traces over HTTP: a file in, its events out, for pages that show a trace without its bus."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio.to_thread
import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tracewire import Recording

from .documents import answers, problems
from .event_json import event_json
from .guarded_routes import GuardedRoute
from .state import TheGateway, needs

__all__ = ["router"]

router = APIRouter(prefix="/recordings", tags=["traces"], route_class=GuardedRoute)

#: The most that a file may unpack to, in bytes, and the most values of its events. An empty dict is a byte of the file,
#: and takes a hundred in memory.
_MOST, _VALUES = 64 * 1024 * 1024, 2_000_000
_BODY = {"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": {"type": "string"}}}}}


@router.post(
    "",
    operation_id="read_recording",
    dependencies=[needs("read")],
    openapi_extra=_BODY,
    responses=answers("What the recording has.", "RecordedTrace") | problems(400),
)
async def read_recording(request: Request, gateway: TheGateway) -> Response:
    """Read a file of `tracewire record`, and answer with its events as `GET /traces/{id}/events` has them.

    The gateway keeps nothing of it. Arrays of more than 1,024 elements are references.
    """
    body = await request.body()
    # On a thread, since a long one takes a moment, and one after the other, since it takes memory.
    answer = await anyio.to_thread.run_sync(partial(_answer, body), limiter=gateway.recordings)
    return Response(answer, media_type="application/json")


def _answer(body: bytes) -> bytes:
    recording = Recording.from_bytes(body, most=_MOST, values=_VALUES)
    found: dict[str, Any] = {
        name: getattr(recording, name) for name in ("trace_id", "model", "made_at", "made_by", "complete")
    }
    found["engine"] = msgspec.to_builtins(recording.engine)
    found["events"] = [event_json(event, "small", recording.trace_id) for event in recording.events()]
    return msgspec.json.encode(found)
