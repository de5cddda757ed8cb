"""`tracewire traces` and `watch`: list the traces of all clients, and follow one, or the lifecycle events of all."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from tracewire.admin.traces import STATES
from tracewire.client import Client, connect
from tracewire.traces.output import Final
from tracewire_bus.store.trace_list import ListedTrace

from .commands import UsageError, add_command, positive
from .format import age, counted, event_line, lifecycle_line
from .model_names import add_model
from .presenters import JsonLines
from .printing import place, print_json, print_json_line, print_rows, remark

__all__ = ["RUNNING", "add_traces", "add_watch"]

#: The states of a trace that has not ended.
RUNNING = ("queued", "running", "paused")
_COLUMNS = ("trace", "model", "state", "tokens", "age", "client", "tenant")
#: How many traces are listed by default.
_LIMIT = 20


def add_traces(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    traces = add_command(
        commands,
        "traces",
        _traces,
        parents=parents,
        help="list the traces of all clients, running and ended, the newest first",
        examples=("tracewire traces --running", "tracewire traces --ended --model demo --limit 100 --json"),
        json="a list of objects: trace_id, tenant, model, client, state, engine, queued_at, ended_at, error, ...",
    )
    add_model(traces, "--model", help="only this model's traces")
    traces.add_argument("--client", metavar="NAME", help="only traces that this client submitted")
    traces.add_argument("--tenant", metavar="TENANT", help="only this tenant's traces, whose ids begin with TENANT:")
    which = traces.add_mutually_exclusive_group()
    which.add_argument("--running", action="store_true", help="only traces that wait in the queue, run or are paused")
    which.add_argument("--ended", action="store_true", help="only traces that have ended, well or not")
    what = f"how many traces to list (default: {_LIMIT})"
    traces.add_argument("--limit", type=positive, default=_LIMIT, metavar="N", help=what)


async def _traces(options: argparse.Namespace) -> int:
    states = RUNNING if options.running else sorted(STATES.difference(RUNNING)) if options.ended else None
    async with connect(options.url, prefix=options.prefix) as client:
        listed = await client.traces.list(
            model=options.model,
            client=options.client,
            states=states,
            id_prefix=f"{options.tenant}:" if options.tenant else "",
            limit=options.limit,
        )
        url = client.url
    if options.json:
        print_json([_trace_json(trace) for trace in listed])
        return 0
    if not listed:
        remark(f"No {_which(options)} on {place(url, options.prefix)}. Run one: tracewire run --help")
    now = time.time()
    print_rows(_COLUMNS, [_trace_row(trace, now) for trace in listed])
    if len(listed) == options.limit:
        remark(f"tracewire: there may be more traces than {options.limit}: --limit N")
    return 0


def _which(options: argparse.Namespace) -> str:
    kind = "running traces" if options.running else "ended traces" if options.ended else "traces"
    names = {"of": options.model, "by": options.client, "of the tenant": options.tenant}
    return " ".join([kind, *(f"{word} {name!r}" for word, name in names.items() if name)])


def _tenant(trace: ListedTrace) -> str:
    tenant, colon, _ = trace.trace_id.partition(":")
    return tenant if colon else ""


def _trace_row(trace: ListedTrace, now: float) -> list[str]:
    # A cancelled trace ends with the error Cancelled, which says no more.
    error = "" if trace.error is None or trace.error.lower() == trace.state else f": {trace.error}"
    tokens = "-" if trace.tokens is None else counted(trace.tokens, "token")
    since = age(now - trace.queued_at)
    return [trace.trace_id, trace.model, f"{trace.state}{error}", tokens, since, trace.client or "-", _tenant(trace)]


def _trace_json(trace: ListedTrace) -> dict[str, Any]:
    plain = msgspec.structs.asdict(trace)
    del plain["place"]
    return {"trace_id": plain.pop("trace_id"), "tenant": _tenant(trace) or None, **plain}


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
