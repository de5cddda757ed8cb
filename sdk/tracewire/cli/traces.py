"""`tracewire watch`: follow one trace, or the lifecycle events of all."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from tracewire.client import Client, connect
from tracewire.traces.output import Final

from .commands import UsageError, add_command
from .format import event_line, lifecycle_line
from .model_names import add_model
from .presenters import JsonLines
from .printing import print_json_line

__all__ = ["add_watch"]


def add_watch(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    watch = add_command(
        commands,
        "watch",
        _watch,
        parents=parents,
        help="follow a trace to its end; without one, the lifecycle events of all traces",
        exits={0: "the trace finished", 1: "an error, or the trace failed, was refused or was cancelled"},
        json="each event as a JSON object on a line",
    )
    watch.add_argument("trace", metavar="TRACE", nargs="?", help="the trace's id")
    add_model(watch, "--model", help="without TRACE: only events of this model's traces")
    watch.add_argument("--names", nargs="+", metavar="NAME", help="with TRACE: show only these saved names")
    watch.add_argument(
        "--since",
        help="'start' (default with TRACE), 'now' (default without), 'recent' (with TRACE: its last 32 events, and new "
        "ones), an event's id, or an earlier watch's position",
    )


async def _watch(options: argparse.Namespace) -> int:
    """Returns 0 if the trace ended well."""
    async with connect(options.url, prefix=options.prefix) as client:
        return await (_follow if options.trace is not None else _follow_all)(client, options)


async def _follow_all(client: Client, options: argparse.Namespace) -> int:
    """Prints until it is interrupted. Then it prints the position for `--since` on standard error."""
    if options.names is not None:
        raise UsageError("--names shows saved names of one trace: tracewire watch TRACE --names NAME")
    try:
        watch = client.watch(model=options.model, since=options.since or "now")
    except ValueError as error:
        raise UsageError(str(error)) from None
    async with watch:
        try:
            async for event in watch:
                if options.json:
                    print_json_line(msgspec.structs.asdict(event))
                else:
                    print(lifecycle_line(event), flush=True)
        finally:
            if watch.position:
                print(f"tracewire: go on with --since {watch.position}", file=sys.stderr)
    return 0


async def _follow(client: Client, options: argparse.Namespace) -> int:
    try:
        subscription = client.subscribe(options.trace, since=options.since or "start", names=options.names)
    except ValueError as error:
        raise UsageError(str(error)) from None
    shown = JsonLines(options.trace) if options.json else None
    async with subscription:
        async for event in subscription:
            if shown is not None:
                shown.feed(event)
            else:
                print(event_line(event), flush=True)
            if isinstance(event, Final):
                return 0 if event.status in ("finished", "stopped") else 1
    return 0
