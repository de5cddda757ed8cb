"""Traces over HTTP: submitted, listed, read, followed and controlled by their ids."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Annotated, Any, Literal

import anyio
import msgspec
from fastapi import APIRouter, Header, Query
from starlette.requests import Request
from starlette.responses import Response

from tracewire import (
    BrokenStream,
    EditConflict,
    EntryConflict,
    Event,
    Output,
    State,
    Subscription,
    Trace,
    TracewireError,
    UnknownEdit,
    ValueMissing,
    VersionConflict,
)
from tracewire_bus.wire.ids import FINAL_ID

from .bodies import ControlBody, SteerBody, TraceBody
from .documents import TraceId, ValueDigest, answers, files, problems, stream
from .downloads import FORMATS
from .event_json import event_json, state_json
from .guarded_routes import GuardedRoute
from .json_values import Form, inlined, to_json, values_of
from .keys import Caller
from .problems import Problem, of_error
from .state import Gateway, TheCaller, TheGateway, needs
from .streams import RETRY, EventSource, encoded, unless_left
from .submitting import detached_trace

__all__ = [
    "EventFeed",
    "author",
    "feed_json",
    "matching",
    "resume_point",
    "router",
    "steered",
    "subscribed",
    "version_of",
]

router = APIRouter(prefix="/traces", tags=["traces"], route_class=GuardedRoute)

_POSITION = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
#: How many traces a page has.
_PAGE, _MOST = 50, 1000
#: How many lifecycle entries one page looks through.
_ENTRIES = 8192

_EVENTS = stream("The events.", 'id: 1-1\nevent: output\ndata: {"type": "output", "text": " return"}\n\n') | {
    204: {"description": "`Last-Event-ID` is that of the final: nothing comes after it."},
    **problems(404),
}

Content = Literal["text", "all"]
Arrays = Annotated[Form, Query(description="how arrays stand in the answer")]
Names = Annotated[list[str] | None, Query(description="the saves to follow; without it, all")]
ModelName = Annotated[str | None, Query(min_length=1, description="a model's name")]
IfMatch = Annotated[str | None, Header(description="the version of the live parameters that must hold")]
LastEventId = Annotated[str | None, Header(description="the position to go on from")]
Since = Annotated[str, Query(description="`start`, `now`, `recent` (the last 32 events), or an event's id")]


def _json(value: Any, status: int = 200, **headers: str) -> Response:
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return Response(msgspec.json.encode(value), status, named, "application/json")


# --- submitting and listing -------------------------------------------------------------------------------------------


@router.post(
    "",
    operation_id="submit_trace",
    status_code=202,
    dependencies=[needs("submit")],
    responses=answers("The trace is queued.", "SubmittedTrace", 202) | problems(400, 404, 409),
)
async def submit(body: TraceBody, request: Request, gateway: TheGateway, caller: TheCaller) -> Response:
    """Submit a trace that runs detached. A `trace_id` that was submitted before runs once."""
    trace = detached_trace(gateway.client, body, caller)

    async def start() -> None:
        with gateway.patience():
            await trace.start()

    try:
        await unless_left(request, start)
    finally:
        gateway.detached.count(caller, trace.id)
        with anyio.CancelScope(shield=True):
            await trace.aclose()
    return _json(_submitted(trace), 202, Location=f"/traces/{trace.id}", Tracewire_Trace_Id=trace.id)


def _submitted(trace: Trace) -> dict[str, Any]:
    links = {name: f"/traces/{trace.id}/{name}" for name in ("events", "state", "live")}
    return {"id": trace.id, "model": trace.model, "links": {"self": f"/traces/{trace.id}", **links}}


@router.get(
    "",
    operation_id="list_traces",
    dependencies=[needs("read")],
    responses=answers("A page.", "TracePage"),
)
async def list_traces(
    gateway: TheGateway,
    caller: TheCaller,
    model: ModelName = None,
    client: str | None = None,
    state: Annotated[list[str] | None, Query(description="states of traces, such as `running`")] = None,
    limit: Annotated[int, Query(ge=1, le=_MOST)] = _PAGE,
    before: Annotated[str | None, Query(description="the `next` of the last page")] = None,
) -> Response:
    """List the traces that were submitted of late, the newest first. A page with `next` may be short, or empty."""
    prefix = f"{caller.tenant}:" if caller.tenant else ""
    try:
        with gateway.patience():
            found, following = await gateway.client.traces._page(
                model=model,
                client=client,
                states=state,
                id_prefix=prefix,
                before=before,
                limit=limit,
                entries=_ENTRIES,
            )
    except ValueError as error:
        field, _, _ = str(error).partition(":")
        raise Problem(422, str(error), code="invalid_request", field=field if field == "states" else "before") from None
    page: dict[str, Any] = {"data": [_listed(one) for one in found]}
    if following is not None:
        page["next"] = following
    return _json(page)


def _listed(trace: Any) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(trace)
    plain.pop("place")
    return {"id": plain.pop("trace_id"), **plain}


# --- reading ----------------------------------------------------------------------------------------------------------


@router.get(
    "/{trace_id}",
    operation_id="get_trace",
    dependencies=[needs("read")],
    responses=answers("The trace.", "TraceDescription") | problems(404),
)
async def describe(trace_id: TraceId, gateway: TheGateway, caller: TheCaller) -> Response:
    """Describe a trace: how far it is, and the version of its live parameters."""
    gateway.check_visible(caller, trace_id)
    with gateway.patience():
        live = await gateway.client.get_live(trace_id)
        state = await gateway.client.get_state(trace_id)
    found = state_json(state, "reference")
    for invoke in found["invokes"]:
        for choice in invoke:
            choice["saves"] = sorted(choice["saves"])
    found["shared"] = sorted(found["shared"])
    found["live"] = {"version": live.version, "values": to_json(live.values, "list", trace_id)}
    return _json(found, ETag=_etag(live.version))


@router.get(
    "/{trace_id}/state",
    operation_id="get_trace_state",
    dependencies=[needs("read")],
    responses=answers("The state.", "TraceState") | problems(404),
)
async def read_state(
    trace_id: TraceId, gateway: TheGateway, caller: TheCaller, arrays: Arrays = "reference"
) -> Response:
    """The trace's events so far, folded into text, tokens and saves."""
    gateway.check_visible(caller, trace_id)
    with gateway.patience():
        state = await gateway.client.get_state(trace_id)
        if arrays in ("list", "base64"):
            await _inline(state, gateway.settings.inline_bytes)
    return _json(state_json(state, arrays))


async def _inline(state: State, limit: int) -> None:
    """Download the large arrays of a state."""
    for choice in (choice for invoke in state.invokes for choice in invoke.choices):
        for name, value in list(choice.saves.items()):
            choice.saves[name] = await inlined(value, limit)
    for name, value in list(state.shared.items()):
        state.shared[name] = await inlined(value, limit)


@router.get(
    "/{trace_id}/live",
    operation_id="get_live_parameters",
    dependencies=[needs("read")],
    responses=answers("The live parameters.", "LiveParameters") | problems(404),
)
async def read_live(trace_id: TraceId, gateway: TheGateway, caller: TheCaller, arrays: Arrays = "list") -> Response:
    """The trace's live parameters. The `ETag` is their version."""
    gateway.check_visible(caller, trace_id)
    with gateway.patience():
        live = await gateway.client.get_live(trace_id)
    values = to_json(live.values, arrays, trace_id)
    return _json({"version": live.version, "values": values}, ETag=_etag(live.version))


@router.get(
    "/{trace_id}/values/{digest}",
    operation_id="get_value",
    response_class=Response,
    dependencies=[needs("read")],
    responses=files() | problems(404, 406, 501),
)
async def read_value(
    trace_id: TraceId,
    digest: ValueDigest,
    request: Request,
    gateway: TheGateway,
    caller: TheCaller,
    format: Annotated[Literal["npy", "safetensors", "arrow", "raw"] | None, Query()] = None,
    dtype: Annotated[str | None, Query(description="the dtype to convert to")] = None,
) -> Response:
    """An array of the trace by its digest. `npy` and `arrow` have bfloat16 and 8-bit floats as float32."""
    gateway.check_visible(caller, trace_id)
    wanted = format or _accepted_format(request.headers.get("accept"))
    etag = f'"{digest}"'
    with gateway.patience():
        key, read = bytes.fromhex(digest), partial(gateway.client.get_state, trace_id)
        download = await gateway.values.find(trace_id, key, read)
    if download is None:
        raise ValueMissing(trace_id, digest, "no value of the trace has this digest")
    if request.headers.get("if-none-match") == etag and dtype is None:
        return Response(status_code=304, headers={"ETag": etag})
    body = await download.encoded(wanted, dtype)
    headers = {
        "Cache-Control": "private, max-age=31536000, immutable",
        "Tracewire-Dtype": download.dtype,
        "Tracewire-Shape": ",".join(map(str, download.shape)),
    }
    if dtype is None:
        headers["ETag"] = etag
    return Response(body, 200, headers, FORMATS[wanted])


def _accepted_format(accept: str | None) -> str:
    for part in (accept or "*/*").split(","):
        kind = part.partition(";")[0].strip()
        if kind in ("*/*", "application/*"):
            return "npy"
        for name, media in FORMATS.items():
            if kind == media:
                return name
    raise Problem(406, f"Accept: expected one of {', '.join(FORMATS.values())}", code="no_such_form", field="Accept")


# --- following --------------------------------------------------------------------------------------------------------


def resume_point(last_event_id: str | None, since: str) -> str:
    """Where a stream begins: after `Last-Event-ID` if there is one, else at `since`.

    Raises:
        Problem: it is none.
    """
    point = since if last_event_id is None else last_event_id
    parts = point.split("-")
    if point in ("start", "now", "recent") or (_POSITION.fullmatch(point) and all(int(part) < 2**64 for part in parts)):
        return point
    field = "since" if last_event_id is None else "Last-Event-ID"
    raise Problem(
        422,
        f"expected 'start', 'now', 'recent' or an event's id, got {point[:60]!r}",
        code="unknown_position",
        field=field,
    )


@router.get(
    "/{trace_id}/events",
    operation_id="follow_trace",
    response_class=Response,
    dependencies=[needs("read")],
    responses=_EVENTS,
)
async def follow(
    trace_id: TraceId,
    gateway: TheGateway,
    caller: TheCaller,
    since: Since = "start",
    names: Names = None,
    content: Content = "all",
    arrays: Arrays = "reference",
    last_event_id: LastEventId = None,
) -> Response:
    """Follow a trace: server-sent events from `since`, or after `Last-Event-ID`, up to and with the final."""
    gateway.check_visible(caller, trace_id)
    point = resume_point(last_event_id, since)
    if point == FINAL_ID:
        # Nothing comes after it. A browser that is told so does not come back.
        return Response(status_code=204)
    subscription = await subscribed(gateway, trace_id, point, content, names)
    return EventFeed(gateway, subscription, content, arrays)


async def subscribed(
    gateway: Gateway, trace_id: str, since: str, content: Content, names: list[str] | None
) -> Subscription:
    """A subscription to a trace that exists."""
    subscription = gateway.client.subscribe(trace_id, since=since, names=() if content == "text" else names)
    try:
        with gateway.patience():
            await subscription.check()
    except BaseException:
        with anyio.CancelScope(shield=True):
            await subscription.aclose()
        raise
    return subscription


class EventFeed(EventSource):
    """The events of one trace."""

    def __init__(self, gateway: Gateway, subscription: Subscription, content: Content, form: Form) -> None:
        super().__init__(gateway.streams, subscription, {"Tracewire-Trace-Id": subscription.trace_id})
        self._subscription = subscription
        self._limit = gateway.settings.inline_bytes
        self._content = content
        self._form = form

    def opening(self) -> bytes:
        """See `EventSource.opening`."""
        return RETRY

    async def rendered(self, event: Event) -> bytes:
        """See `EventSource.rendered`."""
        data = await feed_json(event, self._content, self._form, self._subscription.trace_id, self._limit)
        return encoded(data, name=event.type, event_id=self._subscription.position)

    def failed(self, error: TracewireError) -> bytes:
        """See `EventSource.failed`."""
        # After `broken`, another attempt would read the same.
        name = "broken" if isinstance(error, BrokenStream) else "interrupted"
        return encoded(of_error(error).details(), name=name)


async def feed_json(event: Event, content: Content, form: Form, trace_id: str, limit: int) -> dict[str, Any]:
    """An event as a feed has it."""
    data = event_json(event, form, trace_id)
    if content == "text":
        for name in ("delta", "saves", "shared", "manifest"):
            data.pop(name, None)
    elif form in ("list", "base64") and isinstance(event, Output):
        data["delta"] = to_json(await inlined(event.delta, limit), form, trace_id)
    return data


# --- control ----------------------------------------------------------------------------------------------------------


def _etag(version: int) -> str:
    return f'"{version}"'


def version_of(header: str | None) -> int | None:
    """The version that `If-Match` asks for; None without one, or for `*`.

    Raises:
        Problem: it is no version.
    """
    if header is None or header.strip() == "*":
        return None
    text = header.strip().removeprefix('"').removesuffix('"')
    if not text.isdecimal() or len(text) > 15:
        raise Problem(
            422, f'expected a version such as "3", got {header[:60]!r}', code="invalid_request", field="If-Match"
        )
    return int(text)


@contextmanager
def matching(wanted: int | None) -> Iterator[None]:
    """Have a conflict say which version holds: 412 if it is with the version `wanted`, which `If-Match` names.

    Raises:
        Problem: another version holds.
    """
    try:
        yield
    except (VersionConflict, EditConflict, EntryConflict, UnknownEdit) as error:
        if isinstance(error, UnknownEdit) and wanted is None:
            raise
        problem = of_error(error)
        version = None if isinstance(error, UnknownEdit) else error.version
        if wanted is not None and version != wanted:
            problem.status, problem.field = 412, "If-Match"
        if version is not None:
            problem.headers["ETag"] = _etag(version)
        raise problem from error


def author(caller: Caller, by: str | None) -> str:
    """The author of a change, as other clients see it: the key's name, and the name that the caller gives itself."""
    return caller.name if not by else f"{caller.name}/{by}"


@router.post(
    "/{trace_id}/steer",
    operation_id="steer_trace",
    dependencies=[needs("steer")],
    responses=answers("The new version.", "NewVersion") | problems(400, 404, 409, 412),
)
async def steer(
    trace_id: TraceId, body: SteerBody, gateway: TheGateway, caller: TheCaller, if_match: IfMatch = None
) -> Response:
    """Change live parameters, all of them at once. `If-Match`, or `if_version`, makes it a compare-and-set."""
    gateway.check_visible(caller, trace_id)
    wanted = version_of(if_match)
    if_version = body.if_version if wanted is None else wanted
    with matching(wanted), gateway.patience():
        version = await steered(gateway, trace_id, body.values, if_version, author(caller, body.by))
    return _json({"version": version}, ETag=_etag(version))


async def steered(gateway: Gateway, trace_id: str, values: Any, if_version: int | None, by: str) -> int:
    """Change live parameters, count the change and its time, and return the new version."""
    begun, outcome = monotonic(), "refused"
    try:
        given = values_of(values, "live", arrays=True)
        version = await gateway.client.steer(trace_id, given, if_version=if_version, by=by)
        outcome = "accepted"
        gateway.steer_times.begin(trace_id, version, begun)
    finally:
        gateway.metrics.steers.labels(outcome).inc()
    return version


@router.post(
    "/{trace_id}/pause",
    operation_id="pause_trace",
    dependencies=[needs("steer")],
    responses=answers("Whether it was running.", "PausedTrace") | problems(400, 404, 409),
)
async def pause(trace_id: TraceId, gateway: TheGateway, caller: TheCaller, body: ControlBody | None = None) -> Response:
    """Pause a trace within two steps, until it is resumed."""
    gateway.check_visible(caller, trace_id)
    with gateway.patience():
        changed = await gateway.client.pause(trace_id, by=author(caller, body.by if body else None))
    return _json({"paused": changed})


@router.post(
    "/{trace_id}/resume",
    operation_id="resume_trace",
    dependencies=[needs("steer")],
    responses=answers("Whether it was paused.", "ResumedTrace") | problems(400, 404, 409),
)
async def resume(
    trace_id: TraceId, gateway: TheGateway, caller: TheCaller, body: ControlBody | None = None
) -> Response:
    """Resume a paused trace."""
    gateway.check_visible(caller, trace_id)
    with gateway.patience():
        changed = await gateway.client.resume(trace_id, by=author(caller, body.by if body else None))
    return _json({"resumed": changed})


@router.post(
    "/{trace_id}/cancel",
    operation_id="cancel_trace",
    dependencies=[needs("steer")],
    responses=answers("Whether it had not ended.", "CancelledTrace") | problems(400, 404, 409),
)
async def cancel(
    trace_id: TraceId, gateway: TheGateway, caller: TheCaller, body: ControlBody | None = None
) -> Response:
    """Cancel a trace. What was generated and saved until then can still be read."""
    gateway.check_visible(caller, trace_id)
    given = body or ControlBody()
    with gateway.patience():
        changed = await gateway.client.cancel(trace_id, given.reason, by=author(caller, given.by))
    return _json({"cancelled": changed})
