"""`tracewire redis`: a private Redis for one machine."""

from __future__ import annotations

import argparse
import signal
from typing import Any

import anyio

from .commands import add_command
from .printing import remark

__all__ = ["add_redis", "port"]


def add_redis(commands: Any) -> None:
    """Add the subcommand."""
    redis = add_command(
        commands,
        "redis",
        _redis,
        parents=(),
        help="run a private Redis and print its URL; ends on SIGTERM or SIGINT",
        exits={0: "a signal ended it", 1: "the Redis did not start"},
        examples=("tracewire redis --port 6379",),
    )
    what = "listen on this port of 127.0.0.1 (default: a unix socket)"
    redis.add_argument("--port", type=port, default=0, metavar="PORT", help=what)


def port(text: str) -> int:
    """An argparse converter for a port's number."""
    number = int(text) if text.isdecimal() else 0
    if not 0 < number < 1 << 16:
        raise argparse.ArgumentTypeError(f"expected a port from 1 to 65535, got {text}")
    return number


async def _redis(options: argparse.Namespace) -> int:
    from tracewire_bus.transport.embedded import EmbeddedServer, EmbeddedServerError

    try:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with EmbeddedServer.start(port=options.port) as server:
                print(server.url, flush=True)
                remark(f"Every other command finds it by: export TRACEWIRE_URL={server.url}")
                async for _ in signals:
                    break
    except EmbeddedServerError as error:
        remark(f"tracewire: {error}")
        return 1
    return 0
