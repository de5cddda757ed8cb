"""Serving: where a gateway binds, its TLS, and how it stops."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState

from .app import create_app
from .browser_sockets import is_loopback
from .http_connections import HttpConnection
from .keys import Keys
from .settings import Settings

__all__ = ["Binding", "Server", "bound"]


@dataclass(frozen=True, kw_only=True)
class Binding:
    """Where a gateway listens. Port 0 is any free one. TLS needs both a certificate and its key."""

    host: str = "127.0.0.1"
    port: int = 8080
    certificate: Path | None = None
    certificate_key: Path | None = None
    client_ca: Path | None = None


def bound(binding: Binding) -> socket.socket:
    """A socket that is bound and does not listen yet.

    Raises:
        OSError: the address is taken, or is not this machine's.
    """
    family = socket.AF_INET6 if ":" in binding.host else socket.AF_INET
    # With its protocol named: only then does asyncio send at once what is small (TCP_NODELAY).
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((binding.host, binding.port))
    except OSError as error:
        made.close()
        where = f"[{binding.host}]" if family == socket.AF_INET6 else binding.host
        raise OSError(
            f"cannot listen on {where}:{binding.port}: {error.strerror}; --host and --port choose another"
        ) from error
    return made


class Server(uvicorn.Server):
    """A gateway's server. `url` is where it listens.

    Raises:
        ValueError: the address is not loopback and there are no keys, or the TLS options are incomplete.
        InvalidKeys: the file of keys cannot be used.
        OSError: a file cannot be read, or the address cannot be bound.
    """

    def __init__(self, settings: Settings, binding: Binding) -> None:
        if settings.keys is None and not is_loopback(binding.host):
            raise ValueError(
                f"{binding.host} can be reached from elsewhere, and there are no keys: pass --keys FILE, or bind to "
                "127.0.0.1"
            )
        if (binding.certificate is None) != (binding.certificate_key is None):
            raise ValueError("TLS takes both --tls-certificate and --tls-key")
        if binding.client_ca is not None and binding.certificate is None:
            raise ValueError("--tls-client-ca takes a --tls-certificate")
        keys = Keys(settings.keys, age_s=settings.keys_age_s)
        self.app: FastAPI = create_app(settings, keys)
        # uvicorn calls it, and takes it for a class.
        http: Any = partial(HttpConnection, head_s=settings.head_s)
        config = uvicorn.Config(
            self.app,
            log_config=None,
            access_log=False,
            lifespan="on",
            server_header=False,
            http=http,
            ws=_Socket,
            # Longer than clients keep a connection, so that none sends a request as the server closes it.
            timeout_keep_alive=75,
            # Streams have been ended by then.
            timeout_graceful_shutdown=5,
            **_tls(binding),
        )
        config.load()
        super().__init__(config)
        self._socket = bound(binding)
        self._ready: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        host, port = self._socket.getsockname()[:2]
        scheme = "https" if binding.certificate is not None else "http"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def run_bound(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until a signal, or until `should_exit` is set. `ready` is called once requests are taken."""
        self._ready = ready
        await self.serve(sockets=[self._socket])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal, and stop at once at a second SIGINT."""
        super().handle_exit(sig, frame)
        gateway = getattr(self.app.state, "gateway", None)
        if self.force_exit and gateway is not None and self._loop is not None:
            # Tasks cannot be cancelled from a signal's handler.
            self._loop.call_soon_threadsafe(gateway.hurry)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop: `/readyz` says so while the requests that run have time to end."""
        gateway = getattr(self.app.state, "gateway", None)
        if gateway is not None:
            await gateway.drain()
        # A second interrupt has ended the draining. What is left is short, and cancels the attached traces.
        self.force_exit = False
        await super().shutdown(sockets)


class _Socket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket. uvicorn cannot stop one whose client is just closing it, and takes refusals for defects."""

    async def send(self, message: Any) -> None:
        """Send a message of the app. An answer in place of the handshake completes the handshake."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True

    def shutdown(self) -> None:
        """Close the connection: the server stops."""
        with suppress(InvalidState):
            super().shutdown()
        self.transport.close()


def _tls(binding: Binding) -> dict[str, Any]:
    if binding.certificate is None:
        return {}
    return {
        "ssl_certfile": str(binding.certificate),
        "ssl_keyfile": str(binding.certificate_key),
        **(
            {"ssl_ca_certs": str(binding.client_ca), "ssl_cert_reqs": int(ssl.CERT_REQUIRED)}
            if binding.client_ca is not None
            else {}
        ),
    }
