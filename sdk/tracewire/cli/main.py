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
from pathlib import Path

import anyio

from tracewire.errors import TracewireError, UnknownTrace

from .acl import add_acl
from .approve import add_approve
from .audit import add_audit
from .chat import add_chat
from .commands import Parser, UsageError
from .completion import add_completion, complete
from .control import add_control
from .dead import add_dead
from .doctor import add_doctor
from .edits import add_edits
from .engines import add_engines
from .export import add_export
from .extract import add_extract
from .gateway import add_gateway
from .guard import add_guard
from .harvest import add_harvest
from .installed import COMMANDS, ENGINE, missing_engine
from .keyring import add_keys
from .library import add_library
from .printing import PREFIX, place, print_any_character
from .record import add_record
from .redis import add_redis
from .replay import add_replay
from .run import add_run
from .sweep import add_sweep
from .top import add_top
from .traces import add_traces, add_watch
from .up import add_up

__all__ = ["build_parser", "main"]

_ENGINE_HELP = "serve a model: tracewire engine MODEL; needs tracewire[engine-gpu], or make setup in a checkout"


def _commands() -> dict[str, EntryPoint]:
    return {found.name: found for found in entry_points(group=COMMANDS)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: the subcommand's, or 1 for an error that was printed."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    print_any_character()
    if argv[:1] in (["--version"], ["-V"]):
        return _print_version()
    parser, own = _built()
    complete(parser)
    if not argv:
        parser.print_help()
        return 0
    if not argv[0].startswith("-") and argv[0] not in own:
        if argv[0] == ENGINE and (missing := missing_engine()):
            print(f"tracewire: {missing}", file=sys.stderr)
            return 2
        if (found := _commands().get(argv[0])) is not None:
            command: Callable[[list[str]], int | None] = found.load()
            return command(argv[1:]) or 0
    return _run(_parsed(parser, argv))


def _parsed(parser: Parser, argv: list[str]) -> argparse.Namespace:
    for argument in argv:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            parser.error(f"expected arguments in UTF-8, got {argument!r}")
    options, more = parser.parse_known_args(argv)
    if more and not getattr(options, "takes_more", False):
        options.parser.refuse_more(more)
    options.more = more
    if (path := getattr(options, "url_file", None)) is not None:
        if options.url is not None:
            parser.error("--url-file: expected one of --url and --url-file, got both")
        try:
            options.url = Path(path).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"--url-file: {error}")
        if not options.url:
            parser.error(f"--url-file: expected a file with a URL, got an empty one: {path}")
    return options


def _run(options: argparse.Namespace) -> int:
    try:
        backend = {"use_uvloop": getattr(options, "uvloop", False)}
        status = int(anyio.run(options.run, options, backend_options=backend))
        # Flushed here: the interpreter prints an error if it cannot flush at its end.
        sys.stdout.flush()
        return status
    except BaseException as error:
        return _status_of(_single(error), options)


def _single(error: BaseException) -> BaseException:
    """The one error in a group of one, as a task group raises it; any other error itself."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _status_of(error: BaseException, options: argparse.Namespace) -> int:
    """Print an error that the user can mend, and return the exit status; raise any other."""
    match error:
        case BrokenPipeError():
            # The reader of the pipe has closed it, as `head` does when it has enough.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        case UsageError():
            print(f"tracewire: {error}", file=sys.stderr)
            return 2
        case TracewireError():
            print(f"tracewire: {error}{_looked(error, options)}", file=sys.stderr)
            return 1
        case KeyboardInterrupt():
            if sys.stderr.isatty():
                # The shell's prompt begins a line of its own.
                print(file=sys.stderr)
            return 130
    raise error


def _looked(error: TracewireError, options: argparse.Namespace) -> str:
    """Where a command has looked that finds no trace, or no engine at all."""
    if not isinstance(error, UnknownTrace) and getattr(error, "available", True):
        return ""
    url, prefix = (getattr(options, name, None) for name in ("url", "prefix"))
    url = url or os.environ.get("TRACEWIRE_URL")
    return f"; looked on {place(url, prefix)}" if url and prefix else ""


def _print_version() -> int:
    # Imported here: it takes a moment, and no other command needs it.
    from importlib.metadata import version

    print(f"tracewire {version('tracewire')}")
    return 0


def build_parser() -> Parser:
    """The parser of this package's own subcommands."""
    return _built()[0]


def _built() -> tuple[Parser, Container[str]]:
    """The parser of all subcommands, and the names of this package's own."""
    parser = Parser(
        prog="tracewire",
        description="Run interventions on language models that engines serve, and watch and steer each generation.",
        epilog="Start here: tracewire up demo. Each command has a --help with examples and its exit statuses.",
    )
    parser.add_argument("-V", "--version", action="store_true", help="print the version")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--url", help="Redis URL (default: $TRACEWIRE_URL)")
    shared.add_argument(
        "--url-file", metavar="FILE", help="read the Redis URL from this file or descriptor (/dev/fd/3)"
    )
    shared.add_argument("--prefix", default=PREFIX, help=f"prefix of all keys on Redis (default: {PREFIX})")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    parents = (shared,)

    add_up(commands, parents)
    for add in (add_run, add_chat, add_control, add_traces, add_top, add_replay, add_export, add_watch, add_engines):
        add(commands, parents)
    for add in (
        add_harvest,
        add_extract,
        add_sweep,
        add_edits,
        add_library,
        add_dead,
        add_audit,
        add_doctor,
        add_gateway,
        add_acl,
    ):
        add(commands, parents)
    add_guard(commands, parents)
    add_record(commands, parents)
    add_approve(commands, parents)
    add_keys(commands)
    add_redis(commands)
    add_completion(commands)
    own = frozenset(commands.choices)
    for name, entry in sorted({ENGINE: None, **_commands()}.items()):
        if name not in own:
            # Listed in the help; `main` hands their arguments to their own parsers.
            what = _ENGINE_HELP if name == ENGINE else f"a command of an installed package: {entry.value}"  # type: ignore[union-attr]
            commands._choices_actions.append(commands._ChoicesPseudoAction(name, (), what))
    return parser, own


if __name__ == "__main__":
    sys.exit(main())
