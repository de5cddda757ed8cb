"""Routes for operators: whether the gateway lives and is ready, its metrics, and the engines."""

from __future__ import annotations

import logging
from typing import Any

import anyio
from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from tracewire import TracewireError

from .documents import answers
from .guarded_routes import GuardedRoute
from .metrics import CONTENT_TYPE
from .state import TheCaller, TheGateway, needs

__all__ = ["router"]

logger = logging.getLogger("tracewire.gateway")

router = APIRouter(tags=["operations"], route_class=GuardedRoute)

#: How long `/readyz` waits for the bus, in seconds.
_READY_S = 2.0


@router.get("/healthz", include_in_schema=False)
async def healthz() -> Response:
    """Answer for as long as the process lives."""
    return JSONResponse({"status": "ok"})


@router.get("/readyz", include_in_schema=False)
async def readyz(gateway: TheGateway) -> Response:
    """Answer 200 while the gateway takes requests and the bus answers."""
    if gateway.closing:
        return JSONResponse({"status": "closing"}, 503)
    try:
        with anyio.fail_after(_READY_S):
            models: Any = await gateway.client.models.list()
    except (TimeoutError, TracewireError):
        return JSONResponse({"status": "the bus does not answer"}, 503)
    return JSONResponse({"status": "ok", "models": sorted(one.name for one in models)})


@router.get(
    "/key",
    operation_id="get_key",
    dependencies=[needs("read")],
    responses=answers("The key.", "CallerKey"),
)
async def key(caller: TheCaller) -> Response:
    """Describe the request's key: its name, its rights, and the tenant whose traces it sees."""
    return JSONResponse({"name": caller.name, "rights": sorted(caller.rights), "tenant": caller.tenant or None})


@router.get("/metrics", dependencies=[needs("operate")], include_in_schema=False)
async def metrics(gateway: TheGateway) -> Response:
    """Answer with the metrics in Prometheus's text form. While the bus does not answer, its last ones stay."""
    with anyio.move_on_after(_READY_S):
        try:
            await gateway.metrics.read_bus(gateway.client)
        except TracewireError as error:
            logger.warning("the metrics of the bus cannot be read: %s", error)
    gateway.metrics.running.set(gateway.running)
    return Response(gateway.metrics.text(), media_type=CONTENT_TYPE)
