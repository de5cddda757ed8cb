"""The dashboard: a page of static files, which needs no key and uses nothing but the gateway's public API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from .problems import Problem

__all__ = ["FOLDER", "POLICY", "add_dashboard", "is_dashboard"]

FOLDER = Path(__file__).parent / "dashboard"

#: Nothing comes from other hosts, no markup holds code, and no text becomes markup.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # A browser asks with the ETag each time, so that it never mixes files of two versions.
    "Cache-Control": "no-cache",
}


def is_dashboard(path: str) -> bool:
    """Whether a path is the dashboard's, which is open to callers without a key."""
    return path in ("/", "/dashboard") or path.startswith("/dashboard/")


class _Files(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        answer = await super().get_response(path, scope)
        answer.headers.update(_HEADERS)
        return answer


async def _enter(request: Request) -> Response:
    """Send browsers to the dashboard. For other clients there is nothing here."""
    if "text/html" not in request.headers.get("accept", ""):
        raise Problem(404, "Not Found", code="unknown_route")
    return RedirectResponse("dashboard/", 307)


async def _slash(request: Request) -> Response:
    """The files' links are relative to the folder."""
    return RedirectResponse("dashboard/", 307)


def add_dashboard(app: FastAPI) -> None:
    """Serve the dashboard at `/dashboard/`, and send browsers there from `/`."""
    options: dict[str, Any] = {"methods": ["GET"], "include_in_schema": False}
    app.add_route("/", _enter, **options)
    app.add_route("/dashboard", _slash, **options)
    app.mount("/dashboard", _Files(directory=FOLDER, html=True))
