"""The command `tracewire`: thin over the same objects that a service uses.

Besides its own subcommands it runs those that installed packages bring, found by name in the entry-point group
`tracewire.commands`: `tracewire engine` is the engine adapter's. Each is a function of the remaining arguments that
returns the exit status.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import anyio
import anyio.abc
import msgspec

from tracewire.admin.dead_letters import DeadLetter
from tracewire.client import Client, connect
from tracewire.errors import ConnectError, TracewireError, UnknownDeadLetter
from tracewire.traces.output import Accepted, Event, Final, Gap, Paused, Restarted, Resumed, Steered, Waiting
from tracewire_bus.store.lifecycle import Lifecycle

from .edits import add_edits

__all__ = ["main"]

GROUP = "tracewire.commands"
#: Subcommands of this module, which no package replaces.
OWN = ("models", "engines", "drain", "ready", "watch", "edits", "dead", "redis")
#: How long `tracewire ready` waits for a Redis that does not answer, in seconds: whoever probes has little time.
_PROBE_S = 5.0
#: Within how many seconds an engine that lives is in the registry again.
_RENEWED_S = 3.0


def _commands() -> dict[str, EntryPoint]:
    return {found.name: found for found in entry_points(group=GROUP)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 1 for an error that was reported, or what a subcommand returns."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if argv and not argv[0].startswith("-"):
        if argv[0] not in OWN and (found := _commands().get(argv[0])) is not None:
            command: Callable[[list[str]], int | None] = found.load()
            return command(argv[1:]) or 0
        if argv[0] == "engine":
            # Known to the readers of the documentation, and not installed with the client.
            print(
                "tracewire: no engine is installed here: pip install 'tracewire[engine-gpu]', or [engine-cpu]",
                file=sys.stderr,
            )
            return 2
    options = _parser().parse_args(argv)
    try:
        status = int(anyio.run(options.run, options))
        # Here: what cannot be written when the interpreter ends is complained of.
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The program that reads what is printed has closed the pipe, as `head` does when it has enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except TracewireError as error:
        print(f"tracewire: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    more = ", ".join(sorted(_commands())) or "none"
    parser = argparse.ArgumentParser(
        prog="tracewire",
        description="Submit interventions on running language models, and watch them live.",
        epilog=f"Subcommands of installed packages: {more}.",
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--url", help="Redis URL (default: $TRACEWIRE_URL)")
    shared.add_argument("--prefix", default="tw", help="prefix of all keys on Redis (default: tw)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    models = commands.add_parser("models", parents=[shared], help="list the models that are served")
    models.add_argument("--tree", action="store_true", help="print each model's modules, too")
    models.set_defaults(run=_models)

    engines = commands.add_parser("engines", parents=[shared], help="list the engines that live")
    engines.add_argument("--model", metavar="MODEL", help="only those of this model")
    engines.add_argument("--json", action="store_true", help="print one JSON list, with all that is known of each")
    engines.set_defaults(run=_engines)

    drain = commands.add_parser(
        "drain", parents=[shared], help="have engines take nothing new, finish what they run, and leave; waits for that"
    )
    drain.add_argument("engines", metavar="ENGINE", nargs="*", help="an engine's name")
    _add_host(drain, "all engines of this machine, or pod; of HOST, if it is given")
    drain.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="put back what has not ended by then, for other engines (default: wait for it)",
    )
    drain.add_argument("--no-wait", action="store_true", help="return when they have been asked to")
    drain.set_defaults(run=_drain)

    ready = commands.add_parser(
        "ready", parents=[shared], help="exit with 0 if an engine serves, else with 1: a probe for whoever runs engines"
    )
    ready.add_argument("engine", metavar="ENGINE", nargs="?", help="the engine's name (default: any engine)")
    ready.add_argument("--model", metavar="MODEL", help="one that serves this model")
    _add_host(ready, "one of this machine, or pod; of HOST, if it is given")
    ready.add_argument(
        "--alive",
        action="store_true",
        help="one that lives, also if it drains; and 0 as well if Redis does not answer, which is no engine's fault",
    )
    ready.set_defaults(run=_ready)

    watch = commands.add_parser(
        "watch", parents=[shared], help="follow a trace to its end; without one, what becomes of all traces"
    )
    watch.add_argument("trace", metavar="TRACE", nargs="?", help="the trace's id")
    watch.add_argument("--model", metavar="MODEL", help="without a trace: only those of this model")
    watch.add_argument("--names", nargs="+", metavar="NAME", help="show only these saved names")
    watch.add_argument(
        "--since",
        help="'start' (default for a trace), 'now' (default without one), an event's id, or where a watch was left",
    )
    watch.set_defaults(run=_watch)

    add_edits(commands, shared)

    dead = commands.add_parser("dead", help="submissions that were given up: list, show, resubmit or drop them")
    actions = dead.add_subparsers(required=True, metavar="ACTION")
    for name, run, text in (
        ("list", _dead_list, "list them, the oldest first"),
        ("show", _dead_show, "print one as JSON"),
        ("resubmit", _dead_resubmit, "submit each once more, as a new trace, whose id is printed"),
        ("drop", _dead_drop, "remove each"),
    ):
        action = actions.add_parser(name, parents=[shared], help=text)
        action.set_defaults(run=run)
        if name == "list":
            action.add_argument("--model", metavar="MODEL", help="only those of this model")
        else:
            action.add_argument("ids", metavar="ID", nargs=1 if name == "show" else "+", help="the dead letter's id")

    redis = commands.add_parser("redis", help="run a private Redis; prints its URL, and ends on SIGTERM or SIGINT")
    redis.set_defaults(run=_redis)
    return parser


def _add_host(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--host", metavar="HOST", nargs="?", const=socket.gethostname(), help=text)


async def _engines(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        engines = await client.engines(options.model)
    if options.json:
        print(json.dumps([asdict(engine) for engine in engines], indent=2))
        return 0
    for engine in engines:
        versions = " ".join(f"{name} {version}" for name, version in engine.versions.items() if version)
        running = f"{engine.running} of {engine.capacity} traces"
        columns = [engine.name, engine.model, engine.state, running, engine.host or "-", versions]
        if engine.malformed:
            columns.append(f"{engine.malformed} malformed items in Redis passed over")
        print("\t".join(columns).rstrip())
    return 0


async def _drain(options: argparse.Namespace) -> int:
    """Returns 0 when all of them have been asked to and, unless nobody waits, have left."""
    if options.timeout is not None and not options.timeout >= 0:
        print(f"tracewire: --timeout takes a number of seconds, got {options.timeout:g}", file=sys.stderr)
        return 2
    if not options.engines and options.host is None:
        print("tracewire: name an engine (tracewire engines lists them), or give --host", file=sys.stderr)
        return 2
    async with connect(options.url, prefix=options.prefix) as client:
        names = list(options.engines)
        if options.host is not None:
            here = await _of_host(client, options.host)
            names += here
            if not here:
                print(f"tracewire: no engine of host {options.host!r} lives (tracewire engines)", file=sys.stderr)
                return 1
        drained = [await client.drain(name, timeout=options.timeout) for name in dict.fromkeys(names)]
        asked = {one.engine.name for one in drained}
        for one in drained:
            print(f"{one.engine.name}: asked to drain; it runs {one.engine.running} traces", flush=True)
            if one.waiting and asked.issuperset(one.others):
                print(
                    f"tracewire: no other engine serves {one.engine.model!r}: the {one.waiting} submissions that wait "
                    "for it, and what is put back, wait until one does",
                    file=sys.stderr,
                )
        for one in drained if not options.no_wait else ():
            await one.wait()
            print(f"{one.engine.name}: has left", flush=True)
    return 0


async def _of_host(client: Client, host: str) -> list[str]:
    """The names of a host's engines. One that Redis has just kept waiting may be out of the registry for a moment."""
    with anyio.move_on_after(_RENEWED_S):
        while True:
            if found := [engine.name for engine in await client.engines() if engine.host == host]:
                return found
            await anyio.sleep(0.2)
    return []


async def _ready(options: argparse.Namespace) -> int:
    """Returns 0 if there is such an engine."""
    try:
        async with connect(options.url, prefix=options.prefix, patience=_PROBE_S) as client:
            engines = await client.engines(options.model)
    except ConnectError as error:
        if not options.alive:
            raise
        print(f"tracewire: whether an engine lives is not known: {error}", file=sys.stderr)
        return 0
    for engine in engines:
        named = options.engine in (None, engine.name) and options.host in (None, engine.host)
        if named and (engine.ready or options.alive):
            print(f"{engine.name}\t{engine.state}")
            return 0
    wanted = " ".join(
        text
        for text in (
            f"engine {options.engine}" if options.engine else "engine",
            f"of {options.model!r}" if options.model else "",
            f"on {options.host}" if options.host else "",
        )
        if text
    )
    print(f"tracewire: no {wanted} {'lives' if options.alive else 'serves'}", file=sys.stderr)
    return 1


async def _models(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        for info in await client.models():
            engines = f"{len(info.engines)} engine{'s' if len(info.engines) != 1 else ''}"
            print(
                f"{info.name}\t{engines}\t{info.running} of {info.capacity} traces\t{info.dtype}\t"
                f"{info.layer_count} layers of {info.hidden_size}\t{info.max_model_len} tokens"
                + (f"\tits engines differ in: {', '.join(info.differs)}" if info.differs else "")
            )
            if options.tree:
                print((await client.model(info.name)).tree)
    return 0


async def _watch(options: argparse.Namespace) -> int:
    """Returns 0 if the trace ended well."""
    async with connect(options.url, prefix=options.prefix) as client:
        return await (_follow if options.trace is not None else _follow_all)(client, options)


async def _follow_all(client: Client, options: argparse.Namespace) -> int:
    """Prints until it is interrupted; then where to go on, on standard error."""
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
                print(_lifecycle_line(event), flush=True)
        finally:
            if watch.position:
                print(f"tracewire: go on with --since {watch.position}", file=sys.stderr)
    return 0


def _lifecycle_line(event: Lifecycle) -> str:
    more = [event.status or "", event.error or ""]
    if event.kind in ("accepted", "restarted"):
        more.append(f"by {event.engine}, attempt {event.attempt}")
    if event.kind == "queued" and event.client:
        more.append(f"by {event.client}")
    if event.tokens is not None:
        more.append(f"{event.tokens} tokens")
    return "\t".join(
        (_when(event.time), event.kind, event.trace, event.model, ", ".join(part for part in more if part))
    ).rstrip()


async def _follow(client: Client, options: argparse.Namespace) -> int:
    try:
        subscription = client.subscribe(options.trace, since=options.since or "start", names=options.names)
    except ValueError as error:
        print(f"tracewire: {error}", file=sys.stderr)
        return 2
    async with subscription:
        async for event in subscription:
            print(_line(event), flush=True)
            if isinstance(event, Final):
                return 0 if event.status in ("finished", "stopped") else 1
    return 0


def _line(event: Event) -> str:
    if isinstance(event, Accepted):
        return f"accepted by {event.engine}"
    if isinstance(event, Waiting):
        return f"waiting for another engine: {event.reason}"
    if isinstance(event, Restarted):
        return f"restarted: {event.reason}" if event.reason else "restarted"
    if isinstance(event, Steered):
        values = {name: value for change in event.changes for name, value in change.values.items()}
        shown = "  ".join(f"{name}={_short(value)}" for name, value in values.items())
        where = ", ".join(f"{one.invoke}.{one.choice} {one.index}" for one in event.first)
        return f"steered to version {event.version} from {where or 'no token'} on: {shown}"
    if isinstance(event, Paused | Resumed):
        return f"{'paused' if isinstance(event, Paused) else 'resumed'} by {event.by}"
    if isinstance(event, Gap):
        return f"(trimmed: what came after {event.since} up to {event.until})"
    if isinstance(event, Final):
        error = f": {event.error.type}: {event.error.message}" if event.error else ""
        return f"{event.status}, {event.usage.completion_tokens} tokens{error}"
    saved = "  ".join(f"{name}={_short(value)}" for name, value in event.delta.items())
    text = json.dumps(event.text, ensure_ascii=False)
    return f"{event.invoke}.{event.choice} {event.index:5d} {text}  {saved}".rstrip()


def _short(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape:
        return f"{getattr(value.dtype, 'name', value.dtype)}{list(shape)}"
    if isinstance(value, list):
        return f"[{', '.join(_short(item) for item in value[:8])}{', ...' if len(value) > 8 else ''}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_short(item)}' for key, item in list(value.items())[:8])}}}"
    text = f"{value:.4g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


async def _letters(client: Client) -> AsyncIterator[DeadLetter]:
    after = ""
    while page := await client.dead_letters(after):
        for letter in page:
            yield letter
        after = page[-1].id


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


async def _dead_list(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        async for letter in _letters(client):
            if options.model is None or letter.model == options.model:
                print("\t".join((letter.id, _when(letter.time), letter.model, letter.trace, letter.reason)))
    return 0


async def _dead_show(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        async for letter in _letters(client):
            if letter.id == options.ids[0]:
                shown = {name: getattr(letter, name) for name in ("id", "model", "trace", "reason", "problem")}
                shown["time"] = _when(letter.time)
                shown["submission"] = msgspec.to_builtins(letter.submission, builtin_types=(bytes,))
                print(json.dumps(shown, ensure_ascii=False, indent=2, default=_described))
                return 0
    raise UnknownDeadLetter(options.ids[0])


def _described(value: Any) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes) else repr(value)


async def _dead_resubmit(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        for id_ in options.ids:
            print(f"{id_} is trace {await client.resubmit(id_)} now", flush=True)
    return 0


async def _dead_drop(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        for id_ in options.ids:
            if not await client.drop_dead_letter(id_):
                raise UnknownDeadLetter(id_)
    return 0


async def _redis(options: argparse.Namespace) -> int:
    from tracewire_bus.transport.embedded import EmbeddedServer, EmbeddedServerError

    try:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with EmbeddedServer.start() as server:
                print(server.url, flush=True)
                async for _ in signals:
                    break
    except EmbeddedServerError as error:
        print(f"tracewire: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
