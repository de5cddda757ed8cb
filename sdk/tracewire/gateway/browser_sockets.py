"""What browsers' WebSockets need: a key without a header, and a check of the page that opens one.

A browser cannot send `Authorization` with a WebSocket. It offers the subprotocols `tracewire` and `tracewire.key.KEY`
instead, with the key in base64url without padding. The gateway chooses the first.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import Scope

from .problems import Problem

__all__ = [
    *("SUBPROTOCOL", "authorization_of", "check_host", "check_origin"),
    *("header_of", "is_loopback", "subprotocol_of"),
]

SUBPROTOCOL = "tracewire"
_KEY = f"{SUBPROTOCOL}.key."


def header_of(scope: Scope, name: bytes) -> str | None:
    """The first header of this name, in lower case; `None` without one."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def authorization_of(scope: Scope) -> str | None:
    """The `Authorization` of a request or WebSocket, whichever way it was sent; None without one."""
    found = header_of(scope, b"authorization")
    if found is not None or scope["type"] != "websocket":
        return found
    for offered in scope.get("subprotocols", ()):
        if offered.startswith(_KEY):
            return f"Bearer {_decoded(offered.removeprefix(_KEY))}"
    return None


def _decoded(text: str) -> str:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
    except (binascii.Error, ValueError):
        # No key is empty, so this is an unknown one.
        return ""


def subprotocol_of(scope: Scope) -> str | None:
    """The subprotocol to accept a WebSocket with: ours, if its client offers it."""
    return SUBPROTOCOL if SUBPROTOCOL in scope.get("subprotocols", ()) else None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_host(scope: Scope, allowed: Sequence[str]) -> None:
    """Check that a request to a gateway without keys names this machine, or the host of an allowed origin.

    A page can have the name of its own host point to this machine. To the browser the gateway is then of the page's
    origin, and the page may read all answers. Only the name tells such a request from others.

    Raises:
        Problem: it names another host.
    """
    named = header_of(scope, b"host")
    if named is None or "*" in allowed or any(urlsplit(one).netloc.lower() == named.lower() for one in allowed):
        return
    try:
        host = urlsplit(f"//{named}").hostname or ""
    except ValueError:
        host = ""
    if not is_loopback(host.removesuffix(".")) and not host.endswith(".localhost"):
        raise Problem(
            403,
            f"a gateway without keys is asked by the names of this machine, not by {named[:80]!r}: see --cors",
            code="not_allowed",
            field="Host",
        )


def check_origin(scope: Scope, allowed: Sequence[str]) -> None:
    """Check that a request comes from no page, from a page of the gateway's own, or from one of an allowed origin.

    Browsers let any page open WebSockets to any host, and post to it, and name the page's origin. Other clients name
    none.

    Raises:
        Problem: it comes from another page.
    """
    origin = header_of(scope, b"origin")
    if origin is None or origin in allowed or "*" in allowed:
        return
    if urlsplit(origin).netloc.lower() != (header_of(scope, b"host") or "").lower():
        raise Problem(403, f"pages of {origin[:80]} may not do this here: see --cors", code="not_allowed")
