"""The application: routes, errors, and the life of its client."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError, WebSocketRequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

import tracewire
from tracewire import TracewireError

from .dashboard_files import add_dashboard
from .documents import COMMON, OPENAI_COMMON, completed
from .engine_routes import router as engines
from .guard import Guard
from .keys import Keys
from .library_routes import router as library
from .many_traces import DESCRIPTION
from .many_traces import router as many_traces
from .openai_routes import router as openai
from .operations import router as operations
from .problems import Problem, of_error, of_validation
from .recording_routes import router as recordings
from .responses_routes import router as responses
from .settings import Settings
from .sockets import router as sockets
from .state import Gateway
from .streams import ClientLeft
from .trace_routes import router as traces

__all__ = ["create_app"]

logger = logging.getLogger("tracewire.gateway")

#: Our own headers of answers.
TRACEWIRE_HEADERS = ("Tracewire-Trace-Id", "Tracewire-Dtype", "Tracewire-Shape")
#: nginx's status for a client that has left before its answer. Nobody reads it but the metrics.
_LEFT = 499


class Application(FastAPI):
    """FastAPI, but for its document."""

    def openapi(self) -> dict[str, Any]:
        """The API's document, which is made once."""
        if self.openapi_schema is None:
            self.openapi_schema = completed(super().openapi())
        return self.openapi_schema


def create_app(settings: Settings, keys: Keys | None = None) -> FastAPI:
    """The application of a gateway.

    Raises:
        InvalidKeys: the file of keys cannot be used.
        OSError: the file of keys cannot be read.
    """
    keys = keys or Keys(settings.keys, age_s=settings.keys_age_s)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        client = tracewire.connect(
            settings.url,
            prefix=settings.prefix,
            name=settings.name,
            lease_ttl=settings.lease_ttl_s,
            key=settings.signing_key,
            read_interval=settings.read_interval_s,
            # A request has a shorter patience of its own; the end of a request must not wait for ever.
            retry_timeout=max(20.0, settings.patience_s),
        )
        async with client as connected:
            gateway = app.state.gateway = Gateway(connected, settings, keys)
            try:
                yield
            finally:
                await gateway.detached.aclose()

    middleware = [Middleware(Guard)]
    if settings.tracing:
        # Here, since only `--tracing` needs the extra.
        from .server_spans import ServerSpans

        middleware.insert(0, Middleware(ServerSpans))
    if settings.cors:
        middleware.insert(0, _cors(settings))
    app = Application(
        title="Tracewire",
        version=version("tracewire"),
        summary="Run, follow and steer generations of the models that Tracewire's engines serve.",
        description=DESCRIPTION,
        lifespan=lifespan,
        middleware=middleware,
        docs_url=None,
        redoc_url=None,
    )
    _handle_errors(app)
    for router in (openai, responses):
        app.include_router(router, responses=OPENAI_COMMON)
    for router in (traces, recordings, engines, library, operations, many_traces):
        app.include_router(router, responses=COMMON)
    app.include_router(sockets)
    add_dashboard(app)
    return app


def _cors(settings: Settings) -> Middleware:
    """What has browsers call from the configured origins."""
    return Middleware(
        CORSMiddleware,
        allow_origins=list(settings.cors),
        allow_methods=["GET", "POST", "PUT", "DELETE"],
        # Any: OpenAI's client for browsers sends a dozen of its own, and the key is what counts.
        allow_headers=["*"],
        expose_headers=["ETag", "Location", "Retry-After", "X-Should-Retry", *TRACEWIRE_HEADERS],
    )


def _handle_errors(app: FastAPI) -> None:
    def is_openai(request: Request) -> bool:
        return request.url.path.startswith("/v1/")

    @app.exception_handler(Problem)
    async def problem(request: Request, error: Problem) -> Response:
        return error.response(request.url.path)

    @app.exception_handler(TracewireError)
    async def tracewire_error(request: Request, error: TracewireError) -> Response:
        found = of_error(error, openai=is_openai(request))
        if found.status >= 500:
            logger.warning("%s %s failed: %s", request.method, request.url.path, error)
        return found.response(request.url.path)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return of_validation(error.errors(), openai=is_openai(request)).response(request.url.path)

    @app.exception_handler(WebSocketRequestValidationError)
    async def invalid_socket(socket: WebSocket, error: WebSocketRequestValidationError) -> None:
        await socket.send_denial_response(of_validation(error.errors(), openai=False).response(socket.scope["path"]))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        codes = {404: "unknown_route", 405: "method_not_allowed", 413: "body_too_large"}
        code = codes.get(error.status_code, "invalid_request")
        headers = dict(error.headers or {})
        if error.status_code == 405:
            # The router names the methods of the first route with this path only.
            headers["Allow"] = ", ".join(sorted(_methods(app, request.url.path)))
        detail = str(error.detail)
        if detail == HTTPStatus(error.status_code).phrase and error.status_code in (404, 405):
            # The router's own.
            there = f"this path takes {headers['Allow']}" if "Allow" in headers else "/openapi.json lists the routes"
            detail = f"there is no {request.method} {request.url.path}: {there}"
        made = Problem(error.status_code, detail, code=code, headers=headers)
        return made.response(request.url.path)

    @app.exception_handler(ClientLeft)
    async def left(request: Request, error: ClientLeft) -> Response:
        return Response(status_code=_LEFT)

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> Response:
        # Starlette logs it with its traceback.
        return Problem(500, "the gateway has a defect: its log has more", code="internal_error").response(
            request.url.path
        )


def _methods(app: FastAPI, path: str) -> set[str]:
    """The methods of all routes with this path."""
    found = set()
    for pattern, methods in app.openapi()["paths"].items():
        if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", pattern), path):
            found |= {method.upper() for method in methods}
    return found
