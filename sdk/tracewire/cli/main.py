"""The command `tracewire`, which uses the public client.

Installed packages add subcommands by the entry-point group `tracewire.commands`: the engine adapter adds `tracewire
engine`. Such a subcommand is a function that takes the remaining arguments and returns the exit status.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Container, Sequence
from importlib.metadata import EntryPoint, entry_points

import anyio

from tracewire.errors import TracewireError

from .dead import add_dead
from .edits import add_edits
from .engines import add_engines
from .gateway import add_gateway
from .harvest import add_harvest
from .traces import add_watch

__all__ = ["build_parser", "main"]

GROUP = "tracewire.commands"


def _commands() -> dict[str, EntryPoint]:
    return {found.name: found for found in entry_points(group=GROUP)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: the subcommand's, or 1 for an error that was printed."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    parser, own = _built()
    if argv and not argv[0].startswith("-"):
        # No package replaces a subcommand of this one.
        if argv[0] not in own and (found := _commands().get(argv[0])) is not None:
            command: Callable[[list[str]], int | None] = found.load()
            return command(argv[1:]) or 0
        if argv[0] == "engine":
            # The documentation shows this subcommand, which comes with the engine's packages.
            print(
                "tracewire: no engine is installed here: pip install 'tracewire[engine-gpu]', or [engine-cpu]",
                file=sys.stderr,
            )
            return 2
    options = parser.parse_args(argv)
    try:
        backend = {"use_uvloop": getattr(options, "uvloop", False)}
        status = int(anyio.run(options.run, options, backend_options=backend))
        # Flushed here: the interpreter prints an error if it cannot flush at its end.
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader of the pipe has closed it, as `head` does when it has enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except TracewireError as error:
        print(f"tracewire: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of this package's own subcommands."""
    return _built()[0]


def _built() -> tuple[argparse.ArgumentParser, Container[str]]:
    """The parser of this package's own subcommands, and their names."""
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

    add_engines(commands, shared)
    add_watch(commands, shared)
    add_harvest(commands, shared)
    add_edits(commands, shared)
    add_dead(commands, shared)
    add_gateway(commands, shared)
    redis = commands.add_parser("redis", help="run a private Redis and print its URL; ends on SIGTERM or SIGINT")
    what = "listen on this port of 127.0.0.1 (default: a unix socket)"
    redis.add_argument("--port", type=_port, default=0, metavar="PORT", help=what)
    redis.set_defaults(run=_redis)
    return parser, commands.choices


def _port(text: str) -> int:
    port = int(text)
    if not 0 < port < 1 << 16:
        raise argparse.ArgumentTypeError(f"expected a port from 1 to 65535, got {text}")
    return port


async def _redis(options: argparse.Namespace) -> int:
    from tracewire_bus.transport.embedded import EmbeddedServer, EmbeddedServerError

    try:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with EmbeddedServer.start(port=options.port) as server:
                print(server.url, flush=True)
                async for _ in signals:
                    break
    except EmbeddedServerError as error:
        print(f"tracewire: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
