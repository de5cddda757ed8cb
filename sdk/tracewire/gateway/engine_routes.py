"""Engines, standing interventions, and the lifecycle events of all traces over HTTP."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from tracewire import Edit, Lifecycle, TracewireError, Watch

from .bodies import DrainBody, EditBody
from .documents import EditName, EngineName, ModelPath, answers, problems, stream
from .guarded_routes import GuardedRoute
from .json_values import block_of, interventions_of, to_json
from .keys import Caller
from .problems import Problem, of_error
from .state import Gateway, TheCaller, TheGateway, needs
from .streams import RETRY, EventSource, encoded
from .trace_routes import IfMatch, LastEventId, ModelName, author, matching, version_of

__all__ = ["router"]

router = APIRouter(route_class=GuardedRoute)


def _json(value: Any, status: int = 200, **headers: str) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


# --- engines ----------------------------------------------------------------------------------------------------------


@router.get(
    "/engines",
    operation_id="list_engines",
    tags=["engines"],
    dependencies=[needs("read")],
    responses=answers("The engines.", "EngineList"),
)
async def list_engines(gateway: TheGateway, model: ModelName = None) -> Response:
    """List the running engines."""
    with gateway.patience():
        engines = await gateway.client.engines.list(model=model)
    return _json({"data": [{**msgspec.to_builtins(engine), "ready": engine.ready} for engine in engines]})


@router.get(
    "/engines/{name}",
    operation_id="get_engine",
    tags=["engines"],
    dependencies=[needs("read")],
    responses=answers("The engine.", "RunningEngine") | problems(404),
)
async def get_engine(name: EngineName, gateway: TheGateway) -> Response:
    """Describe one engine."""
    with gateway.patience():
        engine = await gateway.client.engines.get(name)
    return _json({**msgspec.to_builtins(engine), "ready": engine.ready})


@router.post(
    "/engines/{name}/drain",
    operation_id="drain_engine",
    tags=["engines"],
    status_code=202,
    dependencies=[needs("operate")],
    responses=answers("The engine drains.", "DrainingEngine", 202) | problems(400, 404, 409),
)
async def drain(name: EngineName, gateway: TheGateway, caller: TheCaller, body: DrainBody | None = None) -> Response:
    """Have an engine take no new traces, finish its own, and leave."""
    given = body or DrainBody()
    with gateway.patience():
        draining = await gateway.client.engines.drain(name, timeout=given.timeout, by=author(caller, given.by))
    return _json({"engine": draining.engine.name, "others": list(draining.others), "waiting": draining.waiting}, 202)


# --- standing interventions -------------------------------------------------------------------------------------------


def _edit(edit: Edit) -> dict[str, Any]:
    names = ("name", "version", "time", "scope", "on_error", "max_failures", "by", "block", "filename", "line")
    found = {name: getattr(edit, name) for name in (*names, "disabled", "problems")}
    interventions = [
        {"do": one.__struct_config__.tag, **{name: _plain(getattr(one, name)) for name in one.__struct_fields__}}
        for one in edit.interventions
    ]
    return {**found, "engines": list(edit.engines), "interventions": interventions}


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else to_json(value, "list", "")


@router.get(
    "/edits/{model}",
    operation_id="list_edits",
    tags=["edits"],
    dependencies=[needs("read")],
    responses=answers("The edits.", "EditList") | problems(404),
)
async def list_edits(model: ModelPath, gateway: TheGateway) -> Response:
    """List a model's standing interventions, in the order in which they apply."""
    with gateway.patience():
        edits = await gateway.client.edits(model).list()
    return _json({"data": [_edit(edit) for edit in edits]})


@router.get(
    "/edits/{model}/{name}",
    operation_id="get_edit",
    tags=["edits"],
    dependencies=[needs("read")],
    responses=answers("The edit.", "StandingEdit") | problems(404),
)
async def get_edit(model: ModelPath, name: EditName, gateway: TheGateway) -> Response:
    """Describe one standing intervention. The `ETag` is its version."""
    with gateway.patience():
        edit = await gateway.client.edits(model).get(name)
    return _json(_edit(edit), ETag=f'"{edit.version}"')


@router.put(
    "/edits/{model}/{name}",
    operation_id="install_edit",
    tags=["edits"],
    dependencies=[needs("operate")],
    responses=answers("The installed edit.", "StandingEdit") | problems(400, 404, 409, 412),
)
async def install_edit(
    model: ModelPath, name: EditName, body: EditBody, gateway: TheGateway, caller: TheCaller, if_match: IfMatch = None
) -> Response:
    """Install a standing intervention. `If-Match` is the version to replace, `"0"` for none."""
    block = None
    if body.block is not None:
        caller.require("code")
        block = block_of(body.block, "block")
    interventions = interventions_of(body.interventions, "interventions")
    wanted = version_of(if_match)
    with matching(wanted), gateway.patience():
        edit = await gateway.client.edits(model).install(
            name,
            block,
            interventions=interventions,
            scope=body.scope,
            on_error=body.on_error,
            max_failures=body.max_failures,
            replacing=wanted,
            timeout=min(body.timeout, gateway.settings.patience_s / 2),
        )
    return _json(_edit(edit), ETag=f'"{edit.version}"')


@router.delete(
    "/edits/{model}/{name}",
    operation_id="remove_edit",
    tags=["edits"],
    status_code=204,
    dependencies=[needs("operate")],
    responses=problems(404, 409, 412),
)
async def remove_edit(model: ModelPath, name: EditName, gateway: TheGateway, if_match: IfMatch = None) -> Response:
    """Remove a standing intervention, or only the version that `If-Match` names."""
    wanted = version_of(if_match)
    with matching(wanted), gateway.patience():
        timeout = gateway.settings.patience_s / 2
        await gateway.client.edits(model).remove(name, version=wanted, timeout=timeout)
    return Response(status_code=204)


# --- lifecycle events -------------------------------------------------------------------------------------------------


@router.get(
    "/events",
    operation_id="watch_traces",
    response_class=Response,
    tags=["traces"],
    dependencies=[needs("read")],
    responses=stream("The events.", 'event: final\ndata: {"trace_id": "mine", "status": "finished"}\n\n'),
)
async def watch(
    gateway: TheGateway,
    caller: TheCaller,
    model: ModelName = None,
    since: str = "now",
    last_event_id: LastEventId = None,
) -> Response:
    """Follow the lifecycle events of all traces: server-sent events without an end."""
    try:
        watch = gateway.client.watch(model=model, since=last_event_id or since)
    except ValueError as error:
        field = "since" if last_event_id is None else "Last-Event-ID"
        raise Problem(422, str(error), code="unknown_position", field=field) from None
    try:
        with gateway.patience():
            await watch.start()
    except BaseException:
        with anyio.CancelScope(shield=True):
            await watch.aclose()
        raise
    return LifecycleFeed(gateway, watch, caller)


class LifecycleFeed(EventSource):
    """The lifecycle events of all traces that a caller sees."""

    def __init__(self, gateway: Gateway, watch: Watch, caller: Caller) -> None:
        super().__init__(gateway.streams, watch)
        self._watch = watch
        self._caller = caller

    def opening(self) -> bytes:
        """See `EventSource.opening`."""
        return RETRY

    async def rendered(self, event: Lifecycle) -> bytes:
        """See `EventSource.rendered`."""
        if not self._caller.sees(event.trace_id):
            return b""
        return encoded(msgspec.to_builtins(event), name=event.type, event_id=self._watch.position)

    def failed(self, error: TracewireError) -> bytes:
        """See `EventSource.failed`."""
        return encoded(of_error(error).details(), name="interrupted")
