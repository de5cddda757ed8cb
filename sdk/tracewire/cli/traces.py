"""`tracewire watch`: follow one trace, or the lifecycle events of all."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from tracewire.client import Client, connect
from tracewire.traces.output import Final

from .format import event_line, lifecycle_line

__all__ = ["add_watch"]


def add_watch(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    watch = commands.add_parser(
        "watch", parents=[shared], help="follow a trace to its end; without one, the lifecycle events of all traces"
    )
    watch.add_argument("trace", metavar="TRACE", nargs="?", help="the trace's id")
    watch.add_argument("--model", metavar="MODEL", help="without TRACE: only events of this model's traces")
    watch.add_argument("--names", nargs="+", metavar="NAME", help="with TRACE: show only these saved names")
    watch.add_argument(
        "--since",
        help="'start' (default with TRACE), 'now' (default without), an event's id, or an earlier watch's position",
    )
    watch.set_defaults(run=_watch)


async def _watch(options: argparse.Namespace) -> int:
    """Returns 0 if the trace ended well."""
    async with connect(options.url, prefix=options.prefix) as client:
        return await (_follow if options.trace is not None else _follow_all)(client, options)


async def _follow_all(client: Client, options: argparse.Namespace) -> int:
    """Prints until it is interrupted. Then it prints the position for `--since` on standard error."""
    if options.names is not None:
        print("tracewire: --names shows saved names of one trace: tracewire watch TRACE --names NAME", file=sys.stderr)
        return 2
    try:
        watch = client.watch(model=options.model, since=options.since or "now")
    except ValueError as error:
        print(f"tracewire: {error}", file=sys.stderr)
        return 2
    async with watch:
        try:
            async for event in watch:
                print(lifecycle_line(event), flush=True)
        finally:
            if watch.position:
                print(f"tracewire: go on with --since {watch.position}", file=sys.stderr)
    return 0


async def _follow(client: Client, options: argparse.Namespace) -> int:
    try:
        subscription = client.subscribe(options.trace, since=options.since or "start", names=options.names)
    except ValueError as error:
        print(f"tracewire: {error}", file=sys.stderr)
        return 2
    async with subscription:
        async for event in subscription:
            print(event_line(event), flush=True)
            if isinstance(event, Final):
                return 0 if event.status in ("finished", "stopped") else 1
    return 0
