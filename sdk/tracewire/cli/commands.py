"""How subcommands are declared: their help, their exit statuses, and their errors, which are one line."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

__all__ = ["EXITS", "Parser", "UsageError", "add_command", "add_group", "exits_of", "subparsers_of"]

#: The meanings of the exit statuses that every command can have.
EXITS: Mapping[int, str] = MappingProxyType(
    {
        0: "the command did what it was asked to",
        1: "an error, which is on standard error",
        2: "an argument is wrong; nothing was done",
        130: "interrupted by Ctrl-C",
        141: "the reader of standard output has closed it",
    }
)


class UsageError(Exception):
    """A wrong argument that is found after parsing. The command exits with 2."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and whose options cannot be abbreviated."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], Awaitable[int]],
    *,
    parents: Sequence[argparse.ArgumentParser],
    help: str,
    exits: Mapping[int, str] = MappingProxyType({}),
    examples: Sequence[str] = (),
    json: str = "",
) -> argparse.ArgumentParser:
    """Add a subcommand.

    Args:
        commands: the value that `add_subparsers` returned.
        name: the subcommand's name.
        run: runs it and returns its exit status.
        parents: parsers whose options it has, too.
        help: its purpose, for the list of commands and its own help.
        exits: the meanings of its exit statuses, where they are not those of `EXITS`.
        examples: command lines to show in its help.
        json: the output of `--json`; without it the subcommand has no such option.
    """
    meanings = {**{number: EXITS[number] for number in (0, 1, 2)}, **exits}
    lines = [f"example: {example}" for example in examples]
    lines.append("exit status: " + "; ".join(f"{number}: {meaning}" for number, meaning in sorted(meanings.items())))
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        parents=list(parents),
        help=help,
        description=help[:1].upper() + help[1:] + ".",
        epilog="\n".join(lines),
        formatter_class=_Formatter,
    )
    if json:
        parser.add_argument("--json", action="store_true", help=f"print {json}")
    parser.set_defaults(run=run, exits=meanings)
    return parser


class _Formatter(argparse.HelpFormatter):
    """Keeps the lines of the text below the options: examples are commands to copy."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = super()._fill_text
        return "\n".join(
            line if line.startswith("example: ") else filled(line, width, indent) for line in text.splitlines()
        )


def add_group(commands: Any, name: str, help: str) -> Any:
    """Add a subcommand that has subcommands of its own, and return the object to which they are added."""
    parser = commands.add_parser(name, help=help, description=help[:1].upper() + help[1:] + ".")
    return parser.add_subparsers(required=True, metavar="ACTION")


def subparsers_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """All subcommands below a parser, by the words that a user types."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                nested = subparsers_of(below)
                found.update({f"{name} {word}": one for word, one in nested.items()} or {name: below})
    return found


def exits_of(parser: argparse.ArgumentParser) -> dict[int, str]:
    """The meanings of a subcommand's exit statuses."""
    found: dict[int, str] = parser.get_default("exits")
    return found
