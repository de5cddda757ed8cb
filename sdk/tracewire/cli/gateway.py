"""`tracewire gateway`: serve HTTP over the bus, and make API keys for it."""

from __future__ import annotations

import argparse
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tracewire.checks import check_seconds
from tracewire.client import connect
from tracewire.errors import LibraryMissing
from tracewire_bus.logs import LOG_FORMATS, configure_logging
from tracewire_bus.process_memory import settle_memory

from .commands import UsageError, add_command

__all__ = ["add_gateway"]

_NEEDS = ("fastapi", "prometheus_client", "pythonjsonlogger", "uvicorn")


def add_gateway(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    gateway = add_command(
        commands,
        "gateway",
        _gateway,
        parents=parents,
        help="serve OpenAI's API and traces over HTTP; any number of gateways can serve one bus",
        exits={0: "a signal ended it, or a key was made", 1: "it could not serve"},
        examples=("tracewire gateway --url redis://localhost --port 8080",),
    )
    add = gateway.add_argument
    add("--host", default="127.0.0.1", help="address to bind to (default: 127.0.0.1); others need --keys")
    add("--port", type=_port, default=8080, help="port to bind to (default: 8080); 0 is any free one")
    add("--keys", type=Path, metavar="FILE", help="TOML file with the API keys; read again when it changes")
    what = "sign what is submitted with this key file (tracewire keys new; default: $TRACEWIRE_KEY)"
    add("--signing-key", type=Path, metavar="FILE", help=what)
    add("--cors", action="append", default=[], metavar="ORIGIN", help="let browsers call from ORIGIN (repeatable)")
    add("--tls-certificate", type=Path, metavar="FILE", help="certificate chain, PEM")
    add("--tls-key", type=Path, metavar="FILE", help="the certificate's private key, PEM")
    add("--tls-client-ca", type=Path, metavar="FILE", help="only let clients in with a certificate of this authority")
    add("--body-limit", type=_bytes, default=32 << 20, metavar="BYTES", help="largest body of a request (default: 32M)")
    add(
        "--concurrency",
        type=_count,
        default=0,
        metavar="N",
        help="requests that one key may run at once (default: any)",
    )
    add(
        "--drain",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long SIGTERM lets requests run (default: 30)",
    )
    what = "least time between two reads of events, at most 1 (default: 0.0005 for each stream, 0.04 at most)"
    add("--read-interval", type=_interval, default=None, metavar="SECONDS", help=what)
    add("--log-format", choices=LOG_FORMATS, default="text", help="text, or a JSON object in each line (default: text)")
    add(
        "--tracing", action="store_true", help="send OpenTelemetry spans, as the variables OTEL_* say (docs/tracing.md)"
    )
    add("--new-key", metavar="NAME", help="print a new key and its entry for the file of keys, and serve nothing")
    rights = "rights of the new key, separated by commas (default: read,steer,submit)"
    add("--rights", default="read,steer,submit", metavar="RIGHTS", help=rights)
    add("--tenant", default="", metavar="TENANT", help="tenant of the new key: the key sees this tenant's traces only")
    gateway.set_defaults(uvloop=find_spec("uvloop") is not None)


def _port(text: str) -> int:
    number = int(text) if text.isdecimal() else -1
    if not 0 <= number < 1 << 16:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text}")
    return number


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of requests, or 0 for any, got {text}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        return check_seconds("--drain", float(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected seconds, such as 30, got {text}") from None


def _bytes(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    unit = units.get(text[-1:].upper(), 1)
    count = int(text[:-1] if unit > 1 else text) * unit
    if count <= 0:
        raise argparse.ArgumentTypeError(f"expected a positive number of bytes, such as 32M, got {text}")
    return count


def _interval(text: str) -> float:
    try:
        return check_seconds("--read-interval", float(text), most=1.0)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected seconds from 0 to 1, such as 0.03, got {text}") from None


async def _gateway(options: argparse.Namespace) -> int:
    try:
        # Here, since only this subcommand needs the extra.
        from tracewire.gateway.keys import InvalidKeys
        from tracewire.gateway.server import Binding, Server
        from tracewire.gateway.settings import Settings
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _NEEDS:
            raise
        raise LibraryMissing("tracewire gateway", error.name, "gateway") from error
    try:
        if options.new_key is not None:
            return _new_key(options)
        settings = Settings(
            url=options.url,
            prefix=options.prefix,
            keys=options.keys,
            signing_key=options.signing_key,
            cors=tuple(options.cors),
            body_bytes=options.body_limit,
            concurrency=options.concurrency,
            drain_s=options.drain,
            read_interval_s=options.read_interval,
            tracing=options.tracing,
        )
        binding = Binding(
            host=options.host,
            port=options.port,
            certificate=options.tls_certificate,
            certificate_key=options.tls_key,
            client_ca=options.tls_client_ca,
        )
        tracing = _exporting_spans() if options.tracing else nullcontext()
        server = Server(settings, binding)
    except InvalidKeys as error:
        raise UsageError(f"{options.keys or '--new-key'}: {error}") from None
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None
    # Fails here with one line; in the server's start it would be a traceback.
    async with connect(options.url, prefix=options.prefix):
        pass
    configure_logging(options.log_format)
    # uvicorn stops at these, and raises them again when it has stopped.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    with tracing:
        await server.run_bound(lambda: _begin(server.url))
    return 0 if server.started else 1


def _begin(url: str) -> None:
    settle_memory()
    print(f"ready {url}", flush=True)


def _exporting_spans() -> AbstractContextManager[None]:
    """Exports the spans of this process while the returned context is entered.

    Raises:
        LibraryMissing: the extra `tracing` is not installed.
        ValueError: an environment variable of OpenTelemetry is malformed.
    """
    try:
        from opentelemetry.trace import set_tracer_provider

        from tracewire_bus.span_export import exporting, otlp_exporter
    except ModuleNotFoundError as error:
        raise LibraryMissing("tracewire gateway --tracing", error.name or "opentelemetry", "tracing") from error
    exporter = otlp_exporter()

    @contextmanager
    def exported() -> Iterator[None]:
        instance = f"{socket.gethostname()}:{os.getpid()}"
        with exporting(exporter, "tracewire-gateway", instance, version("tracewire")) as provider:
            # The client of the gateway takes its tracer from here, too.
            set_tracer_provider(provider)
            yield

    return exported()


def _new_key(options: argparse.Namespace) -> int:
    from tracewire.gateway.keys import entry_of, new_key

    key = new_key()
    rights = frozenset(one.strip() for one in options.rights.split(",") if one.strip())
    entry = entry_of(key, options.new_key, rights, options.tenant)
    print(f"# The key, which is not kept anywhere: {key}\n{entry}", end="")
    return 0
