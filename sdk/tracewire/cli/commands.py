"""How subcommands are declared: their help, their exit statuses, and their errors, which are one line."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NoReturn

__all__ = [
    "EXITS",
    "Parser",
    "UsageError",
    "add_command",
    "add_group",
    "exits_of",
    "nearest",
    "positive",
    "subparsers_of",
]

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

    def refuse_more(self, arguments: Sequence[str]) -> NoReturn:
        """Refuse the arguments that no option and no position takes. The nearest option is named."""
        hint = nearest(arguments[0].partition("=")[0], self._option_string_actions) if arguments[0][:1] == "-" else ""
        self.error(f"unrecognized arguments: {' '.join(arguments)}{hint}")

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        """As the base does, but the error of a number says what was expected."""
        expected = "a whole number" if action.type is int else "a number" if action.type is float else ""
        try:
            return super()._get_value(action, text)
        except argparse.ArgumentError:
            if not expected:
                raise
        raise argparse.ArgumentError(action, f"expected {expected}, got {text!r}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As the base does, but for a command that does not exist: the nearest one is named."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            names = [listed.dest for listed in action._choices_actions]
            hint = nearest(value, names) or f"; expected one of {', '.join(names)}"
            raise argparse.ArgumentError(None, f"no {str(action.metavar).lower()} is called {value!r}{hint}")
        super()._check_value(action, value)


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?`, with the known word that is nearest to a misspelt one; `""` if none is near."""
    near = get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def positive(text: str) -> int:
    """An argparse converter for a number of things."""
    number = int(text) if text.isdecimal() else 0
    if not 0 < number < 1 << 31:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return number


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
    parser.set_defaults(run=run, exits=meanings, parser=parser)
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
