"""`tracewire up`: a Redis, an engine and a gateway for one model, in one command."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from tracewire.client import connect
from tracewire_bus.owned_folder import OwnedFolder
from tracewire_bus.transport.embedded import EmbeddedServer, EmbeddedServerError
from tracewire_bus.transport.urls import redacted

from .children import Child
from .commands import UsageError, add_command
from .installed import missing_engine, missing_gateway
from .printing import print_json_line, remark
from .redis import port

__all__ = ["add_up", "curl_of"]

#: How long the engine and the gateway may take to end, in seconds, before they are killed.
_GRACE_S = 20.0
#: The same once the private Redis has ended, in seconds.
_GRACE_WITHOUT_REDIS_S = 2.0
#: How often progress is printed where standard error is no terminal, in seconds.
_EVERY_S = 10.0
_PORT = 8080
_PROMPT = "def parse(text):"


def add_up(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    up = add_command(
        commands,
        "up",
        _up,
        parents=parents,
        help="start an engine for a model, the gateway, and a Redis if no URL names one; Ctrl-C ends them all",
        exits={0: "a signal ended it", 1: "something did not start, or ended by itself"},
        examples=("tracewire up demo", "tracewire up MODEL --max-model-len 4096 --port 9000"),
        json="an object when all is ready: model, engine, redis, gateway, dashboard, curl",
    )
    up.usage = "tracewire up MODEL [options] [options of tracewire engine and of vLLM's engine]"
    up.add_argument("model", metavar="MODEL", help="a Hugging Face model: its folder or name, or 'demo'")
    what = f"port of the gateway on 127.0.0.1 (default: {_PORT}, or another one if that is taken)"
    up.add_argument("--port", type=port, metavar="PORT", help=what)
    up.add_argument(
        "--redis-port", type=port, default=0, metavar="PORT", help="without --url: the private Redis's port"
    )
    up.add_argument("--no-gateway", action="store_true", help="start no gateway")
    up.add_argument("--verbose", action="store_true", help="print the logs of the engine and the gateway")
    up.set_defaults(takes_more=True)


async def _up(options: argparse.Namespace) -> int:
    if options.model.startswith("-"):
        raise UsageError(f"expected MODEL before the engine's options, got {options.model}")
    _check_installed(options)
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with anyio.create_task_group() as group:
            status = 0

            async def end_on_signal() -> None:
                async for _ in signals:
                    remark("tracewire: ending the engine and the gateway; another Ctrl-C kills them")
                    group.cancel_scope.cancel()

            group.start_soon(end_on_signal)
            try:
                status = await _serve(options)
            except EmbeddedServerError as error:
                remark(f"tracewire: {error}")
                status = 1
            group.cancel_scope.cancel()
    return status


def _check_installed(options: argparse.Namespace) -> None:
    missing = [found] if (found := missing_engine()) else []
    if not options.no_gateway and (found := missing_gateway()):
        missing.append(f"{found}, or give --no-gateway")
    if missing:
        raise UsageError("\n".join(missing))


async def _serve(options: argparse.Namespace) -> int:
    """Start everything, print the ready line, and wait until a process ends by itself. Being cancelled ends them."""
    began = time.monotonic()
    async with _redis(options) as (url, server), _children(options, url) as children:
        engine = children[0]
        with _progress(f"loading {options.model}") as progress:
            while not all(child.answer for child in children):
                if (gone := _gone(children, server, retry=True)) is not None:
                    progress.done()
                    return _failed(gone, children, options)
                progress.tell(engine.progress())
                await anyio.sleep(0.1)
        async with connect(url, prefix=options.prefix) as client:
            model = (await client.engines.get(engine.answer)).model
        gateway = children[1].answer if len(children) > 1 else ""
        dashboard = await anyio.to_thread.run_sync(_dashboard, gateway) if gateway else ""
        told = {
            "model": model,
            "engine": engine.answer,
            "redis": redacted(url),
            "gateway": gateway,
            "dashboard": dashboard,
            "curl": curl_of(gateway, model) if gateway else "",
        }
        if options.json:
            print_json_line(told)
        else:
            _print_ready(told, time.monotonic() - began)
        while (gone := _gone(children, server)) is None:  # noqa: ASYNC110
            await anyio.sleep(0.1)
        return _failed(gone, children, options)


@asynccontextmanager
async def _redis(options: argparse.Namespace) -> AsyncIterator[tuple[str, EmbeddedServer | None]]:
    """The URL of the given Redis, or of a private one, which ends with the context, and that private one."""
    given = options.url or os.environ.get("TRACEWIRE_URL", "")
    if given and not given.startswith("embedded:"):
        # Fails at once if no Redis answers.
        async with connect(given, prefix=options.prefix, retry_timeout=5.0):
            pass
        yield given, None
        return
    async with EmbeddedServer.start(port=options.redis_port) as server:
        yield server.url, server


class _Children(list[Child]):
    """The processes, the engine first."""

    #: Starts the gateway on any port: another process may take the usual one while this gateway starts.
    other: Callable[[], Child] | None = None
    #: How long they may take to end, in seconds, before they are killed.
    grace_s = _GRACE_S

    def retry(self, child: Child) -> bool:
        """Start a gateway that has ended once more. Returns whether that could be done."""
        if child.name != "gateway" or self.other is None:
            return False
        self[self.index(child)], self.other = self.other(), None
        return True


@asynccontextmanager
async def _children(options: argparse.Namespace, url: str) -> AsyncIterator[_Children]:
    """The engine and the gateway, which start at the same time."""
    environment = {"TRACEWIRE_URL": url}
    with OwnedFolder("tracewire-up-") as folder:
        logs = None if options.verbose else folder.path
        # Running traces end soon after Ctrl-C. An option that is given comes later, and counts.
        arguments = [options.model, "--prefix", options.prefix, *([] if _gives_drain(options) else ["--drain", "1"])]
        children = _Children([Child("engine", [*arguments, *options.more], environment, logs and logs / "engine.log")])
        if not options.no_gateway:

            def gateway(port: int) -> Child:
                where = ["--port", str(port), "--prefix", options.prefix, "--drain", "1"]
                return Child("gateway", where, environment, logs and logs / "gateway.log")

            children.append(gateway(_gateway_port(options.port)))
            if options.port is None:
                children.other = partial(gateway, 0)
        try:
            yield children
        finally:
            with anyio.CancelScope(shield=True):
                # The second Ctrl-C kills them.
                with anyio.open_signal_receiver(signal.SIGINT) as signals:
                    async with anyio.create_task_group() as group:
                        group.start_soon(_kill_on, signals, group.cancel_scope)
                        async with anyio.create_task_group() as stopping:
                            for child in children:
                                stopping.start_soon(child.stop, children.grace_s)
                        group.cancel_scope.cancel()


async def _kill_on(signals: Any, scope: anyio.CancelScope) -> None:
    async for _ in signals:
        scope.cancel()


def _gives_drain(options: argparse.Namespace) -> bool:
    return any(one.partition("=")[0] == "--drain" for one in options.more)


def _gateway_port(given: int | None) -> int:
    """The port to bind the gateway to: 0 for any, if none is given and the usual one is taken."""
    if given is not None:
        return given
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", _PORT))
        except OSError:
            return 0
    return _PORT


def _gone(children: _Children, server: EmbeddedServer | None, *, retry: bool = False) -> Child | EmbeddedServer | None:
    """The private Redis or the process that has ended by itself; `None` while all run.

    With `retry`, a gateway that has ended is started once more, on another port.
    """
    if server is not None and server.status is not None:
        return server
    for child in children:
        if child.status is not None and not (retry and children.retry(child)):
            return child
    return None


def _failed(gone: Child | EmbeddedServer, children: _Children, options: argparse.Namespace) -> int:
    """Say what has ended by itself. Returns the command's exit status."""
    if isinstance(gone, EmbeddedServer):
        remark(f"tracewire: the private Redis ended with status {gone.status}, and its data is lost")
        # Without Redis an engine cannot hand back its traces, and would try to the end.
        children.grace_s = _GRACE_WITHOUT_REDIS_S
        return 1
    if tail := gone.log_tail():
        remark(tail)
    refused = gone.status == 2 and gone.name == "engine"
    remark(
        f"tracewire: the {gone.name} ended with status {gone.status}"
        + ("" if options.verbose else "; its log is above")
    )
    return 2 if refused else 1


def _dashboard(gateway: str) -> str:
    """The URL of the gateway's dashboard; `""` if this gateway has none."""
    url = f"{gateway}/dashboard"
    try:
        # The URL is that of the gateway that this command has started.
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310  # nosec B310
            return url if answer.status == 200 else ""
    except (urllib.error.URLError, OSError):
        return ""


def curl_of(gateway: str, model: str) -> str:
    """A command that asks the gateway for a completion."""
    body = json.dumps({"model": model, "prompt": _PROMPT, "max_tokens": 32})
    return f"curl -s {gateway}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"


def _print_ready(told: dict[str, str], took_s: float) -> None:
    lines = [
        f"ready: {told['model']} after {took_s:.0f} s",
        f"  Redis      {told['redis']}",
        *([f"  gateway    {told['gateway']}"] if told["gateway"] else []),
        *([f"  dashboard  {told['dashboard']}"] if told["dashboard"] else []),
        "",
        "In another terminal:",
        # A password is not printed; the caller who gave it sets the variable.
        *([] if "***" in told["redis"] else [f"  export TRACEWIRE_URL={shlex.quote(told['redis'])}"]),
        f"  tracewire run {shlex.quote(told['model'])} {shlex.quote(_PROMPT)} --max-tokens 32",
        *([f"  {told['curl']}"] if told["curl"] else []),
        "",
        "Ctrl-C ends everything.",
    ]
    print("\n".join(lines), flush=True)


class _Progress:
    """Says on standard error for how long a wait has lasted: in place on a terminal, else now and then."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = self._told = time.monotonic()
        self._terminal = sys.stderr.isatty()
        if not self._terminal:
            remark(f"{what} ...")

    def tell(self, more: str = "") -> None:
        """Say for how long the wait has lasted. `more` is the last news of the log."""
        now = time.monotonic()
        line = f"{self._what} ... {now - self._began:.0f} s" + (f"  {more}" if more else "")
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{line[:width]}", end="", file=sys.stderr, flush=True)
        elif now - self._told >= _EVERY_S:
            self._told = now
            remark(line)

    def done(self) -> None:
        """Take the line off the terminal."""
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def _progress(what: str) -> Iterator[_Progress]:
    progress = _Progress(what)
    try:
        yield progress
    finally:
        progress.done()
