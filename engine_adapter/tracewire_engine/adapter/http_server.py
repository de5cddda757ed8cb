"""vLLM's own OpenAI-compatible HTTP server, on the adapter's engine: `tracewire engine --openai HOST:PORT`.

Its requests and the traces share one engine. They run with the model's standing interventions (`http_requests.py`),
and know nothing of them unless they ask: by the extra argument `tracewire_edits`, which the openai client sends as
`extra_body={"vllm_xargs": {"tracewire_edits": ["calm"]}}`.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import secrets
import socket
import ssl
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import anyio
import uvicorn

from tracewire_engine.link.addresses import host_and_port

from .http_requests import EditedClient, PlainRequests

__all__ = ["OPEN", "Guarded", "HttpApi", "bound", "parsed"]

logger = logging.getLogger("tracewire")


def bound(address: str) -> socket.socket:
    """A socket bound to `HOST:PORT`, which listens when the server starts. Port 0 is any that is free.

    Raises:
        ValueError: it is no such address.
        OSError: it cannot be bound.
    """
    host, port = host_and_port(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except BaseException:
        made.close()
        raise
    return made


#: The routes of a server with API keys that need no key: whether the server lives.
OPEN = frozenset({"/health", "/ping"})
#: Options of vLLM's own server that mean nothing here, or would open what must stay closed, and what to use instead.
_REFUSED = {
    "host": "the address is that of --openai",
    "port": "the address is that of --openai",
    "uds": "the address is that of --openai",
    "enable_ssl_refresh": "restart the engine with the new files",
}
_UNAUTHORIZED = b'{"error":{"message":"an API key is needed","type":"Unauthorized","code":401}}'


class Guarded:
    """An ASGI app whose every route asks for one of some API keys, but for `OPEN` and a browser's OPTIONS.

    vLLM's own check covers a list of prefixes, and leaves what its versions add open.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], keys: Sequence[str], root_path: str = "") -> None:
        self._app = app
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._root_path = root_path

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        if scope["type"] == "lifespan" or scope.get("method") == "OPTIONS" or self._admitted(scope):
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": _UNAUTHORIZED})

    def _admitted(self, scope: Mapping[str, Any]) -> bool:
        # A proxy may send the prefix that it serves this under, or take it off.
        if scope["path"].removeprefix(self._root_path) in OPEN:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        asked = hashlib.sha256(key).digest()
        # All of them, so that how long it takes says nothing.
        matches = [secrets.compare_digest(asked, one) for one in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


def parsed(options: Sequence[str], api_key: str | None = None) -> Namespace:
    """Options of vLLM's server, looked at before a model is loaded. `api_key` counts where none of them is one.

    Raises:
        ValueError: one of them cannot be carried out here; says which.
        OSError: a file that one of them names cannot be read.
    """
    import vllm.envs as envs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    _, _, make_arg_parser = _of_vllm()
    if getattr(envs, "VLLM_SERVER_DEV_MODE", False):
        raise ValueError("VLLM_SERVER_DEV_MODE opens routes that run whatever they are sent: unset it")
    parser = make_arg_parser(FlexibleArgumentParser(prog="tracewire engine --openai-option"))
    arguments: Namespace = parser.parse_args(list(options))
    for name, instead in _REFUSED.items():
        if getattr(arguments, name, None) not in (None, parser.get_default(name)):
            raise ValueError(f"--openai-option=--{name.replace('_', '-')} is not supported: {instead}")
    if not any(arguments.api_key or ()):
        arguments.api_key = [api_key] if api_key else None
    if bool(arguments.ssl_keyfile) != bool(arguments.ssl_certfile):
        raise ValueError("TLS takes both --openai-option=--ssl-certfile=FILE and --openai-option=--ssl-keyfile=FILE")
    if not arguments.ssl_certfile and (arguments.ssl_ca_certs or arguments.ssl_cert_reqs):
        raise ValueError("--ssl-ca-certs and --ssl-cert-reqs take an --ssl-certfile and its --ssl-keyfile")
    if arguments.ssl_certfile:
        # Whether it can be used shows here, and not when the model has loaded.
        uvicorn.Config(_never, log_config=None, **_tls(arguments)).load()
    return arguments


async def _never(scope: Any, receive: Any, send: Any) -> None:
    """An app that nobody asks."""


def _tls(arguments: Namespace) -> dict[str, Any]:
    """The TLS options for uvicorn; none without TLS."""
    if not arguments.ssl_certfile:
        return {}
    ciphers = getattr(arguments, "ssl_ciphers", None)
    return {
        "ssl_certfile": arguments.ssl_certfile,
        "ssl_keyfile": arguments.ssl_keyfile,
        "ssl_ca_certs": arguments.ssl_ca_certs,
        "ssl_cert_reqs": int(arguments.ssl_cert_reqs or ssl.CERT_NONE),
        **({"ssl_ciphers": ciphers} if ciphers else {}),
    }


#: How long its end may take, in seconds.
_END_S = 2.0


class _Server(uvicorn.Server):
    """Uvicorn's server, which leaves signals to the adapter."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpApi:
    """The server of one adapter."""

    def __init__(self, server: uvicorn.Server, made: socket.socket, scheme: str = "http") -> None:
        self._server = server
        self._scheme = scheme
        self._socket = made
        # Taken down now: the server closes its socket when it ends.
        self._address: tuple[str, int] = made.getsockname()[:2]
        self._over = anyio.Event()

    @classmethod
    async def of(
        cls,
        llm: Any,
        plain: PlainRequests,
        made: socket.socket,
        *,
        model: str,
        path: str,
        arguments: Namespace,
    ) -> Self:
        """Built over `llm`, an `AsyncLLM`, which it serves as `model`. `arguments` are those of `parsed`."""
        build_app, init_app_state, _ = _of_vllm()
        arguments.model, arguments.served_model_name = path, arguments.served_model_name or [model]
        arguments.disable_log_stats = not getattr(llm, "log_stats", False)
        tasks = await llm.get_supported_tasks()
        client = EditedClient(llm, plain)
        # Not all of vLLM's versions know each of these.
        root = logging.getLogger()
        level, handlers = root.level, list(root.handlers)
        try:
            app = build_app(arguments, **_known(build_app, supported_tasks=tasks, model_config=llm.model_config))
        finally:
            # A package that it imports sets the root logger up anew, to errors only.
            root.setLevel(level)
            root.handlers[:] = handlers
        known = _known(init_app_state, vllm_config=llm.vllm_config, supported_tasks=tasks)
        known |= {"engine_client": client, "state": app.state, "args": arguments}
        await init_app_state(**known)
        return cls.over(app, made, arguments)

    @classmethod
    def over(cls, app: Any, made: socket.socket, arguments: Namespace) -> Self:
        """Of an app that is made."""
        keys, tls = [key for key in arguments.api_key or () if key], _tls(arguments)
        config = uvicorn.Config(
            Guarded(app, keys, getattr(arguments, "root_path", None) or "") if keys else app,
            log_config=None,
            access_log=False,
            lifespan="on",
            **tls,
        )
        return cls(_Server(config), made, "https" if tls else "http")

    @property
    def url(self) -> str:
        """Where it is served, for clients on this machine or, of a wildcard address, on any."""
        host, port = self._address
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        return f"{self._scheme}://{f'[{host}]' if ':' in host else host}:{port}/v1"

    async def run(self) -> None:
        """Serve until `stop`, and then until what runs has ended, or `drop`."""
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._over.set()

    def stop(self) -> None:
        """Take no new requests."""
        self._server.should_exit = True

    async def drop(self) -> None:
        """End it now: what is being answered has a moment to be sent."""
        self.stop()
        for force in (False, True):
            self._server.force_exit = force
            with anyio.move_on_after(_END_S):
                await self._over.wait()
                return


def _of_vllm() -> tuple[Any, Any, Any]:
    """vLLM's makers of an app, of its state, and of the parser of its options."""
    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:
        # Where versions up to 0.26 or so have them.
        from vllm.entrypoints.openai.api_server import build_app, init_app_state
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    return build_app, init_app_state, make_arg_parser


def _known(function: Any, **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that a function takes."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}
