"""vLLM's own OpenAI-compatible HTTP server, on the adapter's engine: `tracewire engine --openai HOST:PORT`.

Its requests and the traces share one engine. They run with the model's standing interventions (`plain_requests.py`),
and know nothing of them unless they ask: by the extra argument `tracewire_edits`, which the openai client sends as
`extra_body={"vllm_xargs": {"tracewire_edits": ["calm"]}}`.
"""

from __future__ import annotations

import inspect
import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import anyio
import uvicorn

from .plain_requests import EditedClient, PlainRequests

__all__ = ["HttpApi", "bound"]

logger = logging.getLogger("tracewire")


def bound(address: str) -> socket.socket:
    """A socket bound to `HOST:PORT`, which listens when the server starts. Port 0 is any that is free.

    Raises:
        ValueError: it is no such address.
        OSError: it cannot be bound.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"expected HOST:PORT, got {address!r}")
    host = host.removeprefix("[").removesuffix("]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, int(port)))
    except BaseException:
        made.close()
        raise
    return made


#: How long its end may take, in seconds.
_END_S = 2.0


class _Server(uvicorn.Server):
    """Uvicorn's server, which leaves signals to the adapter."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpApi:
    """The server of one adapter."""

    def __init__(self, server: uvicorn.Server, made: socket.socket) -> None:
        self._server = server
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
        options: Sequence[str],
    ) -> Self:
        """Built over `llm`, an `AsyncLLM`, which it serves as `model`. `options` are options of vLLM's server."""
        build_app, init_app_state, make_arg_parser = _of_vllm()
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(list(options))
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
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="on",
        )
        return cls(_Server(config), made)

    @property
    def url(self) -> str:
        """Where it is served, for clients on this machine or, of a wildcard address, on any."""
        host, port = self._address
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

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
