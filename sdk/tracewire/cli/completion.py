"""`tracewire completion`: completion of commands, options and model names by bash, zsh and fish."""

from __future__ import annotations

import argparse
import os
from typing import Any

from tracewire.errors import LibraryMissing

from .commands import add_command

__all__ = ["SHELLS", "add_completion", "complete"]

SHELLS = ("bash", "zsh", "fish")
#: Set by the shell's function when it asks for completions.
_ASKED = "_ARGCOMPLETE"


def add_completion(commands: Any) -> None:
    """Add the subcommand."""
    completion = add_command(
        commands,
        "completion",
        _completion,
        parents=(),
        help="print the code by which a shell completes the command's words",
        examples=('eval "$(tracewire completion bash)"',),
    )
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


async def _completion(options: argparse.Namespace) -> int:
    try:
        # Here, since only completion needs the extra.
        from argcomplete.shell_integration import shellcode
    except ImportError as error:
        raise LibraryMissing("tracewire completion", "argcomplete", "cli") from error
    print(shellcode(["tracewire"], shell=options.shell))
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """If a shell asks for completions, answer and end the process."""
    if _ASKED not in os.environ:
        return
    try:
        import argcomplete
    except ImportError:
        return
    _add_others(parser)
    argcomplete.autocomplete(parser)


def _add_others(parser: argparse.ArgumentParser) -> None:
    """Add the commands of installed packages, which have parsers of their own.

    The entry points of the group `tracewire.completion` make them: the client does not import those packages by name.
    """
    from importlib.metadata import entry_points

    made = {found.name: found for found in entry_points(group="tracewire.completion")}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:
                if listed.dest not in action.choices:
                    found = made.get(listed.dest)
                    other = argparse.ArgumentParser() if found is None else found.load()()
                    action._name_parser_map[listed.dest] = other
