"""vLLM's own OpenAI-compatible HTTP server, on the adapter's engine: `tracewire engine --openai HOST:PORT`.

Its requests and the traces share one engine. The model's standing interventions run on these requests too
(`http_requests.py`). A request can ask for edits by name with the extra argument `tracewire_edits`, which the openai
client sends as `extra_body={"vllm_xargs": {"tracewire_edits": ["calm"]}}`.
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
from types import MappingProxyType
from typing import Any, Self

import anyio
import uvicorn

from tracewire_bus.logs import kept_logging
from tracewire_engine.link.addresses import host_and_port

from .http_fence import ROUTES, Fence, is_public
from .http_requests import EditedClient, PlainRequests
from .runner_bounds import RunnerBounds

__all__ = ["OPEN", "Guarded", "HttpApi", "bound", "parsed"]

logger = logging.getLogger("tracewire")


def bound(address: str) -> socket.socket:
    """Bind a socket to `HOST:PORT`. It listens when the server starts. Port 0 means any free port.

    Raises:
        ValueError: `address` is not of this form.
        OSError: the socket cannot be bound to it.
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


#: The routes that need no API key: health checks.
OPEN = frozenset({"/health", "/ping"})
#: Options of vLLM's server that are not supported here, and what to do instead.
_REFUSED = {
    "host": "the address is that of --openai",
    "port": "the address is that of --openai",
    "uds": "the address is that of --openai",
    "enable_ssl_refresh": "restart the engine with the new files",
}
_UNAUTHORIZED = b'{"error":{"message":"an API key is needed","type":"Unauthorized","code":401}}'


class Guarded:
    """An ASGI app that requires an API key on every route, except `OPEN` and requests with the method OPTIONS.

    vLLM's own check covers only a list of route prefixes, and leaves routes open that new versions add.
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
        # A proxy may pass the prefix under which it serves this API on, or remove it.
        if scope["path"].removeprefix(self._root_path) in OPEN:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        asked = hashlib.sha256(key).digest()
        # Compare with all keys, so that the time taken reveals nothing.
        matches = [secrets.compare_digest(asked, one) for one in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


def parsed(options: Sequence[str], api_key: str | None = None, address: str = "") -> Namespace:
    """Parse and check the options of vLLM's server. Called before the model is loaded.

    Args:
        options: as on the command line of vLLM's server.
        api_key: the key that clients must send, unless the options have one.
        address: `HOST:PORT` of `--openai`.

    Raises:
        ValueError: an option is not supported here, or other hosts could reach a server without a key; the message
            names the option.
        OSError: a file that an option names cannot be read.
    """
    import vllm.envs as envs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    _, _, make_arg_parser = _of_vllm()
    if getattr(envs, "VLLM_SERVER_DEV_MODE", False):
        raise ValueError("VLLM_SERVER_DEV_MODE opens routes that execute whatever clients send: unset it")
    parser = make_arg_parser(FlexibleArgumentParser(prog="tracewire engine --openai-option"))
    arguments: Namespace = parser.parse_args(list(options))
    for name, instead in _REFUSED.items():
        if getattr(arguments, name, None) not in (None, parser.get_default(name)):
            raise ValueError(f"--openai-option=--{name.replace('_', '-')} is not supported: {instead}")
    if not any(arguments.api_key or ()):
        arguments.api_key = [api_key] if api_key else None
    if address and not arguments.api_key and is_public(host_and_port(address)[0]):
        raise ValueError(
            f"{address} can be reached from other hosts and needs a key: --openai-option=--api-key=KEY or "
            "VLLM_API_KEY; without a key listen on 127.0.0.1"
        )
    if bool(arguments.ssl_keyfile) != bool(arguments.ssl_certfile):
        raise ValueError("TLS needs both --openai-option=--ssl-certfile=FILE and --openai-option=--ssl-keyfile=FILE")
    if not arguments.ssl_certfile and (arguments.ssl_ca_certs or arguments.ssl_cert_reqs):
        raise ValueError("--ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile and --ssl-keyfile too")
    if arguments.ssl_certfile:
        # Load the certificate now, so that an error shows before the model is loaded.
        uvicorn.Config(_never, log_config=None, **_tls(arguments)).load()
    return arguments


async def _never(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI app that is never called."""


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


#: How long the server may take to end, in seconds, before it is forced to.
_END_S = 2.0


class _Server(uvicorn.Server):
    """Uvicorn's server, but the adapter handles signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpApi:
    """The HTTP server of one adapter."""

    def __init__(self, server: uvicorn.Server, made: socket.socket, scheme: str = "http") -> None:
        self._server = server
        self._scheme = scheme
        self._socket = made
        # Read now, since the server closes its socket when it ends.
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
        fence: Mapping[str, Any] = MappingProxyType({}),
    ) -> Self:
        """Make the server of vLLM's app for an `AsyncLLM`.

        Args:
            llm: the `AsyncLLM`.
            plain: counts the requests, and publishes the saves of edits on them.
            made: the bound socket.
            model: the name under which the model is served.
            path: the model's folder or name on the hub.
            arguments: the result of `parsed`.
            fence: arguments of `Fence`, in place of the defaults.
        """
        build_app, init_app_state, _ = _of_vllm()
        arguments.model, arguments.served_model_name = path, arguments.served_model_name or [model]
        arguments.disable_log_stats = not getattr(llm, "log_stats", False)
        tasks = await llm.get_supported_tasks()
        client = EditedClient(llm, plain, RunnerBounds(llm))
        # `_known` leaves out arguments that this version of vLLM does not take.
        with kept_logging():
            # A package that `build_app` imports reconfigures the root logger to log errors only.
            app = build_app(arguments, **_known(build_app, supported_tasks=tasks, model_config=llm.model_config))
        known = _known(init_app_state, vllm_config=llm.vllm_config, supported_tasks=tasks)
        known |= {"engine_client": client, "state": app.state, "args": arguments}
        await init_app_state(**known)
        return cls.over(app, made, arguments, fence)

    @classmethod
    def over(
        cls, app: Any, made: socket.socket, arguments: Namespace, fence: Mapping[str, Any] = MappingProxyType({})
    ) -> Self:
        """Make the server of an ASGI app. `made` is the bound socket, and `arguments` the result of `parsed`."""
        keys, tls = [key for key in arguments.api_key or () if key], _tls(arguments)
        root = getattr(arguments, "root_path", None) or ""
        fenced = Fence(app, **{"routes": ROUTES, "body_bytes": 32 << 20, "requests": 0, "root_path": root, **fence})
        config = uvicorn.Config(
            Guarded(fenced, keys, root) if keys else fenced,
            log_config=None,
            access_log=False,
            lifespan="on",
            **tls,
        )
        return cls(_Server(config), made, "https" if tls else "http")

    @property
    def url(self) -> str:
        """The base URL for clients. For a wildcard address it names this host."""
        host, port = self._address
        if host in ("0.0.0.0", "::"):  # noqa: S104  # nosec B104
            host = socket.gethostname()
        return f"{self._scheme}://{f'[{host}]' if ':' in host else host}:{port}/v1"

    async def run(self) -> None:
        """Serve until `stop` is called, and then until running requests have ended or `drop` is called."""
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._over.set()

    def stop(self) -> None:
        """Stop taking new requests."""
        self._server.should_exit = True

    async def drop(self) -> None:
        """End the server now. Responses that are being sent get a moment to finish."""
        self.stop()
        for force in (False, True):
            self._server.force_exit = force
            with anyio.move_on_after(_END_S):
                await self._over.wait()
                return


def _of_vllm() -> tuple[Any, Any, Any]:
    """vLLM's functions that make its app, the app's state, and the parser of the server's options."""
    # Up to 0.30, one of these modules imports a package that reconfigures the root logger to log errors only.
    with kept_logging():
        try:
            from vllm.entrypoints.launchers.api_server.app_state import init_app_state
            from vllm.entrypoints.launchers.app import build_app
            from vllm.entrypoints.launchers.cli_args import make_arg_parser
        except ImportError:
            # Versions up to 0.28 have them here.
            from vllm.entrypoints.openai.api_server import build_app, init_app_state
            from vllm.entrypoints.openai.cli_args import make_arg_parser
    return build_app, init_app_state, make_arg_parser


def _known(function: Any, **arguments: Any) -> dict[str, Any]:
    """The arguments that a function accepts."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}
